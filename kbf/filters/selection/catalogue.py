"""Models of ``configs/model`` by what their filters can do, for errors that say what to take instead; a test compares the two."""

WITH_CONTROLS = (
    *("kbf", "kbf_tuned", "kbf_paper", "kernel_monte_carlo", "particle_learned", "kalman"),
    *("lstm", "lstm_feedback", "lstm_images", "gru", "gru_images", "rkn", "backprop_kf", "dpf"),
    *("window_ridge", "window_boosting", "mean"),
)
"""Models whose filters take the controls of recordings that have some."""

WITH_SMOOTHER = (
    *(
        "kbf",
        "kbf_tuned",
        "kbf_paper",
        "kbf_features",
        "kernel_monte_carlo",
        "kalman",
        "ekf",
        "ukf",
    ),
    *("particle", "particle_learned", "particle_observation"),
)
"""Models whose filters have a smoother."""

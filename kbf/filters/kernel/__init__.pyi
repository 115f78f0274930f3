from kbf.filters.kernel import (
    algorithm as algorithm,
    controlled_transition as controlled_transition,
    feature_kbf as feature_kbf,
    filter as filter,
    hyperparameters as hyperparameters,
    kbf as kbf,
    kernel_bayes_smoother as kernel_bayes_smoother,
    moment_matching as moment_matching,
    operators as operators,
    simulated_kbf as simulated_kbf,
    smoother as smoother,
    update as update,
)

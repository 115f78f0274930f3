"""The experiments of the papers, one file for each figure or table: ``kbf reproduce NAME``."""

EXPERIMENTS = {
    "posterior_mean": (
        "Xu et al. (2022), figure 1: error of the posterior mean against the dimension"
    ),
    "low_dim_filtering": "Xu et al. (2022), figure 2: filtering on rotation and oscillatory data",
    "dmlab": "Xu et al. (2022), figure 5: the heading in a first-person maze, from images",
    "dsprites": "Xu et al. (2022), figure 6: the place of a sprite, from images",
    "kde_comparison": (
        "Fukumizu et al., figure 2: kernel Bayes' rule against kernel density estimates"
    ),
    "abc_comparison": "Fukumizu et al., figure 3: error against computing time, with rejection ABC",
    "fukumizu_filtering": "Fukumizu et al., figure 4: filtering against EKF and UKF",
    "camera_rotation": "Fukumizu et al., table 1: the rotation of a camera in a room, from images",
    "prior_influence": "Johno et al. (2018), figures 2-5: does the prior come through?",
    "ckme_gaussian": "LCKME draft, figures 1-8: cheap conditional mean embeddings on Gaussian data",
    "ckme_nonlinear": "LCKME draft, figures 9-15: the same on a nonlinear regression",
    "coalescent": (
        "LCKME draft, figure 16: parameters of a coalescent with recombination from summary "
        "statistics"
    ),
    "cv_bandwidth": "LCKME draft, section 5.4: cross-validated bandwidths, local against global",
    "consistency": (
        "Fukumizu et al., theorems 3.5 and 3.6; Xu et al., theorems 3.4 and 3.6: rates of "
        "convergence"
    ),
}
"""Every experiment with where it comes from; the module of that name in this folder makes it."""

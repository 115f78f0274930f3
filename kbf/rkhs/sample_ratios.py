"""Density ratios pi / p from two samples: KLIEP, and any probabilistic classifier.

Both require draws z_i of p and u_j of pi; the estimators of `kbf.rkhs.ratios` require the embedding
of pi alone, which is what a filter has.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kbf.rkhs.kernels import Kernel
from kbf.runtime.errors import FitError

# Steps of the fixed-point iteration of `kliep`. It converges linearly; for kernels that are narrow
# compared to the distances of the centres 1,000 steps give six digits.
KLIEP_STEPS = 2000

# The iteration ends once no coefficient changes by more than this share of their sum.
KLIEP_TOLERANCE = 1e-10


def kliep(
    gram: Float[Tensor, "n l"],
    prior_gram: Float[Tensor, "m l"],
    weights: Float[Tensor, " m"] | None = None,
    *,
    steps: int = KLIEP_STEPS,
    tol: float = KLIEP_TOLERANCE,
) -> Float[Tensor, " l"]:
    """Return the coefficients of the KLIEP ratio r(z) = sum_l alpha_l k(z, c_l).

    KLIEP (Kullback-Leibler importance estimation procedure) maximises sum_j a_j log r(u_j) over
    alpha >= 0 with mean 1 of r over the training points. With s_l = (1/n) sum_i k(z_i, c_l) and
    beta_l = s_l alpha_l, which sum to 1, the problem is that of the shares of a mixture whose
    components are k(., c_l) / s_l, and each step of expectation-maximisation,

        beta_l <- sum_j a_j beta_l k(u_j, c_l) / (s_l r(u_j)),

    increases the objective; it is concave, so that the iteration finds its maximum.

    Args:
        gram: k(z_i, c_l) ``n l``, of a kernel that is positive.
        prior_gram: k(u_j, c_l) ``m l``. The centres c are often the u_j.
        weights: a ``m``, positive, of sum 1; None for 1/m.
        steps: largest number of steps.
        tol: the iteration stops if no beta_l changes by more.

    Returns:
        alpha ``l``; the ratio at the training points is gram @ alpha.

    Raises:
        ValueError: negative entries, or negative weights.
        FitError: centres that no training point or prior points that no centre is near.

    References: Sugiyama, Suzuki, Nakajima, Kashima, von Buenau and Kawanabe (2008), Direct
    importance estimation for covariate shift adaptation (equations from memory, not compared with
    the text; theirs is projected gradient ascent on the same objective).
    """
    m = len(prior_gram)
    a = prior_gram.new_full((m,), 1 / m) if weights is None else weights
    if not min(gram.min(), prior_gram.min(), a.min()) >= 0:
        raise ValueError("kliep needs a kernel and weights that are not negative")
    scale = gram.mean(0)
    used = scale > torch.finfo(gram.dtype).tiny
    if not bool(used.any()):
        raise FitError("kliep: no training point is near a centre; use a wider kernel")
    basis = torch.where(used, prior_gram / torch.where(used, scale, 1), 0)
    beta = used.to(gram) / used.sum()
    for _ in range(steps):
        r = basis @ beta
        if not bool((r[a > 0] > 0).all()):
            raise FitError("kliep: a prior point is near no centre; use a wider kernel")
        new = beta * ((torch.where(a > 0, a / torch.where(r > 0, r, 1), 0)) @ basis)
        moved = (new - beta).abs().max()
        beta = new / new.sum()
        if moved <= tol:
            break
    return torch.where(used, beta / torch.where(used, scale, 1), 0)


def kliep_cv(
    kernels: list[Kernel],
    states: Float[Tensor, "n d"],
    prior: Float[Tensor, "m d"],
    *,
    folds: int = 5,
) -> int:
    """Return the index of the kernel with the highest likelihood of the left-out prior points.

    Point j of the prior is in fold j mod ``folds``; the score of a fold is the mean of log r over
    its points, with r and its centres from the others. A kernel whose r is 0 at a left-out point is
    not selected.

    Raises:
        ValueError: fewer than two folds, or more than prior points.
        FitError: no kernel has a finite score.
    """
    m = len(prior)
    if not 2 <= folds <= m:
        raise ValueError(f"kliep_cv: {folds} folds of {m} points")
    fold = torch.arange(m, device=prior.device) % folds
    scores = []
    for kernel in kernels:
        total = 0.0
        for f in range(folds):
            kept, held = prior[fold != f], prior[fold == f]
            try:
                alpha = kliep(kernel(states, kept), kernel(kept, kept))
            except FitError:
                total = -torch.inf
                break
            total += (kernel(held, kept) @ alpha).log().mean().item()
        scores.append(total)
    best = int(torch.tensor(scores).argmax())
    if not np.isfinite(scores[best]):
        raise FitError(f"kliep_cv: none of {len(kernels)} kernels has a finite score")
    return best


@runtime_checkable
class Classifier(Protocol):
    """A probabilistic classifier with the interface of scikit-learn."""

    def fit(self, X: Any, y: Any) -> Any:
        """Fit to points ``n d`` and labels ``n``."""
        ...

    def predict_proba(self, X: Any) -> Any:
        """Return probabilities ``n 2`` of the labels 0 and 1."""
        ...


def classifier_ratio(
    classifier: Classifier, states: Float[Tensor, "n d"], prior: Float[Tensor, "m d"]
) -> Callable[[Float[Tensor, "k d"]], Float[Tensor, " k"]]:
    """Fit a classifier of prior (1) against training points (0) and return the ratio z -> r(z).

    By Bayes' rule r(z) = (n / m) P(1 | z) / P(0 | z). With a logistic regression on features it is
    the exponential of a linear function of the features.

    Args:
        classifier: for instance scikit-learn's ``LogisticRegression``, or a pipeline with
            ``Nystroem`` features before it. It is fitted.
        states: z ``n d``, draws of p.
        prior: u ``m d``, draws of pi.

    Raises:
        ValueError: in the returned function, a probability of 1, whose ratio is infinite.

    References: Bickel, Brueckner and Scheffer (2007), Discriminative learning for differing
    training and test distributions (from memory).
    """
    points = torch.cat([states, prior]).cpu().numpy()
    classifier.fit(points, np.repeat([0, 1], [len(states), len(prior)]))

    def ratio(at: Float[Tensor, "k d"]) -> Float[Tensor, " k"]:
        chances = torch.as_tensor(np.asarray(classifier.predict_proba(at.cpu().numpy()))).to(at)
        if bool((chances[:, 0] <= 0).any()):
            raise ValueError(
                "classifier_ratio: the classifier is certain that a point is of the prior, its "
                "ratio is infinite; use a stronger penalty"
            )
        return len(states) / len(prior) * chances[:, 1] / chances[:, 0]

    return ratio

"""Density ratios and ridge regressions of `kbf` and of other libraries, in float64.

densratio's uLSIF is least squares over kernels at the points of the numerator with the penalty reg
||coef||^2: that is `kbf.rkhs.ratios.relative_primal` with these kernel values as the features. It
then cuts negative coefficients, ours negative ratios: the numbers agree where no coefficient is
negative, as with the wide kernel and the strong ridge here. `kbf.rkhs.ratios.kulsif` has the RKHS
norm for a penalty, as the filters need it: another estimator, for comparison.

A Gaussian process's posterior mean with the noise n reg is the conditional mean
`kbf.rkhs.conditional_means.kernel_ridge.exact`, and that of its sparse form (SGPR) the ridge on
Nyström features of the same landmarks. gpytorch is set to factorise; by default it takes conjugate
gradients where there are more than 800 points, to a tolerance, in a second row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from kbf.rkhs import conditional_means, features, ratios
from kbf.rkhs.kernels import gaussian
from kbf.ssm import oscillatory
from studies.benchmarks.peers_sides import Side

WIDTH, REG = 0.4, 1e-4
"""Bandwidth and ridge of the regressions."""
RATIO_WIDTH, RATIO_REG, KULSIF_REG = 0.3, 1.0, 1e-2
"""Of the density ratios."""
JITTER = 1e-8
"""Of the landmarks' Gram matrix, as gpytorch has it in float64."""


def ratio(n: int, m: int, library: Callable[[str], Any]) -> dict[str, Side]:
    """The ratio of N(0.5, 0.5^2 I) to N(0, I) in the plane.

    Evaluated at n points of the latter, from m points of the former.
    """
    generator = Generator().manual_seed(0)
    z, u = (
        torch.randn(n, 2, generator=generator).double(),
        0.5 + 0.5 * torch.randn(m, 2, generator=generator).double(),
    )
    kernel, weights = partial(gaussian, bandwidth=RATIO_WIDTH), z.new_full((m,), 1 / m)
    sides = {
        "kbf": Side(
            lambda: ratios.relative_primal(kernel(z, u), kernel(u, u), weights, RATIO_REG, 0.0)
        ),
        "kbf, KuLSIF": Side(
            lambda: ratios.kulsif(kernel(z, z), kernel(z, u) @ weights, KULSIF_REG),
            None,
            "another penalty",
        ),
    }
    if library("densratio"):
        densratio, (x, y) = library("densratio").densratio, (u.numpy(), z.numpy())
        settings = {
            "alpha": 0.0,
            "sigma_range": [RATIO_WIDTH],
            "lambda_range": [RATIO_REG],
            "kernel_num": m,
            "verbose": False,
        }
        sides["densratio"] = Side(
            lambda: torch.from_numpy(densratio(x, y, **settings).compute_density_ratio(y))
        )
    return sides


def pairs(n: int, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs ``n 2``, noisy outputs ``n 1`` and queries: a component of the oscillatory move."""
    model, generator = oscillatory(), Generator().manual_seed(0)
    x = torch.randn(n + queries, 2, generator=generator).double()
    return x[:n], model.move(x[:n], generator)[:, :1], x[n:]


def exact(n: int, queries: int, library: Callable[[str], Any]) -> dict[str, Side]:
    """Fit to n pairs, and predict."""
    x, z, query = pairs(n, queries)
    sides = {
        "kbf": Side(
            lambda: conditional_means.exact(partial(gaussian, bandwidth=WIDTH), x, z, REG).mean(
                query
            )[:, 0]
        )
    }
    if library("gpytorch"):
        gp = library("gpytorch")
        sides["gpytorch"] = Side(partial(posterior, gp, x, z, query, factorise=True), 1e-6)
        tolerance = gp.settings.eval_cg_tolerance.value()
        note = (
            f"conjugate gradients to {tolerance:g}"
            if n > gp.settings.max_cholesky_size.value()
            else "factorised: few points"
        )
        sides["gpytorch, as it comes"] = Side(partial(posterior, gp, x, z, query), None, note)
    return sides


def landmarks(n: int, m: int, queries: int, library: Callable[[str], Any]) -> dict[str, Side]:
    """The same through m landmarks, the pivots of the incomplete Cholesky factorisation."""
    x, z, query = pairs(n, queries)
    kernel = partial(gaussian, bandwidth=WIDTH)
    points = x[features.pivots(kernel, x, rank=m)]

    def ours() -> Tensor:
        return conditional_means.feature_ridge(
            features.nystrom(kernel, points, jitter=JITTER), x, z, REG
        ).mean(query)[:, 0]

    sides = {"kbf": Side(ours)}
    if library("gpytorch"):
        sides["gpytorch"] = Side(
            partial(posterior, library("gpytorch"), x, z, query, points, factorise=True), 1e-4
        )
    return sides


def posterior(
    gp: Any,
    x: Tensor,
    z: Tensor,
    query: Tensor,
    points: Tensor | None = None,
    *,
    factorise: bool = False,
) -> Tensor:
    """Mean of a Gaussian process with our kernel and ridge.

    With landmarks it is the SGPR mean, without its correction.
    """

    class Model(gp.models.ExactGP):
        def __init__(self, likelihood: Any) -> None:
            super().__init__(x, z[:, 0], likelihood)
            self.mean, base = gp.means.ZeroMean(), gp.kernels.RBFKernel()
            base.lengthscale = WIDTH
            self.kernel = (
                base if points is None else gp.kernels.InducingPointKernel(base, points, likelihood)
            )

        def forward(self, inputs: Tensor) -> Any:
            return gp.distributions.MultivariateNormal(self.mean(inputs), self.kernel(inputs))

    likelihood = gp.likelihoods.GaussianLikelihood()
    likelihood.noise = len(x) * REG
    model = Model(likelihood).double().eval()
    settings, fast = gp.settings, not factorise
    fixed = settings.fast_computations(fast, fast, fast)
    with (
        torch.no_grad(),
        settings.skip_posterior_variances(True),
        settings.sgpr_diagonal_correction(False),
        fixed,
    ):
        return model(query).mean

"""Cheap conditional mean embeddings on a nonlinear regression with Gaussian noise.

LCKME draft, section 5.2, figures 9-15.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Generator

from kbf.plots.charts import Figure
from studies.papers import cme_study
from studies.papers.base import Job, Row, Settings, Verdict
from studies.papers.cme_forms import density
from studies.papers.cme_study import Problem

PRESETS: dict[str, dict[str, Any]] = {
    "full": {
        "runs": 30,
        "n": 500,
        "d": 2,
        "queries": 20,
        "variance_y": 0.1,
        "sigmas": [0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0],
        "ridges": [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1],
        "sizes": [100, 200, 500, 1000],
        "dimensions": [1, 2, 4, 8],
        "time_n": 1000,
        "m": [10, 30, 100, 200],
    }
}
PRESETS["quick"] = PRESETS["full"] | {
    "runs": 3,
    "sigmas": [0.003, 0.01, 0.03, 0.1, 0.3, 1.0],
    "ridges": [1e-4, 1e-3, 1e-2, 1e-1],
    "sizes": [100, 500],
    "dimensions": [2, 8],
    "time_n": 500,
    "m": [10, 100],
}
PRESETS["smoke"] = PRESETS["full"] | {
    **{
        "runs": 2,
        "n": 40,
        "queries": 3,
        "sigmas": [0.1, 1.0],
        "ridges": [1e-3],
        "sizes": [20, 40],
        "dimensions": [2, 4],
    },
    **{"time_n": 40, "m": [5]},
}
NOTES = """\
The draft is unfinished: it has captions, but no figures and no text on results. The questions are
derived from the aims of its sections 1 and 3. It gives no c, sigma, V, n, m or grids. Here c = 10,
sigma = 0.1 d_x, so that the bumps overlap in every dimension, and y is scaled such that f has
variance 1 (over uniform x) and the noise V = 0.1; d_y = 1, since its gamma are numbers. sigma_y =
0.1 (a variance, as all its sigmas). The other settings are those of ckme_gaussian: m = n^(2/3) for
every low-cost form; the ridge is epsilon over k(x, x); bandwidth and ridge are selected for each
method from one grid by 5-fold cross-validation of the RKHS distance; 30 trials of 20 queries; RMSE
is the expectation over the true sample y; figure 9, the surface, is in the table of results (kind
grid); "accurate" means all three errors, and figure 15 is made as figure 7. ICF, RFF, divide and
conquer and leverage scores are our additions.
"""
BUMPS, NOISE = 10, 0.1


def problem(n: int, d: int, queries: int, seed: int) -> Problem:
    """y = f(x) + e, f(x) = s sum_i gamma_i d(x | U_i, sigma I).

    x, U, gamma are uniform on [-1, 1]; s makes Var f(X) = 1.

    References: LCKME draft, section 5.2, equation 6.
    """
    generator = Generator().manual_seed(seed)
    uniform = partial(torch.rand, dtype=torch.float64, generator=generator)
    U, gamma = 2 * uniform(BUMPS, d) - 1, 2 * uniform(BUMPS, 1) - 1

    def f(x: torch.Tensor) -> torch.Tensor:
        return density(x, U, variance=0.1 * d) @ gamma

    scale = 1 / f(2 * uniform(10_000, d) - 1).std()
    x, at = 2 * uniform(n, d) - 1, 2 * uniform(queries, d) - 1
    noise = NOISE**0.5 * torch.randn(n, 1, dtype=torch.float64, generator=generator)
    return Problem(
        x, scale * f(x) + noise, at, scale * f(at), torch.tensor([[NOISE]], dtype=torch.float64)
    )


def jobs(settings: Settings) -> list[Job]:
    """Those of `cme_study`."""
    return cme_study.jobs(settings)


def work(job: Job) -> list[Row]:
    """The errors of each method."""
    return cme_study.work(job, problem(job["n"], job["d"], job["queries"], job["run"]))


def judge(rows: list[Row]) -> list[Verdict]:
    """The questions on figures 9-15."""
    return cme_study.judge(rows)


def tests(rows: list[Row]) -> list[Row]:
    """Wilcoxon signed-rank tests between the methods."""
    return cme_study.tests(rows)


def draw(rows: list[Row]) -> Figure:
    """Figures 10-15."""
    return cme_study.draw(rows, (10, 11, 12, 13, 14, 15), [])

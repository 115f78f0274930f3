"""Cheap conditional mean embeddings on Gaussian data with a known conditional.

LCKME draft, section 5.1, figures 1-8.
"""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import torch
from torch import Generator

from kbf.plots.charts import Figure
from kbf.rkhs.linalg import psd_solve
from studies.papers import cme_study
from studies.papers.base import Job, Row, Settings, Verdict, means
from studies.papers.cme_forms import CKME, LCKME, METHODS, fit
from studies.papers.cme_study import FORM_SEEDS, Problem

PRESETS: dict[str, dict[str, Any]] = {
    "full": {
        "runs": 30,
        "n": 500,
        "d": 2,
        "queries": 20,
        "variance_y": 1.0,
        "sigmas": [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0],
        "ridges": [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1],
        "sizes": [100, 200, 500, 1000],
        "dimensions": [1, 2, 4, 8, 16],
        "time_n": 1000,
        "m": [10, 30, 100, 200],
        "large": [10_000, 20_000, 40_000, 70_000, 100_000],
        "large_m": 300,
        "large_runs": 10,
        "large_queries": 100,
    }
}
PRESETS["quick"] = PRESETS["full"] | {
    "runs": 3,
    "sigmas": [0.1, 0.3, 1.0, 3.0, 10.0, 100.0],
    "ridges": [1e-4, 1e-3, 1e-2, 1e-1],
    "sizes": [100, 500],
    "dimensions": [2, 8],
    "time_n": 500,
    "m": [10, 100],
    "large": [2000, 5000, 20_000],
    "large_runs": 2,
}
PRESETS["smoke"] = PRESETS["full"] | {
    **{
        "runs": 2,
        "n": 40,
        "queries": 3,
        "sigmas": [1.0, 10.0],
        "ridges": [1e-3],
        "sizes": [20, 40],
        "dimensions": [2, 4],
    },
    **{
        "time_n": 40,
        "m": [5],
        "large": [100, 200],
        "large_m": 20,
        "large_runs": 1,
        "large_queries": 5,
    },
}
LARGEST_EXACT = 10_000
"""The most points of CKME."""
NOTES = """\
The draft is unfinished: it has captions, but no figures and no text on results. The questions are
derived from the aims of its sections 1 and 3. It gives no n, d, m, grids or sigma_y for figures
1-7. Here d_y = 2, sigma_y = 1 (a variance, as all its sigmas), m = n^(2/3) (k in its section 5.4)
for every low-cost form; sizes and grids are those of the presets. The ridge is epsilon over k(x,
x): the weights depend on this ratio only, and one grid serves all sigma and d. Bandwidth and ridge
are selected for each method from one grid by 5-fold cross-validation of the RKHS distance, with 40
points of each fold (figures 4-7); figures 2 and 3 show the best value over the other parameter.
There are 30 trials as in the draft, each with 20 queries instead of one. RMSE is the expectation
over the true sample y, trace(cov) + ||estimate - mean||^2. RFF has n epsilon where the draft has m
epsilon. Times are CPU times of one fit and these queries at given sigma and epsilon. Figure 8:
sigma = 1, epsilon = 0.001 / sqrt(n) for densities as kernels as in the draft, m = 300, 10 runs as
in the draft, 100 queries, five of its ten n. Its largest n of CKME is 30,000, here 10,000 (30,000
require 7 GB for each copy of the matrix). The draft does not say which error it shows: here it is
that of the conditional mean. "Accurate" means all three errors of the draft, the RKHS-norm error
and the RMSE of mean and mode; "more accurate" is p < 0.05 (Wilcoxon). Figure 1, the surface over
sigma and epsilon, is in the table of results (kind grid), not in the figure. Figure 7 has the
geometric means, over trials and n, of the ratios of sigma (vertical) and epsilon (horizontal) to
those of CKME, instead of differences for each; NWKR has no epsilon. m counts the real features of
RFF, half as many frequencies. ICF replaces k(x) by its low-rank form, too. ICF, RFF, divide and
conquer and leverage scores are our additions.
"""


def problem(
    n: int, d: int, queries: int, seed: int, *, offset: float = 0.0, loc: float = 0.0
) -> Problem:
    """(X, Y) from N((0, offset), A^T A), A of entries N(loc, 1), d_y = 2; queries from N(0, V_X).

    References: LCKME draft, section 5.1.
    """
    generator = Generator().manual_seed(seed)
    normal = partial(torch.randn, dtype=torch.float64, generator=generator)
    A = loc + normal(d + 2, d + 2)
    V = A.mT @ A
    joint = normal(n, d + 2) @ A  # of covariance A^T A
    at = normal(queries, d + 2) @ A
    B = psd_solve(V[:d, :d], V[:d, d:]).mT  # V_YX V_X^-1
    cov = V[d:, d:] - B @ V[:d, d:]
    return Problem(
        joint[:, :d],
        offset + joint[:, d:],
        at[:, :d],
        offset + at[:, :d] @ B.mT,
        (cov + cov.mT) / 2,
    )


def jobs(settings: Settings) -> list[Job]:
    """Those of `cme_study`, and one for each run and n of figure 8."""
    large = [
        {
            "kind": "large",
            "n": n,
            "d": 2,
            "m": settings["large_m"],
            "run": run,
            "queries": settings["large_queries"],
        }
        for run in range(
            settings["seed"], settings["seed"] + min(settings["runs"], settings["large_runs"])
        )
        for n in settings["large"]
    ]
    return cme_study.jobs(settings) + large


def work(job: Job) -> list[Row]:
    """The errors of each method."""
    if job["kind"] == "large":
        return large(job)
    return cme_study.work(job, problem(job["n"], job["d"], job["queries"], job["run"]))


def large(job: Job) -> list[Row]:
    """Error of the conditional mean and time at large n, for the draft's sigma and epsilon.

    Figure 8.
    """
    n = job["n"]
    p = problem(n, job["d"], job["queries"], job["run"], offset=1.0, loc=3.0)
    reg = 0.001 / math.sqrt(n) * 2 * math.pi  # over k(x, x) = 1 / (2 pi)
    rows, seed = [], FORM_SEEDS + job["run"]
    for method in METHODS:
        if method == CKME and n > LARGEST_EXACT:
            continue
        began = time.process_time()
        form = fit(method, p.x, p.y, variance=1.0, reg=reg, m=job["m"], seed=seed)
        predicted = form.mean(p.queries)
        seconds = time.process_time() - began
        rows.append(
            {
                **{key: job[key] for key in ("kind", "run", "n", "d", "m")},
                **{"method": method, "sigma": 1.0, "ridge": reg, "rkhs": None},
                **{"mean": (predicted - p.mean).square().sum(-1).mean().item(), "mode": None},
                **{"noise": p.cov.trace().item(), "seconds": seconds},
            }
        )
    return rows


def judge(rows: list[Row]) -> list[Verdict]:
    """The questions on figures 1-7, and for figure 8."""
    table = means([r for r in rows if r["kind"] == "large"], ["method", "n"], "mean", "seconds")
    full = max((r for r in table if r["method"] == CKME), key=lambda r: r["n"])
    same, local = (
        next(r for r in table if r["method"] == LCKME and r["n"] == n)
        for n in (full["n"], max(r["n"] for r in table))
    )
    ours = "; ".join(
        f"{r['method']} at n = {r['n']}: error {r['mean']:.3g} in {r['seconds']:.2g} s"
        for r in (full, same, local)
    )
    better = local["mean"] < full["mean"] and local["seconds"] < full["seconds"]
    finding = (
        "LCKME is computed for n that are too large for CKME, with a smaller error in less time"
    )
    return [*cme_study.judge(rows), Verdict(finding, ours, better, asked=True)]


def tests(rows: list[Row]) -> list[Row]:
    """Wilcoxon signed-rank tests between the methods."""
    return cme_study.tests(rows)


def draw(rows: list[Row]) -> Figure:
    """Figures 2-8."""
    table = means([r for r in rows if r["kind"] == "large"], ["method", "n"], "mean", "seconds")
    more = [
        cme_study.point("fig. 8: squared error of the mean, n", r["n"], r, "mean") for r in table
    ]
    more += [cme_study.point("fig. 8: seconds, n", r["n"], r, "seconds") for r in table]
    return cme_study.draw(rows, (2, 3, 4, 5, 6, 7), more)

"""Error of the posterior mean against the dimension: Gaussian (X, Z) and a prior of its own (Xu et al., figure 1).

The truth is known: Q(Z | X = x) of the prior N(0, V_ZZ / 2) and the data's likelihood p(x | z) is Gaussian.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from kbf import ratios, rules
from kbf.charts import Figure, curves
from kbf.experiments.base import Job, Row, Settings, Verdict, column, means, wilcoxon
from kbf.kernels import gaussian, median_distance
from kbf.linalg import psd_solve
from kbf.ssm import gaussian_log_density

ORIGINAL, WEIGHTED, TRUE, RELATIVE = "original", "IW", "IW, true ratio", "IW, relative ratio"
METHODS = (ORIGINAL, WEIGHTED, TRUE, RELATIVE)
PRESETS = {
    "full": {"runs": 30, "dimensions": [2, 4, 8, 16, 32, 64], "n": 200, "queries": 100},
    "quick": {"runs": 10, "dimensions": [2, 8, 32, 64], "n": 200, "queries": 100},
    "smoke": {"runs": 2, "dimensions": [2, 4], "n": 30, "queries": 10},
}
NOTES = """Bandwidths are median distances of the training points, eta = lambda = 0.2 as in the paper; delta of the original rule is
lambda too (with ratios of mean 1, the authors' scaling). The paper does not say how many queries it takes: here 100 a run, drawn
from N(0, V_XX) as in Fukumizu et al. (2013). The relative ratio (alpha = 0.1) is our addition."""


class Problem(NamedTuple):
    """One draw: training pairs ``n d``, a prior sample ``m d``, queries ``q d``, the true posterior means and log ratios at z."""

    x: Tensor
    z: Tensor
    prior: Tensor
    queries: Tensor
    truth: Tensor
    log_prior: Tensor
    log_density: Tensor


def problem(d: int, n: int, queries: int, seed: int) -> Problem:
    """V = A^T A / (2 d) + 2 I, X of mean 1 and Z of mean 0, prior N(0, V_ZZ / 2) (Xu et al., section 6.1)."""
    generator = Generator().manual_seed(seed)
    draw = partial(torch.randn, dtype=torch.float64, generator=generator)
    A = draw(2 * d, 2 * d)
    V = A.mT @ A / (2 * d) + 2 * torch.eye(2 * d, dtype=torch.float64)
    joint = draw(n, 2 * d) @ torch.linalg.cholesky(V).mT
    x, z = 1 + joint[:, :d], joint[:, d:]
    V_xx, V_xz, V_zz = V[:d, :d], V[:d, d:], V[d:, d:]
    prior = draw(n, d) @ torch.linalg.cholesky(V_zz / 2).mT
    at = draw(queries, d) @ torch.linalg.cholesky(V_xx).mT
    B = psd_solve(V_zz, V_xz.mT).mT  # x = 1 + B z + noise
    noise = V_xx - B @ V_xz.mT
    truth = (at - 1) @ psd_solve(B @ (V_zz / 2) @ B.mT + noise, B @ (V_zz / 2))
    return Problem(x, z, prior, at, truth, gaussian_log_density(z, V_zz / 2), gaussian_log_density(z, V_zz))


def jobs(settings: Settings) -> list[Job]:
    """One for each dimension and run."""
    shared = {"n": settings["n"], "queries": settings["queries"]}
    seeds = range(settings["seed"], settings["seed"] + settings["runs"])
    return [{"d": d, "run": run, **shared} for run in seeds for d in settings["dimensions"]]


def work(job: Job) -> list[Row]:
    """The error of each method, the mean over queries of ||E_hat - E||^2."""
    p = problem(job["d"], job["n"], job["queries"], job["run"])
    reg = 0.2
    k_z, k_x = partial(gaussian, bandwidth=median_distance(p.z)), partial(gaussian, bandwidth=median_distance(p.x))
    G_Z, G_X, cross, g = k_z(p.z, p.z), k_x(p.x, p.x), k_z(p.z, p.prior), k_x(p.queries, p.x)
    uniform = p.z.new_full((len(p.prior),), 1 / len(p.prior))
    prior = cross @ uniform  # the prior embedding at the training points
    ratio = {
        ORIGINAL: ratios.tikhonov(G_Z, prior, reg),
        WEIGHTED: ratios.kulsif(G_Z, prior, reg),
        TRUE: ratios.true_ratio(p.log_prior, p.log_density),
        RELATIVE: ratios.relative(G_Z, cross, uniform, reg, alpha=0.1),
    }
    rows = []
    for method in METHODS:
        rule = rules.original if method == ORIGINAL else rules.importance_weighted
        found = rule(ratio[method].expand(len(g), -1), G_X, g, reg) @ p.z
        error = (found - p.truth).square().sum(-1).mean().item()
        rows.append({"d": job["d"], "run": job["run"], "method": method, "mse": error})
    return rows


def judge(rows: list[Row]) -> list[Verdict]:
    """Which of the paper's two statements come out."""
    table = means(rows, ["d", "method"], "mse")
    dimensions = sorted({row["d"] for row in rows})
    error = {(row["d"], row["method"]): row["mse"] for row in table}
    better = [d for d in dimensions if error[d, WEIGHTED] < error[d, ORIGINAL]]
    worse = [d for d in dimensions if error[d, TRUE] > error[d, WEIGHTED]]
    pairs = "; ".join(f"d = {d}: {error[d, ORIGINAL]:.3g} and {error[d, WEIGHTED]:.3g}" for d in dimensions)
    last, of = dimensions[-1], len(dimensions)
    wins = sum(a < b for a, b in zip(*(column(rows, "mse", d=last, method=m) for m in (WEIGHTED, ORIGINAL)), strict=True))
    ours = f"smaller at {len(better)} of {of} (original and IW: {pairs}); at d = {last} in {wins} of {table[-1]['runs']} runs"
    against = f"at d = {last} {error[last, TRUE]:.3g} against {error[last, WEIGHTED]:.3g}"
    return [
        Verdict("IW has a smaller error than the original rule at every dimension", ours, len(better) == of),
        Verdict("the true ratio does worse than the estimated one", f"worse at {len(worse)} of {of}; {against}", len(worse) == of),
    ]


def tests(rows: list[Row]) -> list[Row]:
    """Wilcoxon signed-rank tests between the methods, at each dimension."""
    return wilcoxon(rows, "mse", ["d"])


def draw(rows: list[Row]) -> Figure:
    """Figure 1."""
    table = means(rows, ["d", "method"], "mse")
    name = "squared error of the posterior mean"
    return curves(table, x="d", y="mse", by="method", se="mse_se", log="xy", xlabel="dimension d", ylabel=name)

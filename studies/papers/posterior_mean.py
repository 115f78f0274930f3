"""Error of the posterior mean against the dimension: Gaussian (X, Z), separate prior.

Xu et al., figure 1.

`studies.papers.gaussian_model` has the data.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Generator

from kbf.plots.charts import Figure, curves
from kbf.rkhs import ratios, rules
from kbf.rkhs.kernels import gaussian, median_distance
from kbf.ssm import gaussian_log_density
from studies.papers.base import (
    Job,
    Row,
    Settings,
    Verdict,
    column,
    means,
    p_values,
    significantly_better,
    wilcoxon,
)
from studies.papers.gaussian_model import gaussian_model

ORIGINAL, DAMPED, WEIGHTED = "original", "original, n^2 delta", "IW"
TRUE, RELATIVE, PRIOR = "IW, true ratio", "IW, relative ratio", "the prior's mean"
PRESETS: dict[str, dict[str, Any]] = {
    "full": {"runs": 30, "dimensions": [2, 4, 8, 16, 32, 64], "n": 200, "queries": 100},
    "quick": {"runs": 10, "dimensions": [2, 8, 32, 64], "n": 200, "queries": 100},
    "smoke": {"runs": 2, "dimensions": [2, 4], "n": 30, "queries": 10},
}
NOTES = """\
Bandwidths are median distances of the training points, eta = lambda = 0.2 as in the paper; delta of
the original rule is lambda, too, with ratios of mean 1 as in equation 2 of the paper and the code
of the authors. In the scaling of the operators (Fukumizu et al., equation 18) delta is n^2 times
larger: "original, n^2 delta", with which the original rule is much closer to IW. The paper does not
give the number of queries: here there are 100 in each run, drawn from N(0, V_XX) as in Fukumizu et
al. (2013). The relative ratio (alpha = 0.1) and the mean of the prior, 0, as the estimate for every
query are our additions.
"""


def jobs(settings: Settings) -> list[Job]:
    """One for each dimension and run."""
    shared = {"n": settings["n"], "queries": settings["queries"]}
    seeds = range(settings["seed"], settings["seed"] + settings["runs"])
    return [{"d": d, "run": run, **shared} for run in seeds for d in settings["dimensions"]]


def work(job: Job) -> list[Row]:
    """The error of each method, the mean over queries of ||E_hat - E||^2."""
    d, n, generator = job["d"], job["n"], Generator().manual_seed(job["run"])
    model = gaussian_model(d, generator, scale=1 / (2 * d))
    z, x = model.pairs(n, generator)
    drawn, queries = model.prior(n, generator), model.queries(job["queries"], generator)
    truth = model.posterior_mean(queries)
    reg = 0.2
    k_z, k_x = (
        partial(gaussian, bandwidth=median_distance(z)),
        partial(gaussian, bandwidth=median_distance(x)),
    )
    G_Z, G_X, cross, g = k_z(z, z), k_x(x, x), k_z(z, drawn), k_x(queries, x)
    uniform = z.new_full((n,), 1 / n)
    prior = cross @ uniform  # the prior embedding at the training points
    V_zz = model.V[:d, :d]
    gamma, r = ratios.tikhonov(G_Z, prior, reg), ratios.kulsif(G_Z, prior, reg)
    known = ratios.true_ratio(gaussian_log_density(z, model.P), gaussian_log_density(z, V_zz))
    relative = ratios.relative(G_Z, cross, uniform, reg, alpha=0.1)
    ways = {
        ORIGINAL: (rules.original, gamma, reg),
        DAMPED: (rules.original, gamma, n**2 * reg),
        WEIGHTED: (rules.importance_weighted, r, reg),
        TRUE: (rules.importance_weighted, known, reg),
        RELATIVE: (rules.importance_weighted, relative, reg),
    }
    means = {
        method: rule(ratio.expand(len(g), -1), G_X, g, ridge) @ z
        for method, (rule, ratio, ridge) in ways.items()
    }
    means[PRIOR] = torch.zeros_like(truth)
    errors = {
        method: (mean - truth).square().sum(-1).mean().item() for method, mean in means.items()
    }
    return [
        {"d": d, "run": job["run"], "method": method, "mse": mse} for method, mse in errors.items()
    ]


def judge(rows: list[Row]) -> list[Verdict]:
    """The paper's three statements, and IW against the other scaling and against zero."""
    error = {(row["d"], row["method"]): row["mse"] for row in means(rows, ["d", "method"], "mse")}
    p = p_values(tests(rows), "d")
    dimensions = sorted({row["d"] for row in rows})
    last = dimensions[-1]

    def ahead(finding: str, better: str, worse: str, *, asked: bool = False) -> Verdict:
        won = [d for d in dimensions if error[d, better] < error[d, worse]]
        largest = max(p[d, frozenset((better, worse))] for d in dimensions)
        wins = sum(
            a < b
            for a, b in zip(
                *(column(rows, "mse", d=last, method=m) for m in (better, worse)), strict=True
            )
        )
        listed = "; ".join(
            f"d = {d}: {error[d, worse]:.3g} and {error[d, better]:.3g}" for d in dimensions
        )
        ours = (
            f"smaller at {len(won)} of {len(dimensions)}, largest p = {largest:.2g} ({worse} and "
            f"{better}: {listed}); "
        )
        ours += f"at d = {last} in {wins} of {len(column(rows, 'mse', d=last, method=better))} runs"
        return Verdict(
            finding, ours, significantly_better(len(won) == len(dimensions), largest), asked
        )

    # Errors are sums over the components, which grow with the dimension by themselves.
    relative = {d: error[d, WEIGHTED] / error[d, PRIOR] for d in dimensions}
    growing = [
        m
        for m in (ORIGINAL, WEIGHTED)
        if all(error[a, m] < error[b, m] for a, b in pairwise(dimensions))
    ]
    return [
        ahead(
            "IW is significantly better than the original rule at every dimension",
            WEIGHTED,
            ORIGINAL,
        ),
        ahead("the estimated ratio is better than the true one at every dimension", WEIGHTED, TRUE),
        Verdict(
            "the error increases with the dimension",
            f"at every step for {len(growing)} of 2 rules",
            len(growing) == 2,
        ),
        ahead(
            "IW is better than the original rule with n^2 delta, too", WEIGHTED, DAMPED, asked=True
        ),
        ahead("IW is better than the prior's mean", WEIGHTED, PRIOR, asked=True),
        Verdict(
            "relative to the error of the prior's mean, the error of IW increases with the "
            "dimension",
            ", ".join(f"d = {d}: {relative[d]:.2f}" for d in dimensions),
            all(relative[a] < relative[b] for a, b in pairwise(dimensions)),
            asked=True,
        ),
    ]


def tests(rows: list[Row]) -> list[Row]:
    """Wilcoxon signed-rank tests between the methods, at each dimension."""
    return wilcoxon(rows, "mse", ["d"])


def draw(rows: list[Row]) -> Figure:
    """Figure 1."""
    table = means(rows, ["d", "method"], "mse")
    name = "squared error of the posterior mean"
    return curves(
        table, x="d", y="mse", by="method", se="mse_se", log="xy", xlabel="dimension d", ylabel=name
    )

"""Measured convergence slopes against n, next to the proven rates.

Fukumizu et al., theorems 3.5 and 3.6; Xu et al., theorems 3.4 to 3.6.

Everything is known: the prior N(0, 1) against training states from N(0, 2) with k_Z = exp(-(z -
z')^2 / 4) (Xu et al., appendix A), r_0 = sqrt(2) k_Z(., 0); and an observation of three values, x =
1 and 2 with probabilities exp(-(z -+ 1)^2 / 2) / 2, else x = 0. Q(Z | x) is N(+-1/2, 1/2) for x =
1, 2 and a difference of Gaussians for x = 0. With the delta kernel on x all smoothness conditions
of the theorems hold and every norm is a finite sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor
from torch.nn.functional import one_hot

from kbf.plots.charts import Figure, curves
from kbf.rkhs import ratios, rules
from kbf.rkhs.kernels import gaussian
from studies.papers.base import Job, Row, Settings, Verdict, all_of, means

IW, ORIGINAL = "IW", "original"
RATIO, COVARIANCE, OPERATOR = (
    "ratio, sup norm",
    "covariance, operator norm",
    "conditional operator, Hilbert-Schmidt norm",
)
POINT, AVERAGE = "E[f(Z) | x], worst x", "E[f(Z) | x], L2 over x"
CLIPPED = "share of weights below zero"
PROVEN = {  # exponents of n, with alpha = beta_1 = beta_2 = 1/2 (the theorems' largest) and nu = 2
    (RATIO, IW): 1 / 6,  # Xu et al., theorem 3.4
    (COVARIANCE, IW): 1 / 6,  # corollary 3.5
    (COVARIANCE, ORIGINAL): 1 / 3,  # Fukumizu et al., theorem 6.1
    (OPERATOR, IW): 1 / 18,  # Xu et al., theorem 3.6
    (OPERATOR, ORIGINAL): 1 / 18,  # Fukumizu et al., theorem 6.2, as Xu et al. quote it
    (POINT, ORIGINAL): 4 / 27,  # Fukumizu et al., theorem 3.5
    (AVERAGE, ORIGINAL): 1 / 6,  # Fukumizu et al., theorem 3.6
}
ETA, LAMBDA = 1 / 3, 1 / 9  # ridges eta = epsilon = n^-1/3 and lambda = n^-1/9
DELTAS = {OPERATOR: 2 / 9, POINT: 4 / 27, AVERAGE: 1 / 6}
PRESETS: dict[str, dict[str, Any]] = {
    "full": {"runs": 30, "n": [100, 200, 400, 800, 1600, 3200], "scales": [1.0, 10.0]},
    "quick": {"runs": 20, "n": [100, 200, 400, 800], "scales": [1.0, 10.0]},
    "smoke": {"runs": 3, "n": [50, 100], "scales": [10.0]},
}
NOTES = """\
The prior's embedding is that of n draws, alpha = 1/2. In appendix A r_0 is in the range of C^beta_1
for every beta_1 < 1/2; the rates are those of the limit. f = k_Z(., 1). An observation of three
values, because with a Gaussian one and a Gaussian kernel the conditional operator is not in H_X x
H_Z, as theorem 3.6 of Xu et al. demands. The theorems have ridges n^-a without a factor, but
kernels of any height s: multiplying both kernels by s is dividing eta, epsilon and lambda by s, and
delta by s^2. At s = 1 delta is 0.17 or more at all n that can be reached, compared with 0.08 and
0.20, the squared eigenvalues of C_XX, and the error is its bias, a share delta / (c^2 + delta),
which falls as delta only in the limit; so s = 10 is judged, and s = 1 is only reported. A slope is
that of the logarithm of the root mean square error over runs; its standard error is the jackknife's
over runs. The theorems are upper bounds: a rate is reproduced if the errors fall at least as fast,
and undecided within two standard errors of it. IW's errors of E[f(Z) | x] are beside; no rate of
their own is stated for them. What the paper says of the two rules against each other compares
bounds; here it is asked of the errors. Where fewer than 1 % of the weights are below zero, IW's
covariance is the original's, and no slower: undecided.
"""

WIDTH = 2.0  # sigma^2 of k_Z
kernel: Callable[..., Tensor] = partial(gaussian, bandwidth=math.sqrt(WIDTH))
SEEN = math.exp(-1 / 4) / math.sqrt(8)  # probability of x = 1, and of x = 2, under the prior
CHANCES = torch.tensor(
    [1 - 2 * SEEN, SEEN, SEEN], dtype=torch.float64
)  # of x under the prior: the diagonal of C_XX
MEANS = torch.tensor([0, 0.5, -0.5], dtype=torch.float64)
VARIANCES = torch.tensor([1, 0.5, 0.5], dtype=torch.float64)
MIXTURE = (
    torch.tensor([[1, -SEEN, -SEEN], [0, SEEN, 0], [0, 0, SEEN]], dtype=torch.float64)
    / CHANCES[:, None]
)
"""Q(Z | x) = sum_j MIXTURE[x, j] N(MEANS[j], VARIANCES[j])."""


def smoothed(gap: Tensor, variance: Tensor) -> Tensor:
    """E k_Z(gap + N(0, variance), 0)."""
    return (WIDTH / (WIDTH + variance)).sqrt() * torch.exp(-0.5 * gap.square() / (WIDTH + variance))


def posterior_embedding(z: Float[Tensor, " m"]) -> Float[Tensor, "3 m"]:
    """E[k_Z(z, Z) | x] under Q, for each of the three x."""
    return MIXTURE @ smoothed(MEANS[:, None] - z, VARIANCES[:, None])


POSTERIOR_NORMS = torch.einsum(
    "xi,xj,ij->x",
    MIXTURE,
    MIXTURE,
    smoothed(MEANS[:, None] - MEANS, VARIANCES[:, None] + VARIANCES),
)
"""||E[k_Z(., Z) | x]||^2 for each x."""


def sample(
    n: int, seed: int
) -> tuple[Float[Tensor, "n 1"], Int[Tensor, " n"], Float[Tensor, "n 1"]]:
    """Training states and observations, and n draws of the prior."""
    generator = Generator().manual_seed(seed)
    z, u = (torch.randn(n, 1, dtype=torch.float64, generator=generator) for _ in range(2))
    z = math.sqrt(2) * z
    seen = 0.5 * torch.exp(-0.5 * (z - torch.tensor([1.0, -1.0], dtype=torch.float64)).square())
    return (
        z,
        torch.multinomial(
            torch.cat([1 - seen.sum(1, keepdim=True), seen], 1), 1, generator=generator
        )[:, 0],
        u,
    )


def ratio_function(
    at: Float[Tensor, "m 1"],
    z: Float[Tensor, "n 1"],
    u: Float[Tensor, "l 1"],
    gamma: Float[Tensor, " n"],
    eta: float,
) -> Float[Tensor, " m"]:
    """The function max(0, r) with r = (C + eta I)^-1 m_Pi.

    eta r = m_Pi - (1/n) sum_i gamma_i k_Z(., z_i) with gamma_i = r(z_i).
    """
    return ((kernel(at, u).mean(1) - kernel(at, z) @ gamma / len(z)) / eta).clamp_min(0)


def errors(n: int, seed: int, scale: float) -> dict[tuple[str, str], float]:
    """The errors that the theorems bound, by quantity and method, for kernels of height ``scale``.

    And what IW clips.
    """
    z, x, u = sample(n, seed)
    psi, queries = one_hot(x, 3).to(z), torch.eye(3, dtype=z.dtype)
    G_Z, m = kernel(z, z), kernel(z, u).mean(1)
    eta, reg = n**-ETA / scale, n**-LAMBDA / scale
    gamma, r = ratios.tikhonov(G_Z, m, eta), ratios.kulsif(G_Z, m, eta)
    w = {
        (what, IW): rules.importance_weighted_primal(r.expand(3, -1), psi, queries, reg)
        for what in DELTAS
    }
    for what, power in DELTAS.items():
        delta = n**2 * n**-power / scale**2  # of the Gram matrices: n^2 times that of the operators
        w[what, ORIGINAL] = rules.original_primal(gamma.expand(3, -1), psi, queries, delta)
    grid = torch.linspace(-10, 10, 2001, dtype=z.dtype)[:, None]
    one = torch.ones(1, 1, dtype=z.dtype)
    truth, f, expected = (
        posterior_embedding(z[:, 0]),
        kernel(z, one)[:, 0],
        posterior_embedding(one[0])[:, 0],
    )
    distances = {
        (RATIO, IW): (
            ratio_function(grid, z, u, gamma, eta)
            - math.sqrt(2) * torch.exp(-(grid[:, 0] ** 2) / 4)
        )
        .abs()
        .max()
    }
    distances[CLIPPED, IW] = (gamma < 0).double().mean()
    for method, weights in ((IW, r), (ORIGINAL, gamma)):
        distances[COVARIANCE, method] = (weights @ psi / n - CHANCES).abs().max()
        v = w[OPERATOR, method]
        distances[OPERATOR, method] = (
            ((v @ G_Z * v).sum(1) - 2 * (v * truth).sum(1) + POSTERIOR_NORMS).sum().sqrt()
        )
        distances[POINT, method] = (w[POINT, method] @ f - expected).abs().max()
        distances[AVERAGE, method] = ((w[AVERAGE, method] @ f - expected).square() @ CHANCES).sqrt()
    return {key: value.item() for key, value in distances.items()}


def jobs(settings: Settings) -> list[Job]:
    """One for each n and run."""
    seeds = range(settings["seed"], settings["seed"] + settings["runs"])
    return [
        {"n": n, "run": run, "scales": settings["scales"]} for run in seeds for n in settings["n"]
    ]


def work(job: Job) -> list[Row]:
    """The errors at one n, for each height of the kernels."""
    rows = []
    for scale in job["scales"]:
        distances = errors(
            job["n"], 10_000 * job["run"] + job["n"], scale
        )  # the samples of different n are independent
        about = {"n": job["n"], "run": job["run"], "scale": scale}
        rows += [
            about | {"quantity": what, "method": method, "error": value}
            for (what, method), value in distances.items()
        ]
    return rows


def slope(rows: list[Row], quantity: str, method: str, scale: float) -> tuple[float, float]:
    """Least-squares slope of log RMS error on log n, and its jackknife standard error over runs."""
    mine = [
        row
        for row in rows
        if (row["quantity"], row["method"], row["scale"]) == (quantity, method, scale)
    ]
    sizes, runs = sorted({row["n"] for row in mine}), sorted({row["run"] for row in mine})
    at = {(row["run"], row["n"]): row["error"] for row in mine}
    squares = torch.tensor(
        [[at[run, n] for n in sizes] for run in runs], dtype=torch.float64
    ).square()
    x = torch.tensor(sizes, dtype=torch.float64).log()
    x = (x - x.mean()) / (x - x.mean()).square().sum()
    whole = (0.5 * squares.mean(0).log() @ x).item()
    left_out = 0.5 * ((squares.sum(0) - squares) / (len(runs) - 1)).log() @ x
    return whole, ((len(runs) - 1) * (left_out - left_out.mean()).square().mean()).sqrt().item()


def judge(rows: list[Row]) -> list[Verdict]:
    """Each proven rate against the measured slope, and the two rules against each other."""
    scales = sorted({row["scale"] for row in rows})
    judged = scales[-1]
    slopes = {(*key, s): slope(rows, *key, s) for key in PROVEN for s in scales}

    def listed(what: str, method: str) -> str:
        return ", ".join(
            f"{slopes[what, method, s][0]:.3f} +- {slopes[what, method, s][1]:.3f} (s = {s:g})"
            for s in reversed(scales)
        )

    verdicts = []
    for (what, method), rate in PROVEN.items():
        value, se = slopes[what, method, judged]
        verdicts.append(
            Verdict(
                f"{what}, {method}: slope of at most {-rate:.3f}",
                listed(what, method),
                below(value, -rate, se),
            )
        )
    point, average = (
        (slopes[what, ORIGINAL, judged], 2 * PROVEN[what, ORIGINAL]) for what in (POINT, AVERAGE)
    )
    clipped = means(
        [r for r in rows if (r["quantity"], r["scale"]) == (CLIPPED, judged)], ["n"], "error"
    )
    shares = ", ".join(
        f"{r['error']:.1%} at n = {r['n']}" for r in sorted(clipped, key=lambda r: r["n"])
    )
    slower = faster(slopes[COVARIANCE, ORIGINAL, judged], slopes[COVARIANCE, IW, judged])
    idle = min(r["error"] for r in clipped) < 0.01
    return [
        *verdicts,
        Verdict(
            "the errors of theorems 3.5 and 3.6, which the paper says can fall much faster in "
            "practice, fall with more than twice the exponent here",
            f"{point[0][0]:.3f} +- {point[0][1]:.3f} and {average[0][0]:.3f} +- "
            f"{average[0][1]:.3f}",
            all_of([below(value, -rate, se) for (value, se), rate in (point, average)]),
            asked=True,
        ),
        Verdict(
            "clipping makes the covariance of IW converge more slowly than the original's",
            f"{listed(COVARIANCE, IW)} and {listed(COVARIANCE, ORIGINAL)}; weights below zero: "
            f"{shares}",
            None if idle and not slower else slower,  # with nothing to clip the two are the same
            asked=True,
        ),
        Verdict(
            "the conditional operator of IW converges faster than the original's, given the "
            "covariances",
            f"{listed(OPERATOR, IW)} and {listed(OPERATOR, ORIGINAL)}",
            faster(slopes[OPERATOR, IW, judged], slopes[OPERATOR, ORIGINAL, judged]),
            asked=True,
        ),
    ]


def faster(one: tuple[float, float], other: tuple[float, float]) -> bool | None:
    """Whether one slope is steeper than another.

    None within two standard errors of the difference, or without any.
    """
    return below(one[0], other[0], math.hypot(one[1], other[1]))


def below(value: float, bound: float, se: float) -> bool | None:
    """Whether a measured value is at most the bound.

    None within two standard errors of it, or without any.
    """
    return value < bound if abs(value - bound) > 2 * se else None


def tests(rows: list[Row]) -> list[Row]:
    """None: the papers make no significance test."""
    return []


def draw(rows: list[Row]) -> Figure:
    """Errors against n, each with the line of its proven rate."""
    kept = [row for row in rows if row["quantity"] != CLIPPED]
    table = means(kept, ["quantity", "n", "method", "scale"], "error")
    shown = [row | {"line": f"{row['method']}, s = {row['scale']:g}"} for row in table]
    scale = max(row["scale"] for row in rows)
    for (what, method), rate in PROVEN.items():
        mine: list[dict[str, Any]] = [
            r for r in table if (r["quantity"], r["method"], r["scale"]) == (what, method, scale)
        ]
        first = min(mine, key=lambda row: row["n"])
        for row in mine:
            value = first["error"] * (row["n"] / first["n"]) ** -rate
            shown.append(
                {
                    "quantity": what,
                    "n": row["n"],
                    "line": f"proven rate, {method}",
                    "error": value,
                    "error_se": None,
                }
            )
    return curves(
        shown,
        x="n",
        y="error",
        by="line",
        se="error_se",
        panel="quantity",
        log="xy",
        ylabel="error",
    )

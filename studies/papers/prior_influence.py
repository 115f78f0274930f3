"""Does the prior come through?

Two classes, Bayes' rule and the kernel Bayes' rules (Johno et al., figures 2-5).

The state is a class, C1 or C2, with the delta kernel; the observation is in the plane, N((1, 0),
0.1 I) or N((0, 1), 0.1 I). The truth is Bayes' rule with these two densities, p1(y) and p2(y): Q(C1
| y) = pi p1(y) / (pi p1(y) + (1 - pi) p2(y)).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor
from torch.distributions import MultivariateNormal
from torch.nn.functional import one_hot

from kbf.plots.charts import Figure, curves
from kbf.rkhs import ratios, rules
from kbf.rkhs.kernels import gaussian
from studies.papers.base import SLIGHT_INCREASE, Job, Row, Settings, Verdict, means

THEORY, BR, NEUTRAL, KBR1, KBR2, IW = (
    "BR, true parameters",
    "BR",
    "BR, prior 1/2",
    "KBR1",
    "KBR2",
    "IW",
)
REGS = [10.0**-k for k in (1, 3, 5, 7, 9, 11, 13, 15)]
PRESETS: dict[str, dict[str, Any]] = {
    "full": {"runs": 100, "sigmas": [0.01, 0.1, 1.0, 10.0, 100.0], "regs": REGS},
    "quick": {"runs": 15, "sigmas": [0.01, 0.1, 1.0, 10.0, 100.0], "regs": REGS},
    "smoke": {"runs": 2, "sigmas": [0.1, 1.0], "regs": [1e-1, 1e-7]},
}
SMALL_INFLUENCE = 0.25
"""An influence below this is hardly any."""
SIGMA, FIGURES = 0.1, (1e-7, 1e-5, 1e-3, 1e-1)  # figures 2-5
SAMPLES_PER_CLASS, VARIANCE = 50, 0.1  # samples of a class, and their variance
CENTRES = torch.eye(2, dtype=torch.float64)
PRIORS = torch.arange(1, 10, dtype=torch.float64) / 10  # of C1
POINTS = torch.tensor([[0.5, 0.5], [0.6, 0.4], [0.7, 0.3]], dtype=torch.float64)
NOTES = """\
Delta and epsilon are those of the paper, whose mu is gamma / n: in the scaling of this library
delta is n^2 times larger. The Gaussian kernel has the factor 1 / (sqrt(2 pi) sigma) as printed.
Pseudoinverses set singular values below 1e-15 of the largest to zero (the default of numpy when the
paper was written; the paper does not give its value). "Influence" is the least-squares slope of the
estimates on the posterior by Bayes' rule over the nine priors, around the mean at each test point:
it is 1 for Bayes' rule and 0 if the prior has no effect. Below a quarter it is "hardly" influence,
and the prior "shows" if the influence is larger after normalisation of the estimates (which are too
small before). "Error" is the root mean square over priors and points. The paper does not say what a
reasonable result is; two bounds are given. "Better than no prior": the influence is at least 1/2
and the error (root mean square over samples, too) is below that of BR with the prior 1/2 in place
of each prior. This is a weak bound: an error below that of ignoring the prior is not a success. "As
good as BR": the influence is at least 1/2 and the error at most a quarter above that of BR, which
is Bayes' rule with Gaussian densities fitted to the same sample. IW is our addition, with eta =
epsilon and lambda = delta over the same grid. Where G_X is well conditioned and the ridge vanishes
it returns G_X^-1 g, as KBR1 and KBR2 do, which does not depend on the prior. "Normalised" divides
by the sum over the two classes.
"""


def posterior(log_densities: Float[Tensor, "m 2"]) -> Float[Tensor, "9 m"]:
    """Bayes' rule: Q(C1 | y) for each prior and each of m points, from log p1(y) and log p2(y)."""
    return torch.sigmoid(PRIORS.logit()[:, None] + log_densities[:, 0] - log_densities[:, 1])


TRUTH = posterior(-0.5 / VARIANCE * (POINTS[:, None] - CENTRES).square().sum(-1))


def sample(seed: int) -> tuple[Int[Tensor, " n"], Float[Tensor, "n 2"]]:
    """50 points of each class: class (0 or 1) and observation."""
    z = torch.arange(2).repeat_interleave(SAMPLES_PER_CLASS)
    noise = torch.randn(
        2 * SAMPLES_PER_CLASS, 2, dtype=torch.float64, generator=Generator().manual_seed(seed)
    )
    return z, CENTRES[z] + math.sqrt(VARIANCE) * noise


def bayes(z: Int[Tensor, " n"], x: Float[Tensor, "n 2"]) -> Float[Tensor, "9 m"]:
    """BR (section 4.1.1): Gaussian densities with the mean and covariance of each class."""
    classes = [x[z == j] for j in range(2)]
    return posterior(
        torch.stack(
            [MultivariateNormal(c.mean(0), c.mT.cov()).log_prob(POINTS) for c in classes], -1
        )
    )


def kernel_bayes(
    method: str,
    z: Int[Tensor, " n"],
    x: Float[Tensor, "n 2"],
    sigma: float,
    eps: float,
    delta: float,
) -> Float[Tensor, "9 m 2"]:
    """Sums of the posterior's weights over C1 and C2, for each prior and point.

    Sections 4.1.2 and 4.1.3, and IW.
    """
    n, height = len(z), 1 / (math.sqrt(2 * math.pi) * sigma)
    classes = one_hot(z, 2).to(x)
    G_Z, prior = (
        classes @ classes.mT,
        torch.stack([PRIORS, 1 - PRIORS], -1) @ classes.mT,
    )  # the delta kernel
    G_X, g = height * gaussian(x, x, bandwidth=sigma), height * gaussian(POINTS, x, bandwidth=sigma)
    shape = (len(PRIORS), len(POINTS), n)
    g = g.expand(shape)
    if method == KBR1:
        w = rules.original(
            ratios.tikhonov(G_Z, prior, eps)[:, None].expand(shape), G_X, g, n**2 * delta
        )
    elif method == KBR2:
        w = rules.pseudo_inverse(
            (prior @ torch.linalg.pinv(G_Z))[:, None].expand(shape), G_X, g, rtol=1e-15
        )
    else:
        w = rules.importance_weighted(
            ratios.kulsif(G_Z, prior, eps)[:, None].expand(shape), G_X, g, delta
        )
    return w @ classes


def jobs(settings: Settings) -> list[Job]:
    """One for each training sample."""
    shared = {"sigmas": settings["sigmas"], "regs": settings["regs"]}
    return [
        {"run": run, **shared}
        for run in range(settings["seed"], settings["seed"] + settings["runs"])
    ]


def work(job: Job) -> list[Row]:
    """Every answer of figures 2-5, and a row of summaries (y: all) for each setting."""
    z, x = sample(job["run"])
    shown = dict.fromkeys((SIGMA, reg, reg) for reg in FIGURES)
    grid = dict.fromkeys(
        (sigma, eps, delta)
        for sigma in job["sigmas"]
        for eps in job["regs"]
        for delta in job["regs"]
    )
    tried = {
        KBR1: shown | grid,
        KBR2: dict.fromkeys((sigma, None, None) for sigma in job["sigmas"]),
        IW: shown | grid,
    }
    rows: list[Row] = []
    fitted = bayes(z, x)
    for method, answers in ((THEORY, TRUTH), (BR, fitted), (NEUTRAL, fitted[4].expand_as(fitted))):
        setting = {"run": job["run"], "method": method, "sigma": None, "eps": None, "delta": None}
        rows += report(setting, answers, answers, method != NEUTRAL)
    for method, settings in tried.items():
        for sigma, eps, delta in settings:
            mass = kernel_bayes(method, z, x, sigma, eps or 0.0, delta or 0.0)
            setting = {
                "run": job["run"],
                "method": method,
                "sigma": sigma,
                "eps": eps,
                "delta": delta,
            }
            in_figure = (sigma, eps, delta) in shown or (method == KBR2 and sigma == SIGMA)
            rows += report(setting, mass[..., 0], mass[..., 0] / mass.sum(-1), in_figure)
    return rows


def report(
    setting: Row, answers: Float[Tensor, "9 m"], normalised: Float[Tensor, "9 m"], each: bool
) -> list[Row]:
    """The summaries of the answers of one setting, and each answer itself if wanted."""
    ways = {"": answers, "normalised ": normalised}
    numbers = {
        f"{way}{f.__name__}": f(values) for way, values in ways.items() for f in (error, influence)
    }
    rows = [setting | {"y": "all", "prior": None, "answer": answers.mean().item()} | numbers]
    for j, y in enumerate(POINTS.tolist() if each else []):
        for prior, answer in zip(PRIORS.tolist(), answers[:, j].tolist(), strict=True):
            rows.append(
                setting
                | {"y": str(tuple(y)), "prior": round(prior, 1), "answer": answer}
                | dict.fromkeys(numbers)
            )
    return rows


def error(answers: Float[Tensor, "9 m"]) -> float:
    """Root mean squared difference from Bayes' posterior."""
    return (answers - TRUTH).square().mean().sqrt().item()


def influence(answers: Float[Tensor, "9 m"]) -> float:
    """Least-squares slope of the answers on Bayes' posterior over the priors.

    Both are centred at each point.
    """
    theirs = TRUTH - TRUTH.mean(
        0
    )  # the answers need not be centred as well: the product sums to the same
    return (answers * theirs).sum().item() / theirs.square().sum().item()


def judge(rows: list[Row]) -> list[Verdict]:
    """The paper's statements, and what becomes of the prior in IW."""
    rows = [row for row in rows if row["y"] == "all"]
    table = averages(r for r in rows if r["sigma"] in (SIGMA, None))
    shown = {(row["method"], row["eps"], row["delta"]): row for row in table}
    of = {m: [shown[m, reg, reg] for reg in FIGURES] for m in (KBR1, IW)}
    influences = {
        m: ", ".join(f"{row['influence']:.3f}" for row in summary) for m, summary in of.items()
    }
    at, wanted = "eps = delta = 1e-7, 1e-5, 1e-3, 0.1", TRUTH.mean().item()
    answers = ", ".join(f"{row['answer']:.3f}" for row in of[KBR1])
    shares = ", ".join(f"{row['normalised influence']:.3f}" for row in of[KBR1])
    small, large = of[KBR1][:2], of[KBR1][2:]
    shows = all(
        abs(row["normalised influence"]) > SMALL_INFLUENCE
        and row["answer"] + 2 * row["answer_se"] < min(wanted, *(each["answer"] for each in small))
        for row in large
    )
    theirs = shown[BR, None, None]
    grid = {m: averages(r for r in rows if r["method"] == m) for m in (KBR1, KBR2, IW)}
    ignored = {row["sigma"]: row["influence"] for row in grid[KBR2]}
    bound = shown[NEUTRAL, None, None]["error"]
    bounds = {
        "better than no prior": bound,
        "as good as BR": (1 + SLIGHT_INCREASE) * theirs["error"],
    }

    def count(method: str, limit: float) -> int:
        return sum(reasonable(row, limit) for row in grid[method])

    parameters = f"BR error {theirs['error']:.3f}, with prior 1/2 {bound:.3f}"
    return [
        Verdict(
            "KBR1 with small ridges (1e-7, 1e-5) is hardly influenced by the prior",
            f"influence {influences[KBR1]} at {at} (BR {theirs['influence']:.2f})",
            all(abs(row["influence"]) < SMALL_INFLUENCE for row in small),
        ),
        Verdict(
            "KBR2 is not influenced by the prior",
            "influence " + ", ".join(f"{v:.3f} (sigma = {k})" for k, v in ignored.items()),
            all(abs(value) < 0.05 for value in ignored.values()),
        ),
        Verdict(
            "with larger ridges (1e-3, 0.1) the prior shows in KBR1, but the posterior becomes too "
            "small (here: below Bayes' and below that of small ridges)",
            f"mean answer {answers} at {at}, Bayes' posterior {wanted:.3f}; influence after "
            f"normalisation {shares}",
            shows,
        ),
        *(
            Verdict(
                f"no setting of the grid gives a reasonable result ({name})",
                f"{about(KBR1, grid[KBR1], limit)}; {about(KBR2, grid[KBR2], limit)}; {parameters}",
                not count(KBR1, limit) and not count(KBR2, limit),
            )
            for name, limit in bounds.items()
        ),
        Verdict(
            "at the same four settings IW is influenced by the prior (influence above 1/2)",
            f"influence {influences[IW]} at {at}",
            all(row["influence"] > 0.5 for row in of[IW]),
            asked=True,
        ),
        *(
            Verdict(
                f"the grid has reasonable settings for IW ({name})",
                f"{about(IW, grid[IW], limit)} (KBR1: {count(KBR1, limit)}, least error "
                f"{min(row['error'] for row in grid[KBR1]):.3f}); {parameters}",
                count(IW, limit) > 0,
                asked=True,
            )
            for name, limit in bounds.items()
        ),
    ]


def averages(rows: Any) -> list[Row]:
    """The summaries of each setting: means over samples, of errors the root of the mean square."""
    squares = [row | {key: row[key] ** 2 for key in row if key.endswith("error")} for row in rows]
    names = ("answer", "error", "influence", "normalised error", "normalised influence")
    table = means(squares, ["method", "sigma", "eps", "delta"], *names)
    return [
        row | {key: math.sqrt(row[key]) for key in names if key.endswith("error")} for row in table
    ]


def reasonable(row: Mapping[str, Any], bound: float, way: str = "") -> bool:
    """Whether a setting's answers follow the prior and have an error below ``bound``."""
    return row[f"{way}influence"] >= 0.5 and row[f"{way}error"] < bound


def about(method: str, grid: list[Row], bound: float) -> str:
    """How many settings of a grid are reasonable, where they are, and the least error of any."""
    good = [row for row in grid if reasonable(row, bound)]
    where = []
    for sigma in dict.fromkeys(row["sigma"] for row in good):
        deltas = dict.fromkeys(
            f"{row['delta']:g}"
            for row in good
            if row["sigma"] == sigma and row["delta"] is not None
        )
        where.append(
            f" at sigma = {sigma:g}" + (f", delta = {', '.join(deltas)}" if deltas else "")
        )
    normalised = sum(reasonable(row, bound, "normalised ") for row in grid)
    row = min(grid, key=lambda row: row["error"])
    counted = f"{len(good)} of {len(grid)} reasonable ({normalised} normalised){' and'.join(where)}"
    return (
        f"{method}: {counted}, least error {row['error']:.3f} with influence {row['influence']:.2f}"
    )


def tests(rows: list[Row]) -> list[Row]:
    """None: the paper makes no significance test."""
    return []


def draw(rows: list[Row]) -> Figure:
    """Figures 2-5: from left to right, the three test points from top to bottom."""
    table = means(
        [row for row in rows if row["y"] != "all"], ["y", "method", "eps", "prior"], "answer"
    )
    shown = []
    for y in dict.fromkeys(row["y"] for row in table):
        for reg in FIGURES:
            panel = f"y = {y}, eps = delta = {reg:g}"
            shown += [
                row | {"panel": panel}
                for row in table
                if row["y"] == y and row["eps"] in (reg, None)
            ]
    name = "posterior probability of C1"
    axes = partial(curves, xlabel="prior probability of C1", ylabel=name, share_y=True)
    return axes(shown, x="prior", y="answer", by="method", se="answer_se", panel="panel")

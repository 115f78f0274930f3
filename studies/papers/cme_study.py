"""Figures 1-7 and 9-15 of the LCKME draft, for a problem with known N(mean(x), cov).

Three kinds of work: ``grid`` (all bandwidths and ridges), ``chosen`` (those of cross-validation, at
each n and each d_x) and ``time`` (the same for each size m of the cheap forms).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import product
from typing import NamedTuple

from torch import Tensor

from kbf.filters.kernel.hyperparameters import best_of
from kbf.plots.charts import Figure, curves
from kbf.rkhs.embeddings import Embedding
from studies.papers.base import (
    Job,
    Row,
    Settings,
    Verdict,
    every,
    means,
    significantly_better,
    wilcoxon,
)
from studies.papers.cme_forms import (
    ALL_POINTS,
    CKME,
    LCKME,
    METHODS,
    NWKR,
    RANDOM,
    cv_score,
    density,
    fit,
    norm_error,
    split,
)

FORM_SEEDS = 1_000_000
"""Added to the run for the seed of a form, whose draws must not be those of the data."""
EQUAL_WITHIN = 1.1
"""What "as accurate" means in the verdicts: at most a tenth more error."""


class Problem(NamedTuple):
    """Training pairs x ``n q`` and y ``n d``.

    Queries ``b q`` with the truth N(mean ``b d``, cov ``d d``) of y there.
    """

    x: Tensor
    y: Tensor
    queries: Tensor
    mean: Tensor
    cov: Tensor


def local_size(n: int) -> int:
    """m = n^(2/3), the draft's k (section 5.4)."""
    return max(2, round(n ** (2 / 3)))


def jobs(settings: Settings) -> list[Job]:
    """One for each run and each problem of a figure."""
    shared = {key: settings[key] for key in ("sigmas", "ridges", "variance_y", "queries")}
    n, d = settings["n"], settings["d"]
    kinds = [{"kind": "grid", "n": n, "d": d, "m": local_size(n)}]
    problems = dict.fromkeys(
        [
            *((size, d) for size in settings["sizes"]),
            *((n, inputs) for inputs in settings["dimensions"]),
        ]
    )
    kinds += [
        {"kind": "chosen", "n": size, "d": inputs, "m": local_size(size)}
        for size, inputs in problems
    ]
    for i, m in enumerate(settings["m"]):  # those of all points have no m: once
        methods = [method for method in METHODS if i == 0 or method not in ALL_POINTS]
        kinds.append({"kind": "time", "n": settings["time_n"], "d": d, "m": m, "methods": methods})
    seeds = range(settings["seed"], settings["seed"] + settings["runs"])
    return [{**kind, "run": run, **shared} for run in seeds for kind in kinds]


def work(job: Job, p: Problem) -> list[Row]:
    """The errors of every method, at all bandwidths and ridges or at cross-validated ones."""
    m, seed, variance_y = job["m"], FORM_SEEDS + job["run"], job["variance_y"]
    grid = list(product(job["sigmas"], job["ridges"]))
    if job["kind"] == "grid":
        return [row(job, p, method, *at) for at in grid for method in METHODS]
    parts = split(p.x, p.y, variance=variance_y)
    rows = []
    for method in job.get("methods", METHODS):
        mine = (
            grid if method != NWKR else list(product(job["sigmas"], job["ridges"][:1]))
        )  # it has no ridge
        chosen = best_of(
            mine,
            lambda at, to=method: cv_score(parts, to, variance=at[0], reg=at[1], m=m, seed=seed),
        )
        rows.append(row(job, p, method, *chosen))
    return rows


def row(job: Job, p: Problem, method: str, sigma: float, reg: float) -> Row:
    """The errors of one fit, averaged over the queries, and the time of fit and means."""
    began = time.process_time()
    seed = FORM_SEEDS + job["run"]
    form = fit(method, p.x, p.y, variance=sigma, reg=reg, m=job["m"], seed=seed)
    mean = form.mean(p.queries)
    seconds = time.process_time() - began
    w = form.weights(p.queries)
    mode = Embedding(p.y, w).mode(lambda a, b: density(a, b, variance=job["variance_y"]))
    return {
        **{key: job[key] for key in ("kind", "run", "n", "d", "m")},
        "method": method,
        "sigma": sigma,
        "ridge": reg,
        "rkhs": norm_error(w, p.y, p.mean, p.cov, variance=job["variance_y"]).mean().item(),
        "mean": (mean - p.mean).square().sum(-1).mean().item(),
        "mode": (mode - p.mean).square().sum(-1).mean().item(),
        "noise": p.cov.trace().item(),
        "seconds": seconds,
    }


def judge(rows: list[Row]) -> list[Verdict]:
    """What the draft hopes of the local form, in RKHS-norm error and both RMSE."""
    rows = with_noise(rows)
    settings, sizes, inputs = (
        [r for r in rows if r["kind"] == "grid"],
        sweep(rows, "n"),
        sweep(rows, "d"),
    )
    best = {
        value: {method: lowest(settings, method, value) for method in (CKME, LCKME)}
        for value in ERRORS
    }
    verdicts = [
        Verdict(
            "LCKME is as accurate as CKME (within 10 %), each at its best sigma and ridge",
            "; ".join(
                f"{ERRORS[value].name}: "
                + ", ".join(
                    f"{k} {shown(r, value):.3g} (sigma {r['sigma']:g}, ridge {r['ridge']:g})"
                    for k, r in at.items()
                )
                for value, at in best.items()
            ),
            every(
                [
                    shown(at[LCKME], value) <= EQUAL_WITHIN * shown(at[CKME], value)
                    for value, at in best.items()
                ]
            ),
        ),
        *(
            compare(
                f"LCKME is as accurate as CKME (within 10 %) at every {name}, both cross-validated",
                mine,
                name,
                CKME,
                EQUAL_WITHIN,
            )
            for name, mine in (("n", sizes), ("d", inputs))
        ),
        *(
            compare(
                f"LCKME is more accurate than {other} at every n, both cross-validated",
                sizes,
                "n",
                other,
                1.0,
            )
            for other in (RANDOM, NWKR)
        ),
        faster(rows),
        alike(sizes),
    ]
    return [v._replace(asked=True) for v in verdicts]  # the draft reports no result


def with_noise(rows: list[Row]) -> list[Row]:
    """The rows with squared errors of mean and mode as those over the true sample y."""
    kept = [r for r in rows if r["kind"] in ("grid", "chosen", "time")]
    return [{**r, **{key: r[key] + r["noise"] for key in ("mean", "mode")}} for r in kept]


def sweep(rows: list[Row], name: str) -> list[Row]:
    """Rows of cross-validated fits in which ``name`` (n or d) varies, the other is fixed."""
    other = {"n": "d", "d": "n"}[name]
    base = next(r for r in rows if r["kind"] == "grid")
    return sorted(
        (r for r in rows if r["kind"] == "chosen" and r[other] == base[other]),
        key=lambda r: r[name],
    )


def lowest(rows: list[Row], method: str, value: str = "rkhs") -> Row:
    """The bandwidth and ridge of a method with the smallest mean error over the runs."""
    table = means([r for r in rows if r["method"] == method], ["method", "sigma", "ridge"], value)
    return min(table, key=lambda r: r[value])


def compare(finding: str, rows: list[Row], by: str, other: str, most: float) -> Verdict:
    """Whether LCKME's errors are at most ``most`` times the other's at every value of ``by``.

    With ``most`` = 1 they must be smaller with p < 0.05; undecided where some are, or are not
    surely.
    """
    values = list(dict.fromkeys(r[by] for r in rows))
    pairs = [r for r in rows if r["method"] in (LCKME, other)]
    p = {(r[by], r["error"]): r["p_value"] for r in tests_of(pairs, [by])}
    holds: list[bool | None] = []
    parts = []
    for value, kind in ERRORS.items():
        error = {(r[by], r["method"]): shown(r, value) for r in means(rows, [by, "method"], value)}
        share = {at: error[at, LCKME] / error[at, other] for at in values}
        if most != 1:
            holds += [s <= most for s in share.values()]
        else:
            holds += [significantly_better(s < 1, p[at, kind.name]) for at, s in share.items()]
        parts.append(f"{kind.name} {', '.join(f'{s:.2f}' for s in share.values())}")
    ours = (
        f"LCKME's error over that of {other} at {by} = {', '.join(map(str, values))}: "
        f"{'; '.join(parts)}"
    )
    answer = None if None in holds else every([bool(h) for h in holds])
    return Verdict(finding, ours, answer)


def faster(rows: list[Row]) -> Verdict:
    """The cheapest LCKME that comes close to CKME in all errors, in the same number of queries."""
    table = means([r for r in rows if r["kind"] == "time"], ["method", "m"], *ERRORS, "seconds")
    full = min((r for r in table if r["method"] == CKME), key=lambda r: r["seconds"])
    near = [
        r
        for r in table
        if r["method"] == LCKME
        and all(shown(r, value) <= EQUAL_WITHIN * shown(full, value) for value in ERRORS)
    ]
    finding = "LCKME reaches CKME's errors (within 10 %) in less time"
    if not near:
        return Verdict(finding, "it does not reach them at any m", False)
    r = min(near, key=lambda r: r["seconds"])
    ours = "; ".join(
        f"{name}: "
        + ", ".join(f"{shown(one, value):.3g}" for value in ERRORS)
        + f" in {1e3 * one['seconds']:.2g} ms"
        for name, one in ((f"LCKME, m = {r['m']}", r), (CKME, full))
    )
    names = ", ".join(kind.name for kind in ERRORS.values())
    return Verdict(finding, f"{names}: {ours}", r["seconds"] < full["seconds"])


def differences(rows: list[Row]) -> list[Row]:
    """Decades between a method's cross-validated sigma and ridge and those of CKME.

    For each run and n (figures 7 and 15). NWKR has no ridge.
    """
    full = {(r["run"], r["n"]): r for r in rows if r["method"] == CKME}
    optima = []
    for r in rows:
        exact = full[r["run"], r["n"]]
        sigma, ridge = (math.log10(r[key] / exact[key]) for key in ("sigma", "ridge"))
        ridge = None if r["method"] == NWKR else ridge
        optima.append({"method": r["method"], "sigma": sigma, "ridge": ridge, "off": abs(sigma)})
    return optima


def alike(rows: list[Row]) -> Verdict:
    """Whether cross-validation of the local form may stand in for that of the full one."""
    off = {r["method"]: r["off"] for r in means(differences(rows), ["method"], "off")}
    ours = "mean distance of log10 sigma: " + ", ".join(
        f"{name} {off[name]:.2f}" for name in (LCKME, RANDOM, NWKR)
    )
    return Verdict(
        "cross-validation chooses CKME's sigma for LCKME too (within half a decade on average)",
        ours,
        off[LCKME] <= 0.5,
    )


def tests(rows: list[Row]) -> list[Row]:
    """Wilcoxon signed-rank tests between the methods, cross-validated, at each n and d."""
    return tests_of(with_noise([r for r in rows if r["kind"] == "chosen"]), ["n", "d"])


def tests_of(rows: list[Row], by: list[str]) -> list[Row]:
    """Wilcoxon signed-rank tests in each of the errors."""
    return [
        {"error": kind.name, **test}
        for value, kind in ERRORS.items()
        for test in wilcoxon(rows, value, by)
    ]


def draw(rows: list[Row], figures: tuple[int, ...], more: list[Row]) -> Figure:
    """Figures 2-7 (10-15), the first five with RKHS-norm error, RMSE of mean and RMSE of mode.

    Args:
        rows: of the experiment.
        figures: the draft's numbers for the panels: sigma, ridge, d_x, n, time, differences.
        more: with the columns panel, at, method, error and se.
    """
    rows = with_noise(rows)
    grid, sizes, points = [r for r in rows if r["kind"] == "grid"], sweep(rows, "n"), []
    timed = [r for r in rows if r["kind"] == "time"]
    for value, (error, root) in ERRORS.items():
        for number, key in zip(figures[:2], ("sigma", "ridge"), strict=True):
            other = {"sigma": "ridge", "ridge": "sigma"}[key]
            for method, at in product(METHODS, sorted({r[key] for r in grid})):
                r = lowest([r for r in grid if r[key] == at], method, value)
                panel = f"fig. {number}: {error}, {key} (best {other})"
                points.append(point(panel, at, root(r, value), value))
        for number, mine, key, label in (
            (figures[2], sweep(rows, "d"), "d", "d_x"),
            (figures[3], sizes, "n", "n"),
        ):
            points += [
                point(f"fig. {number}: {error}, {label}", r[key], root(r, value), value)
                for r in means(mine, ["method", key], value)
            ]
        for method in METHODS:
            by = ["method"] if method in ALL_POINTS else ["method", "m"]
            for r in means([r for r in timed if r["method"] == method], by, value, "seconds"):
                panel = f"fig. {figures[4]}: {error}, seconds"
                points.append(point(panel, r["seconds"], root(r, value), value))
    with_ridge = [r for r in differences(sizes) if r["ridge"] is not None]
    for r in means(with_ridge, ["method"], "sigma", "ridge"):
        factor = {**r, "sigma": 10 ** r["sigma"], "sigma_se": None}
        panel = f"fig. {figures[5]}: factor to CKME's sigma, to its ridge"
        points.append(point(panel, 10 ** r["ridge"], factor, "sigma"))
    points.sort(key=lambda p: p["panel"].partition(":")[0])  # by figure
    return curves(
        [*points, *more],
        x="at",
        y="error",
        by="method",
        se="se",
        panel="panel",
        log="xy",
        xlabel=" ",
        ylabel=" ",
    )


def as_is(r: Row, value: str) -> Row:
    """The mean of errors that are no squares."""
    return r


def rooted(r: Row, value: str) -> Row:
    """The root of a mean of squares, with its standard error by the first derivative."""
    rmse = math.sqrt(r[value])
    return {**r, value: rmse, f"{value}_se": r[f"{value}_se"] / (2 * rmse)}


class Error(NamedTuple):
    """A column of errors: its name in panels and verdicts, and what is shown of its mean."""

    name: str
    root: Callable[[Row, str], Row]


ERRORS = {
    "rkhs": Error("RKHS error", as_is),
    "mean": Error("RMSE of the mean", rooted),
    "mode": Error("RMSE of the mode", rooted),
}
"""The three errors of the draft."""


def shown(r: Row, value: str) -> float:
    """The error of a row of means, as the figures have it."""
    return ERRORS[value].root(r, value)[value]


def point(panel: str, at: float | int, r: Row, value: str) -> Row:
    """A point of the picture."""
    return {
        "panel": panel,
        "at": at,
        "method": r["method"],
        "error": r[value],
        "se": r[f"{value}_se"],
    }

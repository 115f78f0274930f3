"""Error against time of cheap conditional mean embeddings, `kbf.rkhs.conditional_means`.

The regression is the move of the oscillatory model, z -> E[z'] = f(z), known exactly: n pairs of
successive states, and new states as queries. All forms take bandwidth and ridge from one grid by
the closed-form leave-one-out error on the training pairs. Those that approximate the exact form
share its choice (found with features of a rank that leaves hardly anything out). Those that are
estimators of their own, over fewer points, near the query or without a ridge, choose for
themselves, at each size, by the error at some of the pairs. The time is that of a fit and of the
means of all queries; the error is the root mean square of m(z) - f(z).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

from torch import Generator, Tensor

from kbf.data.synthetic import SyntheticData
from kbf.plots.charts import Figure, curves
from kbf.rkhs import conditional_means, features
from kbf.rkhs.kernels import gaussian, median_distance
from kbf.rkhs.linalg import evenly
from kbf.ssm import oscillatory
from studies.benchmarks.base import Claim, Row, Settings, Tell, alternate

SIZES: dict[str, dict[str, Any]] = {
    "full": {
        "n": 5000,
        "queries": 1000,
        "sizes": [50, 100, 200, 400],
        "neighbours": [25, 50, 100, 200],
        "factors": [0.1, 0.15, 0.2, 0.3, 0.5],
        "regs": [1e-6, 1e-5, 1e-4, 1e-3, 1e-2],
        "rank": 1000,
        "turns": {"rounds": 3, "seconds": 0.2},
    },
    "smoke": {
        "n": 150,
        "queries": 30,
        "sizes": [20],
        "neighbours": [20],
        "factors": [0.2, 0.4],
        "regs": [1e-4, 1e-2],
    }
    | {"rank": 40, "turns": {"rounds": 1, "seconds": 0.01}},
}
EXACT = "exact"
SCORED_POINTS = 400
"""Training pairs at which an estimator of its own is scored."""

Grid = list[tuple[float, float]]
Fit = Callable[[float, float], conditional_means.ConditionalMean]
"""(bandwidth, reg) -> a fitted form."""


def run(settings: Settings, tell: Tell) -> list[Row]:
    """Times and error of each form at each size."""
    device, n = settings["device"], settings["n"]
    model = oscillatory()
    data = SyntheticData(model, n_train=n + 1, n_test=settings["queries"], seed=0)
    states, query = data.train[0].states.double(), data.test[0].states.double()
    truth = model.f(query).to(device)
    x, z, query = states[:-1].to(device), states[1:].to(device), query.to(device)
    median = median_distance(x).item()
    grid = list(product([factor * median for factor in settings["factors"]], settings["regs"]))
    tell("leave-one-out")
    shared = of_all(grid, x, z, settings["rank"])
    chosen, fits = {}, {}
    for (form, size), (fit, own) in forms(x, z, settings["sizes"], settings["neighbours"]).items():
        name = f"{form} {size}"
        tell(name)
        bandwidth, reg = best(grid, fit, x, z) if own else shared
        chosen[name] = {"form": form, "m": size, "bandwidth": bandwidth, "reg": reg}
        fits[name] = partial(fit, bandwidth, reg)
    tell("time of a fit")
    fitting = alternate(fits, **settings["turns"])
    fitted = {name: fit() for name, fit in fits.items()}
    tell("time of the queries")
    asking = alternate(
        {name: partial(fit.mean, query) for name, fit in fitted.items()}, **settings["turns"]
    )
    total = {name: fitting[name] + asking[name] for name in fits}
    first = next(iter(fits))
    errors = {
        name: (fit.mean(query) - truth).square().sum(-1).mean().sqrt().item()
        for name, fit in fitted.items()
    }
    return [
        {**row, "fit seconds": fitting[name], "query seconds": asking[name], "seconds": total[name]}
        | {"times faster than exact": total[first] / total[name]}
        | {"error": errors[name], "error above exact": errors[name] / errors[first] - 1}
        for name, row in chosen.items()
    ]


def forms(
    x: Tensor, z: Tensor, sizes: list[int], neighbours: list[int]
) -> dict[tuple[str, int], tuple[Fit, bool]]:
    """(form, size) -> how to fit it, and whether it is an estimator of its own.

    The exact one comes first.

    The size is the number of features, landmarks, neighbours or points drawn; of
    `divide_and_conquer` that of the points in a part.
    """
    n, search = len(x), "tree" if x.device.type == "cpu" else "kernel"

    def of(form: Callable[..., conditional_means.ConditionalMean], **settings: object) -> Fit:
        return lambda width, reg: form(partial(gaussian, bandwidth=width), x, z, reg, **settings)

    def drawn(form: Callable[..., conditional_means.ConditionalMean], **settings: object) -> Fit:
        return lambda width, reg: of(form, generator=Generator().manual_seed(0), **settings)(
            width, reg
        )

    def fourier(m: int) -> Fit:
        return lambda width, reg: conditional_means.random_fourier(
            width, x, z, reg, m=m, generator=Generator().manual_seed(0)
        )

    def nadaraya_watson(width: float, reg: float) -> conditional_means.ConditionalMean:
        return conditional_means.nadaraya_watson(partial(gaussian, bandwidth=width), x, z)

    table: dict[tuple[str, int], tuple[Fit, bool]] = {
        (EXACT, n): (of(conditional_means.exact), False)
    }
    for m in sizes:
        table["incomplete Cholesky", m] = of(conditional_means.incomplete_cholesky, rank=m), False
        table["Nyström", m] = drawn(conditional_means.nystrom, m=m), False
        table["Nyström, leverage scores", m] = (
            drawn(conditional_means.nystrom, m=m, sampling="leverage"),
            False,
        )
        table["random Fourier", m] = fourier(m), False
        table["divide and conquer", m] = (
            drawn(conditional_means.divide_and_conquer, s=max(1, n // m)),
            False,
        )
        table["subsample", m] = drawn(conditional_means.subsample, m=m), True
    for m in neighbours:
        table["nearest", m] = of(conditional_means.nearest, m=m, search=search), True
    table["Nadaraya-Watson", n] = nadaraya_watson, True
    return table


def of_all(grid: Grid, x: Tensor, z: Tensor, rank: int) -> tuple[float, float]:
    """Bandwidth and ridge of the exact form with the least leave-one-out error over all pairs.

    Computed with features of a high rank.
    """
    bases = {}
    for bandwidth in {bandwidth for bandwidth, _ in grid}:
        kernel = partial(gaussian, bandwidth=bandwidth)
        bases[bandwidth] = features.nystrom(
            kernel, x[features.pivots(kernel, x, rank=rank, tol=1e-9)]
        )
    return min(
        grid,
        key=lambda at: conditional_means.feature_loo(
            conditional_means.feature_ridge(bases[at[0]], x, z, at[1]), z
        ).item(),
    )


def best(grid: Grid, fit: Fit, x: Tensor, z: Tensor) -> tuple[float, float]:
    """Bandwidth and ridge with the least leave-one-out error."""
    return min(grid, key=lambda at: left_out(fit(*at), x, z))


def left_out(fit: conditional_means.ConditionalMean, x: Tensor, z: Tensor) -> float:
    """Mean leave-one-out error ||z_i - m_{-i}(x_i)||^2 over some training pairs.

    ||z_i - m_{-i}(x_i)||^2 = ||z_i - m(x_i)||^2 / (1 - w_i(x_i))^2.
    """
    rows = evenly(len(x), SCORED_POINTS, x.device)
    weights = fit.weights(x[rows])
    own = weights.gather(1, rows[:, None])
    return ((z[rows] - weights @ z) / (1 - own)).square().sum(-1).mean().item()


def claims(rows: list[Row]) -> list[Claim]:
    """The error of the exact form in much less time."""
    good = [row for row in rows if row["form"] != EXACT and row["error above exact"] <= 0.02]
    best = max(good, key=lambda row: row["times faster than exact"], default=None)
    target = "some form within 2 % of the exact one's error in at most 1/50 of the time"
    if best is None:
        return [Claim(target, "no form is within 2 %", False)]
    times = best["times faster than exact"]
    words = (
        f"{times:.0f} times faster: {best['form']}, m = {best['m']}, error "
        f"{100 * best['error above exact']:+.1f} %"
    )
    return [Claim(target, words, times >= 50)]


def draw(rows: list[Row]) -> Figure:
    """Error against time, a line for each form."""
    exact = next(row for row in rows if row["form"] == EXACT)
    return curves(
        rows,
        x="seconds",
        y="error",
        by="form",
        log="xy",
        xlabel="seconds, fit and queries",
        ylabel="error of the conditional mean",
        level=(exact["error"], "error of the exact form"),
        title=f"Conditional mean embeddings, n = {exact['m']}",
    )

"""Rates of mutation and recombination from summary statistics: error against time (LCKME draft, section 5.3, figure 16)."""

from __future__ import annotations

import time
from functools import partial
from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor

from kbf.charts import Figure, curves
from kbf.experiments.base import Job, Row, Settings, Verdict, means, wilcoxon
from kbf.experiments.cme_forms import CKME, DIVIDED, ICF, LCKME, LEVERAGE, METHODS, NWKR, RANDOM, RFF, fit
from kbf.experiments.coalescent_data import PRIOR, chunk, observations, simulations, sizes
from kbf.kernels import gaussian, median_distance
from kbf.selection import best_of

PRESETS = {
    "full": {
        "runs": 5,
        "n": 100_000,
        "observed": 100,
        "held": 300,
        "factors": [0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0],
        "ridges": [1e-7, 1e-5, 1e-3, 1e-1],
        "m": {
            **{CKME: [5000], LCKME: [10, 30, 100, 300], NWKR: [100_000], RANDOM: [300, 1000, 3000]},
            **{ICF: [30, 100, 300], RFF: [30, 100, 300], DIVIDED: [100, 300, 1000], LEVERAGE: [30, 100, 300]},
        },
    },
    "quick": {
        **{
            "runs": 1,
            "n": 8000,
            "observed": 100,
            "held": 150,
            "factors": [0.125, 0.25, 0.5, 1.0, 2.0],
            "ridges": [1e-5, 1e-3, 1e-1],
        },
        "m": {
            **{CKME: [1500], LCKME: [30, 100], NWKR: [8000], RANDOM: [300, 1000]},
            **{ICF: [30, 100], RFF: [30, 100], DIVIDED: [100, 300], LEVERAGE: [30, 100]},
        },
    },
    "smoke": {
        **{"runs": 2, "n": 60, "observed": 4, "held": 10, "factors": [1.0], "ridges": [1e-2]},
        "m": {CKME: [30], LCKME: [5, 10], NWKR: [60], RANDOM: [10], ICF: [10], RFF: [10], DIVIDED: [20], LEVERAGE: [10]},
    },
}
NOTES = """The data are simulated anew by msprime in place of the R package's file, by its description: 50 haplotypes, infinite
sites, a uniform noise on [0, 25] as the second statistic; the prior, which it does not print, is that of the papers it comes from:
theta uniform on [2, 10], rho on [0, 10]. The simulations are kept in the user's cache and are the same for all methods and runs; a
run has its own 100 observations. Statistics are divided by their standard deviation. Bandwidth (a factor times the median
distance) and ridge are chosen for each method and size by the squared error of the mean at 300 simulations that are taken out for
it. CKME of all 100,000 needs 80 GB; here it has the first 5,000. Times (of the processor) are of one fit and 100 queries at given
settings. The mode is looked for on a grid of the prior's box with steps of 0.2, with a bandwidth of 1."""


def jobs(settings: Settings) -> list[Job]:
    """First the simulations, in chunks; then one for each run, method and size."""
    shared = {"n": settings["n"], "seed": settings["seed"]}
    simulate = [{"kind": "simulate", "chunk": k, **shared} for k in range(len(sizes(settings["n"])))]
    shared |= {key: settings[key] for key in ("observed", "held", "factors", "ridges")}
    seeds = range(settings["seed"], settings["seed"] + settings["runs"])
    pairs = [(method, m) for method in METHODS for m in settings["m"][method]]
    return simulate + [{"kind": "estimate", "run": run, "method": method, "m": m, **shared} for run in seeds for method, m in pairs]


def work(job: Job) -> list[Row]:
    """Make a chunk (no rows), or tune and fit one method and estimate theta and rho of the observations."""
    if job["kind"] == "simulate":
        chunk(job["chunk"], sizes(job["n"])[job["chunk"]], job["seed"])
        return []
    table, observed = simulations(job["n"], job["seed"]), observations(job["observed"], job["seed"], job["run"])
    y, truth = table[:, :2], observed[:, :2]
    centre, scale = table[:, 2:].mean(0), table[:, 2:].std(0)
    x, at = (table[:, 2:] - centre) / scale, (observed[:, 2:] - centre) / scale
    method, m, held = job["method"], job["m"], job["held"]
    median, most = median_distance(x).item(), m if method == CKME else job["n"]
    form = partial(fit, method, m=m, seed=job["run"])

    def error(settings: tuple[float, float]) -> float:
        factor, reg = settings
        fitted = form(x[held:][:most], y[held:][:most], variance=(factor * median) ** 2, reg=reg)
        return (fitted.mean(x[:held]) - y[:held]).square().sum(-1).mean().item()

    factor, reg = best_of(product(job["factors"], job["ridges"][:1] if method == NWKR else job["ridges"]), error)
    began = time.process_time()
    fitted = form(x[:most], y[:most], variance=(factor * median) ** 2, reg=reg)
    mean = fitted.mean(at)
    seconds = time.process_time() - began
    row = {"run": job["run"], "method": method, "m": m, "factor": factor, "ridge": reg, "seconds": seconds}
    for name, found in (("mean", mean), ("mode", mode(y[:most], fitted.weights(at)))):
        theta, rho = (found - truth).square().mean(0).tolist()
        row |= {f"theta_{name}": theta, f"rho_{name}": rho, f"mse_{name}": theta + rho}
    return [row]


def mode(y: Float[Tensor, "n 2"], w: Float[Tensor, "b n"], *, step: float = 0.2, bandwidth: float = 1.0) -> Float[Tensor, "b 2"]:
    """The point of a grid over the prior's box with the largest sum_i w_i k(., y_i): `Embedding.mode` is O(n^2)."""
    axes = [torch.linspace(low, high, round((high - low) / step) + 1, dtype=y.dtype) for low, high in PRIOR]
    grid = torch.cartesian_prod(*axes)
    height = w.new_zeros(len(w), len(grid))
    for points, weights in zip(y.split(10_000), w.split(10_000, -1), strict=True):
        height += weights @ gaussian(points, grid, bandwidth=bandwidth)
    return grid[height.argmax(-1)]


def judge(rows: list[Row]) -> list[Verdict]:
    """The draft's claims for the local form, in the squared error of the mean of (theta, rho)."""
    table = means(rows, ["method", "m"], "mse_mean", "seconds")
    best = {method: min((r for r in table if r["method"] == method), key=lambda r: r["mse_mean"]) for method in METHODS}
    mine, told = best[LCKME], []
    for other in (CKME, RANDOM, NWKR):
        finding = {CKME: "LCKME over all simulations is more accurate than CKME over as many as it can hold"}
        ours = f"{describe(mine)}; {describe(best[other])}"
        told.append(
            Verdict(finding.get(other, f"LCKME is more accurate than {other}"), ours, mine["mse_mean"] < best[other]["mse_mean"])
        )
    beaten = [r for r in table if r["mse_mean"] < mine["mse_mean"] and r["seconds"] < mine["seconds"]]
    ours = f"{describe(mine)}; " + (
        "; ".join(describe(r) for r in beaten) + " are ahead in both" if beaten else "none is ahead in both"
    )
    return [*told, Verdict("no other form is both faster and more accurate than LCKME", ours, not beaten)]


def describe(row: Row) -> str:
    """A method with its size, error and time."""
    return f"{row['method']} (m = {row['m']}) {row['mse_mean']:.3g} in {row['seconds']:.2g} s"


def tests(rows: list[Row]) -> list[Row]:
    """Wilcoxon signed-rank tests over the runs, each method at its best m."""
    table = means(rows, ["method", "m"], "mse_mean")
    best = {r["method"]: r["m"] for r in sorted(table, key=lambda r: -r["mse_mean"])}
    return wilcoxon([{**r, "error": "mse_mean"} for r in rows if r["m"] == best[r["method"]]], "mse_mean", ["error"])


def draw(rows: list[Row]) -> Figure:
    """Figure 16: error against time."""
    values = {"theta_mean": "theta, mean", "rho_mean": "rho, mean", "theta_mode": "theta, mode", "rho_mode": "rho, mode"}
    points = [
        {"panel": f"fig. 16: {name}", "method": r["method"], "seconds": r["seconds"], "error": r[value], "se": r[f"{value}_se"]}
        for value, name in values.items()
        for r in means(rows, ["method", "m"], value, "seconds")
    ]
    return curves(
        points,
        x="seconds",
        y="error",
        by="method",
        se="se",
        panel="panel",
        log="xy",
        xlabel="seconds, fit and queries",
        ylabel="squared error",
    )

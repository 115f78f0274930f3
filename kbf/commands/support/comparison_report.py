"""Tables of ``kbf compare``: means over seeds, single runs, paired tests and a figure."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from kbf.commands.support.console import console, print_table, print_written
from kbf.evaluation.metrics import (
    corrected_pairs,
    mean_and_error,
    summary,
    wilcoxon_pairs,
)
from kbf.evaluation.scoring_rules import COVERAGE_LEVELS
from kbf.plots.charts import comparison_figure
from kbf.plots.tracks import save
from kbf.runtime.atomic_files import write_csv, write_json
from kbf.runtime.run_folders import ABOUT

# The file with one row for each run.
RUNS = "runs.csv"
# Name of the Bayes-optimal filter of a data set in the results.
FLOOR = "floor"
COVERAGE_COLUMNS = tuple(f"coverage_{round(100 * level)}" for level in COVERAGE_LEVELS)
# Columns of filters with a predictive density; left out where no filter has one.
DENSITY_COLUMNS = (
    "log_likelihood",
    "log_likelihood_se",
    "log_likelihood_raw",
    "log_likelihood_raw_se",
    "energy_score",
    "energy_excess",
    "energy_excess_se",
)
# Those of them that are printed, with their headings.
DENSITY_HEADINGS = {
    "log_likelihood": "log lik.",
    "log_likelihood_raw": "before recal.",
    "energy_score": "energy",
}
# Files of the paired tests: of runs on independent draws, and of runs on folds of the same data.
TEST_FILES = ("wilcoxon.csv", "corrected_t.csv")
# Metrics of one run.
Result = dict[str, Any]


def report(
    name: str,
    results: dict[tuple[str, int, int], Result],
    directory: Path,
    record: dict[str, Any],
) -> None:
    """Print and write the tables, the paired tests and the figure.

    Args:
        name: of the data set.
        results: metrics of each run, by (model, n_train, seed).
        directory: where the files are written.
        record: of the comparison (`kbf.runtime.provenance`).
    """
    rows: list[dict[str, Any]] = []
    tests: list[dict[str, Any]] = []
    # n counts recordings or steps. A recording has several steps: n steps are not n recordings.
    counts_recordings = any(r.get("recordings") == n for (_, n, _), r in results.items())
    unit = "recordings" if counts_recordings else "steps"
    for n in sorted({n for _, n, _ in results}):
        by_model: dict[str, dict[int, Result]] = {}
        for (model, m, seed), result in results.items():
            if m == n:
                by_model.setdefault(model, {})[seed] = result
        overlap = overlap_of([each for runs in by_model.values() for each in runs.values()])
        floors = by_model.pop(FLOOR, {})
        size = {"data": name, "n_train": n}
        found = [
            size | row_of_model(model, runs, floors, overlap) for model, runs in by_model.items()
        ]
        rows += found
        for score, value_of in {} if math.isnan(overlap) else TESTED.items():
            values = {
                model: {s: value_of(r) for s, r in runs.items() if not math.isnan(value_of(r))}
                for model, runs in by_model.items()
            }
            some = {model: each for model, each in values.items() if each}
            pairs = corrected_pairs(some, overlap) if overlap else wilcoxon_pairs(some)
            tests += [size | {"score": score} | pair for pair in pairs]
        if found:
            source = found[0]["renderer"]
            title = f"{name}, {n} training {unit}{source and f'; images: {source}'}"
            show_table(title, found, density_scores(floors, floors) if floors else {})
            if math.isnan(overlap):
                part = next(each["test_part"] for each in next(iter(by_model.values())).values())
                console.print(
                    f"every run has the same test part ({part}): no standard errors and no tests",
                    highlight=False,
                    markup=False,
                )
    if not rows:
        return
    empty = [
        key
        for key in [*COVERAGE_COLUMNS, *DENSITY_COLUMNS]
        if all(row[key] != row[key] for row in rows)
    ]
    empty += [key for key in ("rejected", "filter") if not any(row[key] for row in rows)]
    kept = [{key: value for key, value in row.items() if key not in empty} for row in rows]
    runs = [run_row(result) for _, result in sorted(results.items())]
    if any(result.get("test_part") for result in results.values()):
        for row, (_, result) in zip(runs, sorted(results.items()), strict=True):
            row["test_part"] = result.get("test_part", "")
    commits = sorted({str(result.get("commit")) for result in results.values()})
    if len(commits) > 1:
        console.print(
            f"[yellow]these runs are of several commits[/] ({', '.join(commits)}); "
            "delete cells/ to run all of them at one commit"
        )
    write_csv(directory / "results.csv", kept)
    write_csv(directory / RUNS, runs)
    write_json(directory / ABOUT, record | {"commits": commits})
    for file in TEST_FILES:
        (directory / file).unlink(missing_ok=True)  # of other models, perhaps
    tested = TEST_FILES["difference_se" in tests[0]] if tests else None
    if tested:
        write_csv(directory / tested, tests)
    title = f"{name}: {max(row['runs'] for row in rows)} runs"
    save(comparison_figure(rows, title=title, unit=unit), directory / "comparison.png")
    written = [
        "results.csv",
        RUNS,
        *([tested] if tested else []),
        "comparison.png",
        ABOUT,
    ]
    print_written(directory, written)


def overlap_of(results: list[Result]) -> float:
    """Return n_test / n_train of runs on folds of the same data, for `mean_and_error`.

    0 for runs on independent draws, whose test parts have no names, and for a single run; NaN where
    runs have the same test part.
    """
    parts = {result["seed"]: result.get("test_part") for result in results}
    if len(parts) < 2 or not all(parts.values()):
        return 0.0
    if len(set(parts.values())) < len(parts):
        return math.nan
    return mean_of(results, "test_share")


def row_of_model(
    model: str, runs: dict[int, Result], floors: dict[int, Result], overlap: float
) -> dict[str, Any]:
    """Return the means of a model over its runs, with standard errors.

    Args:
        model: its name.
        runs: its results by seed.
        floors: results of the Bayes-optimal filter by seed.
        overlap: see `overlap_of`.
    """
    results = list(runs.values())
    known = [floors.get(seed, {}).get("test.mse") for seed in runs]
    given = [math.nan if floor is None else floor for floor in known]
    return {
        "renderer": next((r["renderer"] for r in results if r.get("renderer")), ""),
        "model": model,
        "filter": ", ".join(sorted({selected(r) for r in results} - {""})),
        "runs": len(results),
        **summary([r["test.mse"] for r in results], known, overlap),
        "mse_settled": mean_of(results, "test.mse_settled"),
        "floor": mean_and_error(given)[0],
        "seconds": mean_of(results, "seconds"),
        **normalised(results, overlap),
        **density_scores(runs, floors, overlap),
        **{key: mean_of(results, f"test.{key}") for key in COVERAGE_COLUMNS},
        "rejected": mean_and_error([r.get("test.rejected") or 0.0 for r in results])[0],
    }


def selected(result: Result) -> str:
    """Return the filter that model selection chose in a run; empty where it is the model itself."""
    name = result.get("filter") or ""
    return "" if name == result["model"] else name


def mean_of(results: list[Result], key: str) -> float:
    """Return the mean of a metric over runs; NaN where a run has none."""
    values = [result.get(key) for result in results]
    return mean_and_error([math.nan if value is None else value for value in values])[0]


def run_row(result: Result) -> dict[str, Any]:
    """Return the row of a run in ``runs.csv``; without covariances its log likelihood is NaN."""
    return {
        **{key: result[key] for key in ("data", "n_train", "seed", "model")},
        "filter": result.get("filter") or "",
        "test.mse": result["test.mse"],
        "log_likelihood": likelihood(result),
        "log_likelihood_raw": likelihood_raw(result),
        "seconds": result["seconds"],
    }


def normalised(results: list[Result], overlap: float) -> dict[str, float]:
    """Return the NMSE with its standard error and by component, and times of fit and step."""
    value, error = mean_and_error([run.get("test.nmse", math.nan) for run in results], overlap)
    components = {key for run in results for key in run if key.startswith("test.nmse.")}
    keys = sorted(components, key=lambda key: int(key.split(".")[-1]))
    return {"nmse": value, "nmse_se": error} | {
        key.removeprefix("test."): mean_of(results, key)
        for key in (*keys, "seconds.fit", "seconds.step")
    }


def negated(result: Result, key: str) -> float:
    """Return minus a metric; NaN where a run has none."""
    value = result.get(key)
    return math.nan if value is None else -float(value)


def likelihood(result: Result) -> float:
    """Return the mean log likelihood of a step, recalibrated where there is a calibration."""
    return negated(result, "test.nll" if "test.nll" in result else "test.nll_raw")


def likelihood_raw(result: Result) -> float:
    """Return the mean log likelihood before recalibration; NaN where `likelihood` is the same."""
    return negated(result, "test.nll_raw") if "test.nll" in result else math.nan


# Scores of a run by which models are compared in pairs.
TESTED: dict[str, Callable[[Result], float]] = {
    "mse": lambda result: result["test.mse"],
    "log_likelihood": likelihood,
    "log_likelihood_raw": likelihood_raw,
}


def density_scores(
    runs: dict[int, Result], floors: dict[int, Result], overlap: float = 0.0
) -> dict[str, float]:
    """Return RMSE and the `DENSITY_COLUMNS`, as means over runs by seed.

    The energy score is that of the filter's own predictive density: a sample where the filter has
    one; recalibrated it would be a Gaussian. Its excess over that of the Bayes-optimal filter is
    NaN where either is not known.
    """
    errors = [math.nan if run["test.mse"] is None else run["test.mse"] for run in runs.values()]
    energies = [-negated(run, "test.energy_score_raw") for run in runs.values()]
    optimal = [-negated(floors.get(seed, {}), "test.energy_score_raw") for seed in runs]
    over = summary(
        energies,
        optimal if all(map(math.isfinite, [*energies, *optimal])) else [None] * len(optimal),
        overlap,
    )
    values = (
        *mean_and_error([likelihood(run) for run in runs.values()], overlap),
        *mean_and_error([likelihood_raw(run) for run in runs.values()], overlap),
        mean_and_error(energies)[0],
        over["excess"],
        over["excess_se"],
    )
    return {
        "rmse": mean_and_error([math.sqrt(error) for error in errors])[0],
        **dict(zip(DENSITY_COLUMNS, values, strict=True)),
    }


def with_error(value: float, error: float, digits: int = 4, unit: str = "") -> str:
    """Format a mean and its standard error; empty where the mean is not known.

    >>> with_error(12.34, 0.51, 1, " %"), with_error(0.5, float("nan"))
    ('12.3 ± 0.5 %', '0.5000')
    >>> with_error(float("nan"), 1.0)
    ''
    """
    known = [f"{each:.{digits}f}" for each in (value, error) if each == each]
    return " ± ".join(known) + unit if value == value else ""


def density_cell(row: Result, key: str) -> str:
    """Format one of the `DENSITY_COLUMNS`; empty where it is not known."""
    return with_error(row.get(key, math.nan), math.nan, 4 if key == "energy_score" else 2)


def show_table(title: str, rows: list[dict[str, Any]], floor: dict[str, float]) -> None:
    """Print the table of one training size, the model with the least error first.

    Args:
        title: printed above.
        rows: of `row_of_model`.
        floor: `density_scores` of the Bayes-optimal filter.
    """
    counts = {row["runs"] for row in rows}
    same = f"; {max(counts)} run{'s' if max(counts) > 1 else ''}" if len(counts) == 1 else ""
    console.print(f"\n[bold]{title}[/]{same}", highlight=False)
    known = {key for row in rows for key, value in row.items() if value == value}
    # Errors in the units of the data mean little alone: without a floor the NMSE is printed.
    without_floor = "floor" not in known
    nmse = {"NMSE": lambda row: with_error(row["nmse"], row["nmse_se"])}
    excess = {
        "excess": lambda row: with_error(100 * row["excess"], 100 * row["excess_se"], 1, " %")
    }
    densities = {
        heading: partial(density_cell, key=key)
        for key, heading in DENSITY_HEADINGS.items()
        if key in known
    }
    columns: dict[str, Callable[[Result], str]] = {
        "model": lambda row: row["model"],
        **(
            {"filter": lambda row: row["filter"] or row["model"]}
            if any(row["filter"] for row in rows)
            else {}
        ),
        "error": lambda row: with_error(row["mse"], row["se"]),
        **(nmse if without_floor else excess),
        **densities,
        **({} if same else {"runs": lambda row: str(row["runs"])}),
        "seconds": lambda row: f"{row['seconds']:.1f}",
        **{
            f"in {key.removeprefix('coverage_')} %": lambda row, key=key: with_error(
                100 * row[key], math.nan, 1, " %"
            )
            for key in COVERAGE_COLUMNS
            if key in known
        },
    }
    texts = ("model", "filter")
    table = Table(*(Column(c, justify="left" if c in texts else "right") for c in columns))
    order = "nmse" if without_floor and all(row["nmse"] == row["nmse"] for row in rows) else "mse"
    for row in sorted(rows, key=lambda row: row[order]):
        table.add_row(*(cell(row) for cell in columns.values()))
    if not without_floor and (error := rows[0]["floor"]) == error:
        cells = {"model": "floor", "error": f"{error:.4f}", "excess": "0"}
        cells |= {heading: cell(floor) for heading, cell in densities.items()}
        table.add_row(*(cells.get(heading, "") for heading in columns), style="dim")
    print_table(table)
    if rejected := [f"{r['model']} {100 * r['rejected']:.2f} %" for r in rows if r["rejected"]]:
        console.print(
            f"share of observations rejected as implausible: {', '.join(rejected)}", highlight=False
        )

"""``kbf compare``: many models on the same sequences; every finished run is a file, so that a killed comparison goes on."""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from kbf import __version__
from kbf.commands.support.console import (
    commit,
    console,
    provenance,
    reliability_metrics,
    reliability_of,
    resolved,
    start,
    without_model_selection,
)
from kbf.commands.support.console_tables import print_wide
from kbf.commands.support.resumable_jobs import finish_all
from kbf.commands.train import finish
from kbf.data.dataset import load_data
from kbf.data.download import one_at_a_time
from kbf.evaluation.floors import data_floor
from kbf.evaluation.scoring_rules import COVERAGE_LEVELS
from kbf.evaluation.statistics import mean_and_error, summary, wilcoxon_pairs
from kbf.plots.charts import comparison_figure
from kbf.plots.tracks import save
from kbf.runtime.atomic_files import scratch, sweep, write_csv, write_json
from kbf.training.fit import train
from kbf.training.held_out_calibration import learn

COVERAGE_COLUMNS = tuple(f"coverage_{round(100 * level)}" for level in COVERAGE_LEVELS)
STATEMENTS = (
    "log_likelihood",
    "log_likelihood_se",
    "log_likelihood_raw",
    "log_likelihood_raw_se",
    "energy_score",
    "energy_excess",
    "energy_excess_se",
)
SAID = {"log_likelihood": "log lik.", "log_likelihood_raw": "as learned", "energy_score": "energy"}
"""Columns of the table on the screen, and their headings."""
FLOOR = "floor"
"""The name under which the floor of a data set is kept beside the models."""


class Cell(NamedTuple):
    """One model on one data set: what to run, and the file for its result."""

    model: str
    n_train: int
    seed: int
    config: dict[str, Any]
    path: Path


def run(config: dict[str, Any]) -> int:
    """Run what is missing, then make the tables and the picture; returns 1 if a run failed.

    ``config["bases"]`` holds an unresolved configuration of ``kbf train`` for each model.
    """
    start()
    directory = Path(config["run_dir"])
    cells = make_cells(config, directory / "cells")
    sweep(directory / "cells")  # what a killed comparison left
    results, failed = finish_all(
        run_cell,
        cells,
        config["workers"],
        name="runs",
        called=named,
        order=in_order,
        whole=is_result,
    )
    report(
        config["data"]["name"],
        {(c.model, c.n_train, c.seed): results[c.path] for c in cells if c.path in results},
        directory,
    )
    if failed:
        console.print(
            f"[red]{failed} runs failed[/]; the same command tries them again", highlight=False
        )
    return 1 if failed else 0


def make_cells(config: dict[str, Any], directory: Path) -> list[Cell]:
    """All runs, seed by seed; the hash in a file's name is of everything that its result depends on."""
    for kind, name in (
        ("data", config["data"]["name"]),
        *(("model", name) for name in config["bases"]),
    ):
        if not re.fullmatch(r"[\w. +-]+", str(name)) or str(name).startswith("."):
            raise ValueError(
                f"{kind}.name={name} cannot be part of the names of files: letters, digits, spaces and . + - _ can"
            )
    cells = []
    for seed in range(config["seed"], config["seed"] + config["runs"]):
        for n in config["n_train"]:
            for model in [FLOOR, *config["bases"]]:
                base = config["bases"].get(model) or {
                    **config["recipe"],
                    "model": {"name": FLOOR},
                    "trainer": {},
                }
                values = resolved(base, n_train=n, seed=seed)
                if model == FLOOR:
                    values["particles"] = config["particles"]
                elif config["calibrate"]:
                    values["calibrate"] = True
                else:
                    values["model"] = without_model_selection(values["model"])
                values["trainer"] |= {"enable_progress_bar": False}
                key = hashed([values, *fingerprints(values["data"])])
                path = directory / f"{config['data']['name']}-n{n}-seed{seed}-{model}-{key}.json"
                cells.append(Cell(model, n, seed, values, path))
    return cells


def is_result(stored: dict[str, Any]) -> bool:
    """Whether what a file holds is the result of a run; where no true model is known the floor has no error."""
    error, seconds = stored.get("test.mse"), stored.get("seconds")
    floor = error is None and stored.get("model") == FLOOR
    words = all(isinstance(stored.get(key), str) for key in ("data", "model"))
    counts = all(type(stored.get(key)) is int for key in ("n_train", "seed"))
    return (
        words
        and counts
        and isinstance(seconds, int | float)
        and (floor or isinstance(error, int | float))
    )


def named(cell: Cell) -> str:
    """The label of a run in the progress bar."""
    return f"{cell.config['data']['name']}, n {cell.n_train}, seed {cell.seed}: {cell.model}"


def run_cell(cell: Cell) -> dict[str, Any]:
    """One model on one data set, from the data to the score."""
    config, began = cell.config, time.perf_counter()
    data = load_data(config["data"], trust=True)
    if not data.test:
        raise ValueError("there is no test part to compare models on: data.test must be above 0")
    about_run = {
        "data": config["data"]["name"],
        "model": cell.model,
        "n_train": cell.n_train,
        "seed": cell.seed,
        "version": __version__,
    }
    about_run |= {"commit": commit(), "renderer": data.renderer, "sequences": len(data.train)}
    if cell.model == FLOOR:
        least = data_floor(data, particles=config["particles"], seed=cell.seed, covariances=True)
        mse = None if least is None else least.mse.mean().item()
        stated = (
            {} if least is None else reliability_metrics(reliability_of(least, data.decoded, None))
        )
        return {**about_run, "test.mse": mse, **stated, "seconds": time.perf_counter() - began}
    encodings = encodings_of(cell)
    cell.path.parent.mkdir(parents=True, exist_ok=True)
    with (
        scratch(cell.path.parent) as directory,
        one_at_a_time(encodings) if encodings and not encodings.exists() else nullcontext(),
    ):
        trained = train(
            config,
            data.train,
            directory,
            trust=True,
            encodings=encodings,
            validation=data.validation,
        )
        assert trained is not None
        if config.get("calibrate"):
            trained = learn(trained, data.validation, seed=cell.seed)
        _, metrics = finish(config, data, trained, None, began)
    return {**metrics, **about_run}


def encodings_of(cell: Cell) -> Path | None:
    """Where the encoded images of a run are kept: models with the same encoders on the same images share them."""
    encoding = cell.config["model"].get("encoding")
    if not encoding or not encoding.get("encoder"):
        return None
    key = hashed(
        [cell.config["data"], encoding, cell.seed, cell.n_train, *fingerprints(cell.config["data"])]
    )
    return cell.path.with_name(f"codes-{key}.pt")


def hashed(values: list[Any]) -> str:
    """A short name for values and this version."""
    return hashlib.sha256(json.dumps([*values, __version__], sort_keys=True).encode()).hexdigest()[
        :10
    ]


def fingerprints(data: dict[str, Any]) -> list[list[Any]]:
    """Size and time of the files that a data set names, and of those in the folder at its path: changed files are other data."""
    paths = [
        Path(value).expanduser() for value in data.values() if isinstance(value, str) and value
    ]
    files = [path for path in paths if path.is_file()]
    if data.get("path"):  # a folder, or what the names of several files begin with
        path = Path(data["path"]).expanduser()
        inside = (
            path.rglob("*")
            if path.is_dir()
            else []
            if path.is_file()
            else path.parent.glob(f"{path.name}*")
        )
        files += sorted(file for file in inside if file.is_file())
    return [[path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def in_order(cells: list[Cell]) -> list[Cell]:
    """One run for each set of encoded images first: the others then find it made."""
    seen: set[Path | None] = {None}
    firsts = [
        cell for cell in cells if (path := encodings_of(cell)) not in seen and not seen.add(path)
    ]
    return [*firsts, *(cell for cell in cells if cell not in firsts)]


def report(name: str, results: dict[tuple[str, int, int], dict[str, Any]], directory: Path) -> None:
    """Tables on the screen and as CSV, the tests between pairs, and the picture."""
    rows: list[dict[str, Any]] = []
    tests: list[dict[str, Any]] = []
    # a sequence has several steps: n steps are never n sequences
    unit = (
        "sequences" if any(r.get("sequences") == n for (_, n, _), r in results.items()) else "steps"
    )
    for n in sorted({n for _, n, _ in results}):
        least = {seed: r for (model, m, seed), r in results.items() if model == FLOOR and m == n}
        floors = {seed: r["test.mse"] for seed, r in least.items()}
        by_model: dict[str, dict[int, dict[str, Any]]] = {}
        for (model, m, seed), result in results.items():
            if model != FLOOR and m == n:
                by_model.setdefault(model, {})[seed] = result
        for model, runs in by_model.items():
            figures = summary(
                [r["test.mse"] for r in runs.values()], [floors.get(seed) for seed in runs]
            )
            given = [floors[seed] for seed in runs if floors.get(seed) is not None]
            floor = mean_and_error(given)[0] if len(given) == len(runs) else math.nan
            seconds = mean_and_error([r["seconds"] for r in runs.values()])[0]
            covered = {
                key: mean_and_error([r.get(f"test.{key}", math.nan) for r in runs.values()])[0]
                for key in COVERAGE_COLUMNS
            }
            scaled = normalised(list(runs.values())) | statements(runs, least)
            passed = mean_and_error([r.get("test.rejected") or 0.0 for r in runs.values()])[0]
            source = next((r["renderer"] for r in runs.values() if r.get("renderer")), "")
            rows.append(
                {
                    "data": name,
                    "renderer": source,
                    "n_train": n,
                    "model": model,
                    "runs": len(runs),
                    **figures,
                    "floor": floor,
                    "seconds": seconds,
                    **scaled,
                    **covered,
                    "rejected": passed,
                }
            )
        for score, of in TESTED.items():
            known = {
                model: {seed: of(r) for seed, r in runs.items() if not math.isnan(of(r))}
                for model, runs in by_model.items()
            }
            by_seed = {model: values for model, values in known.items() if values}
            tests += [
                {"data": name, "n_train": n, "score": score, **pair}
                for pair in wilcoxon_pairs(by_seed)
            ]
        if by_model:
            mine = [row for row in rows if row["n_train"] == n]
            shown = f"; images: {mine[0]['renderer']}" if mine[0]["renderer"] else ""
            show_table(
                f"{name}, {n} training {unit}{shown}",
                mine,
                statements(least, least) if least else {},
            )
    if not rows:
        return
    empty = [key for key in COVERAGE_COLUMNS if all(row[key] != row[key] for row in rows)]
    empty += [key for key in STATEMENTS if all(row[key] != row[key] for row in rows)]
    empty += [] if any(row["rejected"] for row in rows) else ["rejected"]
    write_csv(
        directory / "results.csv",
        [{key: value for key, value in row.items() if key not in empty} for row in rows],
    )
    write_csv(directory / "runs.csv", [row_of(result) for _, result in sorted(results.items())])
    commits = sorted({str(result.get("commit")) for result in results.values()})
    write_json(directory / "about.json", provenance() | {"commits": commits})
    if len(commits) > 1:
        console.print(
            f"[yellow]these runs are of several commits[/] ({', '.join(commits)}); delete cells/ to make them anew"
        )
    written = ["results.csv", "runs.csv", "comparison.png", "about.json"]
    (directory / "wilcoxon.csv").unlink(missing_ok=True)  # of other models, perhaps
    if tests:
        write_csv(directory / "wilcoxon.csv", tests)
        written.insert(2, "wilcoxon.csv")
    save(
        comparison_figure(
            rows, title=f"{name}: {max(row['runs'] for row in rows)} runs", unit=unit
        ),
        directory / "comparison.png",
    )
    console.print(f"in [bold]{directory}[/]: {', '.join(written)}", highlight=False)


def row_of(result: dict[str, Any]) -> dict[str, Any]:
    """A run in ``runs.csv``; its log likelihood is NaN where a filter has no covariances."""
    row = {key: result[key] for key in ("data", "n_train", "seed", "model", "test.mse")}
    likelihoods = {
        "log_likelihood": likelihood(result),
        "log_likelihood_raw": likelihood_raw(result),
    }
    return row | likelihoods | {"seconds": result["seconds"]}


def normalised(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Mean and standard error of the NMSE over runs, its means by component, seconds of the fit, and steps a second of the test."""
    value, error = mean_and_error([run.get("test.nmse", math.nan) for run in runs])
    columns = {"nmse": value, "nmse_se": error}
    keys = sorted(
        {key for run in runs for key in run if key.startswith("test.nmse.")},
        key=lambda key: int(key.split(".")[-1]),
    )
    for key in [*keys, "seconds.fit", "seconds.step"]:
        columns[key.removeprefix("test.")] = mean_and_error(
            [run.get(key, math.nan) for run in runs]
        )[0]
    return columns


def likelihood(run: dict[str, Any]) -> float:
    """Mean log likelihood of a step under the filter's covariances, recalibrated where they were; NaN for a filter without any."""
    value = run.get("test.nll", run.get("test.nll_raw"))
    return math.nan if value is None else -float(value)


def likelihood_raw(run: dict[str, Any]) -> float:
    """The same under covariances as they were learned; NaN where nothing was recalibrated, and `likelihood` says it already."""
    value = run.get("test.nll_raw") if "test.nll" in run else None
    return math.nan if value is None else -float(value)


TESTED = {
    "mse": lambda run: run["test.mse"],
    "log_likelihood": likelihood,
    "log_likelihood_raw": likelihood_raw,
}
"""Scores of a run by which models are compared in pairs."""


def own_energy(run: dict[str, Any]) -> float:
    """The energy score of what the filter itself says, of its sample where it believes in one; recalibrated it is a Gaussian's."""
    value = run.get("test.energy_score_raw")
    return math.nan if value is None else float(value)


def statements(
    runs: dict[int, dict[str, Any]], floors: dict[int, dict[str, Any]]
) -> dict[str, float]:
    """Of runs by seed: RMSE, the Gaussian log likelihood of the states, a step, with its error, and the energy score.

    The likelihood also of the covariances as they were learned, where they are recalibrated; the
    energy score with its excess over the floor's, if that is known.
    """
    rmse, _ = mean_and_error(
        [
            math.sqrt(run["test.mse"]) if run["test.mse"] is not None else math.nan
            for run in runs.values()
        ]
    )
    likely, error = mean_and_error([likelihood(run) for run in runs.values()])
    raw, raw_error = mean_and_error([likelihood_raw(run) for run in runs.values()])
    energies = [own_energy(run) for run in runs.values()]
    least = [own_energy(floors.get(seed, {})) for seed in runs]
    over = (math.nan, math.nan)
    if all(math.isfinite(each) for each in [*energies, *least]):
        figures = summary(energies, least)
        over = figures["excess"], figures["excess_se"]
    return {
        "rmse": rmse,
        **dict(
            zip(
                STATEMENTS,
                (likely, error, raw, raw_error, mean_and_error(energies)[0], *over),
                strict=True,
            )
        ),
    }


def named_shares(keys: list[str]) -> list[str]:
    """Headings of the coverage columns.

    >>> named_shares(["coverage_95"])
    ['in 95 %']
    """
    return [f"in {key.removeprefix('coverage_')} %" for key in keys]


def shares(row: dict[str, Any], keys: list[str]) -> list[str]:
    """Shares of a row as percentages; empty where a model has none."""
    return [f"{100 * row[key]:.1f} %" if row[key] == row[key] else "" for key in keys]


def give_or_take(value: float, error: float, digits: int = 4, unit: str = "") -> str:
    """A mean and its standard error; nothing for what is not known.

    >>> give_or_take(12.34, 0.51, 1, " %"), give_or_take(0.5, float("nan")), give_or_take(float("nan"), 1.0)
    ('12.3 ± 0.5 %', '0.5000', '')
    """
    told = [f"{each:.{digits}f}" for each in (value, error) if each == each]
    return " ± ".join(told) + unit if value == value else ""


def show_table(title: str, rows: list[dict[str, Any]], floor_says: dict[str, float]) -> None:
    """One training size, the best model first, errors with their standard errors; ``floor_says``: `statements` of the floor."""
    counts = {row["runs"] for row in rows}
    same = f"; {max(counts)} run{'s' if max(counts) > 1 else ''}" if len(counts) == 1 else ""
    console.print(f"\n[bold]{title}[/]{same}", highlight=False)
    table = Table()
    covered = [key for key in COVERAGE_COLUMNS if any(row[key] == row[key] for row in rows)]
    without_floor = all(
        row["floor"] != row["floor"] for row in rows
    )  # errors in units of the data say little alone
    relative = "NMSE" if without_floor else "excess"
    spoken = [key for key in SAID if any(row[key] == row[key] for row in rows)]

    def say(values: dict[str, Any]) -> list[str]:
        return [
            f"{value:.{4 if key == 'energy_score' else 2}f}"
            if (value := values.get(key, math.nan)) == value
            else ""
            for key in spoken
        ]

    headers = [
        "model",
        "error",
        relative,
        *(SAID[key] for key in spoken),
        *([] if same else ["runs"]),
        "seconds",
    ]
    for header in [*headers, *named_shares(covered)]:
        table.add_column(header, justify="left" if header == "model" else "right")
    order = "nmse" if without_floor and all(row["nmse"] == row["nmse"] for row in rows) else "mse"
    for row in sorted(rows, key=lambda row: row[order]):
        if without_floor:
            beside = give_or_take(row["nmse"], row["nmse_se"])
        else:
            beside = give_or_take(100 * row["excess"], 100 * row["excess_se"], 1, " %")
        cells = [give_or_take(row["mse"], row["se"]), beside, *say(row)]
        runs = [] if same else [str(row["runs"])]
        table.add_row(row["model"], *cells, *runs, f"{row['seconds']:.1f}", *shares(row, covered))
    floor = rows[0]["floor"]
    if floor == floor:
        table.add_row("floor", f"{floor:.4f}", "0", *say(floor_says), style="dim")
    print_wide(table)
    if passed := [
        f"{row['model']} {100 * row['rejected']:.2f} %" for row in rows if row["rejected"]
    ]:
        console.print(
            f"share of steps whose observation was passed over as impossible: {', '.join(passed)}",
            highlight=False,
        )

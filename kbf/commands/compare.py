"""``kbf compare``: many models on the same sequences; every finished run is a file, so that a killed comparison goes on."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from kbf import __version__
from kbf.charts import comparison_figure
from kbf.commands.common import commit, console, provenance, resolved, start
from kbf.commands.resume import finish_all
from kbf.commands.train import finish
from kbf.data.download import one_at_a_time
from kbf.data.source import load_data
from kbf.evaluation import data_floor, mean_and_error, summary, wilcoxon_pairs
from kbf.files import write_csv, write_json
from kbf.held_out import learn
from kbf.plots import save
from kbf.reliability import LEVELS
from kbf.training import train

COVERAGE = tuple(f"coverage_{round(100 * level)}" for level in LEVELS)
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
    results, failed = finish_all(run_cell, cells, config["workers"], name="runs", called=named, order=in_order)
    report(config["data"]["name"], {(c.model, c.n_train, c.seed): results[c.path] for c in cells if c.path in results}, directory)
    if failed:
        console.print(f"[red]{failed} runs failed[/]; the same command tries them again", highlight=False)
    return 1 if failed else 0


def make_cells(config: dict[str, Any], directory: Path) -> list[Cell]:
    """All runs, seed by seed; the hash in a file's name is of everything that its result depends on."""
    cells = []
    for seed in range(config["seed"], config["seed"] + config["runs"]):
        for n in config["n_train"]:
            for model in [FLOOR, *config["bases"]]:
                base = config["bases"].get(model) or {**config["recipe"], "model": {"name": FLOOR}, "trainer": {}}
                values = resolved(base, n_train=n, seed=seed)
                if model == FLOOR:
                    values["particles"] = config["particles"]
                elif config["calibrate"]:
                    values["calibrate"] = True
                values["trainer"] |= {"callbacks": None, "enable_progress_bar": False}
                key = hashed([values, *fingerprints(values["data"])])
                path = directory / f"{config['data']['name']}-n{n}-seed{seed}-{model}-{key}.json"
                cells.append(Cell(model, n, seed, values, path))
    return cells


def named(cell: Cell) -> str:
    """What a run is called on the screen."""
    return f"{cell.config['data']['name']}, n {cell.n_train}, seed {cell.seed}: {cell.model}"


def run_cell(cell: Cell) -> dict[str, Any]:
    """One model on one data set, from the data to the score."""
    config, began = cell.config, time.perf_counter()
    data = load_data(config["data"], trust=True)
    if not data.test:
        raise ValueError("there is no test part to compare models on: data.test must be above 0")
    told = {"data": config["data"]["name"], "model": cell.model, "n_train": cell.n_train, "seed": cell.seed, "version": __version__}
    told |= {"commit": commit(), "renderer": data.renderer}
    if cell.model == FLOOR:
        least = data_floor(data, particles=config["particles"], seed=cell.seed)
        mse = None if least is None else least.mse.mean().item()
        return {**told, "test.mse": mse, "seconds": time.perf_counter() - began}
    codes = codes_of(cell)
    cell.path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, one_at_a_time(codes) if codes and not codes.exists() else nullcontext():
        trained = train(config, data.train, Path(directory), trust=True, codes=codes, validation=data.validation)
        assert trained is not None
        if config.get("calibrate"):
            trained = learn(trained, data.validation, seed=cell.seed)
        _, metrics = finish(config, data, trained, None, began)
    return {**metrics, **told}


def codes_of(cell: Cell) -> Path | None:
    """Where the encoded images of a run are kept: models with the same encoders on the same images share them."""
    coding = cell.config["model"].get("coding")
    if not coding or not coding.get("encoder"):
        return None
    key = hashed([cell.config["data"], coding, cell.seed, cell.n_train, *fingerprints(cell.config["data"])])
    return cell.path.with_name(f"codes-{key}.pt")


def hashed(values: list[Any]) -> str:
    """A short name for values and this version."""
    return hashlib.sha256(json.dumps([*values, __version__], sort_keys=True).encode()).hexdigest()[:10]


def fingerprints(data: dict[str, Any]) -> list[list[Any]]:
    """Size and time of the files that a data set names, and of those in the folder at its path: changed files are other data."""
    paths = [Path(value).expanduser() for value in data.values() if isinstance(value, str) and value]
    found = [path for path in paths if path.is_file()]
    if data.get("path"):  # a folder, or what the names of several files begin with
        path = Path(data["path"]).expanduser()
        inside = path.rglob("*") if path.is_dir() else [] if path.is_file() else path.parent.glob(f"{path.name}*")
        found += sorted(file for file in inside if file.is_file())
    return [[path.stat().st_size, path.stat().st_mtime_ns] for path in found]


def in_order(cells: list[Cell]) -> list[Cell]:
    """One run for each set of encoded images first: the others then find it made."""
    seen: set[Path | None] = {None}
    firsts = [cell for cell in cells if (path := codes_of(cell)) not in seen and not seen.add(path)]
    return [*firsts, *(cell for cell in cells if cell not in firsts)]


def report(name: str, results: dict[tuple[str, int, int], dict[str, Any]], directory: Path) -> None:
    """Tables on the screen and as CSV, the tests between pairs, and the picture."""
    rows: list[dict[str, Any]] = []
    tests: list[dict[str, Any]] = []
    for n in sorted({n for _, n, _ in results}):
        floors = {seed: r["test.mse"] for (model, m, seed), r in results.items() if model == FLOOR and m == n}
        by_model: dict[str, dict[int, dict[str, Any]]] = {}
        for (model, m, seed), result in results.items():
            if model != FLOOR and m == n:
                by_model.setdefault(model, {})[seed] = result
        for model, runs in by_model.items():
            told = summary([r["test.mse"] for r in runs.values()], [floors.get(seed) for seed in runs])
            known = [floors[seed] for seed in runs if floors.get(seed) is not None]
            floor = mean_and_error(known)[0] if len(known) == len(runs) else math.nan
            seconds = mean_and_error([r["seconds"] for r in runs.values()])[0]
            covered = {key: mean_and_error([r.get(f"test.{key}", math.nan) for r in runs.values()])[0] for key in COVERAGE}
            source = next((r["renderer"] for r in runs.values() if r.get("renderer")), "")
            rows.append(
                {
                    "data": name,
                    "renderer": source,
                    "n_train": n,
                    "model": model,
                    "runs": len(runs),
                    **told,
                    "floor": floor,
                    "seconds": seconds,
                    **covered,
                }
            )
        pairs = wilcoxon_pairs({model: {s: r["test.mse"] for s, r in runs.items()} for model, runs in by_model.items()})
        tests += [{"data": name, "n_train": n, **pair} for pair in pairs]
        if by_model:
            mine = [row for row in rows if row["n_train"] == n]
            shown = f"; images: {mine[0]['renderer']}" if mine[0]["renderer"] else ""
            show_table(f"{name}, {n} training steps{shown}", mine)
    if not rows:
        return
    empty = [key for key in COVERAGE if all(row[key] != row[key] for row in rows)]
    write_csv(directory / "results.csv", [{key: value for key, value in row.items() if key not in empty} for row in rows])
    keys = ("data", "n_train", "seed", "model", "test.mse", "seconds")
    write_csv(directory / "runs.csv", [{key: result[key] for key in keys} for _, result in sorted(results.items())])
    commits = sorted({str(result.get("commit")) for result in results.values()})
    write_json(directory / "about.json", provenance() | {"commits": commits})
    if len(commits) > 1:
        console.print(f"[yellow]these runs are of several commits[/] ({', '.join(commits)}); delete cells/ to make them anew")
    written = ["results.csv", "runs.csv", "comparison.png", "about.json"]
    (directory / "wilcoxon.csv").unlink(missing_ok=True)  # of other models, perhaps
    if tests:
        write_csv(directory / "wilcoxon.csv", tests)
        written.insert(2, "wilcoxon.csv")
    save(comparison_figure(rows, title=f"{name}: {max(row['runs'] for row in rows)} runs"), directory / "comparison.png")
    console.print(f"in [bold]{directory}[/]: {', '.join(written)}", highlight=False)


def named_shares(keys: list[str]) -> list[str]:
    """What the shares are called on the screen.

    >>> named_shares(["coverage_95"])
    ['in 95 %']
    """
    return [f"in {key.removeprefix('coverage_')} %" for key in keys]


def shares(row: dict[str, Any], keys: list[str]) -> list[str]:
    """Shares of a row as percentages; empty where a model has none."""
    return [f"{100 * row[key]:.1f} %" if row[key] == row[key] else "" for key in keys]


def show_table(title: str, rows: list[dict[str, Any]]) -> None:
    """One training size, the best model first."""
    console.print(f"\n[bold]{title}[/]", highlight=False)
    table = Table()
    covered = [key for key in COVERAGE if any(row[key] == row[key] for row in rows)]
    for header in ("model", "error", "± s.e.", "excess", "± s.e.", "runs", "seconds a run", *named_shares(covered)):
        table.add_column(header, justify="left" if header == "model" else "right")
    for row in sorted(rows, key=lambda row: row["mse"]):
        excess = [f"{100 * row[key]:.1f} %" if row[key] == row[key] else "" for key in ("excess", "excess_se")]
        se = f"{row['se']:.4f}" if row["se"] == row["se"] else ""
        told = [f"{row['mse']:.4f}", se, *excess, str(row["runs"]), f"{row['seconds']:.1f}", *shares(row, covered)]
        table.add_row(row["model"], *told)
    floor = rows[0]["floor"]
    if floor == floor:
        table.add_row("floor", f"{floor:.4f}", "", "0", "", "", "", style="dim")
    console.print(table)

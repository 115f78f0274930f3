"""``kbf compare``: scores many models on the same recordings, each run in a file of its own.

A comparison that was killed continues with the runs that are missing. `comparison_report` makes the
tables.
"""

import csv
import hashlib
import json
import re
import time
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from kbf import __version__
from kbf.commands.support.comparison_report import FLOOR, RUNS, report
from kbf.commands.support.console import console
from kbf.commands.support.resumable_jobs import finish_all
from kbf.commands.support.run_states import read_json
from kbf.commands.support.score_metrics import reliability_metrics, reliability_of
from kbf.commands.train import finish
from kbf.config.run_settings import without_model_selection
from kbf.data.dataset import completed, load_data
from kbf.evaluation.floors import data_floor
from kbf.fitting import fit_model
from kbf.runtime.atomic_files import scratch, sweep
from kbf.runtime.interpolation import incomplete, masked, resolved
from kbf.runtime.provenance import commit, files_of, provenance, sha256
from kbf.runtime.run_folders import ABOUT


class Cell(NamedTuple):
    """One model on one data set: its resolved configuration, and the file for its result."""

    model: str
    n_train: int
    seed: int
    config: dict[str, Any]
    path: Path


def run(config: dict[str, Any]) -> int:
    """Run what is missing, then make the tables and the figure; returns 1 if a run failed.

    ``config["bases"]`` holds an unresolved configuration of ``kbf train`` for each model.
    """
    config = with_shapes(with_folds(config))
    directory = Path(config["run_dir"])
    cells = make_cells(config, directory / "cells")
    if not config["overwrite"]:
        check_tables(directory, cells)
    sweep(directory / "cells")  # temporary files of a comparison that was killed
    results, failed = finish_all(
        run_cell,
        cells,
        config["workers"],
        name="runs",
        label=lambda cell: (
            f"{cell.config['data']['name']}, n {cell.n_train}, seed {cell.seed}: {cell.model}"
        ),
        order=in_order,
        complete=is_result,
    )
    found = {(c.model, c.n_train, c.seed): results[c.path] for c in cells if c.path in results}
    record = provenance(config["command"], config, files_of(config["data"]))
    record["cells"] = sorted(path.name for path in results)
    report(config["data"]["name"], found, directory, record)
    if failed:
        text = f"[red]{failed} runs failed[/]; the same command tries them again"
        console.print(text, highlight=False)
    return 1 if failed else 0


def check_tables(directory: Path, cells: list[Cell]) -> None:
    """Check that the tables in a folder lose no run: each must be one of the comparison.

    Raises:
        ValueError: the tables are of other models, sizes, seeds, settings or data.
    """
    if not (directory / RUNS).exists():
        return
    with (directory / RUNS).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    mine = {
        "model": {cell.model for cell in cells},
        "n_train": {str(cell.config["n_train"]) for cell in cells},
        "seed": {str(cell.seed) for cell in cells},
    }
    for key, values in mine.items():
        if lost := sorted({row.get(key, "") for row in rows} - values - {""}):
            raise ValueError(
                f"{directory} holds a comparison with {key} {', '.join(lost)}, which its tables "
                "would lose: list them as well, name another run_dir, or set overwrite=true"
            )
    known = read_json(directory / ABOUT).get("cells", [])
    if {*known} - {cell.path.name for cell in cells}:
        raise ValueError(
            f"{directory} holds a comparison with other settings, other contents of the data files "
            "or another version of kbf: name another run_dir, or set overwrite=true"
        )


def with_folds(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with ``recipes``, one for each run, where the runs test folds.

    Run k on recordings of the user tests fold k of as many folds as there are runs: whole
    recordings if there are enough of them, else blocks of time with a gap on both sides
    (`kbf.data.files.splits`). A single run keeps its split, and so do runs on a split that the user
    has fixed. Data that is drawn has another draw in each run, and no folds.

    Raises:
        ValueError: more runs than ``data.folds``.
    """
    data, runs = config["recipe"]["data"], config["runs"]
    if runs == 1 or "folds" not in data:
        return config
    if why := fixed_split(data):
        console.print(
            f"all runs have the same test part, since {why}: no standard errors and no tests",
            highlight=False,
        )
        return config
    count = data["folds"] or runs
    if runs > count:
        raise ValueError(
            f"data.folds={count}: each run tests another fold, and there are {runs} runs"
        )
    how = "fold" if data["split"] == "time" else data["split"]
    console.print(
        f"each run tests another of {count} folds in place of data.test (data.split={how})",
        highlight=False,
    )
    folds = [{"split": how, "fold": k, "folds": count} for k in range(runs)]
    return config | {"recipes": [config["recipe"] | {"data": data | fold} for fold in folds]}


def fixed_split(data: dict[str, Any]) -> str | None:
    """Return why all runs have the same split; None where each may test another fold."""
    if data["fold"] is not None:
        return f"data.fold={data['fold']}"
    if any(isinstance(data[part], list | tuple) for part in ("test", "validation")):
        return "data.test or data.validation names recordings"
    return f"data.test={data['test']}" if data["test"] in ("all", 0) else None


def with_shapes(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with what only the recordings contain: shapes, and all steps.

    The data is read where the configuration leaves these to it. An ``n_train`` that is null becomes
    the number of training steps, of folds their mean; each run has all steps of its own fold.

    Raises:
        ValueError: the data cannot be used.
    """
    if not incomplete(config["recipe"]):
        return config
    recipes = []
    for each in config.get("recipes", [config["recipe"]]):
        recipe = {**each, "n_train": None}
        recipes.append(completed(recipe, load_data(resolved(recipe)["data"], trust=True)))
    steps = round(sum(recipe["n_train"] for recipe in recipes) / len(recipes))
    return {
        **config,
        "recipe": recipes[0],
        "recipes": recipes,
        "bases": {name: {**base, **recipes[0]} for name, base in config["bases"].items()},
        "n_train": [steps if n is None else n for n in config["n_train"]],
        "all_steps": steps,
    }


def make_cells(config: dict[str, Any], directory: Path) -> list[Cell]:
    """Return all runs, seed by seed.

    The hash in the name of a file is of everything that the result depends on.

    Raises:
        ValueError: a name of the data or of a model that cannot be part of a file name.
    """
    names = [("data", config["data"]["name"]), *(("model", name) for name in config["bases"])]
    for kind, name in names:
        if not re.fullmatch(r"[\w. +-]+", str(name)) or str(name).startswith("."):
            raise ValueError(
                f"{kind}.name={name} cannot be part of the names of files: "
                "letters, digits, spaces and . + - _ can"
            )
    floor = {**config["recipe"], "model": {"name": FLOOR}, "trainer": {}}
    recipes = config.get("recipes", [config["recipe"]])
    cells = []
    for k in range(config["runs"]):
        recipe, seed = recipes[k % len(recipes)], config["seed"] + k
        for n in config["n_train"]:
            steps = recipe["n_train"] if n == config.get("all_steps") else n
            for model, base in {FLOOR: floor, **config["bases"]}.items():
                # Scores must not depend on the speed of a machine.
                values = resolved({**base, "budget": None, **recipe}, n_train=steps, seed=seed)
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
    """Return whether a file holds the result of a run; the floor may have no error."""
    error, seconds = stored.get("test.mse"), stored.get("seconds")
    floor = error is None and stored.get("model") == FLOOR
    texts = all(isinstance(stored.get(key), str) for key in ("data", "model"))
    counts = all(type(stored.get(key)) is int for key in ("n_train", "seed"))
    numbers = isinstance(seconds, int | float) and (floor or isinstance(error, int | float))
    return texts and counts and numbers


def run_cell(cell: Cell) -> dict[str, Any]:
    """Load the data, fit one model and score it; returns the metrics.

    Raises:
        ValueError: the data has no test part, or the model does not fit the data.
    """
    config, began = cell.config, time.perf_counter()
    data = load_data(config["data"], trust=True)
    if not data.test:
        raise ValueError("there is no test part to compare models on: data.test must be above 0")
    about_run = {
        "data": config["data"]["name"],
        "model": cell.model,
        "n_train": config["n_train"],
        "seed": cell.seed,
        "version": __version__,
        "commit": commit(),
        "renderer": data.renderer,
        "recordings": len(data.train),
    }
    if data.test_part:
        known = sum(int(r.states.isfinite().all(1).sum()) for r in data.test)
        share = known / sum(len(r.states) for r in data.train) if data.train else None
        part = masked(data.test_part, cell.config)  # the name of a file may be a secret's
        about_run |= {"test_part": part, "test_share": share}
    if cell.model == FLOOR:
        least = data_floor(data, particles=config["particles"], seed=cell.seed, covariances=True)
        scores = {"test.mse": None}
        if least is not None:
            scores = {"test.mse": least.mse.mean().item()}
            scores |= reliability_metrics(reliability_of(least, data.decoded, None))
        return {**about_run, **scores, "seconds": time.perf_counter() - began}
    encodings = encodings_of(cell)
    cell.path.parent.mkdir(parents=True, exist_ok=True)
    with (
        scratch(cell.path.parent) as directory,
        # the workers start at the same time and would each encode the images
        FileLock(f"{encodings}.lock") if encodings and not encodings.exists() else nullcontext(),
    ):
        config = {**config, "calibrate": bool(config.get("calibrate"))}
        trained = fit_model(config, data, directory, trust=True, encodings=encodings)
        assert trained is not None
        _, metrics = finish(config, data, trained, None, began)
    return {**metrics, **about_run}


def encodings_of(cell: Cell) -> Path | None:
    """Return the file that keeps the encoded images of a run; None for a run without encoders.

    Models with the same encoders on the same images share it.
    """
    encoding, data = cell.config["model"].get("encoding"), cell.config["data"]
    if not encoding or not encoding.get("encoder"):
        return None
    key = hashed([data, encoding, cell.seed, cell.n_train, *fingerprints(data)])
    return cell.path.with_name(f"codes-{key}.pt")


def hashed(values: list[Any]) -> str:
    """Return a short hash of values and the version of the package."""
    text = json.dumps([*values, __version__], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def fingerprints(data: dict[str, Any]) -> list[str]:
    """Return the SHA-256 sum of each file that a data set names: changed files are other data."""
    return [sum_of(path, path.stat().st_size, path.stat().st_mtime_ns) for path in files_of(data)]


@cache
def sum_of(path: Path, size: int, time_ns: int) -> str:
    """Return the SHA-256 sum of a file, computed once for each size and time of it."""
    return sha256(path)


def in_order(cells: list[Cell]) -> list[Cell]:
    """Return the runs with the first of each set of encoded images in front.

    The others then find the encodings on the disk.
    """
    firsts = {path: cell for cell in reversed(cells) if (path := encodings_of(cell)) is not None}
    first = [cell for cell in cells if cell in firsts.values()]
    return [*first, *(cell for cell in cells if cell not in first)]

"""``python -m studies systems``: methods on systems by seed, with floors; can be resumed.

Each finished cell (system, rows, method) is one line of JSON at the end of a file. Cells that the
file has are not computed again. The summary compares with the floor of each system and with its
best baseline.
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from kbf.runtime.errors import FitError
from kbf.runtime.provenance import commit
from studies.systems.floors import PARTICLES, error_of, floor_of
from studies.systems.grammar import draw_system
from studies.systems.methods import BASELINES, METHODS, run_method
from studies.systems.system import System

# Added to the seed of a system, for the recordings of training and test.
TRAIN_SEED = 10_000
TEST_SEED = 20_000
# Name of the floor among the methods; it does not depend on the rows of the training.
FLOOR = "floor"
# Coverage of regions of 95 % that counts as right.
GOOD_COVERAGE = (0.90, 0.98)

Cell = dict[str, Any]


def main(words: list[str]) -> int:
    """Compute the missing cells and print the summary."""
    options = arguments(words)
    if unknown := set(options.methods) - {FLOOR, *METHODS}:
        names = ", ".join([FLOOR, *METHODS])
        print(f"there is no method {sorted(unknown)[0]!r}; there are {names}")
        return 2
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    options.commit = commit()
    cells = read_cells(options.file)
    if not options.summary:
        for seed in seeds_of(options.seeds):
            cells += run_system(seed, options, cells)
    print(summary(cells))
    return 0


def arguments(words: list[str]) -> argparse.Namespace:
    """Return the parsed options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m studies systems", description=__doc__)
    add = parser.add_argument
    add("--seeds", default="0-9", help="a seed, or the first and the last one: 0-9")
    add("--rows", nargs="+", type=int, default=[300], help="rows of the training recordings")
    add("--test-rows", type=int, default=2000, help="rows of the test recordings")
    methods = ", ".join([FLOOR, *METHODS])
    add("--methods", nargs="+", default=[FLOOR, "kbf", *BASELINES], help=f"of {methods}")
    add("--budget", default="1m", help="time for the model selection of kbf")
    add("--particles", type=int, default=PARTICLES, help="particles of a floor")
    add("--file", type=Path, default=Path("systems.jsonl"), help="finished cells")
    add("--summary", action="store_true", help="print the summary of the file only")
    return parser.parse_args(words)


def seeds_of(text: str) -> range:
    """Return the seeds of "7" or "0-9".

    >>> seeds_of("3-5")
    range(3, 6)
    """
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def read_cells(file: Path) -> list[Cell]:
    """Return the finished cells of a file; a last line that was cut off is ignored."""
    if not file.is_file():
        return []
    cells: list[Cell] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            cells.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return cells


def key_of(cell: Cell) -> tuple[int, int, str]:
    """Return seed, rows and method of a cell."""
    return cell["seed"], cell["rows"], cell["method"]


def run_system(seed: int, options: argparse.Namespace, known: Iterable[Cell]) -> list[Cell]:
    """Compute the missing cells of a system, and write each to the file.

    A floor belongs to the test recordings; its cell has 0 rows. A cell has the commit of its run.
    """
    done = {key_of(cell) for cell in known}
    wanted = [
        (0 if name == FLOOR else rows, name) for rows in options.rows for name in options.methods
    ]
    wanted = list(dict.fromkeys(sorted(wanted, key=lambda each: each[0])))
    missing = [each for each in wanted if (seed, *each) not in done]
    if not missing:
        return []
    system, found = draw_system(seed), []
    test = system.recordings(options.test_rows, torch.Generator().manual_seed(TEST_SEED + seed))
    for rows, name in missing:
        began = time.perf_counter()
        cell: Cell = {"seed": seed, "rows": rows, "method": name, "commit": options.commit}
        if name == FLOOR:
            floor = floor_of(system, test, particles=options.particles)
            error = error_of(torch.cat(floor.estimates), test)
            cell |= {"error": error, "model": floor.kind, "d": system.d}
            cell |= {"features": system.features, "seconds": time.perf_counter() - began}
        else:
            cell |= method_cell(name, system, seed, rows, test, options.budget)
        options.file.parent.mkdir(parents=True, exist_ok=True)
        with options.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(cell) + "\n")
        print(line_of(cell), flush=True)
        found.append(cell)
    return found


def method_cell(
    name: str, system: System, seed: int, rows: int, test: list[Any], budget: str
) -> Cell:
    """Return the results of a method; without an error where it could not be fitted."""
    train = system.recordings(rows, torch.Generator().manual_seed(TRAIN_SEED + seed))
    try:
        result = run_method(name, train, test, budget)
    except FitError as error:
        return {"error": None, "model": f"not fitted: {error}", "seconds": 0.0}
    return {
        "error": error_of(result.estimates, test),
        "coverage": result.coverage,
        "model": result.model,
        "seconds": result.seconds,
    }


def line_of(cell: Cell) -> str:
    """Return a cell as one line of text."""
    error = "not fitted" if cell["error"] is None else f"{cell['error']:.4f}"
    place = f"system {cell['seed']:3d} rows {cell['rows']:5d}"
    return f"{place} {cell['method']:<18} {error:>10} {cell['seconds']:7.1f} s {cell['model']}"


def summary(cells: list[Cell]) -> str:
    """Return a table of methods for each number of rows.

    Excess is the error over the floor's, minus 1, of the systems that have a floor; "over best" the
    error over that of the best baseline that was computed for the system, of all systems. Methods
    that could not be fitted count with an infinite error.
    """
    table = {key_of(cell): cell for cell in cells}
    floors = {seed: cell["error"] for (seed, _, name), cell in table.items() if name == FLOOR}
    names = list(dict.fromkeys(cell["method"] for cell in cells if cell["method"] != FLOOR))
    lines = []
    for rows in sorted({cell["rows"] for cell in cells} - {0}):
        lines += ["", f"{rows} rows", HEADER]
        for name in names:
            mine = {seed: c for (seed, r, m), c in table.items() if (r, m) == (rows, name)}
            if floors.keys() & mine.keys():
                best = {seed: best_baseline(table, seed, rows, name) for seed in mine}
                lines.append(row_of(name, mine, floors, best))
    return "\n".join(lines)


HEADER = (
    f"{'method':<18} {'systems':>7} {'median excess':>14} {'90th perc.':>11} "
    f"{'over best':>10} {'<= 1.05':>8} {'covers':>7} {'seconds':>8}"
)


def best_baseline(table: dict[Any, Cell], seed: int, rows: int, name: str) -> float:
    """Return the least error of the other baselines; infinite without any."""
    errors = [
        table[seed, rows, other]["error"]
        for other in BASELINES
        if other != name and (seed, rows, other) in table
    ]
    return min([each for each in errors if each is not None], default=float("inf"))


def row_of(
    name: str, mine: dict[int, Cell], floors: dict[int, float], best: dict[int, float]
) -> str:
    """Return the row of a method: its cells, the floors and the best baselines by seed."""
    errors = {seed: float("inf") if c["error"] is None else c["error"] for seed, c in mine.items()}
    excess = sorted(100 * (errors[k] / floors[k] - 1) for k in errors if k in floors)
    ratios = [error / best[seed] for seed, error in errors.items()]
    covered = [c["coverage"] for c in mine.values() if c.get("coverage") is not None]
    right = sum(GOOD_COVERAGE[0] <= each <= GOOD_COVERAGE[1] for each in covered)
    tenth = excess[min(len(excess) - 1, round(0.9 * (len(excess) - 1)))]
    seconds = statistics.mean(cell["seconds"] for cell in mine.values())
    return (
        f"{name:<18} {len(mine):>7} {statistics.median(excess):>12.0f} % {tenth:>9.0f} % "
        f"{statistics.median(ratios):>10.2f} {sum(r <= 1.05 for r in ratios):>8} "
        f"{f'{right}/{len(covered)}':>7} {seconds:>8.1f}"
    )

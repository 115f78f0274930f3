"""``python -m studies structure``: are systems with one feature named rightly? Can be resumed.

For each seed and each feature of `KINDS`, a system of the grammar with this feature alone is
simulated, and its structure found as by `kbf.fitted.structure`. A cell is right if the kinds that
are found are those of the feature and no others. Each finished cell is one line of JSON at the end
of a file.
"""

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from kbf.fitted.move_findings import move_findings
from kbf.fitted.sensor_findings import sensor_findings
from kbf.fitted.structure import ALWAYS
from studies.systems.command import TRAIN_SEED, read_cells, seeds_of
from studies.systems.grammar import draw_system

# Kinds that count as right for a feature; none for a system without any.
KINDS: dict[str, set[str]] = {
    "none": set(),
    "jumps": {"jumps"},
    "regimes": {"regime"},
    "late": {"late"},
    "gains": {"drift", "gain"},
    "biases": {"drift", "gain"},
    "failing": {"failing"},
    "sticking": {"sticking"},
    "held": {"held"},
}


def main(words: list[str]) -> int:
    """Compute the missing cells and print the summary."""
    parser = argparse.ArgumentParser(prog="python -m studies structure", description=__doc__)
    add = parser.add_argument
    add("--seeds", default="0-9", help="a seed, or the first and the last one: 0-9")
    add("--rows", type=int, default=1000, help="rows of the recordings")
    add("--dimensions", nargs="+", type=int, default=[1, 2, 3], help="dimensions of the states")
    add("--features", nargs="+", default=list(KINDS), choices=list(KINDS))
    add("--file", type=Path, default=Path("structure.jsonl"), help="finished cells")
    add("--summary", action="store_true", help="print the summary of the file only")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cells = read_cells(options.file)
    if not options.summary:
        done = {(cell["seed"], cell["feature"], cell["rows"]) for cell in cells}
        for seed in seeds_of(options.seeds):
            for feature in options.features:
                if (seed, feature, options.rows) in done:
                    continue
                cell = cell_of(seed, feature, options.rows, options.dimensions)
                options.file.parent.mkdir(parents=True, exist_ok=True)
                with options.file.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(cell) + "\n")
                print(line_of(cell), flush=True)
                cells.append(cell)
    print(summary(cells))
    return 0


def cell_of(seed: int, feature: str, rows: int, dimensions: list[int]) -> dict[str, Any]:
    """Return what is found in the system of a seed with one feature, or "none"."""
    began = time.perf_counter()
    wanted = [] if feature == "none" else [feature]
    system = draw_system(seed, dimensions=dimensions, wanted=wanted)
    cell: dict[str, Any] = {"seed": seed, "feature": feature, "rows": rows, "d": system.d}
    cell["system"] = list(system.features)
    if feature != "none" and feature not in system.features:
        return cell | {"right": None, "found": [], "seconds": 0.0}
    recordings = system.recordings(rows, torch.Generator().manual_seed(TRAIN_SEED + seed))
    found = [*sensor_findings(recordings), *move_findings(recordings)]
    found = [each for each in found if each.kind not in ALWAYS]
    kinds = {each.kind for each in found}
    expected = KINDS[feature]
    right = kinds <= expected and bool(kinds) == bool(expected)
    cell["found"] = [list(each) for each in found]
    return cell | {"right": right, "seconds": time.perf_counter() - began}


def line_of(cell: dict[str, Any]) -> str:
    """Return a cell as one line of text."""
    verdict = {True: "right", False: "WRONG", None: "no such feature"}[cell["right"]]
    kinds = sorted({each[0] for each in cell["found"]})
    system = " ".join(cell["system"][:2])
    return (
        f"system {cell['seed']:3d} d {cell['d']} {system:<22} {cell['feature']:<9} {verdict:<6} "
        f"{', '.join(kinds) or 'nothing'} ({cell['seconds']:.1f} s)"
    )


def summary(cells: list[dict[str, Any]]) -> str:
    """Return a table of features: systems that have them, and those that are named rightly."""
    lines = [f"{'feature':<10} {'systems':>7} {'right':>6}"]
    for name in KINDS:
        mine = [cell for cell in cells if cell["feature"] == name and cell["right"] is not None]
        if mine:
            lines.append(f"{name:<10} {len(mine):>7} {sum(c['right'] for c in mine):>6}")
    return "\n".join(lines)

#!/usr/bin/env python
"""Writes the table of what each model can do into docs/guide.md, from `FittedFilter.capabilities`.

    .venv/bin/python scripts/model_capabilities.py

Each model is fitted to two runs of data/arm.csv: as they are, with a control, and
with missing sensors. A model that cannot have controls or missing sensors, or whose step cannot be
exported, raises a ValueError.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

import kbf
from kbf.runtime.atomic_files import write_text

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "guide.md"
MODELS = {
    "kbf": "`kbf`, the default without another model selected",
    "kernel_monte_carlo": "`kernel_monte_carlo`",
    "kbf_paper": "`kbf_paper`, `kbf_tuned`, `kbf_loo`",
    "kbr_original": "`kbr_original`",
    "particle_learned": "`particle_learned`",
    "ukf_learned": "`ukf_learned`",
    "kalman": "`kalman`, `kalman_velocity`",
    "window_ridge": "`window_ridge`",
    "window_boosting": "`window_boosting`",
    "frame": "`frame`, kernel ridge regression on the observation",
    "lstm": "`lstm`",
    "lstm_feedback": "`lstm_feedback`",
    "gru": "`gru`",
    "gru_ensemble": "`gru_ensemble`",
    "mamba": "`mamba`",
}
"""Models that are learned from recordings of numbers, and their names in the table."""
COLUMNS = ("smooth", "append", "export", "missing sensors", "controls", "intervals")


def capabilities(model: str) -> dict[str, bool]:
    """Return what a model can do, by the columns of the table."""
    table = pd.read_csv(ROOT / "data" / "arm.csv", parse_dates=["time"], index_col="time")
    runs = table[table.run.isin(["run0", "run1"])]
    plain = fitted(model, runs)
    # Some models have covariances only after calibration.
    spread = plain.filter(runs).std is not None
    with_control = attempt(model, runs.assign(u=np.sin(np.arange(len(runs)))), controls=["u"])
    gaps = runs.assign(s2=runs.s2.where(np.arange(len(runs)) % 5 > 0))
    with_gaps = attempt(model, gaps)
    return {
        "smooth": plain.capabilities["smooth"],
        "append": plain.capabilities["append"],
        "export": exports(plain),
        "missing sensors": with_gaps is not None and with_gaps.capabilities["missing_sensors"],
        "controls": with_control is not None and with_control.capabilities["controls"],
        "intervals": spread
        or fitted(model, runs, calibrate=True, validation=0.2).capabilities["intervals"],
    }


def exports(filter: kbf.FittedFilter) -> bool:
    """Return whether a step can be written as a program."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            filter.export(Path(folder) / "step.pt2", format="torch_export")
        except ValueError:
            return False
    return True


def fitted(model: str, runs: pd.DataFrame, **settings: Any) -> kbf.FittedFilter:
    """Return the model, fitted without comparison and, unless asked, without calibration."""
    options = yaml.safe_load((ROOT / "configs" / "model" / f"{model}.yaml").read_text("utf-8"))
    config: dict[str, Any] = {}
    if options.get("model_selection"):
        config["model.model_selection"] = False
    if "epochs" in (options.get("training") or {}):
        config["model.training.epochs"] = 1
    return kbf.fit(
        runs,
        states=["reach_mm", "torque_kNm"],
        observations=["s*"],
        recording="run",
        model=model,
        config=config,
        progress=False,
        **{"calibrate": False, **settings},
    )


def attempt(model: str, runs: pd.DataFrame, **settings: Any) -> kbf.FittedFilter | None:
    """Return the fitted model, or None if it cannot be fitted to such data."""
    try:
        return fitted(model, runs, **settings)
    except ValueError:
        return None


def row(model: str) -> str:
    """Return the line of a model in the table."""
    found = capabilities(model)
    cells = ["yes" if found[name] else "" for name in COLUMNS]
    return f"| {MODELS[model]} | " + " | ".join(cells) + " |"


def main(models: list[str]) -> None:
    """Write the rows of these models; all without arguments."""
    warnings.simplefilter("ignore")
    for model in models or MODELS:
        print(line := row(model), flush=True)
        lines = PAGE.read_text(encoding="utf-8").splitlines()
        lines[place(lines, model)] = line
        write_text(PAGE, "\n".join(lines) + "\n")


def place(lines: list[str], model: str) -> int:
    """Return the number of the line of a model in the page."""
    (found,) = [k for k, line in enumerate(lines) if line.startswith(f"| {MODELS[model]} |")]
    return found


if __name__ == "__main__":
    main(sys.argv[1:])

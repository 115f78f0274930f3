#!/usr/bin/env python
"""Writes data/arm.csv: six runs of a simulated robot arm, 150 rows each at 10 Hz.

The angle of the arm is a random walk with a drift. The states are the reach in mm and the torque in
kN m; the sensors s1, s2 and s3 are functions of them in other units, with noise.
"""

from pathlib import Path

import numpy as np
import pandas as pd

RUNS, STEPS = 6, 150
DECIMALS = {"reach_mm": 2, "torque_kNm": 4, "s1": 2, "s2": 3, "s3": 4}


def arm(runs: int = RUNS, steps: int = STEPS, seed: int = 2026) -> pd.DataFrame:
    """Return the runs as one table, indexed by time."""
    rng = np.random.default_rng(seed)
    frames = []
    for run in range(runs):
        angle = rng.uniform(0, 2 * np.pi) + np.cumsum(rng.normal(0.2, 0.095, steps))
        reach, torque = 400 + 250 * np.cos(angle), 2 + 1.5 * np.sin(angle)
        sensors = {
            "s1": np.hypot(reach - 100, 300) + rng.normal(0, 9, steps),
            "s2": reach / 100 + 5 * torque + rng.normal(0, 0.3, steps),
            "s3": np.sqrt(4 + torque) + rng.normal(0, 0.05, steps),
        }
        start = pd.Timestamp("2026-01-05") + pd.Timedelta(hours=run)
        time = pd.date_range(start, periods=steps, freq="100ms", name="time")
        columns = {"run": f"run{run}", "reach_mm": reach, "torque_kNm": torque, **sensors}
        frames.append(pd.DataFrame(columns, index=time))
    return pd.concat(frames)


if __name__ == "__main__":
    table = arm().round(DECIMALS).reset_index()
    table["time"] = table.time.map(lambda time: time.isoformat(timespec="milliseconds"))
    table.to_csv(Path(__file__).resolve().parents[1] / "data" / "arm.csv", index=False)

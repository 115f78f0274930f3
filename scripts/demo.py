#!/usr/bin/env python
"""A first look at kbf in Python: fits a filter to five runs of a robot arm and filters a sixth."""

from pathlib import Path

import pandas as pd

import kbf

FOLDER = Path("runs/demo")


def main() -> None:
    """Fit, evaluate, draw, save, load and step; the results are in `FOLDER`."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    df = pd.read_csv("data/arm.csv", parse_dates=["time"], index_col="time")
    train, new = df[df.run != "run5"], df[df.run == "run5"]
    arm = kbf.fit(
        train,
        states=["reach_mm", "torque_kNm"],
        observations=["s*"],
        recording="run",
        units={"reach_mm": "mm", "torque_kNm": "kN m"},
        budget="25s",  # for comparing models; without it the comparison takes three minutes
    )
    compared = arm.candidates[["candidate", "nmse", "weight", "seconds"]].dropna()
    print(f"\n{arm}\n\nCandidates\n{compared.round(4).to_string(index=False)}")
    estimates = arm.filter(new)
    print(f"\nA new run, next to baselines\n{arm.evaluate(new).round(4).T.to_string()}")
    estimates.plot(truth=new).savefig(FOLDER / "arm.png", dpi=150)
    estimates.to_frame().to_csv(FOLDER / "estimates.csv")
    arm.save(FOLDER / "arm.ckpt")
    live = kbf.load(FOLDER / "arm.ckpt").online()
    first = live.step(new[["s1", "s2", "s3"]].iloc[0])
    ends = {name: [round(end, 1) for end in pair] for name, pair in first.interval().items()}
    print(f"\nThe first step, live: {first}, intervals of 95 % {ends}")


if __name__ == "__main__":
    main()

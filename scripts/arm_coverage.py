#!/usr/bin/env python
"""Accuracy and coverage of the README's example on further draws of its law.

For each seed, `make_arm.arm` draws six runs; a filter is fitted to five and scored on the last.
Prints seconds of the fit, and for each column NMSE and the share of the 95 % intervals that contain
the state.
"""

import argparse
import time

import make_arm

import kbf


def main() -> None:
    """Fit and score each draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", nargs="*", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--model", default="kbf", help="of kbf.fit; kbf selects among several")
    given = parser.parse_args()
    for seed in given.seeds:
        table = make_arm.arm(seed=seed).round(make_arm.DECIMALS)
        train, new = table[table.run != "run5"], table[table.run == "run5"]
        columns = {"states": ["reach_mm", "torque_kNm"], "observations": ["s*"]}
        began = time.perf_counter()
        fitted = kbf.fit(train, **columns, recording="run", model=given.model, progress=False)
        seconds = time.perf_counter() - began
        scores = fitted.evaluate(new, baselines=False)
        shown = "; ".join(
            f"{name}: NMSE {row.nmse:.4f}, in 95 % intervals {100 * row.coverage_95:.1f} %"
            for name, row in scores.iterrows()
        )
        print(f"seed {seed}, {fitted.model_name} in {seconds:.0f} s: {shown}", flush=True)


if __name__ == "__main__":
    main()

"""The Lorenz equations in discrete time: a filter of learned maps, and filters that know the maps.

z' = sum_{j=0..5} (A(z) 0.02)^j / j! z + N(0, q^2 I), x = R z + N(0, r^2 I), with A(z) = [[-10, 10,
0], [28 - z_3, -1, 0], [z_2, 0, -8/3]], R a rotation by one degree about two axes, and q^2 = r^2 /
100. Recordings start at (1, 1, 1) and have 100 steps. Errors are in dB: 10 log10 of the mean
squared error of a component.

References: Revach et al. (2022), KalmanNet, section IV.C, where the extended Kalman filter has -9.7
dB at r^2 = 1 and -29.7 dB at r^2 = 0.01.
"""

import math
import time
from typing import Any

import torch

from kbf.data.benchmark_systems import discrete_lorenz
from kbf.filters.gaussian.kalman import LearnedKalman
from kbf.filters.gaussian.learned_ukf import LearnedUKF
from kbf.filters.gaussian.ukf import UnscentedKalmanFilter
from kbf.filters.rollout import rollout
from kbf.filters.scaling import ScaledFilter, Scaling
from kbf.plots.charts import Figure, curves
from kbf.recording import Recording
from kbf.ssm import StateSpaceModel
from studies.benchmarks.base import Claim, Row, Settings, Tell

SIZES: dict[str, dict[str, Any]] = {
    "full": {"train": 20, "test": 200, "steps": 100, "noise_db": (0, 10, 20, 30), "seed": 0},
    "smoke": {"train": 4, "test": 3, "steps": 40, "noise_db": (20,), "seed": 0},
}
# Errors to be reached with 20 recordings, by -10 log10 r^2.
TARGETS = {0: -9.6, 20: -29.3, 30: -39.5}


def drawn(model: StateSpaceModel, recordings: int, steps: int, seed: int) -> Recording:
    """Return a batch of recordings."""
    generator, z = torch.Generator().manual_seed(seed), model.m0.expand(recordings, 3)
    states, obs = [], []
    for _ in range(steps):
        z = model.move(z, generator)
        states.append(z)
        obs.append(model.observe(z, generator))
    return Recording(torch.stack(states, 1), torch.stack(obs, 1))


def run(settings: Settings, tell: Tell) -> list[Row]:
    """Errors, shares of states within 1.96 standard deviations, and times of fits."""
    rows: list[Row] = []
    for level in settings["noise_db"]:
        model = discrete_lorenz(level)
        train = drawn(model, settings["train"], settings["steps"], settings["seed"])
        test = drawn(model, settings["test"], settings["steps"], settings["seed"] + 1)
        memory = [Recording(z, x) for z, x in zip(train.states, train.obs, strict=True)]
        scaling = Scaling().prepare(memory)
        scaled = [scaling(each) for each in memory]
        for name, net in {
            "kalman": LearnedKalman(),
            "ukf_learned": LearnedUKF(),
            "ukf": None,
        }.items():
            tell(f"{level} dB: {name}")
            began = time.process_time()
            if net is None:
                filter: Any = UnscentedKalmanFilter(model)
            else:
                net.prepare(scaled)
                filter = ScaledFilter(scaling, net.fit(scaled), torch.float64)
            seconds = time.process_time() - began
            found = rollout(filter, test.obs, covariances=True)
            assert found.covariances is not None
            left = found.estimates - test.states
            spread = found.covariances.diagonal(dim1=-2, dim2=-1).sqrt()
            rows.append(
                {
                    "1/r^2 [dB]": level,
                    "model": name,
                    "error [dB]": 10 * math.log10(left.square().mean()),
                    "within 1.96 std": float((left.abs() <= 1.96 * spread).double().mean()),
                    "fit [CPU s]": seconds,
                }
            )
    return rows


def claims(rows: list[Row]) -> list[Claim]:
    """The errors of `TARGETS`."""
    found = []
    for row in rows:
        target = TARGETS.get(row["1/r^2 [dB]"])
        if row["model"] == "ukf_learned" and target is not None:
            error = row["error [dB]"]
            text = f"{row['1/r^2 [dB]']} dB: an error of at most {target} dB"
            found.append(Claim(text, f"{error:.2f} dB", error <= target))
    return found


def draw(rows: list[Row]) -> Figure:
    """Errors over the level of noise."""
    return curves(rows, x="1/r^2 [dB]", y="error [dB]", by="model", ylabel="error [dB]")

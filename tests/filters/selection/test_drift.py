"""Recordings that drift: what is old is left out, and nothing is left out of those that do not."""

from __future__ import annotations

import pytest
import torch

from kbf.commands.support.search_report import selection_notes
from kbf.config import configure
from kbf.filters.kernel.kbf import KBF
from kbf.filters.regression.window import MeanModel, WindowRidge
from kbf.filters.rollout import rollout
from kbf.filters.selection import auto
from kbf.filters.selection.auto import ModelSelection
from kbf.filters.selection.drift import MIN_STEPS_KEPT, last_steps, newest
from kbf.fitted.checkpoint import load_filter
from kbf.recording import Recording
from kbf.training.fit import train

F64 = torch.float64
KEEP, NOISE = 0.9, 0.3


def turning(n: int, turn: float, seed: int = 0, lead: int = 200) -> tuple[Recording, torch.Tensor]:
    """A state z' = 0.9 z + e of variance 1, seen by a sensor that turns by ``turn`` in n steps: n
    steps and ``lead`` after them.
    """
    generator, T = torch.Generator().manual_seed(seed), n + lead
    noise, error = (torch.randn(T, 2, generator=generator, dtype=F64) for _ in range(2))
    z = torch.zeros(T, 2, dtype=F64)
    for t in range(1, T):
        z[t] = KEEP * z[t - 1] + (1 - KEEP**2) ** 0.5 * noise[t]
    angle = turn * torch.arange(T, dtype=F64) / n
    C = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1).unflatten(-1, (2, 2))
    return Recording(z, (C @ z[..., None])[..., 0] + NOISE * error), C


def true_filter(sequence: Recording, C: torch.Tensor) -> torch.Tensor:
    """Estimates of the Kalman filter that knows how the sensor turns."""
    eye = torch.eye(2, dtype=F64)
    m, P, estimates = torch.zeros(2, dtype=F64), eye, []
    for x, c in zip(sequence.obs, C, strict=True):
        m, P = KEEP * m, KEEP**2 * P + (1 - KEEP**2) * eye
        gain = P @ c.T @ torch.linalg.inv(c @ P @ c.T + NOISE**2 * eye)
        m, P = m + gain @ (x - c @ m), P - gain @ c @ P
        estimates.append(m)
    return torch.stack(estimates)


def during(sequence: Recording, start: int, stop: int | None = None) -> Recording:
    return Recording(sequence.states[start:stop], sequence.obs[start:stop])


def test_last_steps_cross_the_ends_of_recordings():
    parts = [Recording(torch.arange(k, k + 4.0)[:, None], torch.zeros(4, 1)) for k in (0, 10)]
    assert [s.states[:, 0].tolist() for s in last_steps(parts, 6)] == [[2, 3], [10, 11, 12, 13]]
    assert [s.states[:, 0].tolist() for s in last_steps(parts, 3)] == [[11, 12, 13]]
    assert last_steps(parts, 0) is parts and last_steps(parts, 8) is parts


@pytest.mark.parametrize("n", [300, 1000, 3000])
def test_nothing_is_left_out_where_nothing_drifts(n):
    sequence, _ = turning(n, 0.0)
    assert newest([during(sequence, 0, n)], [WindowRidge(None)]) == 0


def test_that_recordings_differ_is_no_drift():
    """Each of ten has a sensor that turns otherwise: the last steps are nearest to those before
    them, of the same recording.
    """
    turned = torch.linspace(0, 6, 10, dtype=F64)[
        torch.randperm(10, generator=torch.Generator().manual_seed(1))
    ].tolist()
    memory = []
    for seed, angle in enumerate(turned):
        sequence, _ = turning(600, 0.0, seed, lead=0)
        c, s = torch.tensor(angle, dtype=F64).cos(), torch.tensor(angle, dtype=F64).sin()
        memory.append(
            Recording(
                sequence.states,
                sequence.obs @ torch.stack([torch.stack([c, s]), torch.stack([-s, c])]),
            )
        )
    assert newest(memory, [WindowRidge(None)]) == 0
    together = Recording(
        torch.cat([s.states for s in memory[:2]]), torch.cat([s.obs for s in memory[:2]])
    )
    assert newest([together], [WindowRidge(None)]) > 0, "as one recording it is drift"


def test_recordings_that_turn_one_after_the_other_do_drift():
    """A sensor that turns from each recording to the next: the oldest recordings are left out,
    whole.
    """
    sequence, _ = turning(4000, 2.0, lead=0)
    memory = [during(sequence, k, k + 200) for k in range(0, 4000, 200)]
    count = newest(memory, [WindowRidge(None)])
    assert count >= MIN_STEPS_KEPT and count % 200 == 0


def test_all_judges_must_agree():
    sequence, _ = turning(2000, 2.0)
    memory = [during(sequence, 0, 2000)]
    assert MIN_STEPS_KEPT <= newest(memory, [WindowRidge(None)]) <= 800
    assert newest(memory, [WindowRidge(None), MeanModel()]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("n", "turn"), [(1000, 1.0), (2000, 1.0)])
def test_a_turning_sensor_is_followed(n, turn):
    """Against the filter that knows how it turns: nearer than over the whole recording, and regions
    that hold.
    """
    sequence, C = turning(n, turn)
    memory, test = [during(sequence, 0, n)], during(sequence, n)
    floor = (true_filter(sequence, C)[n:] - test.states).square().mean()
    net = ModelSelection(KBF(), name="kbf")
    net.prepare(memory)
    assert MIN_STEPS_KEPT <= int(net.newest) <= n // 2
    assert len(net.kept(memory)[0].states) == int(net.newest)

    def run(filter):
        found = rollout(filter, test.obs[None], covariances=True)
        left = found.estimates[0] - test.states
        spread = found.covariances[0].diagonal(dim1=-2, dim2=-1)
        return left.square().mean(), (left.abs() < 1.96 * spread.sqrt()).double().mean()

    error, inside = run(net.fit(memory))
    all_of_it, _ = run(net.main.fit(memory))
    assert error < 0.6 * all_of_it, (error, all_of_it, floor)
    assert error < (4 if n == 1000 else 2.2) * floor, (
        "the sensor turns on: by 0.2 in the test at n = 1000"
    )
    assert 0.7 < inside < 0.99


def test_what_is_left_out_is_in_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(auto, "newest", lambda sequences, judges: 70)
    config = configure(
        "train",
        [
            "data=oscillatory",
            "n_train=120",
            "+model.model_selection=true",
            "logger=none",
            "model=kalman",
        ],
    )
    sequence, _ = turning(120, 0.0)
    made = train(config, [during(sequence, 0, 120)], tmp_path)
    assert made is not None
    kept = load_filter(tmp_path / "best.ckpt")
    (memory,) = kept.module.memory.recordings()
    torch.testing.assert_close(memory.states, sequence.states[50:120].to(memory.states))
    assert kept.module.net.hyperparameters()["newest"] == 70
    assert [
        "their last 70 steps" in ratio_dim for ratio_dim in selection_notes(kept.module.net)
    ] == [True]

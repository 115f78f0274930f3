"""`fitted.structure`: what is there is named with its size, and nothing else is."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

import kbf
from kbf.fitted import structure
from kbf.fitted.move_findings import jumps, move_findings
from kbf.fitted.sensor_findings import Finding, sensor_findings
from kbf.fitted.structure import ALWAYS, COLUMNS, sentence_of_selection
from kbf.recording import Recording
from kbf.runtime.errors import FitError

N = 800


def states(rng, n=N, phi=0.9):
    z = np.zeros((n, 2))
    for t in range(1, n):
        z[t] = phi * z[t - 1] + 0.4 * rng.normal(size=2)
    return z


def readings(rng, z, noise=(0.1, 0.2)):
    return z + np.array(noise) * rng.normal(size=z.shape)


def recording(z, x):
    return [Recording(torch.from_numpy(z), torch.from_numpy(x), None, None)]


def named(found):
    """(kind, column) of all that is not noise."""
    return {(each.kind, each.column) for each in found if "noise" not in each.kind}


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def test_an_ordinary_recording_has_noises_only(rng):
    z = states(rng)
    found = sensor_findings(recording(z, readings(rng, z)))
    assert not named(found)
    noises = {each.column: each.size for each in found}
    assert noises == pytest.approx({0: 0.1, 1: 0.2}, rel=0.1)
    moves = move_findings(recording(z, z))
    assert not named(moves)
    assert [each.size for each in moves] == pytest.approx([0.4, 0.4], rel=0.1)


@pytest.mark.parametrize("law", ["student", "exponential"])
def test_laws_of_noise_are_no_failures_and_no_jumps(rng, law):
    def draw(shape):
        if law == "student":
            return rng.standard_t(3, size=shape) / math.sqrt(3)
        return rng.exponential(size=shape) - 1

    z = np.zeros((N, 2))
    for t in range(1, N):
        z[t] = 0.9 * z[t - 1] + 0.4 * draw(2)
    assert not named(sensor_findings(recording(z, z + 0.2 * draw((N, 2)))))
    assert not named(move_findings(recording(z, z)))


@pytest.mark.parametrize(("seed", "phi", "width"), [(0, 0.98, 1.0), (1, 0.995, 0.5)])
def test_the_spikes_of_a_cell_are_no_failures(seed, phi, width):
    """Of a cell whose place is crossed slowly most counts are 0, and the others come in runs."""
    rng = np.random.default_rng(seed)
    z = states(rng, n=1000, phi=phi)
    centres = np.array([[0, 0], [1, 0], [0, 1.5], [-1, -1]])
    distance = ((z[:, None] / z.std(0) - centres) ** 2).sum(-1)
    x = rng.poisson(np.exp(-distance / (2 * width))).astype(float)
    assert not named(sensor_findings(recording(z, x)))


def test_a_late_sensor(rng):
    z = states(rng)
    x = readings(rng, z)
    x[3:, 1] = readings(rng, z)[:-3, 1]
    found = sensor_findings(recording(z, x))
    assert named(found) == {("late", 1)}
    assert next(each.steps for each in found if each.kind == "late") == 3


def test_a_sensor_that_is_held(rng):
    z = states(rng)
    x = readings(rng, z)
    x[:, 0] = x[np.arange(N) // 4 * 4, 0]
    found = sensor_findings(recording(z, x))
    assert named(found) == {("held", 0)}
    held = next(each for each in found if each.kind == "held")
    assert held.steps == 4 and held.share == pytest.approx(0.75, abs=0.01)


def faults(rng, steps, count):
    """Rows of ``count`` faults of so many steps."""
    starts = rng.choice(N // (2 * steps), count, replace=False) * 2 * steps + 1
    return np.concatenate([np.arange(start, start + steps) for start in starts])


def test_a_sensor_that_sticks(rng):
    z = states(rng)
    x, rows = readings(rng, z), faults(rng, 8, 12)
    for t in rows:
        x[t, 1] = x[t - 1, 1]
    found = sensor_findings(recording(z, x))
    assert named(found) == {("sticking", 1)}
    stuck = next(each for each in found if each.kind == "sticking")
    assert stuck.share == pytest.approx(96 / N, abs=0.02) and stuck.steps == pytest.approx(8, abs=1)


@pytest.mark.parametrize("missing", [False, True])
def test_a_sensor_that_is_constant(rng, missing):
    z = states(rng)
    x = readings(rng, z)
    x[:, 1] = 3.5
    if missing:
        x[rng.random(N) < 0.3, 1] = np.nan
    found = sensor_findings(recording(z, x))
    assert named(found) == {("constant", 1)}


def test_a_sensor_that_fails(rng):
    z = states(rng)
    x, rows = readings(rng, z), faults(rng, 8, 12)
    x[rows, 0] = rng.uniform(-4, 4, len(rows))
    found = sensor_findings(recording(z, x))
    assert named(found) == {("failing", 0)}
    failed = next(each for each in found if each.kind == "failing")
    assert failed.share == pytest.approx(96 / N, abs=0.04)


@pytest.mark.parametrize("law", ["drift", "gain"])
def test_errors_that_go_on(rng, law):
    z = states(rng) + 2.0
    error = np.zeros(N)
    for t in range(1, N):
        error[t] = 0.97 * error[t - 1] + math.sqrt(1 - 0.97**2) * rng.normal()
    x = readings(rng, z)
    x[:, 0] += 0.3 * error if law == "drift" else 0.3 * error * z[:, 0]
    found = sensor_findings(recording(z, x))
    assert named(found) <= {("drift", 0), ("gain", 0)} and named(found)
    if law == "drift":
        size = next(each.size for each in found if each.kind in ("drift", "gain"))
        assert size == pytest.approx(0.3, rel=0.4)


def test_jumps(rng):
    z, rows = states(rng), rng.choice(np.arange(1, N), 20, replace=False)
    for t in range(1, N):
        z[t] = 0.9 * z[t - 1] + 0.1 * rng.normal(size=2) + (t in rows) * 2 * rng.normal(size=2)
    found = move_findings(recording(z, z))
    assert named(found) == {("jumps", 0), ("jumps", 1)}
    share = next(each.share for each in found if each.kind == "jumps")
    assert share == pytest.approx(20 / N, abs=0.01)
    assert not jumps(torch.randn(N, 2, dtype=torch.float64)).any()


def test_modes_that_last(rng):
    turns, z, mode = (0.3, -0.3), np.ones((N, 2)), 0
    for t in range(1, N):
        mode = 1 - mode if t % 50 == 0 else mode
        c, s = math.cos(turns[mode]), math.sin(turns[mode])
        z[t] = np.array([[c, -s], [s, c]]) @ z[t - 1] + 0.05 * rng.normal(size=2)
        z[t] /= np.linalg.norm(z[t])
    found = move_findings(recording(z, z))
    assert named(found) == {("regime", -1)}
    lasts = [each.steps for each in found if each.kind == "regime"]
    assert lasts == pytest.approx([50, 50], rel=0.2)


@pytest.fixture(scope="module")
def fitted():
    rng = np.random.default_rng(0)
    z = states(rng, 400)
    x = readings(rng, z)
    x[2:, 1] = x[:-2, 1]
    names = {"north": z[:, 0], "east": z[:, 1], "a": x[:, 0], "b": x[:, 1]}
    data = pd.DataFrame({**names, "time": 0.5 * np.arange(400)})
    return kbf.fit(
        data,
        states=["north", "east"],
        observations=["a", "b"],
        time="time",
        model="kalman",
        progress=False,
    )


def test_structure_has_a_sentence_for_each_finding_in_the_names_of_the_columns(fitted):
    found = fitted.structure
    assert tuple(found.columns) == COLUMNS
    assert "b is late by 2 steps (1 s)." in found.sentence.tolist()
    assert found[~found.kind.isin(ALWAYS)].column.tolist() == ["b"]
    noise = found[found.kind == "sensor noise"].set_index("column")["size"]
    assert noise["a"] == pytest.approx(0.1, rel=0.15)  # scaled for the filter, not here
    found.loc[0, "kind"] = "changed"
    assert fitted.structure.kind[0] == "filter"


def test_the_structure_stays_with_the_checkpoint(fitted, tmp_path):
    fitted.save(tmp_path / "a.ckpt")
    pd.testing.assert_frame_equal(kbf.load(tmp_path / "a.ckpt").structure, fitted.structure)


def test_few_rows_have_the_reason_only():
    z = np.arange(60.0)[:, None]
    fitted = kbf.fit(states=z, observations=z + 0.5, model="mean", progress=False)
    assert fitted.structure.kind.tolist() == ["filter"]


def test_why_a_filter_was_selected():
    scores = {"kalman": 0.02, "mean": 1.0}
    assert "least held-out NMSE, 0.02; that of the next of" in sentence_of_selection(
        ["kalman"], scores
    )
    assert sentence_of_selection(["mean"], scores) == (
        "mean has the held-out NMSE, 1; that of the best of 2 candidates, kalman, is 0.02."
    )
    assert "average of kalman and mean has the held-out NMSE 0.01" in sentence_of_selection(
        ["kalman", "mean"], scores | {"gru": 2.0, "average": 0.01}
    )
    assert "average of kalman and mean is the filter" in sentence_of_selection(
        ["kalman", "mean"], scores
    )
    assert "only filter" in sentence_of_selection(["kalman"], {"kalman": 0.02})


def test_steps_that_were_not_observed_are_no_findings(rng):
    z = states(rng)
    x = readings(rng, z)
    (seen,) = recording(z, x)
    mask = torch.ones(N, dtype=torch.bool)
    mask[200:240] = False
    gap = seen._replace(obs=torch.where(mask[:, None], seen.obs, 0), mask=mask)
    assert named(sensor_findings([gap])) == set()


def test_regimes_of_one_component_have_names(monkeypatch):
    modes = [Finding("regime", -1, share=share, steps=9.0) for share in (0.7, 0.3)]
    monkeypatch.setattr(structure, "move_findings", lambda recordings: modes)
    z = np.cumsum(np.random.default_rng(0).normal(size=(150, 1)), axis=0)
    fitted = kbf.fit(states=z, observations=z + 0.1, model="mean", progress=False)
    found = fitted.structure
    assert list(found[found.kind == "regime"].column) == ["mode 1", "mode 2"]


def test_what_cannot_be_examined_has_no_findings(monkeypatch):
    """A state that hardly ever changes has no scale."""

    def failing(recordings):
        raise FitError("the median distance is 0")

    monkeypatch.setattr(structure, "move_findings", failing)
    monkeypatch.setattr(structure, "sensor_findings", failing)
    z = np.cumsum(np.random.default_rng(0).normal(size=(150, 1)), axis=0)
    fitted = kbf.fit(states=z, observations=z + 0.1, model="mean", progress=False)
    assert list(fitted.structure.kind) == ["filter"]

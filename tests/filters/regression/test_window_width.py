"""The width of a window: against regressions on each block, and on data of a known memory."""

from __future__ import annotations

import pytest
import torch

from kbf.filters.regression.boosting import BINS_OF_FEW_STEPS, WindowBoosting
from kbf.filters.regression.window import WindowRidge, rows_of, windows_of
from kbf.filters.regression.window_width import BLOCKS, candidates, select_width
from kbf.recording import Recording
from kbf.runtime.errors import FitError

REGS = (0.1, 10.0)


def moving_average(n: int, memory: int, seed: int = 0) -> Recording:
    """States that are the mean of the last observations, with noise, and a useless sensor."""
    g = torch.Generator().manual_seed(seed)
    obs = torch.randn(n, 2, generator=g, dtype=torch.float64)
    means = windows_of(obs[:, :1], memory).mean(1, keepdim=True)
    states = means + 0.3 * torch.randn(n, 1, generator=g, dtype=torch.float64)
    return Recording(states, obs)


def error_by_blocks(u: torch.Tensor, z: torch.Tensor, reg: float) -> torch.Tensor:
    """Sum of squared errors of ridge regressions, each fitted to the other blocks."""
    found = torch.zeros(z.shape[1], dtype=torch.float64)
    for k in range(BLOCKS):
        held = torch.zeros(len(u), dtype=torch.bool)
        held[torch.arange(len(u)).tensor_split(BLOCKS)[k]] = True
        a, b = u[~held], z[~held]
        eye = torch.eye(u.shape[1], dtype=torch.float64)
        w = torch.linalg.solve(a.mT @ a + reg * eye, a.mT @ b)
        found += (z[held] - u[held] @ w).square().sum(0)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_the_width_has_the_least_error_of_regressions_on_each_block(seed):
    recording = moving_average(120, 4, seed)
    z = torch.cat([recording.states, recording.states.square()], 1)
    widths = [1, 2, 4, 8, 16]
    errors = []
    for width in widths:
        u = windows_of(rows_of(recording), width)
        u, centred = (u - u.mean(0)) / u.std(0), z - z.mean(0)
        least = torch.stack([error_by_blocks(u, centred, reg) for reg in REGS]).amin(0)
        errors.append(float((least / centred.square().sum(0)).mean()))
    found = select_width([(windows_of(rows_of(recording), 16), z)], widths, REGS, 16)
    assert found == widths[errors.index(min(errors))]


def test_wider_windows_are_compared_while_the_error_falls(monkeypatch):
    """A memory of 3 steps: windows of 8 have a larger error than those of 4; of 20, a smaller."""
    solved = []
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda a: solved.append(a.shape[-1]) or eigh(a))
    for memory, compared in ((3, [2, 4, 8]), (20, [2, 4, 8, 16, 32])):
        recording = moving_average(400, memory)
        parts = [(windows_of(rows_of(recording), 32), recording.states)]
        solved.clear()
        select_width(parts, [2, 4, 8, 16, 32], REGS, 8)
        columns = solved[0] // 2
        assert solved == [width * columns for width in compared]


def test_a_short_memory_gets_a_short_window_and_a_long_one_a_long_window():
    """Of 400 steps with two numbers each the usual window has 50 steps."""
    short, long = WindowRidge(None), WindowRidge(None)
    short.prepare([moving_average(400, 3)])
    long.prepare([moving_average(400, 40)])
    assert int(short.selected) == 6
    assert int(long.selected) == 50
    test = moving_average(400, 3, seed=1)
    usual = WindowRidge(None).fit([moving_average(400, 3)])
    filters = [short.fit([moving_average(400, 3)]), usual]
    windows = [windows_of(rows_of(test), each.width) for each in filters]
    errors = [
        float((each.regression(u) - test.states).square().mean())
        for each, u in zip(filters, windows, strict=True)
    ]
    assert errors[0] < errors[1]


def test_wide_windows_need_many_steps():
    assert candidates(50, 2, 400) == [6, 12, 25, 50]
    assert candidates(50, 2, 4000) == [6, 12, 25, 50, 100, 200]
    assert candidates(50, 10, 100_000) == [6, 12, 25, 50, 100]
    assert candidates(3, 1, 20) == [1, 3]


def test_windows_of_many_columns_keep_the_usual_width():
    """Of 200 columns it has eight steps, 1,600 numbers."""
    g = torch.Generator().manual_seed(0)
    states, obs = (torch.randn(60, n, generator=g, dtype=torch.float64) for n in (1, 200))
    model = WindowRidge(None)
    model.prepare([Recording(states, obs)])
    assert int(model.selected) == 8
    assert model.fit([Recording(states, obs)]).width == 8


def test_the_width_is_stored_and_a_given_one_is_kept():
    model, other = WindowRidge(None), WindowRidge(None)
    model.prepare([moving_average(400, 3)])
    other.load_state_dict(model.state_dict())
    assert other.fit([moving_average(400, 3)]).width == int(model.selected)
    other.load_state_dict({})  # of a version without it: the usual width
    assert other.fit([moving_average(400, 3)]).width == 50
    with pytest.raises(ValueError, match=r"a window of 1000000 steps; there are 0 to 1000"):
        other.load_state_dict({"selected": torch.tensor(1_000_000)})
    given = WindowRidge(9)
    given.prepare([moving_average(400, 3)])
    assert given.fit([moving_average(400, 3)]).width == 9


def test_missing_sensors_and_masks_are_filled_before():
    recording = moving_average(400, 3)
    gaps = recording.obs.clone()
    gaps[::7, 1] = torch.nan
    model = WindowRidge(None)
    model.allow_missing_sensors = True
    model.prepare([Recording(recording.states, gaps)])
    assert int(model.selected) == 6
    hidden = torch.arange(400) % 9 == 4
    broken = torch.where(hidden[:, None], 1e6, recording.obs)
    masked = WindowRidge(None)
    masked.prepare([Recording(recording.states, broken, ~hidden)])
    assert int(masked.selected) == 6
    with pytest.raises(FitError, match="ten steps"):
        WindowRidge(None).prepare([moving_average(9, 3)])


def test_trees_of_few_steps_have_narrow_windows():
    model, other = WindowBoosting(None, iterations=2), WindowBoosting(None, iterations=2)
    model.prepare([moving_average(300, 3)])
    assert model.fit([moving_average(300, 3)]).width == 15
    other.load_state_dict(model.state_dict())
    assert other.fit([moving_average(300, 3)]).width == 15
    other.load_state_dict({})  # of a version without it: the usual width
    assert other.fit([moving_average(300, 3)]).width == 50
    model.prepare([moving_average(2001, 3)])
    assert model.fit([moving_average(300, 3)]).width == 50
    given = WindowBoosting(9, iterations=2)
    given.prepare([moving_average(300, 3)])
    assert given.fit([moving_average(300, 3)]).width == 9


def test_few_steps_without_a_width_have_few_bins():
    """A histogram of b bins has b - 1 thresholds; a given width keeps the 255 bins."""
    recording = moving_average(1500, 3)
    thresholds = []
    for width in (None, 3):
        model = WindowBoosting(width)
        model.prepare([recording])
        trees = model.grow(recording.obs, recording.states)
        splits = trees.child[::2] != torch.arange(len(trees.threshold))  # a leaf is its own child
        thresholds.append(len(trees.threshold[splits & (trees.feature == 0)].unique()))
    few, many = thresholds
    assert few <= BINS_OF_FEW_STEPS - 1 < many

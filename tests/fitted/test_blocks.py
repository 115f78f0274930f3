"""Whole recordings are filtered in blocks, with the results of row by row."""

import pytest
import torch

import kbf
from kbf.filters import parallel_rollout
from kbf.filters.particle.bootstrap import ParticleFilter
from kbf.fitted.online_estimator import MIN_ROWS_IN_BLOCKS, OnlineEstimator, StepInputs
from kbf.ssm import rotation, simulate

# Standard deviations by which blocks and single rows may differ: rounding of float32.
ROUNDING = 2e-3


@pytest.fixture(scope="module")
def trained():
    return kbf.load("example:rotation").trained


def path(steps):
    """Simulated observations, of which some are missing and some impossible."""
    start = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    x = simulate(rotation(), start, steps, torch.Generator().manual_seed(1)).obs[0].float()
    x[150:160] = 1e30
    rows = [StepInputs(each[None]) for each in x]
    for t in (0, 50, *range(200, 230)):
        rows[t] = StepInputs(None)
    rows[60] = StepInputs(torch.full((1, 2), torch.nan))
    return rows


def both_ways(trained, rows):
    found = []
    for blocks in (None, False):
        estimator = OnlineEstimator(trained, trained.module.column_schema())
        estimator.in_blocks = blocks
        found.append((estimator, *estimator.advance(rows)))
    return found


def test_blocks_have_the_results_of_row_by_row(trained):
    rows = path(3000)
    (a, state, alarms), (b, wanted, wanted_alarms) = both_ways(trained, rows)
    assert a.in_blocks is True and b.in_blocks is False
    assert alarms == wanted_alarms and {"", "diverged", "out_of_distribution"} <= set(alarms)
    assert a.alarms == b.alarms and a.live.rejected == b.live.rejected > 0
    filter, spread = trained.filter, b.covariances(wanted).diagonal(dim1=-2, dim2=-1).sqrt()
    gap = (filter.estimate(state) - filter.estimate(wanted)).abs() / spread
    assert gap.shape == (3000, 2) and gap.max() < ROUNDING
    next_row = StepInputs(torch.tensor([[0.9, 0.0]]))
    after, after_wanted = (each.advance([next_row])[0] for each in (a, b))
    assert (filter.estimate(after) - filter.estimate(after_wanted)).abs().max() < 1e-4


def test_blocks_begin_where_the_rows_before_ended(trained):
    """In the midst of rejections: their number decides when the track is re-initialised."""
    rows = path(1000)
    rows[258:264] = [StepInputs(torch.full((1, 2), 1e30))] * 6
    (a, *_), (b, *_) = both_ways(trained, rows[:260])
    assert a.live.rejections is not None
    assert torch.equal(a.live.rejections, b.live.rejections)
    _, alarms = a.advance(rows[260:])
    _, wanted = b.advance(rows[260:])
    assert alarms == wanted and a.live.rejected == b.live.rejected


def test_a_filter_that_does_not_forget_runs_row_by_row(trained, monkeypatch):
    monkeypatch.setattr(
        parallel_rollout, "differ", lambda a, b: torch.ones(len(a[0]), dtype=torch.bool)
    )
    (a, state, alarms), (b, wanted, wanted_alarms) = both_ways(trained, path(600))
    assert a.in_blocks is False and alarms == wanted_alarms
    assert torch.equal(state[0], wanted[0])
    assert a.rows_at_a_time(torch.zeros(1, 2)) == b.rows_at_a_time(torch.zeros(1, 2))


def test_few_rows_and_rows_without_observations_are_no_blocks(trained):
    few = both_ways(trained, path(MIN_ROWS_IN_BLOCKS - 1))
    none = both_ways(trained, [StepInputs(None)] * (MIN_ROWS_IN_BLOCKS + 44))
    for (a, state, _), (_, wanted, _) in (few, none):
        assert a.in_blocks is None
        assert all(torch.equal(x, y) for x, y in zip(state, wanted, strict=True))


def test_too_few_rows_for_the_reach_of_a_filter_do_not_rule_out_blocks(trained, monkeypatch):
    monkeypatch.setattr(parallel_rollout, "REACH", 200)
    estimator = OnlineEstimator(trained, trained.module.column_schema())
    rows = path(1200)
    assert estimator.step_in_blocks(rows[:600]) is None and estimator.in_blocks is True
    assert estimator.step_in_blocks(rows) is not None


def test_a_filter_that_draws_runs_row_by_row(trained):
    z = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    memory = kbf.Recording(z, z)
    filter = ParticleFilter(rotation(dtype=torch.float32), 20).fit([memory])
    particles = trained._replace(filter=filter, monitor=None)
    estimator = OnlineEstimator(
        particles, trained.module.column_schema(), generator=torch.Generator().manual_seed(0)
    )
    states, _ = estimator.advance(path(600))
    assert estimator.in_blocks is False and len(states[0]) == 600
    assert estimator.rows_at_a_time(torch.zeros(1, 2)) < 600


@pytest.mark.parametrize(
    "model",
    [
        *("mean", "kalman", "kalman_velocity", "window_ridge", "window_boosting", "frame"),
        *("kbf_paper", "ukf_learned", "lstm", "lstm_feedback", "gru", "gru_ensemble", "mamba"),
    ],
)
def test_every_model_filters_long_recordings_as_row_by_row(model):
    start = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    r = simulate(rotation(), start, 900, torch.Generator().manual_seed(2))
    z, x = r.states[0].numpy(), r.obs[0].numpy()
    training = {"epochs": 2} if model in ("lstm", "lstm_feedback", "gru", "mamba") else None
    fitted = kbf.fit(
        states=z[:200],
        observations=x[:200],
        model=model,
        training=training,
        calibrate=False,
        progress=False,
    )
    rows = [StepInputs(each[None]) for each in torch.from_numpy(x[200:]).float()]
    (_, state, alarms), (_, wanted, wanted_alarms) = both_ways(fitted.trained, rows)
    filter = fitted.trained.filter
    with torch.no_grad():
        gap = (filter.estimate(state) - filter.estimate(wanted)).abs()
    assert len(gap) == len(rows) and gap.max() < 1e-3
    assert alarms == wanted_alarms

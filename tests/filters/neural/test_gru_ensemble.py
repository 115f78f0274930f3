"""Recurrent nets that fit themselves: what they learn, what they keep, and what they say of
themselves.
"""

import pytest
import torch

from kbf.filters.neural.gru_ensemble import FittedGRU, FittedMamba, fingerprint, random_windows
from kbf.filters.regression.boosting import WindowBoosting, with_own_units
from kbf.filters.regression.window import WindowRidge, rows_of, windows_of
from kbf.filters.rollout import rollout
from kbf.recording import Recording


def echoes(steps: int, seed: int, lag: int = 3) -> Recording:
    """States that are what was observed some steps before, with a little noise: memory is all that
    counts.
    """
    x = torch.randn(
        steps + lag, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return Recording((x[:-lag] + 0.5 * x[1 : 1 - lag]).square(), x[lag:])


def nmse(model, memory, test):
    found = rollout(model.fit(memory), test.obs[None]).estimates[0]
    return float((found - test.states)[25:].square().mean() / test.states.var())


@pytest.mark.slow
def test_it_remembers_what_a_line_through_a_window_cannot_tell():
    memory, test = [echoes(1500, 0)], echoes(500, 1)
    model = FittedGRU(networks=2, hidden=32, updates=250, window=30)
    assert nmse(model, memory, test) < 0.3 < 0.7 < nmse(WindowRidge(10), memory, test)


@pytest.mark.slow
def test_a_selective_network_remembers_and_knows_its_errors():
    memory, test = [echoes(1500, 0)], echoes(800, 1)
    model = FittedMamba(hidden=32, updates=250, window=30)
    assert nmse(model, memory, test) < 0.3
    run = rollout(model.fit(memory), test.obs[None], covariances=True)
    assert run.covariances is not None
    std = run.covariances[0, 25:, 0, 0].sqrt()
    inside = ((run.estimates[0] - test.states)[25:, 0].abs() < 1.96 * std).double().mean()
    assert 0.88 < float(inside) < 0.99


@pytest.mark.slow
def test_its_variances_are_those_of_errors_on_what_it_has_not_seen():
    memory, test = [echoes(1500, 0)], echoes(1500, 1)
    filter = FittedGRU(hidden=32, updates=150, window=30).fit(memory)
    run = rollout(filter, test.obs[None], covariances=True)
    std = run.covariances[0, 25:, 0, 0].sqrt()
    inside = ((run.estimates[0] - test.states)[25:, 0].abs() < 1.96 * std).double().mean()
    assert 0.88 < float(inside) < 0.99


@pytest.mark.parametrize("Fitted", [FittedGRU, FittedMamba])
def test_the_same_recordings_are_learned_once_and_others_anew(Fitted):
    memory = [echoes(200, 0)]
    model = Fitted(networks=1, hidden=8, updates=20, window=20)
    first = rollout(model.fit(memory), memory[0].obs[None]).estimates
    kept = model.weights.clone()
    model.updates = -1  # training again would fail: there is no schedule of so many steps
    torch.testing.assert_close(
        rollout(model.fit(memory), memory[0].obs[None]).estimates, first, rtol=0, atol=0
    )
    other = Fitted(networks=1, hidden=8, updates=20, window=20)
    other.weights, other.fingerprint = kept, model.fingerprint
    other.fit([echoes(200, 5)])
    assert not torch.equal(other.weights, kept)


def test_windows_are_as_long_as_half_the_recordings_allow():
    long, short = [echoes(90, 0)], [echoes(20, k) for k in range(3)]
    width = next(random_windows([*long, *short], 100, 1, torch.Generator())).states.shape[1]
    assert width == 90
    assert (
        next(random_windows([*long, *short, *short], 100, 1, torch.Generator())).states.shape[1]
        == 20
    )
    assert next(random_windows([*long, *short], 40, 1, torch.Generator())).states.shape == (
        32,
        40,
        1,
    )


def test_missing_observations_and_controls_are_taken():
    base = echoes(200, 0)
    mask = torch.rand(200, generator=torch.Generator().manual_seed(1)) < 0.7
    memory = [
        base._replace(
            mask=mask, obs=base.obs.where(mask[:, None], torch.nan), controls=base.obs.roll(1, 0)
        )
    ]
    filter = FittedGRU(networks=1, hidden=8, updates=20, window=20).fit(memory)
    found = rollout(
        filter, base.obs[None], mask=mask[None], controls=memory[0].controls[None]
    ).estimates
    assert found.isfinite().all()
    assert fingerprint(memory).isfinite().all()


def test_nothing_to_train_is_told():
    with pytest.raises(ValueError, match="must be positive"):
        FittedGRU(networks=0)


def test_a_window_in_its_own_units_does_not_see_a_level_or_a_gain():
    window = torch.randn(5, 4 * 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moved = (
        window.unflatten(1, (4, 2)) * torch.tensor([3.0, 0.5]) + torch.tensor([10.0, -2.0])
    ).flatten(1)
    own, own_moved = (with_own_units(each, 4)[:, 8:] for each in (window, moved))
    torch.testing.assert_close(own, own_moved)
    still = with_own_units(torch.full((1, 8), 7.0, dtype=torch.float64), 4)
    assert (still[:, 8:] == 0).all()


@pytest.mark.slow
def test_trees_follow_a_signal_whose_level_drifts_away():
    t = torch.arange(3000, dtype=torch.float64)
    phase = 0.2 * t + 0.1 * torch.randn(
        3000, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).cumsum(0)
    signal = (0.003 * t + phase.sin())[:, None]
    states = torch.stack([phase.cos(), phase.sin()], -1)
    memory, test = (
        [Recording(states[:2000], signal[:2000])],
        Recording(states[2000:], signal[2000:]),
    )
    model = WindowBoosting(30)
    windows, later = (windows_of(rows_of(s), 30) for s in (*memory, test))
    raw = float(
        (model.grow(windows, memory[0].states)(later) - test.states)[25:].square().mean()
        / test.states.var()
    )
    assert nmse(model, memory, test) < 0.1 < 0.5 < raw

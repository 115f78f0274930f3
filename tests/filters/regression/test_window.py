"""Regression on a window, trees, and gated units: against scikit-learn, brute force and PyTorch's
own.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kbf.filters.neural.gru import GRUFilter
from kbf.filters.regression.boosting import WindowBoosting, with_own_units
from kbf.filters.regression.window import (
    MeanModel,
    WindowRidge,
    rows_of,
    windows_of,
    windows_with_gaps,
)
from kbf.filters.rollout import rollout
from kbf.recording import Recording

RIDGES = (0.1, 3.0, 100.0)


def recording(n, seed=0, *, mask=False, controls=True):
    """States that depend on the last three observations, and on the control."""
    g = torch.Generator().manual_seed(seed)
    obs = torch.randn(n, 2, generator=g, dtype=torch.float64)
    acted = torch.randn(n, 1, generator=g, dtype=torch.float64)
    past = windows_of(obs, 3)
    z = past @ torch.randn(6, 3, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    z = (
        z
        + (acted if controls else 0)
        + 5
        + 0.3 * torch.randn(n, 3, generator=g, dtype=torch.float64)
    )
    seen = torch.rand(n, generator=g) > 0.3 if mask else None
    if seen is not None:
        obs = torch.where(seen[:, None], obs, torch.nan)
    return Recording(z, obs, seen, acted if controls else None)


def design(sequences, width):
    """Windows ``n wc`` by a loop, held where nothing was observed."""
    rows = []
    for s in sequences:
        held, inputs = None, []
        first = next(t for t in range(len(s.obs)) if s.mask is None or s.mask[t])
        for t in range(len(s.obs)):
            held = s.obs[t] if s.mask is None or s.mask[t] else held
            known = s.obs[first] if held is None else held
            inputs.append(known if s.controls is None else torch.cat([known, s.controls[t]]))
        rows += [
            torch.cat([inputs[max(0, t - j)] for j in range(width - 1, -1, -1)])
            for t in range(len(inputs))
        ]
    return torch.stack(rows)


@pytest.mark.parametrize("mask", [False, True])
def test_windows_are_those_of_a_loop(mask):
    sequences = [recording(9, 1, mask=mask), recording(5, 2, mask=mask)]
    found = torch.cat([windows_of(rows_of(s), 4) for s in sequences])
    assert torch.equal(found, design(sequences, 4))


def test_ridge_is_that_of_the_least_leave_one_out_error():
    """Each component by brute force: n fits for each ridge."""
    sequences = [recording(25, 1), recording(15, 2)]
    U, z = design(sequences, 3), torch.cat([s.states for s in sequences])
    unit = (U - U.mean(0)) / U.std(0, correction=0)
    centred = z - z.mean(0)
    p, n = unit.shape[1], len(unit)
    eye = torch.eye(p, dtype=torch.float64)
    errors = torch.zeros(len(RIDGES), 3, dtype=torch.float64)
    for k, ridge in enumerate(RIDGES):
        for i in range(n):
            rest = [j for j in range(n) if j != i]
            fit = torch.linalg.solve(
                unit[rest].mT @ unit[rest] + ridge * eye, unit[rest].mT @ centred[rest]
            )
            errors[k] += (centred[i] - unit[i] @ fit).square()
    expected = torch.empty_like(z)
    for c in range(3):
        ridge = RIDGES[int(errors[:, c].argmin())]
        expected[:, c] = z[:, c].mean() + unit @ torch.linalg.solve(
            unit.mT @ unit + ridge * eye, unit.mT @ centred[:, c]
        )
    filter = WindowRidge(3, regs=RIDGES).fit(sequences)
    torch.testing.assert_close(filter.regression(U), expected)
    torch.testing.assert_close(filter.spread().diagonal(), errors.amin(0) / n)


@pytest.mark.parametrize("kind", [WindowRidge, WindowBoosting])
@pytest.mark.parametrize("mask", [False, True])
def test_the_loop_estimates_what_the_regression_says_of_each_window(kind, mask):
    filter = kind(4).fit([recording(120, 1, mask=mask)])
    new = recording(20, 5, mask=mask)
    seen = torch.ones(20, dtype=torch.bool) if new.mask is None else new.mask
    first = int(seen.int().argmax())
    found = rollout(
        filter,
        new.obs[None],
        mask=None if new.mask is None else new.mask[None],
        controls=new.controls[None],
    )
    expected = filter.regression(design([new], 4))
    torch.testing.assert_close(found.estimates[0, first:], expected[first:])
    assert torch.equal(found.estimates[0, :first], filter.mean.expand(first, 3))


def test_the_window_finds_what_one_observation_does_not_tell():
    memory, new = [recording(400, 1, controls=False)], recording(400, 2, controls=False)

    def error(width):
        found = rollout(WindowRidge(width).fit(memory), new.obs[None]).estimates[0]
        return (found - new.states).square().mean().item()

    assert error(3) < 0.11  # the noise's variance is 0.09
    assert error(1) > 1


def test_trees_are_those_of_scikit_learn():
    sklearn = pytest.importorskip("sklearn.ensemble")
    memory = [recording(300, 1)]
    U = windows_of(rows_of(memory[0]), 3)
    model = WindowBoosting(3, iterations=20)
    filter = model.fit(memory)
    new = windows_of(rows_of(recording(200, 3)), 3)
    for c in range(3):
        reference = sklearn.HistGradientBoostingRegressor(max_iter=20, random_state=0).fit(
            with_own_units(U, 3).numpy(), memory[0].states[:, c].numpy()
        )
        expected = torch.from_numpy(reference.predict(with_own_units(new, 3).numpy()))
        torch.testing.assert_close(filter.regression(new)[:, c], expected, rtol=1e-12, atol=1e-12)


def with_gaps(n, seed):
    """Single components and whole rows are missing, the latter by NaN and by the mask."""
    s = recording(n, seed, mask=True)
    g = torch.Generator().manual_seed(seed + 100)
    gone = torch.rand(s.obs.shape, generator=g) < 0.3
    return s._replace(obs=torch.where(gone, torch.nan, s.obs))


def test_windows_with_gaps_are_those_of_a_loop():
    s, width = with_gaps(9, 1), 4
    gap = torch.full((3,), torch.nan, dtype=torch.float64)
    known = [
        torch.cat([s.obs[t] if s.mask[t] else gap[:2], s.controls[t]]) for t in range(len(s.obs))
    ]
    padded = [gap] * (width - 1) + known
    expected = torch.stack([torch.cat(padded[t : t + width]) for t in range(len(s.obs))])
    torch.testing.assert_close(
        windows_with_gaps(s, width), expected, rtol=0, atol=0, equal_nan=True
    )


def test_trees_with_gaps_are_those_of_scikit_learn_and_of_the_loop():
    sklearn = pytest.importorskip("sklearn.ensemble")
    memory, new = with_gaps(300, 1), with_gaps(100, 3)
    model = WindowBoosting(3, iterations=20)
    model.allow_missing_sensors = True
    filter = model.fit(memory)
    U, V = (with_own_units(windows_with_gaps(s, 3), 3).numpy() for s in (memory, new))
    expected = torch.stack(
        [
            torch.from_numpy(
                sklearn.HistGradientBoostingRegressor(max_iter=20, random_state=0)
                .fit(U, memory.states[:, c].numpy())
                .predict(V)
            )
            for c in range(3)
        ],
        1,
    )
    run = rollout(filter, new.obs[None], mask=new.mask[None], controls=new.controls[None])
    seen = new.mask & new.obs.isfinite().any(1)
    first = int(seen.int().argmax())
    torch.testing.assert_close(run.estimates[0, first:], expected[first:], rtol=1e-12, atol=1e-12)
    assert torch.equal(run.estimates[0, :first], filter.mean.expand(first, 3))


def test_a_gap_where_training_had_none_goes_the_way_of_scikit_learn():
    """With the larger part of the examples."""
    sklearn = pytest.importorskip("sklearn.ensemble")
    memory, new = recording(300, 1), with_gaps(100, 3)
    model = WindowBoosting(1, iterations=20)
    model.allow_missing_sensors = True
    filter = model.fit(memory)
    reference = sklearn.HistGradientBoostingRegressor(max_iter=20, random_state=0).fit(
        with_own_units(windows_with_gaps(memory, 1), 1).numpy(), memory.states[:, 0].numpy()
    )
    V = windows_with_gaps(new, 1)
    assert V.isnan().any()
    expected = torch.from_numpy(reference.predict(with_own_units(V, 1).numpy()))
    torch.testing.assert_close(filter.regression(V)[:, 0], expected, rtol=1e-12, atol=1e-12)


def test_the_mean_is_the_mean_and_its_covariance_that_of_the_states():
    memory = [recording(50, 1), recording(30, 2)]
    z = torch.cat([s.states for s in memory])
    filter = MeanModel().fit(memory)
    new = recording(4, 3)
    run = rollout(filter, new.obs[None], controls=new.controls[None])
    torch.testing.assert_close(run.estimates[0], z.mean(0).expand(4, 3))
    torch.testing.assert_close(filter.covariance(run.state)[0], torch.cov(z.mT, correction=0))


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="whole number of at least 1"):
        WindowRidge(0)
    with pytest.raises(ValueError, match="needs at least ten steps"):
        WindowRidge(2).fit([recording(5)])
    with pytest.raises(ValueError, match="give fit"):
        WindowRidge(2).fit(None)


# gated recurrent units


def gru(**changes):
    net = GRUFilter(
        3,
        2,
        **{"hidden": 6, "controls": 1, "generator": torch.Generator().manual_seed(1), **changes},
    ).double()
    net.prepare([recording(60)])
    return net


def test_cell_is_that_of_torch():
    net = gru()
    inputs, h = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    reference = nn.GRUCell(4, 6).double()
    for name, value in zip(
        ("weight_ih", "weight_hh", "bias_ih", "bias_hh"), net.rnn.all_weights[0], strict=True
    ):
        getattr(reference, name).data = value.data
    torch.testing.assert_close(net.cell(inputs, h), reference(inputs, h))


def test_the_loop_gives_what_the_whole_sequence_gives():
    net, new = gru(), recording(12, 4, mask=True)
    obs = new.obs.nan_to_num()[None]
    run = rollout(net, obs, mask=new.mask[None], controls=new.controls[None])
    torch.testing.assert_close(run.estimates, net(obs, new.mask[None], new.controls[None]))


@pytest.mark.slow
def test_variances_cost_the_mean_nothing():
    """The cell's gradient is that of the squared error alone; and the head finds the variance of
    the errors.
    """
    net, s = gru(), recording(200)
    batch = Recording(*(None if leaf is None else leaf[None] for leaf in s))
    net.loss(*batch).backward()
    weights = list(net.rnn.parameters())
    found = [w.grad.clone() for w in weights]
    net.zero_grad()
    residual = (batch.states - net(batch.obs, None, batch.controls)) / net.z_scale
    residual.square().sum(-1).mean().backward()
    for w, g in zip(weights, found, strict=True):
        torch.testing.assert_close(w.grad, g)
    optimiser = torch.optim.LBFGS(
        net.log_variance.parameters(), max_iter=200, line_search_fn="strong_wolfe"
    )

    def closure():
        optimiser.zero_grad()
        loss = net.loss(*batch)
        loss.backward()
        return loss

    optimiser.step(closure)
    with torch.no_grad():
        h = net.hidden_states(batch.obs, None, batch.controls)
        said = net.log_variance(h).exp().mean((0, 1))
        error = residual.detach().square().mean((0, 1))
    torch.testing.assert_close(said, error, rtol=0.15, atol=0)


@pytest.mark.parametrize("kind", [WindowRidge, WindowBoosting])
def test_an_observation_without_a_finite_square_is_impossible(kind, normal):
    states, obs = normal(60, 1), normal(60, 2)
    filter = kind(3).fit(Recording(states, obs))
    values = torch.tensor(
        [[1.0, 2.0], [1.0, 1e160], [1e150, 2.0], [float("inf"), 2.0], [float("nan"), 2.0]],
        dtype=obs.dtype,
    )
    state, possible = filter.observe(filter.init(len(values)), values)
    assert possible.tolist() == [True, False, True, False, False]
    assert filter.estimate(state)[possible].isfinite().all()


def test_trees_of_the_covariance_are_grown_once_when_it_is_needed(monkeypatch):
    """A comparison of errors alone does not pay for them."""
    steps = []
    grow = WindowBoosting.grow
    monkeypatch.setattr(
        WindowBoosting, "grow", lambda self, u, z: steps.append(len(u)) or grow(self, u, z)
    )
    sequence = recording(100)
    model = WindowBoosting(3, iterations=5)
    filter = model.fit(sequence)
    rollout(filter, sequence.obs[None], controls=sequence.controls[None])
    assert steps == [100]
    runs = [
        rollout(filter, sequence.obs[None], controls=sequence.controls[None], covariances=True)
        for _ in range(2)
    ]
    assert steps == [100, 80]
    assert torch.equal(runs[0].covariances, runs[1].covariances)
    windows = with_own_units(windows_of(rows_of(sequence), 3), 3)
    held = torch.arange(100) // 5 % 5 == 4  # every fifth block of five steps
    trees = grow(model, windows[~held], sequence.states[~held])
    left = sequence.states[held] - trees(windows[held])
    torch.testing.assert_close(runs[0].covariances[0, -1], left.mT @ left / 20)

"""Maps of few inputs: their selection on blocks, and their fit."""

import pytest
import torch

from kbf.filters.gaussian.learned_ukf import KINDS, LearnedUKF
from kbf.filters.gaussian.map_pairs import pairs_of
from kbf.filters.gaussian.sparse_maps import (
    BLOCKS,
    MAX_INPUTS,
    block_errors,
    fit_sparse,
    forward_selection,
    inputs_of_maps,
    select_inputs,
)
from kbf.recording import Recording

F64 = torch.float64


def draws(n: int, e: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, e, generator=torch.Generator().manual_seed(seed), dtype=F64)


def test_errors_of_blocks_are_those_of_fits_without_them():
    u, y = draws(240, 3), draws(240, 1, 1)[:, 0]
    y = y + u @ torch.tensor([1.0, 2.0, 0.0], dtype=F64)
    found = block_errors(torch.stack([u, u.square()]), y)
    assert found.shape == (2, BLOCKS)
    one = torch.cat([torch.ones(240, 1, dtype=F64), u], 1)
    for k in range(BLOCKS):
        here = slice(30 * k, 30 * (k + 1))
        others = torch.ones(240, dtype=torch.bool)
        others[here] = False
        w = torch.linalg.lstsq(one[others], y[others, None]).solution[:, 0]
        expected = (y[here] - one[here] @ w).square().mean()
        torch.testing.assert_close(found[0, k], expected, rtol=1e-5, atol=0)


def test_inputs_of_each_output_are_found():
    """Linear in one, non-linear in two, linear in one and non-linear in one, and in none."""
    u, e = draws(800, 6), 0.1 * draws(800, 4, 1)
    y = torch.stack([2 * u[:, 0], u[:, 1].sin() * u[:, 2] + u[:, 2], u[:, 3] + u[:, 4] ** 2], 1)
    y = torch.cat([y, torch.zeros(800, 1, dtype=F64)], 1) + e
    choice = select_inputs(u, y)
    assert choice.shape == (4, 9)
    used = [set(row[:-3].nonzero()[:, 0].tolist()) for row in choice]
    assert used[0] >= {0} and used[1] >= {1, 2} and used[2] >= {3, 4}
    assert sum(map(len, used)) <= 5 + 2  # an input of noise is selected now and then
    assert choice[:, -3:].any(1).tolist() == [False, True, True, False]
    fitted = fit_sparse(choice, u, y, ranks=(96,))
    new = draws(200, 6, 2)
    truth = torch.stack([2 * new[:, 0], new[:, 1].sin() * new[:, 2] + new[:, 2]], 1)
    error = (fitted(new)[:, :2] - truth).square().mean(0)
    assert bool((error < 0.02**2 * 10).all())
    torch.testing.assert_close(fitted(new[:1]), fitted(new)[:1])


def test_inputs_are_selected_for_moves_and_sensors_but_not_for_counts():
    z = draws(400, 2)
    obs = z @ torch.tensor([[1.0, 0.0], [1.0, 2.0]], dtype=F64) + 0.1 * draws(400, 2, 1)
    counts = torch.tensor([False, True])
    pairs = pairs_of([Recording(z, obs)], torch.zeros(2, dtype=torch.long), counts)
    found = inputs_of_maps(pairs, 2)
    torch.testing.assert_close(found[:2], select_inputs(pairs.inputs, pairs.change))
    assert found[2].any() and not found[3].any()


def test_a_map_of_velocity_forgets_places():
    """On a road that is never driven twice, the change of the place is a map of the velocity."""
    velocity = draws(600, 1)[:, 0].cumsum(0) / 10
    place = 0.1 * velocity.cumsum(0)
    u = torch.stack([place, velocity], 1)[:-1]
    change = (place[1:] - place[:-1])[:, None] + 0.01 * draws(599, 1, 3)
    inputs, nonlinear = forward_selection((u - u.mean(0)) / u.std(0), change[:, 0] - change.mean())
    assert inputs == [1] and not nonlinear


def test_noise_is_the_covariance_of_residuals():
    u, e = draws(2000, 2), draws(2000, 2, 1)
    C = torch.tensor([[0.04, 0.03], [0.03, 0.09]], dtype=F64)
    y = torch.stack([u[:, 0], -u[:, 1]], 1) + e @ torch.linalg.cholesky(C).mT
    fitted = fit_sparse(select_inputs(u, y), u, y, ranks=(96,))
    torch.testing.assert_close(fitted.noise, C, rtol=0.1, atol=0)
    exact = fit_sparse(
        torch.zeros(2, 5, dtype=F64), u, torch.zeros(2000, 2, dtype=F64), ranks=(96,)
    )
    assert bool((exact.noise == 0).all()) and bool((exact(u) == 0).all())


def test_few_inputs_at_most_and_none_for_few_points():
    u = draws(800, MAX_INPUTS + 4)
    y = u.sum(1) + 0.01 * draws(800, 1, 1)[:, 0]
    assert len(forward_selection(u, y)[0]) == MAX_INPUTS
    assert not select_inputs(u[:70], y[:70, None]).any()


def test_a_choice_of_other_data_is_refused():
    choice = torch.zeros(2, 6, dtype=F64)
    choice[0, 2] = 1
    with pytest.raises(ValueError, match="2 inputs and 2 outputs"):
        fit_sparse(choice, draws(100, 2), draws(100, 2, 1), ranks=(96,))


def test_a_filter_of_sparse_maps_ignores_the_place():
    """One recording of a body at changing velocity; the test part is farther than any row of it."""
    velocity = 1 + draws(900, 1)[:, 0].cumsum(0) / 30
    z = torch.stack([0.1 * velocity.cumsum(0), velocity], 1)
    x = z[:, :1] + 0.3 * draws(900, 1, 5)
    whole = Recording((z - z.mean(0)) / z.std(0), (x - x.mean()) / x.std())
    train, test = Recording(*(s[:600] for s in whole[:2])), Recording(*(s[600:] for s in whole[:2]))
    errors = {}
    for kind in ("sparse", "kernel"):
        net = LearnedUKF(kinds=(kind,), switches=False)
        net.prepare([train])
        assert KINDS[int(net.kinds[0])] == kind
        filter, state, left = net.fit([train]), None, []
        for t in range(300):
            state = filter.init(1) if state is None else filter.predict(state)
            state = filter.update(state, test.obs[t : t + 1])
            left.append((filter.estimate(state)[0] - test.states[t]).square())
        errors[kind] = float(torch.stack(left)[30:].mean())
    assert errors["sparse"] < 0.3 * errors["kernel"]
    assert net.inputs.shape == (0, 3)  # kernel alone selects none

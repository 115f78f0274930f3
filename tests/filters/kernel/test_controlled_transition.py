"""Controls: they travel with their recordings, and every model that takes them gives the truth
where it is known.
"""

from __future__ import annotations

import functools
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import kbf.filters.kernel.controlled_transition
from kbf.data.windows import Span, folds, split, stack, without
from kbf.densities import learned_ssm
from kbf.densities.learned_ssm import learn_model
from kbf.densities.ridge import join_of
from kbf.evaluation.score import score
from kbf.filters.gaussian.kalman import LearnedKalman, fit_linear
from kbf.filters.kernel.controlled_transition import (
    ControlledDensity,
    ControlledTransition,
    control_spread,
    controlled_run,
    controlled_transition,
    large_rows,
)
from kbf.filters.kernel.hyperparameters import choose_transition_reg, control_gram
from kbf.filters.kernel.kbf import KBF
from kbf.filters.kernel.simulated_kbf import SimulatedKBF
from kbf.filters.neural.backprop_kf import BackpropKF
from kbf.filters.neural.dpf import DPF
from kbf.filters.neural.gru import GRUImages
from kbf.filters.neural.lstm import LSTMFilter
from kbf.filters.neural.rkn import RKNFilter
from kbf.filters.online import RunningFilter
from kbf.filters.particle.bootstrap import ParticleFilter
from kbf.filters.particle.learned import LearnedParticleFilter
from kbf.filters.protocols import move
from kbf.filters.regression.kernel_ridge import FrameRegression
from kbf.filters.rollout import rollout, step
from kbf.fitted.buffers import RecordingBuffers
from kbf.fitted.model import cast_all
from kbf.images.encodings import EncodedFilter, Encoding
from kbf.recording import Recording, as_recordings, moves, pad, transitions
from kbf.rkhs.kernels import delta, gaussian
from kbf.ssm import rotation

TURN = 0.8 * torch.tensor(
    [[math.cos(0.3), -math.sin(0.3)], [math.sin(0.3), math.cos(0.3)]], dtype=torch.float64
)
PUSH = torch.tensor([[1.0], [0.5]], dtype=torch.float64)


def piece(sequence: Recording, start: int, stop: int) -> Recording:
    return Recording(*(None if leaf is None else leaf[start:stop] for leaf in sequence))  # pyright: ignore[reportArgumentType]


def without_controls(sequence: Recording) -> Recording:
    return sequence._replace(controls=None)


@functools.cache
def pushed(n: int = 400, seed: int = 0) -> Recording:
    """z' = A z + B u + noise, seen with noise: the control moves the state further than anything
    else.
    """
    g = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=g, dtype=torch.float64)
    u, z, states = draw(n, 1), torch.zeros(2, dtype=torch.float64), []
    for t in range(n):
        z = TURN @ z + PUSH @ u[t] + 0.1 * draw(2)
        states.append(z)
    states = torch.stack(states)
    return Recording(states, states + 0.5 * draw(n, 2), None, u)


@functools.cache
def turning(n: int, seed: int, irregular: bool) -> Recording:
    """A rotation that is looked at after 0.5, 1, ..., 2.5 units of time, or after 1.5: the control
    is that time.
    """
    g = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=g, dtype=torch.float64)
    dt = (
        torch.randint(1, 6, (n, 1), generator=g).double() / 2
        if irregular
        else torch.full((n, 1), 1.5, dtype=torch.float64)
    )
    z, states = torch.tensor([1.0, 0.0], dtype=torch.float64), []
    for t in range(n):
        angle = torch.atan2(z[1], z[0]) + 0.5 * dt[t, 0]
        z = torch.stack([angle.cos(), angle.sin()]) + 0.1 * draw(2)
        states.append(z)
    states = torch.stack(states)
    return Recording(states, states + 0.4 * draw(n, 2), None, dt)


@pytest.fixture(autouse=True)
def few_kernels(monkeypatch) -> None:
    """The learned maps choose among few kernels, for speed."""
    few: Any = {
        "factors": (0.5, 1.0, 2.0, 4.0),
        "slopes": (3.0,),
        "biases": (0.3,),
        "regs": (1e-4, 1e-3, 1e-2),
    }
    monkeypatch.setattr(learned_ssm, "fit_ridge_map", partial(learned_ssm.fit_ridge_map, **few))


def error(model: Any, train: Recording, test: Recording) -> float:
    model.prepare([train])
    with torch.no_grad():
        return score(model.fit([train]), [test]).mse.item()


class Halves(torch.nn.Flatten):
    """An encoder that says its width, as those of images do."""

    features = 2


MODELS = {
    "kbf": KBF,
    "kbf-dense": partial(KBF, rank=None),
    "kbf-matern": partial(KBF, kernel="matern32"),
    "kbf-original": partial(KBF, rule="original", ratio="tikhonov", regs=(1e-3, 1e-3, 1e-2)),
    "enlarged": partial(SimulatedKBF, points=300, draws=4, run=4000, dtype="float64"),
    "kalman": LearnedKalman,
    "particle": partial(LearnedParticleFilter, particles=500),
    "lstm": lambda: LSTMFilter(2, 2, hidden=8, sizes=(8,), controls=1).double(),
    "frame": FrameRegression,
    "gru_images": lambda: GRUImages(2, 2, m=4, units=8, hidden=8, controls=1).double(),
    "rkn": lambda: RKNFilter(2, 2, m=4, matrices=2, hidden=8, controls=1).double(),
    "backprop_kf": lambda: BackpropKF(2, 2, hidden=1, units=8, controls=1).double(),
    "dpf": lambda: DPF(2, 2, hidden=1, particles=30, m=4, units=8, controls=1).double(),
}
TOGETHER = {
    "gru_images": partial(GRUImages, 2, 2, m=8, units=16, hidden=16),
    "rkn": partial(RKNFilter, 2, 2, m=8, matrices=2, hidden=16),
    "backprop_kf": partial(BackpropKF, 2, 2, hidden=0, units=8),
    "dpf": partial(DPF, 2, 2, hidden=0, particles=50, m=8, units=16),
}
"""Nets that are trained end to end."""


@functools.cache
def made(name: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]()
    model.prepare([pushed()])
    with torch.no_grad():
        return model.fit([pushed()])


# they travel with their recordings


def test_pieces_stacks_and_pads_carry_controls():
    u = torch.arange(10.0)[:, None]
    whole = Recording(u.expand(-1, 2), u.expand(-1, 3), None, 100 + u)
    for part in (
        *split([whole], 0.3)[0],
        *split([whole], 0.3)[1],
        *without([whole], [Span(0, 3, 5)]),
    ):
        assert part.controls is not None
        assert torch.equal(part.controls, 100 + part.states[:, :1])
    batch = stack([whole], [Span(0, 1, 4), Span(0, 5, 8)])
    assert batch.controls is not None
    assert batch.controls.shape == (2, 3, 1)
    assert torch.equal(batch.controls, 100 + batch.states[..., :1])
    padded = pad([whole, Recording(u[:4].expand(-1, 2), u[:4].expand(-1, 3), None, 100 + u[:4])])
    assert padded.controls is not None
    assert torch.equal(
        padded.controls[1, :, 0], torch.tensor([100.0, 101, 102, 103, 0, 0, 0, 0, 0, 0])
    )
    assert folds([10], 2)


def test_memory_and_casts_carry_controls():
    kept = RecordingBuffers(cast_all([pushed(20), pushed(30)], torch.float32)).recordings()
    assert [s.controls.dtype for s in kept if s.controls is not None] == [torch.float32] * 2
    again = RecordingBuffers.from_state(RecordingBuffers(kept).state_dict(), "").recordings()
    assert again[1].controls is not None
    assert torch.equal(again[1].controls, pushed(30).controls.float())  # pyright: ignore[reportOptionalMemberAccess]
    assert RecordingBuffers([without_controls(pushed(20))]).recordings()[0].controls is None


def test_moves_pair_a_control_with_the_step_it_leads_to():
    s = Recording(
        torch.arange(8.0)[:, None], torch.zeros(8, 1), None, 10 * torch.arange(8.0)[:, None]
    )
    source, target, u = moves([piece(s, 0, 3), piece(s, 3, 8)])
    assert target.flatten().tolist() == [1, 2, 4, 5, 6, 7]
    assert source.flatten().tolist() == [0, 1, 3, 4, 5, 6]
    assert u is not None
    assert torch.equal(u, 10 * target)
    assert moves([without_controls(s)])[2] is None


@pytest.mark.parametrize(
    "controls, message",
    [
        (
            torch.zeros(19, 1),
            r"recording 1: controls must be \(20, 1\), one row a step, got \(19, 1\)",
        ),
        (torch.zeros(20, 2), r"controls must be \(20, 1\)"),
        (torch.zeros(20), r"controls must be \(20, 1\)"),
        (
            torch.zeros(20, 1).index_fill(0, torch.tensor([4]), math.nan),
            r"NaN or infinite values in 1 of 20 rows \(first: row 4\)",
        ),
        (None, "recording 1 has no controls, recording 0 has"),
    ],
)
def test_controls_that_do_not_fit_are_refused(controls, message):
    with pytest.raises(ValueError, match=message):
        as_recordings([pushed(20), pushed(20)._replace(controls=controls)])


# the loop


def test_who_takes_controls_gets_them_and_nobody_else():
    test, with_u, none = pushed(6, 1), made("kbf"), KBF()
    none.prepare([without_controls(pushed())])
    plain = none.fit([without_controls(pushed())])
    obs, u = test.obs[None], test.controls[None]  # pyright: ignore[reportOptionalSubscript]
    with pytest.raises(
        ValueError, match="made from recordings with controls: give it the 1 of each step"
    ):
        rollout(with_u, obs)
    with pytest.raises(
        ValueError, match=r"KernelBayesFilter takes no controls. Models that do.*: kbf, kbf_tuned"
    ):
        rollout(plain, obs, controls=u)
    with pytest.raises(ValueError, match=r"controls must be \(1, 6, 1\), got \(1, 6, 2\)"):
        rollout(with_u, obs, controls=u.expand(-1, -1, 2))
    with pytest.raises(ValueError, match="controls hold NaN"):
        rollout(with_u, obs, controls=u * math.nan)
    known = ParticleFilter(rotation(), particles=10).fit([without_controls(pushed())])
    with pytest.raises(ValueError, match="takes no controls"):
        score(known, [test])
    with pytest.raises(ValueError, match="not compiled"):
        RunningFilter(with_u, compiled=test.obs[:1])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_rollout_live_and_single_steps_agree(name):
    filter, test = made(name), pushed(5, 1)
    assert filter.controlled == 1
    obs, u = test.obs[None], test.controls[None]  # pyright: ignore[reportOptionalSubscript]
    mask = torch.tensor([[True, True, False, True, True]])
    with torch.no_grad():
        found = rollout(
            filter, obs, mask=mask, controls=u, generator=torch.Generator().manual_seed(0)
        ).estimates
        g = torch.Generator().manual_seed(0)
        state = filter.init(1, generator=g)
        live = RunningFilter(filter, generator=torch.Generator().manual_seed(0))
        for t in range(5):
            state = step(filter, state, obs[:, t], mask=mask[:, t], control=u[:, t], generator=g)
            assert torch.equal(filter.estimate(state), found[:, t])
            seen = live.step(obs[:, t] if bool(mask[0, t]) else None, u[:, t])
            torch.testing.assert_close(seen, found[:, t], rtol=1e-9, atol=1e-9)
        moved = filter.estimate(
            move(filter, state, control=torch.full((1, 1), 3.0).double(), generator=g)
        )
        other = filter.estimate(
            move(filter, state, control=torch.full((1, 1), -3.0).double(), generator=g)
        )
    assert torch.equal(moved, other) == (name == "frame"), (
        "but for the one without a transition, a control moves"
    )
    if name == "kbf":
        with pytest.raises(ValueError, match="give it the 1 of each step"):
            RunningFilter(filter).step(obs[:, 0])
        with pytest.raises(ValueError, match=r"controls must be \(1, 1\), got \(1, 2\)"):
            RunningFilter(filter).step(obs[:, 0], u[:, 0].expand(1, 2))


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("particle", "dpf")])
def test_batch_is_one_by_one(name):
    filter, a, b = made(name), pushed(6, 1), pushed(6, 2)
    obs, u = torch.stack([a.obs, b.obs]), torch.stack([a.controls, b.controls])  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        both = rollout(filter, obs, controls=u).estimates
        for k in range(2):
            torch.testing.assert_close(
                rollout(filter, obs[k : k + 1], controls=u[k : k + 1]).estimates[0], both[k]
            )


def test_a_code_passes_controls_on():
    code = Encoding([Halves()], 2).double()
    with torch.no_grad():
        filter, test = EncodedFilter(code, made("kalman"), torch.float64), pushed(6, 1)
        found = rollout(filter, test.obs[None], controls=test.controls[None]).estimates  # pyright: ignore[reportOptionalSubscript]
        encoded = rollout(
            made("kalman"), code(test.obs)[None], controls=test.controls[None]
        ).estimates  # pyright: ignore[reportOptionalSubscript]
    torch.testing.assert_close(found, encoded)


# the transition of a kernel filter


def test_finite_case_is_the_table_of_probabilities():
    """With delta kernels and a tiny ridge P(u) is p(z' | z, u), counted."""
    g = torch.Generator().manual_seed(0)
    z, u = (
        torch.randint(3, (400, 1), generator=g).double(),
        torch.randint(2, (400, 1), generator=g).double(),
    )
    target = (z[:-1, 0] + u[1:, 0] + (torch.rand(399, generator=g) < 0.3)) % 3
    states = torch.stack([z[:-1, 0], target], 1).reshape(
        -1, 1
    )  # pairs (z, z'), one behind the other
    pairs = transitions([2] * 399)
    table = torch.zeros(3, 3, 2, dtype=torch.float64)  # z', z, u
    for a, b, c in zip(z[:-1, 0].long(), target.long(), u[1:, 0].long(), strict=True):
        table[b, a, c] += 1
    table /= table.sum(0)
    left = (delta(z[:-1], z[:-1]) * delta(u[1:], u[1:]) + 1e-5 * torch.eye(399)).inverse()
    scattered = torch.zeros(len(states), 399, dtype=torch.float64).index_copy(0, pairs.target, left)
    P = ControlledTransition(
        scattered, delta(states, z[:-1]), u[1:], lambda a, b, bandwidth: delta(a, b), torch.ones(1)
    )
    prior = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    members = (states == torch.arange(3.0)).double()  # n x 3
    w = (members / members.sum(0)) @ prior
    for c in range(2):
        moved = P(w[None], torch.full((1, 1), float(c)).double())[0] @ members
        torch.testing.assert_close(moved, table[:, :, c] @ prior, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kernel", ["gaussian", "matern52"])
def test_features_of_full_rank_are_the_dense_form(kernel):
    s = pushed(60)
    pairs, u = transitions([40, 20]), moves([piece(s, 0, 40), piece(s, 40, 60)])[2]
    assert u is not None
    widths = (torch.tensor(1.0, dtype=torch.float64), torch.tensor([0.7], dtype=torch.float64))
    reg = torch.tensor(1e-3, dtype=torch.float64)
    dense, primal = (
        controlled_transition(s.states, pairs, u, kernel, widths, reg, rank, 0.0)
        for rank in (None, 58)
    )
    w, control = torch.randn(4, 60).double(), torch.randn(4, 1).double()
    torch.testing.assert_close(primal(w, control), dense(w, control), rtol=1e-5, atol=1e-6)
    naive = gaussian if kernel == "gaussian" else None
    if naive is not None:  # the same, written as the embedding of (z', given z and u) is
        z, acted = s.states[pairs.source], u
        G = naive(z, z, bandwidth=1.0) * naive(acted, acted, bandwidth=0.7)
        for b in range(4):
            query = (naive(z, s.states, bandwidth=1.0) @ w[b]) * naive(
                acted, control[b : b + 1], bandwidth=0.7
            )[:, 0]
            expected = torch.linalg.solve(G + 58 * 1e-3 * torch.eye(58, dtype=torch.float64), query)
            torch.testing.assert_close(
                dense(w, control)[b, pairs.target], expected, rtol=1e-7, atol=1e-9
            )
    assert (dense(w, control)[:, [0, 40]] == 0).all(), (
        "the first step of a recording is nobody's target"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kbf", "enlarged", "kalman", "particle"])
def test_knowing_the_control_helps_by_far(name):
    """z' = 0.8 z + u + noise, as good as not seen: without u nothing is known, with it the error is
    that of a few moves' noise.
    """
    g = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, generator=g, dtype=torch.float64)
    u, z = draw(500, 1), torch.zeros(500, 1, dtype=torch.float64)
    for t in range(1, 500):
        z[t] = 0.8 * z[t - 1] + u[t] + 0.2 * draw(1)
    whole = Recording(z, z + 2 * draw(500, 1), None, u)
    parts = piece(whole, 0, 400), piece(whole, 400, 500)
    knows, ignores = (
        error(MODELS[name](), *parts),
        error(MODELS[name](), *map(without_controls, parts)),
    )
    assert knows < 0.3 * ignores


def test_kalman_finds_the_matrices():
    model = fit_linear(pushed(4000))
    assert model.B is not None
    torch.testing.assert_close(model.A, TURN, rtol=0, atol=0.01)
    torch.testing.assert_close(model.B, PUSH, rtol=0, atol=0.01)
    assert fit_linear(without_controls(pushed())).B is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kbf", "enlarged"])
def test_uneven_time_steps_cost_nothing_if_they_are_told(name):
    """Measured: kbf 0.056 evenly, 0.072 with the times, 0.118 without; the enlarged one 0.041,
    0.040, 0.125.
    """
    uneven, even = (
        (piece(turning(500, 3, k), 0, 400), piece(turning(500, 3, k), 400, 500))
        for k in (True, False)
    )
    ratio_dim, regular = (
        error(MODELS[name](), *uneven),
        error(MODELS[name](), *map(without_controls, even)),
    )
    untold = error(MODELS[name](), *map(without_controls, uneven))
    assert ratio_dim < (1.5 if name == "kbf" else 1.1) * regular
    assert untold > (1.25 if name == "kbf" else 2) * ratio_dim


def test_gradients_reach_the_bandwidth_of_the_controls():
    model = KBF(rank=16)
    model.prepare([pushed(60)])
    assert model.log_control is not None

    def loss() -> Tensor:
        test = pushed(8, 5)
        assert test.controls is not None
        found = rollout(
            model.fit([pushed(60)]), test.obs[None], controls=test.controls[None], gradients=True
        ).estimates[0]
        return (found - test.states).square().sum(-1).mean()

    loss().backward()
    slope = model.log_control.grad
    assert slope is not None
    with torch.no_grad():
        model.log_control.add_(1e-5)
        above = loss()
        model.log_control.sub_(2e-5)
        below = loss()
    assert slope.abs() > 1e-6
    torch.testing.assert_close(slope[0], (above - below) / 2e-5, rtol=1e-3, atol=1e-7)


def test_selection_looks_at_pairs_of_state_and_control():
    """The ridge for (z, u) is far smaller than for z alone, to which most of the move is noise."""
    memory, alone = [pushed(200)], [without_controls(pushed(200))]
    with_u, without_u = KBF(select="loo"), KBF(select="loo")
    with_u.prepare(memory)
    without_u.prepare(alone)
    assert with_u.log_reg[1] < without_u.log_reg[1]
    gram, kernel = control_gram(with_u, memory), partial(gaussian, bandwidth=1.0)
    assert isinstance(gram, Tensor)
    assert gram.shape == (199, 199)
    assert control_gram(without_u, alone) == 1.0
    assert choose_transition_reg(kernel, memory, near=gram) < choose_transition_reg(kernel, alone)


def test_bandwidths_of_controls_are_kept_and_old_checkpoints_load():
    model = KBF()
    assert model.log_control is None
    old = model.state_dict()
    assert set(old) == {"log_bandwidth", "log_reg"}
    model.prepare([pushed()._replace(controls=pushed().obs * torch.tensor([1.0, 10.0]))])
    assert set(model.hyperparameters()) > {"bandwidth/control_0", "bandwidth/control_1"}
    other = KBF()
    other.load_state_dict(model.state_dict())
    assert other.log_control is not None
    assert torch.equal(other.log_control, model.log_control)  # pyright: ignore[reportArgumentType]
    KBF().load_state_dict(old)
    with pytest.raises(ValueError, match="prepare"):
        KBF().fit([pushed()])
    assert control_spread(torch.tensor([[1.0, 2.0], [1.0, 4.0]])).tolist() == [1.0, 1.0]


# the memory drawn from a learned model


def test_a_control_that_never_changes_is_left_out():
    s, u = pushed(100), pushed(100).obs[:, :1]
    join = join_of(s.states, torch.cat([u, torch.ones(100, 1)], -1))
    near = join(s.states, torch.tensor([0.3, 7.0]).double())
    assert near.shape == (100, 4)
    assert (near[:, 3] == 0).all()
    spread = join(s.states, u.expand(-1, 2))[:, 2].std(correction=0)
    torch.testing.assert_close(spread, s.states.var(0, correction=0).mean().sqrt())


def test_columns_are_the_learned_density_over_the_memory():
    """A naive loop and a tilt, a sum of 1, the exact mean, and from a fine memory of the plane the
    covariance of the prediction.
    """
    model = learn_model([pushed()])
    assert model.join is not None
    assert model.controlled == 1
    before, acted, after = controlled_run(model, [pushed()], 3000, torch.Generator().manual_seed(0))
    states = after[:200]
    P = ControlledDensity(
        model, states, torch.full((200,), 1 / 200).double(), (before[200:900], acted[200:900])
    )
    u = torch.tensor([[0.5]]).double()
    columns = torch.stack([P(e[None], u)[0] for e in torch.eye(200).double()[:5]], 1)
    torch.testing.assert_close(columns.sum(0), torch.ones(5).double())
    density = model.transition.log_density_given(
        states[:, None], *model.transition.predict(model.join(before[200:900], acted[200:900]))
    )
    volume = 1 / density.exp().sum(1)
    linear = torch.cat([states, torch.ones(200, 1)], 1)
    for j in range(5):
        mean, _ = model.transition.predict(model.join(states[j], u[0]))
        torch.testing.assert_close(columns[:, j] @ states, mean, rtol=0, atol=1e-3)
        q = model.transition.log_density(states, model.join(states[j], u[0])).exp() * volume
        seen = columns[:, j] > 1e-12
        ratio = (columns[seen, j] / q[seen]).log()  # linear in z
        fitted = linear[seen] @ torch.linalg.lstsq(linear[seen], ratio[:, None]).solution[:, 0]
        torch.testing.assert_close(ratio, fitted, rtol=1e-6, atol=1e-6)
    with pytest.MonkeyPatch.context() as patch:  # all columns beyond the first five as they are
        patch.setattr(kbf.filters.kernel.controlled_transition, "EXACT_COLUMNS", 5)
        w = torch.linspace(2, 1, 200).double()
        plain = torch.stack(
            [
                (model.transition.log_density(states, model.join(z, u[0])).exp() * volume)
                for z in states[5:]
            ],
            1,
        )
        expected = columns @ w[:5] + (plain / plain.sum(0)) @ w[5:]
        torch.testing.assert_close(P(w[None], u)[0], expected, rtol=1e-6, atol=1e-9)
    axis = torch.linspace(-4, 4, 60).double()
    grid = torch.cartesian_prod(axis, axis)
    even = ControlledDensity(
        model, grid, torch.full((3600,), 1 / 3600).double(), (before[:50], acted[:50])
    )
    even.log_volume.zero_()
    start = torch.zeros(1, 3600).double().index_fill(1, torch.tensor([1830]), 1.0)
    moved = even(start, u)[0]
    mean, scale = model.transition.predict(model.join(grid[1830], u[0]))
    torch.testing.assert_close(moved @ grid, mean, rtol=0, atol=1e-3)
    centred = grid - mean
    torch.testing.assert_close(
        (moved[:, None] * centred).T @ centred, scale * model.transition.noise, rtol=0.02, atol=1e-4
    )


@pytest.mark.slow
def test_columns_of_little_weight_and_rows_of_no_density_are_left_out_at_no_loss(monkeypatch):
    """Against all columns, matched over all rows: estimates differ by far less than the filter
    errs.
    """
    model = SimulatedKBF(points=300, run=4000, transition="gaussian", observation="gaussian").fit(
        [pushed()]
    )
    test = pushed(40, 1)
    assert test.controls is not None
    seen = []
    quick = large_rows
    monkeypatch.setattr(
        kbf.filters.kernel.controlled_transition,
        "large_rows",
        lambda table: seen.append(len(quick(table))) or quick(table),
    )
    short = rollout(model, test.obs[None], controls=test.controls[None]).estimates[0]
    assert min(seen) < 150, "half of the points at most are looked at"
    for name, value in {
        "NEGLIGIBLE_WEIGHT": 0.0,
        "MAX_COLUMNS_OF_ALL_ENTRIES": 300,
        "ERROR_OF_MEAN": 1e-5,
    }.items():
        monkeypatch.setattr(kbf.filters.kernel.controlled_transition, name, value)
    whole = rollout(model, test.obs[None], controls=test.controls[None]).estimates[0]
    apart, error = (
        (short - whole).square().mean().sqrt(),
        (whole - test.states).square().mean().sqrt(),
    )
    assert apart < 0.02 * error, (apart, error)


@pytest.mark.slow
def test_state_dict_holds_the_learned_density():
    first, second = made("enlarged"), MODELS["enlarged"]()
    test = pushed(6, 1)
    obs, u = test.obs[None], test.controls[None]  # pyright: ignore[reportOptionalSubscript]
    with torch.no_grad():
        wanted = rollout(first, obs, controls=u).estimates
        other = second.fit([pushed(seed=7)])
        if len(other.states) != len(first.states):
            pytest.skip("another number of centres")
        state = first.state_dict()
        if {k: v.shape for k, v in other.state_dict().items()} != {
            k: v.shape for k, v in state.items()
        }:
            from kbf.fitted.model import take_shapes

            take_shapes(other, state)
        assert not torch.allclose(rollout(other, obs, controls=u).estimates, wanted)
        other.load_state_dict(state)
        assert torch.equal(rollout(other, obs, controls=u).estimates, wanted)


# nets that are trained end to end


@pytest.mark.slow
@pytest.mark.parametrize("name", TOGETHER)
def test_a_net_learns_what_a_control_does(name):
    """Trained with it, its error is well below that of the same net that is not told of it."""
    cut = [piece(pushed(1200, 5), 20 * k, 20 * k + 20) for k in range(60)]
    test = [piece(pushed(1200, 6), 20 * k, 20 * k + 20) for k in range(60)]
    error = {}
    for ratio_dim in (True, False):
        train, new = (
            cast_all(part if ratio_dim else [*map(without_controls, part)], torch.float32)
            for part in (cut, test)
        )
        torch.manual_seed(0)
        net = TOGETHER[name](controls=1 if ratio_dim else 0)
        net.prepare(train)
        windows = stack(train, [Span(k, 0, 20) for k in range(60)])
        optimiser = torch.optim.Adam(net.parameters(), 0.01)
        for _ in range(150):
            optimiser.zero_grad()
            net.loss(windows.states, windows.obs, None, windows.controls, burn_in=3).backward()
            optimiser.step()
        with torch.no_grad():
            error[ratio_dim] = score(net.eval(), new, dtype=torch.float32).mse.mean().item()
    assert error[True] < 0.75 * error[False], error


# the recurrent net


def test_lstm_filter_is_its_forward_pass_and_needs_its_controls():
    net, test = made("lstm"), pushed(7, 1)
    obs, u = test.obs[None], test.controls[None]  # pyright: ignore[reportOptionalSubscript]
    mask = torch.tensor([[True, False, True, True, False, False, True]])
    with torch.no_grad():
        torch.testing.assert_close(
            net(obs, mask, u), rollout(net, obs, mask=mask, controls=u).estimates
        )
        torch.testing.assert_close(net(obs, None, u), rollout(net, obs, controls=u).estimates)
        assert not torch.allclose(net(obs, mask, u), net(obs, mask, u + 1))
    with pytest.raises(
        ValueError, match=r"built for 0 controls \(model.net.controls\), the recordings have 1"
    ):
        LSTMFilter(2, 2).double().prepare([pushed()])
    feedback = LSTMFilter(2, 2, hidden=8, sizes=(8,), controls=1, feedback=True).double()
    with torch.no_grad():
        torch.testing.assert_close(
            feedback(obs, mask, u), rollout(feedback, obs, mask=mask, controls=u).estimates
        )

"""Units: a filter of scaled units is the same filter in the units of the data."""

import copy
import math
import warnings

import pytest
import torch

from kbf.filters.gaussian.kalman import LearnedKalman
from kbf.filters.kernel.feature_kbf import FeatureKBF
from kbf.filters.kernel.kbf import KBF
from kbf.filters.online import load_state, save_state
from kbf.filters.particle.learned import LearnedParticleFilter
from kbf.filters.protocols import where
from kbf.filters.regression.kernel_ridge import FrameRegression
from kbf.filters.rollout import rollout, step
from kbf.filters.scaling import (
    ScaledFilter,
    ScaleWarning,
    Scaling,
    spread,
    warn_of_isolation,
    warn_of_scales,
)
from kbf.fitted.model import FittedModel
from kbf.recording import Recording
from kbf.rkhs.kernels import gaussian
from kbf.ssm import oscillatory, simulate

UNITS = torch.tensor([1000.0, 0.01]).double()
AWAY = torch.tensor([4e6, -3.0]).double()


def recording(n, seed=0, controls=False):
    drawn = simulate(
        oscillatory(), torch.tensor([1.0, 0.0]).double(), n, torch.Generator().manual_seed(seed)
    )
    acted = (
        torch.randn(n, 1, generator=torch.Generator().manual_seed(seed)).double() * 7 + 3
        if controls
        else None
    )
    return Recording(AWAY + UNITS * drawn.states, drawn.obs * 50 - 1, controls=acted)


def scaled(model, train):
    """The filter of scaled units, and the scaling."""
    scaling = Scaling().prepare([train])
    inside = scaling(train)
    if hasattr(model, "prepare"):
        model.prepare([inside], torch.Generator().manual_seed(0))
    with torch.no_grad():
        inner = model.fit([inside])
    return ScaledFilter(scaling, inner, torch.float64), inner, scaling


MODELS = {
    "kalman": lambda: LearnedKalman(),
    "frame": lambda: FrameRegression(),
    "kbf": lambda: KBF(rank=8, tol=0.0, regs=(1e-3, 1e-3, 1e-3), dtype="float64"),
    "kbf-float32": lambda: KBF(rank=8, tol=0.0, regs=(1e-3, 1e-3, 1e-3), dtype="float32"),
    "particle": lambda: LearnedParticleFilter(particles=64),
}


@pytest.fixture(scope="module", params=list(MODELS))
def case(request):
    filter, inner, scaling = scaled(MODELS[request.param](), recording(60))
    obs = torch.stack([recording(6, seed).obs for seed in (1, 2, 3)])
    return request.param, filter, inner, scaling, obs


def run(filter, obs, mask=None):
    with torch.no_grad():
        return rollout(filter, obs, mask=mask, generator=torch.Generator().manual_seed(0))


def test_it_is_the_inner_filter_in_other_units(case):
    name, filter, inner, scaling, obs = case
    found, truth = run(filter, obs), run(inner, scaling.observation(obs))
    torch.testing.assert_close(found.estimates, scaling.states(truth.estimates), rtol=1e-12, atol=0)
    assert found.estimates.dtype == torch.float64
    assert found.diagnostics.keys() == truth.diagnostics.keys()
    assert type(found.state) is type(truth.state)
    mine, theirs = (
        filter.covariance(found.state),
        getattr(inner, "covariance", lambda _: None)(truth.state),
    )
    assert (mine is None) == (theirs is None)
    if theirs is not None and mine is not None:
        S = torch.diag(scaling.z_scale)
        torch.testing.assert_close(mine, S @ theirs.double() @ S)
    assert hasattr(filter, "step") == hasattr(inner, "step"), name


def test_the_contract(case):
    """The state law, pure methods, masked steps, batch = one by one, and a stopped filter that goes
    on.
    """
    name, filter, _, _, obs = case
    mask = torch.tensor([[True, False, True, True, False, True]] * 3)
    whole = run(filter, obs, mask)
    hidden = torch.where(mask[..., None], obs, torch.nan)
    assert torch.equal(run(filter, hidden, mask).estimates, whole.estimates)
    assert all(
        leaf.shape[0] == 3 for leaf in filter.init(3, generator=torch.Generator().manual_seed(0))
    )
    with torch.no_grad():
        state = filter.init(3, generator=torch.Generator().manual_seed(0))
        before = copy.deepcopy(state)
        moved = filter.predict(state, generator=torch.Generator().manual_seed(1))
        updated = filter.update(moved, obs[:, 0])
        assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))
        kept = step(
            filter, state, obs[:, 0], mask=mask[:, 1], generator=torch.Generator().manual_seed(1)
        )
        assert all(
            torch.equal(a, b) for a, b in zip(kept, where(mask[:, 1], updated, moved), strict=True)
        )
        if hasattr(filter, "step"):
            both = filter.step(state, obs[:, 0])
            torch.testing.assert_close(
                filter.estimate(both), filter.estimate(updated), rtol=1e-5, atol=1e-5
            )
    if name != "particle":
        each = torch.cat([run(filter, obs[k : k + 1], mask[k : k + 1]).estimates for k in range(3)])
        torch.testing.assert_close(each, whole.estimates, rtol=1e-4, atol=1e-4)


def test_a_stopped_filter_goes_on(case, tmp_path):
    name, filter, _, _, obs = case
    if name == "particle":
        return  # its generator would have to be stopped too: tests/test_contract.py
    save_state(run(filter, obs[:, :3]).state, tmp_path / "state.pt")
    with torch.no_grad():
        rest = rollout(filter, obs[:, 3:], state=load_state(filter, tmp_path / "state.pt"))
    assert torch.equal(rest.estimates, run(filter, obs).estimates[:, 3:])


def test_units_are_of_no_matter():
    """A recording in metres or millimetres, near or far from zero: the same estimates."""
    train, test = recording(80), recording(20, seed=5)
    plain = [
        s._replace(states=(s.states - AWAY) / UNITS, obs=(s.obs + 1) / 50) for s in (train, test)
    ]
    here, there = scaled(MODELS["kbf"](), train)[0], scaled(MODELS["kbf"](), plain[0])[0]
    far, near = run(here, test.obs[None]).estimates, run(there, plain[1].obs[None]).estimates
    torch.testing.assert_close((far - AWAY) / UNITS, near, rtol=1e-6, atol=1e-6)
    assert (near - plain[1].states).square().sum(-1).mean() < 0.5


def test_single_precision_inside_does_not_hurt_far_from_zero():
    """At 4,000,000 float32 has steps of 0.25: estimates must not."""
    train, test = recording(80), recording(20, seed=5)
    found = [
        run(scaled(MODELS[name](), train)[0], test.obs[None]).estimates
        for name in ("kbf", "kbf-float32")
    ]
    assert (found[0] - found[1])[..., 0].abs().max() < 0.1


def test_what_is_scaled():
    values = torch.tensor([[1.0, 5.0, 0.6], [3.0, 5.0, 0.8], [math.nan, 5.0, 0.0]]).double()
    mean, scale = spread(values, [True, True, False])
    torch.testing.assert_close(mean, torch.tensor([2.0, 5.0, 0.0]).double())
    torch.testing.assert_close(scale, torch.tensor([1.0, 1.0, 1.0]).double())
    angles = torch.linspace(0, 1, 9).double()
    circle = torch.stack([angles.cos(), angles.sin()], 1)
    mean, scale = spread(circle, None)
    assert mean.tolist() == [0, 0]
    assert scale.tolist() == [1, 1]


def test_masked_observations_and_images_do_not_count():
    mask = torch.tensor([True] * 9 + [False])
    vectors = Recording(
        torch.randn(10, 2).double(),
        torch.cat([torch.ones(9, 1), torch.full((1, 1), 1e9)]).double(),
        mask,
    )
    assert Scaling().prepare([vectors]).x_mean.item() == 1
    images = torch.randint(0, 255, (10, 1, 4, 4), dtype=torch.uint8)
    scaling = Scaling().prepare([Recording(torch.randn(10, 2).double(), images)])
    assert scaling.observation(images) is images
    assert len(scaling.x_mean) == 0


def test_controls_are_scaled_too():
    scaling = Scaling().prepare([recording(50, controls=True)])
    inside = scaling(recording(50, controls=True))
    assert inside.controls is not None
    torch.testing.assert_close(inside.controls.mean(0), torch.zeros(1).double(), atol=1e-9, rtol=0)
    torch.testing.assert_close(inside.controls.std(0, correction=0), torch.ones(1).double())

    class Pushed:
        controlled = 1

        def init(self, batch, *, generator=None):
            return (torch.zeros(batch, 2),)

        def predict(self, state, *, control=None, generator=None):
            return (state[0] + control,)

        def update(self, state, obs):
            return state

        def estimate(self, state):
            return state[0]

    filter = ScaledFilter(scaling, Pushed(), torch.float64)
    moved = filter.predict(filter.init(1), control=scaling.u_mean[None] + 2 * scaling.u_scale)
    torch.testing.assert_close(moved[0].double(), torch.full((1, 2), 2.0).double())
    assert filter.controlled == 1


def test_counts_stay_as_they_are():
    """Beside columns that are not: whole numbers below 0, above `MOST_COUNTED`, or not whole; a
    column of 0 alone is constant.
    """
    rows = torch.tensor(
        [[0, 3.0, -1, 0, 0.5, 0], [2, 0, 1, 101, 1, 0], [1, torch.nan, 4, 2, 2, 0]],
        dtype=torch.float64,
    )
    scaling = Scaling().prepare([Recording(torch.arange(3.0)[:, None].double(), rows)])
    scaled = scaling.observation(rows)
    assert torch.equal(scaled[:, :2].nan_to_num(9), rows[:, :2].nan_to_num(9))
    assert torch.allclose(scaled[:, 2:5].mean(0), torch.zeros(3).double()) and torch.allclose(
        scaled[:, 2:5].std(0, correction=0), torch.ones(3).double()
    )
    assert torch.equal(scaled[:, 5], torch.zeros(3).double())
    assert scaling.z_scale != 1, "states are scaled whatever they are"


@pytest.fixture
def silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error", ScaleWarning)
        yield


@pytest.mark.parametrize("factors", [[1.0, 9.0, 3.0], [2.0, 2.0, 0.0], [0.0, 0.0, 0.0]])
def test_columns_of_similar_scales_bring_no_warning(factors, silent):
    draw = torch.randn(200, 3, generator=torch.Generator().manual_seed(0)).double()
    values = draw / draw.std(0) * torch.tensor(factors) + 5
    warn_of_scales(values, "states", offset=True)
    values[::7, 0] = torch.nan
    warn_of_scales(values, "states", offset=True)


def test_columns_of_other_scales_and_means_bring_a_warning():
    one = torch.randn(200, 1, generator=torch.Generator().manual_seed(0)).double()
    with pytest.warns(ScaleWarning, match="states: column 1 varies by .*, column 0 by .* hides"):
        warn_of_scales(torch.cat([one, 12 * one.flip(0)], 1), "states")
    with pytest.warns(ScaleWarning, match="column 0 varies by .* around 50.*do not sum to 1"):
        warn_of_scales(one + 50, "states", offset=True)


def test_points_without_neighbours_bring_a_warning(silent):
    """Two of three points have a twin, or none has."""
    twins = torch.arange(30.0, dtype=torch.float64).div(2, rounding_mode="floor")[:, None]
    warn_of_isolation(twins, gaussian, 0.1, "states")
    warn_of_isolation(twins[::2], gaussian, 1.0, "states")
    with pytest.warns(ScaleWarning, match=r"states: .* \(effective sample size 1.00 of 15; .* 5\)"):
        warn_of_isolation(twins[::2], gaussian, 0.1, "states")


def test_filters_warn_where_nothing_scales_their_columns(silent):
    drawn = simulate(oscillatory(), torch.tensor([1.0, 0.0]).double(), 60)
    good = Recording(drawn.states, drawn.obs)
    units = Recording(drawn.states * torch.tensor([1000.0, 1.0]), drawn.obs)
    sensors = Recording(drawn.states, drawn.obs * torch.tensor([1.0, 50.0]))
    for model in (KBF(), FrameRegression(), KBF(normalise=False)):
        model.prepare([good])
        with pytest.warns(ScaleWarning, match="observations: column 1"):
            model.prepare([sensors])
    with pytest.warns(ScaleWarning, match="states: column 0"):
        KBF().prepare([units])
    away = good._replace(states=good.states + 100)
    KBF().prepare([away])
    with pytest.warns(ScaleWarning, match="do not sum to 1"):
        KBF(normalise=False).prepare([away])
    large = Recording(1000 * drawn.states, drawn.obs)
    with pytest.warns(ScaleWarning, match=r"states: at a bandwidth of 1 .* resembles only itself"):
        KBF().fit([large])
    far = good._replace(obs=1000 * good.obs)
    with pytest.warns(ScaleWarning, match=r"observations: at a bandwidth of 1 .* resembles only"):
        KBF().fit([far])
    FeatureKBF(torch.nn.Linear(2, 3)).fit([far])  # features, and no kernel of the observations
    prepared = KBF()
    prepared.prepare([large])
    prepared.fit([large])
    config = {"model": {"name": "kbf", "net": {"_target_": "kbf.KBF"}}, "seed": 0}
    FittedModel(config | {"data": {"normalise": "standard"}}, [units]).prepare([units])

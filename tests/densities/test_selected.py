"""The choice of laws as a part of models: what it finds, what it leaves alone, and what a
checkpoint keeps of it.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kbf.data.noise_systems import Clutter, Fork, Spikes, Volatility
from kbf.data.synthetic import SyntheticData
from kbf.densities.learned_ssm import learn_model
from kbf.densities.selected import SelectedDensities
from kbf.densities.selection import COUNTS, DENSITIES, fit_density, select_density
from kbf.evaluation.alarms import innovation_score
from kbf.evaluation.score import score
from kbf.filters.kernel.simulated_kbf import SimulatedKBF, bounded_run
from kbf.filters.kernel.update.nearest_draws import LocalUpdate
from kbf.filters.particle.bootstrap import BootstrapFilter
from kbf.filters.particle.learned import LearnedParticleFilter
from kbf.filters.protocols import Filter
from kbf.filters.rollout import rollout
from kbf.filters.selection.auto import ModelSelection
from kbf.recording import Recording
from kbf.rkhs.features import pivots
from kbf.runtime.errors import FitError
from kbf.ssm import rotation

SMALL: dict[str, Any] = {"points": 200, "run": 4000, "transition": None, "observation": None}
GAUSSIAN: dict[str, Any] = {
    "points": 200,
    "run": 4000,
    "transition": "gaussian",
    "observation": "gaussian",
}


def estimates(filter: Filter, obs: Tensor) -> Tensor:
    return rollout(filter, obs[None].float(), generator=torch.Generator().manual_seed(0)).estimates


@pytest.mark.slow
def test_gaussian_noise_keeps_todays_filter():
    data = SyntheticData(rotation(), 150, 20, seed=1000)
    chosen, plain = SimulatedKBF(**SMALL), SimulatedKBF(**GAUSSIAN)
    chosen.prepare(data.train)
    assert chosen.densities.names == ("gaussian", "gaussian")
    assert torch.equal(
        estimates(chosen.fit(data.train), data.test[0].obs),
        estimates(plain.fit(data.train), data.test[0].obs),
    )


@pytest.mark.slow
def test_the_law_of_observations_is_found_and_the_filter_uses_it():
    data = SyntheticData(Volatility(), 300, 300, seed=1000)
    model = SimulatedKBF(**SMALL)
    model.prepare(data.train)
    assert model.densities.names[0] == "gaussian"
    assert model.densities.names[1] in ("spread", "networks")
    filter = model.fit(data.train)
    assert isinstance(filter.rule, LocalUpdate)
    floor = score(BootstrapFilter(data.problem, data.train[0].states, 2000), data.test).mse
    gaussian = SimulatedKBF(**GAUSSIAN).fit(data.train)
    errors = [
        float(score(f, data.test, dtype=torch.float32).mse / floor) for f in (filter, gaussian)
    ]
    assert errors[0] < 1.3 < errors[1]


@pytest.mark.slow
def test_a_filter_over_another_law_knows_what_was_to_be_expected():
    data = SyntheticData(Clutter(), 200, 60, seed=1000)
    filter = SimulatedKBF(points=200, run=4000, observation="clutter").fit(data.train)
    near, far = (filter.states[:1] + by for by in (0.0, 1.5))
    weights = torch.zeros(1, len(filter.states))
    weights[0, 0] = 1
    assert isinstance(filter.rule, LocalUpdate)
    expected, unexpected = (innovation_score(filter, weights, x).item() for x in (near, far))
    assert math.isfinite(expected)
    assert unexpected > expected + 1


@pytest.mark.slow
def test_moves_with_two_modes_are_found_and_the_filter_uses_them():
    data = SyntheticData(Fork(), 300, 200, seed=1000)
    model = SimulatedKBF(**SMALL)
    model.prepare(data.train)
    assert model.densities.names == ("branches", "gaussian")
    floor = score(BootstrapFilter(data.problem, data.train[0].states, 2000), data.test).mse
    gaussian = SimulatedKBF(**GAUSSIAN).fit(data.train)
    errors = [
        float(score(f, data.test, dtype=torch.float32).mse / floor)
        for f in (model.fit(data.train), gaussian)
    ]
    assert errors[0] < 1.15 < errors[1]


@pytest.mark.slow
@pytest.mark.parametrize("net", [SimulatedKBF, LearnedParticleFilter])
def test_a_stored_choice_is_used_again(net):
    data = SyntheticData(Clutter(), 120, 15, seed=1000)
    small: dict[str, Any] = {"points": 80, "run": 800} if net is SimulatedKBF else {"particles": 50}
    model, again = (net(**small, transition=None, observation=None) for _ in range(2))
    model.prepare(data.train)
    assert model.densities.names == ("gaussian", "clutter")
    again.load_state_dict(model.state_dict())
    assert again.hyperparameters() == model.hyperparameters()
    obs = data.test[0].obs
    assert torch.equal(estimates(again.fit(data.train), obs), estimates(model.fit(data.train), obs))


@pytest.mark.slow
def test_a_chosen_law_is_not_fitted_again_to_the_same_recording():
    data = SyntheticData(Clutter(), 120, 15, seed=1000).train
    densities = SelectedDensities(None, None)
    densities.choose(data)
    same, fresh = (
        learn_model(data, densities.names, densities.fitted),
        learn_model(data, densities.names),
    )
    assert same.observation is densities.fitted[1].choice.density
    assert fresh.observation is not densities.fitted[1].choice.density
    u = data[0].states
    assert torch.equal(same.log_transition(u[1:], u[:-1]), fresh.log_transition(u[1:], u[:-1]))
    assert torch.equal(same.log_likelihood(data[0].obs, u), fresh.log_likelihood(data[0].obs, u))
    shorter = [data[0]._replace(states=u[:100], obs=data[0].obs[:100])]
    assert (
        learn_model(shorter, densities.names, densities.fitted).observation
        is not densities.fitted[1].choice.density
    )


def test_what_was_stored_before_there_was_a_choice_is_gaussian():
    densities = SelectedDensities(None, None)
    densities.load_state_dict({})
    assert densities.names == ("gaussian", "gaussian")
    assert densities.hyperparameters() == {"density/transition": 0.0, "density/observation": 0.0}


@pytest.mark.parametrize("stored", [[0, 99], [-1, 0]])
def test_stored_laws_that_there_are_not_are_told(stored):
    densities = SelectedDensities(None, None)
    with pytest.raises(ValueError, match=r"was stored with densities \[.*; there are 0 to 9"):
        densities.load_state_dict(densities.state_dict() | {"chosen": torch.tensor(stored)})


def test_a_told_law_is_taken_and_the_other_chosen():
    data = SyntheticData(Spikes(neurons=3), 120, 10, seed=1000)
    densities = SelectedDensities("student", None)
    densities.choose(data.train)
    assert densities.names == ("student", "poisson")
    assert densities.hyperparameters()["density/observation"] == DENSITIES.index("poisson")
    assert (
        densities.hyperparameters()["density/observation/poisson"]
        > densities.hyperparameters()["density/observation/gaussian"]
    )
    assert "density/transition/gaussian" not in densities.hyperparameters()


def test_images_and_moves_with_controls_are_left_alone():
    data = SyntheticData(Fork(), 200, 10, seed=1000).train[0]
    densities = SelectedDensities(None, None)
    densities.choose(
        Recording(
            data.states, torch.rand(200, 1, 3, 3), None, torch.rand(200, 1, dtype=torch.float64)
        )
    )
    assert densities.names == ("gaussian", "gaussian")


def test_unknown_laws_and_controlled_laws_are_told():
    with pytest.raises(ValueError, match=r"observation must be null .* got 'cauchy'"):
        SimulatedKBF(observation="cauchy")
    data = SyntheticData(Fork(), 100, 10, seed=1000).train[0]
    steered = data._replace(controls=torch.rand(100, 1, dtype=torch.float64))
    with pytest.raises(ValueError, match="with controls the transition density must be gaussian"):
        SimulatedKBF(transition="student").fit(steered)


def test_runs_of_heavy_tails_stay_within_reach():
    g = torch.Generator().manual_seed(0)
    z = torch.randn(100, 1, dtype=torch.float64, generator=g)
    density = fit_density(
        "student",
        z[:-1],
        0.9 * z[:-1]
        + 0.1 * torch.randn(99, 1, dtype=torch.float64, generator=g) / z[1:].abs().sqrt(),
    )
    run = bounded_run(density, z[:10], 50, z, g)
    margin = (z.max() - z.min()) / 2
    assert run.shape == (500, 1)
    assert z.min() - margin <= run.min()
    assert run.max() <= z.max() + margin


def births_and_deaths(n):
    """Whole states whose moves are Poisson draws, seen with noise."""
    draw = torch.Generator().manual_seed(0)
    z = [torch.tensor(1.0, dtype=torch.float64)]
    for _ in range(n):
        z.append(torch.poisson(0.3 + 0.7 * z[-1], generator=draw))
    states = torch.stack(z[1:])[:, None]
    return Recording(states, states + 0.5 * torch.randn(n, 1, generator=draw, dtype=torch.float64))


@pytest.mark.slow
def test_whole_states_make_no_law_of_counts_of_moves():
    """A memory has states between whole numbers, of which such a law would say that
    they cannot be.
    """
    data = births_and_deaths(300)
    model = SimulatedKBF(**SMALL)
    run = rollout(model.fit(data), data.obs[None].float())
    assert model.densities.names[0] not in COUNTS
    assert float(run.diagnostics["rejected"].sum()) == 0
    assert float((run.estimates[0] - data.states).square().mean()) < 0.9 * float(data.states.var())
    with pytest.raises(ValueError, match="transition=poisson: counts are observations"):
        SimulatedKBF(transition="poisson")


@pytest.mark.slow
def test_without_prepare_each_recording_gets_laws_of_its_own():
    real = births_and_deaths(300)
    draw = torch.Generator().manual_seed(1)
    update_rejection_count = real._replace(
        obs=torch.poisson((0.2 + 0.3 * real.states).exp(), generator=draw)
    )
    model = SimulatedKBF(**SMALL)
    model.fit(update_rejection_count)
    assert model.densities.names[1] in ("poisson", "negbin")
    model.fit(real)
    assert model.densities.names[1] not in ("poisson", "negbin")
    model.prepare([update_rejection_count])
    model.fit(update_rejection_count._replace(obs=update_rejection_count.obs + 1))
    assert model.densities.names[1] in ("poisson", "negbin"), "what prepare chose stays"


@pytest.mark.parametrize("step", [0.1, 0.3])
def test_rounded_readings_keep_their_heavy_tails(step):
    """Up to a step of half the deviation of the noise, which is 0.7."""
    draw = torch.Generator().manual_seed(0)
    u = torch.randn(400, 1, generator=draw, dtype=torch.float64)
    wide = torch.randn(400, 1, generator=draw, dtype=torch.float64) * (
        1 + 9 * (torch.rand(400, 1, generator=draw) < 0.1)
    )
    y = u.sin() + 0.3 * wide
    found = select_density(u, (y / step).round() * step)
    assert (
        found.name in ("student", "branches", "clutter", "networks") and "poisson" in found.scores
    )


def test_a_count_below_all_recorded_ones_is_possible():
    draw = torch.Generator().manual_seed(0)
    u = torch.randn(300, 1, generator=draw, dtype=torch.float64)
    y = torch.poisson((3 + 0.3 * u).exp(), generator=draw)
    assert float(y.min()) > 0
    density = fit_density("poisson", u, y)
    assert math.isfinite(float(density.log_density(y.min(0).values[None] - 1, u[:1])))
    part = fit_density("poisson", u[:60], y[:60])  # too few rows a value for a choice
    torch.testing.assert_close(part.mean(u), density.mean(u), rtol=0.5, atol=2.0)


@pytest.mark.slow
def test_categories_are_told_apart_and_not_measured():
    """A point on a line in one of six rooms, numbered without order, read rightly in 8 of 10: a
    number nearby says nothing.
    """
    g = torch.Generator().manual_seed(0)
    z = [torch.zeros(1, dtype=torch.float64)]
    for _ in range(899):
        z.append(
            (0.98 * z[-1] + 0.2 * torch.randn(1, generator=g, dtype=torch.float64)).clamp(-2.9, 2.9)
        )
    states = torch.stack(z)
    room = torch.tensor([3, 0, 5, 2, 4, 1])[((states[:, 0] + 3).floor()).long()]
    wrong = torch.rand(900, generator=g) < 0.2
    room = torch.where(wrong, torch.randint(6, (900,), generator=g), room)
    data = Recording(states, room.double()[:, None])
    train, test = (
        Recording(data.states[:600], data.obs[:600]),
        Recording(data.states[600:], data.obs[600:]),
    )
    errors = {}
    for name in (None, "poisson"):
        model = SimulatedKBF(points=200, run=4000, transition="gaussian", observation=name)
        model.prepare([train])
        errors[name] = float(score(model.fit(train), [test], dtype=torch.float32).mse.mean())
        assert name is not None or model.densities.names[1] == "categories"
    assert errors[None] < 0.5 * errors["poisson"]
    assert errors[None] < 0.25
    strange = rollout(model.fit(train), torch.tensor([[[9.0], [3.0]]]))
    assert strange.estimates.isfinite().all()


def test_models_with_the_same_settings_select_their_densities_once(monkeypatch):
    from kbf.densities import selected

    found, select = [], selected.select_density

    def counted(*args: Any, **settings: Any) -> Any:
        found.append(select(*args, **settings))
        return found[-1]

    monkeypatch.setattr(selected, "select_density", counted)
    data = SyntheticData(rotation(), 90, 20, seed=1000).train
    main, other, given = SimulatedKBF(**SMALL), LearnedParticleFilter(), SimulatedKBF(**GAUSSIAN)
    other.share_densities(main)
    given.share_densities(main)
    for model in (main, other, given):
        model.prepare(data)
    assert len(found) == 2 and other.densities is main.densities is not given.densities
    main.prepare(list(data))  # the same points
    assert len(found) == 2
    main.prepare([each._replace(states=each.states[5:], obs=each.obs[5:]) for each in data])
    assert len(found) == 4


def stop_the_second(monkeypatch, module) -> list[Any]:
    """Let the second selection of a density end with the budget; return what is selected."""
    found, select = [], module.select_density

    def stopped(*args: Any, **settings: Any) -> Any:
        if len(found) == 1:
            found.append(None)
            raise FitError("stopped at the end of the budget")
        found.append(select(*args, **settings))
        return found[-1]

    monkeypatch.setattr(module, "select_density", stopped)
    return found


def test_densities_of_sensors_are_selected_once(monkeypatch):
    """By the models of a selection that share them, which is finished where it was stopped."""
    from kbf.densities import per_sensor

    found = stop_the_second(monkeypatch, per_sensor)
    states, obs = (getattr(rotation_recording(90), name) for name in ("states", "obs"))
    obs[::5, 0] = torch.nan
    models = ModelSelection(SimulatedKBF(**SMALL), name="kbf").models
    sensors = [models["kbf"].densities.sensors, models["kernel_monte_carlo"].sensors]
    with pytest.raises(FitError, match="stopped"):
        sensors[0].choose(states, obs)
    for each in (*sensors, models["particle_learned"].densities.sensors):
        each.choose(states, obs)
        assert each.density.tolist() == [DENSITIES.index(found[k].name) for k in (0, 2)]
    assert len(found) == 3


def rotation_recording(steps: int) -> Recording:
    return SyntheticData(rotation(), steps, 20, seed=1000).train[0]


def test_a_selection_that_was_stopped_is_finished_by_the_next_model(monkeypatch):
    from kbf.densities import selected

    found = stop_the_second(monkeypatch, selected)
    data = SyntheticData(rotation(), 90, 20, seed=1000).train
    densities = SelectedDensities(None, None)
    with pytest.raises(FitError, match="stopped"):
        densities.choose(data)
    densities.choose(data)
    assert len(found) == 3, "that of transitions is known"
    assert [each.choice for each in densities.fitted] == [found[0], found[2]]


def test_a_restored_model_takes_the_kernels_that_it_had_selected(monkeypatch):
    from kbf.densities import ridge

    compared: list[Any] = []

    def counted(kernel: Any, points: Tensor, **settings: Any) -> Tensor:
        compared.append(kernel)
        return pivots(kernel, points, **settings)

    data = SyntheticData(rotation(), 90, 20, seed=1000).train
    model, again = SimulatedKBF(**GAUSSIAN), SimulatedKBF(**GAUSSIAN)
    filter = model.fit(data)
    again.load_state_dict(model.state_dict())
    monkeypatch.setattr(ridge, "pivots", counted)
    restored = again.fit(data)
    assert len(compared) == 2  # of transitions and of observations
    obs = data[0].obs
    assert torch.equal(estimates(restored, obs), estimates(filter, obs))
    fewer = [data[0]._replace(states=data[0].states[:80], obs=obs[:80])]
    again.fit(fewer)  # kernels of other recordings are selected
    assert len(compared) > 20
    fresh = SimulatedKBF(**GAUSSIAN)
    assert torch.equal(estimates(again.fit(fewer), obs), estimates(fresh.fit(fewer), obs))

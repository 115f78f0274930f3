"""Gymnasium's pendulum: the equations against the simulator, the recordings, the filters that know
the equations, the command.
"""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from kbf.cli import main
from kbf.config import composing, configure, plain
from kbf.data import pendulum
from kbf.data.dataset import load_data
from kbf.data.pendulum import (
    Pendulum,
    PendulumModel,
    Run,
    kept_run,
    noisy,
    photograph,
    simulate_run,
    write_recordings,
)
from kbf.evaluation.floors import floor
from kbf.evaluation.score import score
from kbf.filters.gaussian.ekf import EKF, extended
from kbf.filters.gaussian.moments import GaussianState
from kbf.filters.gaussian.polar import TurningFilter, TurningModel, turning_filter
from kbf.filters.gaussian.ukf import UKF, sigma_points, unscented
from kbf.filters.rollout import rollout
from kbf.fitted.checkpoint import load_filter
from kbf.fitted.settings import read_encoding_settings
from kbf.plots.animation import animate
from kbf.plots.frames import frame_grid
from kbf.recording import Recording
from kbf.runtime.instantiate import build
from kbf.runtime.interpolation import resolved
from kbf.ssm import OrientationModel, simulate
from kbf.training.fit import train

F64 = torch.float64


@pytest.fixture(scope="module")
def env():
    gymnasium = pytest.importorskip("gymnasium")
    pytest.importorskip("pygame")
    made = gymnasium.make(
        "Pendulum-v1", render_mode="rgb_array", max_episode_steps=-1, disable_env_checker=True
    )
    made.reset(seed=0)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KBF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")


def vectors(
    n: int = 300, n_test: int = 100, seed: int = 0, **changes
) -> tuple[PendulumModel, Recording, Recording]:
    """Training and test part of the model itself, which sees noisy angles."""
    model = PendulumModel(**changes)
    states, obs = simulate(
        model,
        torch.tensor([-1.0, 0.0, 0.0], dtype=F64),
        n + n_test,
        torch.Generator().manual_seed(seed),
    )[:2]
    return model, Recording(states[:n], obs[:n]), Recording(states[n:], obs[n:])


# --- the equations


@pytest.mark.parametrize("repeat", [1, 4])
def test_the_equations_are_the_simulators(env, rng, repeat):
    """From 300 states, at rest, at the limit of the speed, and with torques that are clipped: one
    decision of the driver.
    """
    model = PendulumModel(repeat=repeat, sigma_u=2.0)
    y = torch.from_numpy(np.stack([rng.uniform(-4, 4, 300), rng.uniform(-8, 8, 300)], -1))
    e = torch.from_numpy(rng.normal(size=(300, 1)))
    expected = []
    for start, u in zip(y.numpy(), model.torque(y, e[:, 0]).numpy(), strict=True):
        env.unwrapped.state = start.copy()
        for _ in range(repeat):
            env.step(np.array([u]))
        expected.append(env.unwrapped.state)
    found = model.f(y, e)
    torch.testing.assert_close(found, torch.from_numpy(np.stack(expected)), atol=1e-12, rtol=0)
    assert (found[:, 1].abs() == 8).any() and (
        model.torque(y, e[:, 0]).abs() == 2
    ).any()  # both limits were met


def test_the_driver_leaves_alone_what_has_its_energy():
    model = PendulumModel(sigma_u=0.0, energy=0.9)
    theta = torch.linspace(0.5, math.pi, 9, dtype=F64)
    omega = (30 * (0.9 - theta.cos())).sqrt()  # on the orbit of energy 0.9
    y = torch.stack([theta, omega], -1)
    torch.testing.assert_close(
        model.torque(y, torch.zeros(9, dtype=F64)), torch.zeros(9, dtype=F64), atol=1e-12, rtol=0
    )
    slower, faster = (
        model.torque(torch.stack([theta, omega * k], -1), torch.zeros(9, dtype=F64))
        for k in (0.5, 1.2)
    )
    assert (slower > 0).all() and (faster < 0).all()  # along the motion, and against it


def test_states_and_chart_are_one_to_one(rng):
    model = PendulumModel(unit=4.0)
    y = torch.from_numpy(np.stack([rng.uniform(-3.1, 3.1, 50), rng.uniform(-8, 8, 50)], -1))
    z = model.embed(y)
    torch.testing.assert_close(model.chart(z), y)
    torch.testing.assert_close(z[:, 2] * 4, y[:, 1])
    torch.testing.assert_close(
        model.chart(model.embed(y + torch.tensor([2 * math.pi, 0.0], dtype=F64))), y
    )  # once more around


def test_the_density_of_the_shown_angle_integrates_to_one():
    model = PendulumModel(sigma_x=0.7)
    angle = torch.arange(2000, dtype=F64) * (2 * math.pi / 2000)
    x = torch.stack([angle.cos(), angle.sin()], -1)
    z = model.embed(torch.tensor([[2.5, 1.0]], dtype=F64))
    density = model.log_likelihood(x, z).exp()
    assert density.mean() * 2 * math.pi == pytest.approx(1.0, abs=1e-9)
    many = model.observe(z.expand(20000, 3), torch.Generator().manual_seed(0))
    mean = math.exp(-(0.7**2) / 2) * z[0, :2]
    torch.testing.assert_close(many.mean(0), mean, atol=4 / 20000**0.5, rtol=0)


# --- the simulator's recordings


def test_a_run_is_the_simulators_and_the_camera_leaves_it_alone(env):
    model = PendulumModel()
    calls: list[int] = []
    run = simulate_run(model, 12, 5, calls.append)
    assert calls == list(range(1, 13))
    env.reset(seed=5)
    generator = torch.Generator().manual_seed(5)
    for t in range(12):  # the same run without any picture
        e = torch.randn(2, dtype=F64, generator=generator)
        u = model.torque(torch.from_numpy(env.unwrapped.state), e[0])
        for _ in range(model.repeat):
            env.step(u[None].numpy())
        assert np.array_equal(run.y[t].numpy(), env.unwrapped.state)
        assert run.shown[t].item() == pytest.approx(
            run.y[t, 0].item() + 0.15 * e[1].item(), abs=1e-12
        )
    before = env.unwrapped.state.copy(), env.unwrapped.last_u
    picture = photograph(env, run.shown[-1].item())
    assert np.array_equal(picture, run.frames[-1].numpy())
    assert np.array_equal(before[0], env.unwrapped.state) and before[1] == env.unwrapped.last_u


def test_a_picture_shows_the_angle_and_nothing_else(env):
    """The rod's pixels lie, around the middle, in the direction of theta: 0 is up, and it grows
    counter-clockwise.
    """
    grid = torch.arange(32, dtype=F64) - 15.5
    for theta in (0.0, 0.7, 2.0, -1.2, 3.1):
        picture = torch.from_numpy(photograph(env, theta)).double()
        dark = 255 - picture[1]  # the rod is red: green is missing
        right, up = (
            (dark * grid[None, :]).sum() / dark.sum(),
            -(dark * grid[:, None]).sum() / dark.sum(),
        )
        assert abs(math.remainder(math.atan2(-right, up) - theta, 2 * math.pi)) < 0.03
        env.unwrapped.last_u = 1.9  # no arrow of it, nor anything of the speed
        env.unwrapped.state = np.array([1.0, -7.0])
        assert np.array_equal(picture.numpy(), photograph(env, theta))


def test_data_moves_then_shows_with_one_seed_for_all_sizes(env):
    short, long = Pendulum(6, 4, seed=1), Pendulum(8, 2, seed=1)
    whole = [
        torch.cat([getattr(d.train[0], part), getattr(d.test[0], part)])
        for d in (short, long)
        for part in ("states", "obs")
    ]
    assert torch.equal(whole[0], whole[2]) and torch.equal(whole[1], whole[3])
    assert (short.train[0].obs.dtype, tuple(short.train[0].obs.shape)) == (
        torch.uint8,
        (6, 3, 32, 32),
    )
    run = simulate_run(PendulumModel(), 10, 1)
    torch.testing.assert_close(whole[0], PendulumModel().embed(run.y), atol=0, rtol=0)
    noise = whole[1].double() - run.frames
    inside = (run.frames > 100) & (run.frames < 160)
    assert noise[inside].std() == pytest.approx(25.5, rel=0.15)
    decoded = short.decoded[0]
    assert torch.equal(decoded.states, short.test[0].states)
    torch.testing.assert_close(
        torch.atan2(decoded.obs[:, 1], decoded.obs[:, 0]).sin(), run.shown[6:].sin()
    )
    assert short.renderer.startswith("Gymnasium ") and "Pendulum-v1" in short.renderer
    assert not torch.equal(Pendulum(6, 4, seed=2).train[0].states, short.train[0].states)
    with pytest.raises(ValueError, match="n_train >= 2"):
        Pendulum(1, 4)


def test_a_run_is_kept_and_a_damaged_one_made_anew(env, tmp_path, monkeypatch):
    model = PendulumModel()
    first = kept_run(model, 3, 0)
    (kept,) = (tmp_path / "cache").glob("pendulum-*.npz")
    with monkeypatch.context() as patch:
        patch.setattr(pendulum, "simulate_run", lambda *_: pytest.fail("it was there"))
        for one, two in zip(kept_run(model, 3, 0), first, strict=True):
            assert torch.equal(one, two)
    kept.write_bytes(kept.read_bytes()[:100])
    assert torch.equal(kept_run(model, 3, 0).frames, first.frames)
    assert np.load(kept)["frames"].shape == (3, 3, 32, 32)  # whole again
    assert len(list((tmp_path / "cache").iterdir())) == 1
    kept_run(model._replace(sigma_u=0.5), 3, 0)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_without_gymnasium_one_line_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ValueError, match=r'pip install "kbf\[examples\]"'):
        simulate_run(PendulumModel(), 2, 0)
    assert main(["data", "render", "pendulum", "steps=2", f"out={tmp_path / 'p.npz'}"]) == 2
    assert "kbf[examples]" in capsys.readouterr().err
    assert not (tmp_path / "p.npz").exists()


# --- filters that know the equations


class Straight:
    """A body without forces: theta' = theta + h omega + g_1 e, omega' = omega + g_2 e; a linear
    model.
    """

    unit = 1.0
    h, g = 0.2, torch.tensor([0.05, 0.4], dtype=F64)

    def f(self, y: Tensor, e: Tensor) -> Tensor:
        return torch.stack([y[..., 0] + self.h * y[..., 1], y[..., 1]], -1) + self.g * e

    def chart(self, z: Tensor) -> Tensor:
        return torch.stack([torch.atan2(z[..., 1], z[..., 0]), z[..., 2]], -1)


def sigma(f, m, L):
    return unscented(f, m, L, sigma_points(3, 1.0, 0.0, 0.0))


@pytest.mark.parametrize("linearise", [extended, sigma], ids=["ekf", "ukf"])
def test_both_are_the_kalman_filter_of_a_body_without_forces(linearise):
    """Against the textbook's recursion, on an angle that goes round the circle several times."""
    model = Straight()
    assert isinstance(model, TurningModel)
    mean, cov = (
        torch.tensor([0.3, 2.0], dtype=F64),
        torch.tensor([[0.2, 0.0], [0.0, 1.0]], dtype=F64),
    )
    filter = TurningFilter(model, linearise, mean, cov, torch.tensor([[0.01]], dtype=F64))
    F = torch.tensor([[1.0, model.h], [0.0, 1.0]], dtype=F64)
    generator, y, m, P = torch.Generator().manual_seed(0), mean.clone(), mean.clone(), cov.clone()
    state = filter.init(1)
    for _ in range(60):
        e, v = torch.randn(2, dtype=F64, generator=generator)
        y = F @ y + model.g * e
        seen = y[0] + 0.1 * v
        m, P = F @ m, F @ P @ F.mT + model.g[:, None] * model.g
        gain = P[:, 0] / (P[0, 0] + 0.01)
        m, P = m + gain * (seen - m[0]), P - gain[:, None] * P[0]
        state = filter.update(filter.predict(state), torch.stack([seen.cos(), seen.sin()])[None])
        torch.testing.assert_close(state.mean[0], m, atol=1e-6, rtol=0)
        torch.testing.assert_close(state.cov[0], P, atol=1e-6, rtol=1e-5)
    assert y[0].abs() > 2 * math.pi


def test_the_estimate_is_the_mean_and_the_covariance_that_of_the_state(rng):
    """Against a million draws of (theta, omega)."""
    mean, cov = (
        torch.tensor([[2.0, -3.0]], dtype=F64),
        torch.tensor([[[0.5, 0.4], [0.4, 2.0]]], dtype=F64),
    )
    model = PendulumModel(unit=4.0)
    filter = TurningFilter(model, extended, mean[0], cov[0], torch.eye(1, dtype=F64))
    y = torch.from_numpy(rng.multivariate_normal(mean[0].numpy(), cov[0].numpy(), 1_000_000))
    z = model.embed(y)
    state = GaussianState(mean, cov)
    torch.testing.assert_close(filter.estimate(state)[0], z.mean(0), atol=3e-3, rtol=0)
    torch.testing.assert_close(filter.covariance(state)[0], torch.cov(z.mT), atol=3e-3, rtol=0)


def test_start_and_noise_come_from_the_memory():
    model, memory, _ = vectors(1000)
    filter = turning_filter(model, memory, extended)
    assert filter.R.item() == pytest.approx(0.15**2, rel=4 * (2 / 1000) ** 0.5)
    y = model.chart(memory.states)
    assert filter.mean[1].item() == pytest.approx(y[:, 1].mean().item())
    assert filter.cov[1, 1].item() == pytest.approx(y[:, 1].var().item())
    z = torch.stack(
        [torch.tensor([math.cos(a), math.sin(a), 0.0], dtype=F64) for a in (3.0, -3.0, 3.1, -3.1)]
    )
    around = turning_filter(model, Recording(z, z[:, :2]), extended)  # at pi, where angles jump
    assert abs(abs(around.mean[0].item()) - math.pi) < 1e-6
    assert around.cov[0, 0] < 0.03
    with pytest.raises(ValueError, match=r"unit vectors; of images: data\.encoding\.visible"):
        turning_filter(model, Recording(memory.states, memory.states), extended)
    with pytest.raises(ValueError, match="from a memory"):
        EKF(model).fit(None)


def test_filters_that_know_the_pendulum_are_near_the_floor():
    model, memory, _ = vectors(300)
    start = memory.states[torch.randint(300, (20,), generator=torch.Generator().manual_seed(1))]
    states, obs = simulate(model, start, 20, torch.Generator().manual_seed(2))[:2]
    held = [Recording(z, x) for z, x in zip(states, obs, strict=True)]
    least = floor(model, [memory], held, particles=1000).mse.mean().item()
    ekf, ukf = (score(net(model).fit([memory]), held).mse.mean().item() for net in (EKF, UKF))
    assert 0.97 * least < ukf < 1.2 * least
    guess = (states - memory.states.mean(0)).square().sum(-1).mean().item()
    assert (
        ukf < ekf < 0.2 * guess
    )  # the extended one loses the pendulum now and then while it does not know the speed


@pytest.mark.parametrize("net", [EKF, UKF])
def test_batches_are_one_by_one_and_single_precision_is_near(net):
    model, memory, held = vectors(100, 30)
    filter = net(model).fit([memory])
    obs = held.obs.unflatten(0, (3, 10))
    whole = rollout(filter, obs).estimates
    for k in range(3):
        torch.testing.assert_close(whole[k], rollout(filter, obs[k : k + 1]).estimates[0])
    single = net(model).fit([Recording(memory.states.float(), memory.obs.float())])
    found = rollout(single, obs.float())
    assert found.estimates.dtype == torch.float32
    torch.testing.assert_close(found.estimates.double(), whole, atol=2e-3, rtol=0)


def test_missing_images_leave_the_prediction():
    model, memory, held = vectors(100, 20)
    filter = EKF(model).fit([memory])
    mask = torch.ones(1, 20, dtype=torch.bool)
    mask[0, 10:] = False
    run = rollout(filter, held.obs[None], mask=mask).estimates[0]
    state = filter.init(1)
    for t in range(20):
        state = filter.predict(state)
        state = filter.update(state, held.obs[t : t + 1]) if t < 10 else state
        torch.testing.assert_close(run[t], filter.estimate(state)[0])


# --- codes of what is visible


def test_visible_components_are_checked():
    base = {"epochs": 1, "lr": 0.1}
    assert read_encoding_settings(base | {"visible": (0, 1)}).visible_part(
        torch.eye(3)
    ).tolist() == [[1, 0], [0, 1], [0, 0]]
    assert torch.equal(read_encoding_settings(base).visible_part(torch.eye(3)), torch.eye(3))
    for wrong in ((), (0, 0), (-1,), (0.5,), 2):
        with pytest.raises(
            ValueError, match=r"data.encoding.visible must be null or different numbers"
        ):
            read_encoding_settings(base | {"visible": wrong})
    with pytest.raises(ValueError, match=r"names component 3, the states have 0 to 2"):
        read_encoding_settings(base | {"visible": (0, 3)}).visible_part(torch.eye(3))


TINY = [
    "data=pendulum",
    "data.n_test=5",
    "n_train=60",
    "data.encoding.epochs=1",
    "data.encoding.members=2",
    "logger=none",
]
TINY += ["data.encoding.encoder.keypoints=2", "trainer.enable_progress_bar=false"]


@pytest.mark.parametrize("model", ["ekf", "ukf", "particle_observation", "lstm", "kalman"])
def test_models_run_on_codes_of_the_angle_alone(env, tmp_path, model):
    more = {
        "lstm": ["model.training.epochs=1"],
        "particle_observation": ["model.net.particles=100"],
    }.get(model, [])
    config = configure("train", [*TINY, f"model={model}", *more])
    data = load_data(config["data"])
    trained = train(config, data.train, tmp_path)
    assert trained is not None
    found = score(trained.filter, data.test, dtype=trained.module.model_dtype)
    assert found.estimates[0].shape == (5, 3) and math.isfinite(found.mse.item())
    loaded = load_filter(tmp_path / "best.ckpt")
    (memory,) = loaded.module.memory.recordings()
    assert memory.obs.shape == (60, 2) and memory.states.shape == (60, 3)
    torch.testing.assert_close(memory.obs.norm(dim=1), torch.ones(60).to(memory.obs))
    torch.testing.assert_close(memory.states, data.train[0].states.to(memory.states))
    assert torch.equal(
        score(loaded.filter, data.test, dtype=trained.module.model_dtype).estimates[0],
        found.estimates[0],
    )


def test_what_the_states_do_not_have_is_no_visible_component(env, tmp_path, capsys):
    assert main(["train", *TINY, "data.encoding.visible=[0,5]", f"run_dir={tmp_path / 'x'}"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "kbf train: data.encoding.visible names component 5, the states have 0 to 2"
    ]
    assert not (tmp_path / "x").exists()


def test_pictures_show_the_angle_and_the_speed_beside_the_images(env, tmp_path):
    sequence = Pendulum(2, 3).test[0]
    spread = 0.01 * torch.eye(3, dtype=F64).expand(3, 3, 3)
    figure = frame_grid(sequence, sequence.states, spread)
    labels = [text.get_text() for axes in figure.axes for text in axes.get_yticklabels()]
    assert labels == ["$z_{1}$", "$z_{2}$", "$z_{3}$"]
    animate(tmp_path / "filter.gif", sequence, sequence.states, spread, steps=2)
    with Image.open(tmp_path / "filter.gif") as movie:
        assert getattr(movie, "n_frames", 1) == 2


def test_the_experiment_is_what_the_table_says():
    with composing("compare", ["experiment=pendulum"]) as composed:
        config = plain(composed, resolve=False)
    assert config["data"]["name"] == "pendulum" and {"kbf", "lstm", "ekf"} <= set(config["models"])
    filled = resolved({k: config[k] for k in ("data", "seed")}, n_train=300)
    assert build(filled["data"]["problem"]) == PendulumModel()  # the file spells the defaults out


# --- the command


@pytest.mark.slow
def test_the_command_writes_recordings_that_own_data_reads(env, tmp_path, capsys):
    path = tmp_path / "p.npz"
    assert (
        main(["data", "render", "pendulum", "steps=12", "recordings=2", "seed=3", f"out={path}"])
        == 0
    )
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["p.npz", "p.png"]
    stored = np.load(path, allow_pickle=False)
    run = simulate_run(PendulumModel(), 12, 4)
    assert np.array_equal(stored["recording"], np.repeat([3, 4], 12))
    np.testing.assert_allclose(stored["states"][12:, 2], run.y[:, 1])
    np.testing.assert_allclose(
        stored["states"][12:, :2], torch.stack([run.y[:, 0].cos(), run.y[:, 0].sin()], -1)
    )
    assert np.array_equal(stored["observations"][12:], noisy(run.frames, 0.1, 4).numpy())
    config = configure("train", ["data=own", f"data.path={path}", "data.split=time"])
    data = load_data(config["data"])
    assert data.train[0].obs.dtype == torch.uint8 and data.train[0].obs.shape[1:] == (3, 32, 32)
    assert (
        sum(len(s.states) for part in (data.train, data.validation, data.test) for s in part) == 24
    )
    for wrong in ("steps=0", "recordings=0", "out=p.txt", "steps=-1"):
        capsys.readouterr()
        assert main(["data", "render", "pendulum", f"out={path}", wrong]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_recordings_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    run = Run(
        torch.zeros(2, 2, dtype=F64),
        torch.zeros(2, dtype=F64),
        torch.zeros(2, 3, 32, 32, dtype=torch.uint8),
    )
    monkeypatch.setattr(
        np, "savez_compressed", lambda *_, **__: (_ for _ in ()).throw(OSError("full"))
    )
    with pytest.raises(OSError, match="full"):
        write_recordings(tmp_path / "p.npz", PendulumModel(), [run], [0], 0.1)
    assert list(tmp_path.iterdir()) == []


def test_the_density_is_that_of_a_heading():
    x, z = torch.tensor([[0.6, 0.8]], dtype=F64), torch.tensor([[0.0, 1.0, 3.0]], dtype=F64)
    assert PendulumModel(sigma_x=0.3).log_likelihood(x, z) == OrientationModel(
        sigma_x=0.3
    ).log_likelihood(x, z[:, :2])

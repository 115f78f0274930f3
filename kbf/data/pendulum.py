"""Gymnasium's Pendulum-v1, driven by a noisy torque and observed as rendered images.

The state is z = (cos theta, sin theta, omega / unit): theta = 0 is upright and grows
counter-clockwise, omega = d theta / dt. An image shows the angle alone, so that the speed must be
inferred over time. States and images come from Gymnasium's own ``step`` and ``render``. The same
equations are implemented here as `PendulumModel` for filters that require the true model; the
tests compare the two.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.data.cache import cached, installed, write_arrays
from kbf.data.dmlab import pixels
from kbf.data.synthetic import check_lengths, split_at
from kbf.recording import Recording
from kbf.runtime.html_repr import Shown
from kbf.runtime.memory_limit import BYTES_OF_A_PIXEL
from kbf.runtime.optional_dependencies import need
from kbf.ssm import OrientationModel, normal, rotate

# Of Pendulum-v1 in m/s^2, s, rad/s and N m; its mass and length are 1.
GRAVITY = 10.0
DT = 0.05
MAX_SPEED = 8.0
MAX_TORQUE = 2.0

# Pixels along a side of an observation.
IMAGE_SIDE = 32

# Rendered pixels along a side of the block that is averaged for one pixel of an observation.
#
# The pendulum stays within the IMAGE_SIDE * PIXEL_BLOCK = 320 pixels in the middle of the picture.
PIXEL_BLOCK = 10

# To be raised when a change of this file changes the simulated runs: cached ones are made again.
SIMULATION_VERSION = 1


class PendulumModel(NamedTuple):
    """The pendulum under a noisy driver; the observation is its angle + N(0, sigma_x^2).

    A torque u = gain omega (energy - E) + N(0, sigma_u^2), within +-2, is held for ``repeat`` steps
    of the simulator, in each of which omega' = omega + (15 sin theta + 3 u) 0.05, within +-8, and
    theta' = theta + 0.05 omega'. E = omega^2 / 30 + cos theta is the energy: -1 hanging at rest, 1
    standing. The driver swings the pendulum to just below the top; noise may carry it over.

    Attributes:
        sigma_u: standard deviation of the torque, in N m. gain: of the driver. energy: its target.
        repeat: steps of 0.05 s for which a torque is held, and between two observations.
        sigma_x: standard deviation of the shown angle, in radians.
        unit: of the state's speed, in rad/s; with 4 all three components have a similar scale.
    """

    sigma_u: float = 1.0
    gain: float = 0.5
    energy: float = 0.9
    repeat: int = 4
    sigma_x: float = 0.15
    unit: float = 4.0

    def torque(self, y: Float[Tensor, "*b 2"], e: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Returns the driver's torque at y = (theta, omega) for the standard normal number e."""
        theta, omega = y.unbind(-1)
        energy = omega.square() / 30 + theta.cos()
        return (self.gain * omega * (self.energy - energy) + self.sigma_u * e).clamp(
            -MAX_TORQUE, MAX_TORQUE
        )

    def f(self, y: Float[Tensor, "*b 2"], e: Float[Tensor, "*b 1"]) -> Float[Tensor, "*b 2"]:
        """Returns the next (theta, omega) of y; e ~ N(0, 1) is the only noise."""
        u = self.torque(y, e[..., 0])
        theta, omega = y.unbind(-1)
        for _ in range(self.repeat):
            omega = (omega + (1.5 * GRAVITY * theta.sin() + 3 * u) * DT).clamp(
                -MAX_SPEED, MAX_SPEED
            )
            theta = theta + omega * DT
        return torch.stack([theta, omega], -1)

    def chart(self, z: Float[Tensor, "*b 3"]) -> Float[Tensor, "*b 2"]:
        """Returns (theta, omega) of a state, theta in (-pi, pi]."""
        return torch.stack([torch.atan2(z[..., 1], z[..., 0]), self.unit * z[..., 2]], -1)

    def embed(self, y: Float[Tensor, "*b 2"]) -> Float[Tensor, "*b 3"]:
        """Returns the state of (theta, omega)."""
        return torch.stack([y[..., 0].cos(), y[..., 0].sin(), y[..., 1] / self.unit], -1)

    def move(
        self, z: Float[Tensor, "*b 3"], generator: Generator | None = None
    ) -> Float[Tensor, "*b 3"]:
        """Draws z' given z."""
        return self.embed(self.f(self.chart(z), normal(z[..., :1], generator)))

    def observe(
        self, z: Float[Tensor, "*b 3"], generator: Generator | None = None
    ) -> Float[Tensor, "*b 2"]:
        """Draws the observed angle, as (cos, sin)."""
        return rotate(z[..., :2], self.sigma_x * normal(z[..., 0], generator))

    def log_likelihood(
        self, x: Float[Tensor, "*b 2"], z: Float[Tensor, "*c 3"]
    ) -> Float[Tensor, "*e"]:
        """Returns the log density of the wrapped normal distribution."""
        return OrientationModel(sigma_x=self.sigma_x).log_likelihood(x, z[..., :2])


class Run(NamedTuple):
    """A run of the simulator: ``T`` torques of the driver.

    Attributes:
        y: ``T 2`` float64, theta (not wrapped) and omega in rad/s, after each torque.
        shown: ``T`` float64, the observed angle.
        frames: ``T 3 32 32`` uint8, without pixel noise.
    """

    y: Tensor
    shown: Tensor
    frames: Tensor


class Pendulum(Shown):
    """One run of Gymnasium's Pendulum-v1: ``n_train`` training steps, then ``n_test`` test steps.

    It starts at Gymnasium's ``reset(seed=seed)``. Each step moves the state and then observes it:
    the middle of the picture that ``render`` draws at the angle theta + N(0, sigma_x^2), in 32 x 32
    pixels with noise on each, clipped to uint8. The arrow of the torque is not drawn, since the
    torque is to be inferred. For one seed, the training part for a smaller `n_train` is the
    beginning of that for a larger one.

    Attributes:
        train: a list of one recording, states ``T 3`` float64, observations ``T 3 32 32`` uint8.
            test: likewise.
        problem: the true model, whose observation is the observed angle as (cos, sin).
        decoded: the test recording with these angles in place of the images, for the floor.
        renderer: name and version of the simulator.
    """

    @staticmethod
    def memory_needed(n_train: int = 0, n_test: int = 400, **_: Any) -> int:
        """Returns the bytes of the images at most, for data sets that files describe."""
        return BYTES_OF_A_PIXEL * (n_train + n_test) * 3 * 32 * 32

    def __init__(
        self,
        n_train: int,
        n_test: int = 400,
        seed: int = 0,
        *,
        problem: PendulumModel | None = None,
        pixel_noise: float = 0.1,
    ) -> None:
        """Simulate and render the run, or load it from the cache.

        Args:
            n_train: number of training steps.
            n_test: number of test steps.
            seed: of the start, the driver and the noise.
            problem: driver and camera; None for the defaults.
            pixel_noise: standard deviation, of values in [0, 1].

        Raises:
            ValueError: fewer than two training steps or no test step, or Gymnasium or pygame are
                not installed.
        """
        check_lengths("image", n_train, n_test)
        self.problem: PendulumModel = problem or PendulumModel()
        run = kept_run(self.problem, n_train + n_test, seed)
        states, obs = self.problem.embed(run.y), noisy(run.frames, pixel_noise, seed)
        angle = torch.stack([run.shown.cos(), run.shown.sin()], -1)
        self.train, self.test = split_at(n_train, states, obs)
        self.decoded: list[Recording] = split_at(n_train, states, angle)[1]
        self.renderer: str = f"Gymnasium {installed('gymnasium')}, Pendulum-v1"


def simulate_run(
    model: PendulumModel, steps: int, seed: int, progress: Callable[[int], None] | None = None
) -> Run:
    """Runs the simulator under the driver of ``model`` and renders it after each torque.

    Args:
        model: driver and camera.
        steps: number of torques.
        seed: of Gymnasium's reset and of the noise.
        progress: called with the number of finished steps.

    Raises:
        ValueError: Gymnasium or pygame are not installed.
    """
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # no screen is needed
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    need("pygame", "examples", "the pendulum")  # Gymnasium imports it when it renders
    gymnasium = need("gymnasium", "examples", "the pendulum")
    env = gymnasium.make(
        "Pendulum-v1", render_mode="rgb_array", max_episode_steps=-1, disable_env_checker=True
    )
    env.reset(seed=seed)
    generator = Generator().manual_seed(seed)
    y, shown, frames = [], [], []
    for t in range(steps):
        e = torch.randn(2, dtype=torch.float64, generator=generator)
        u = model.torque(torch.from_numpy(body(env).state.copy()), e[0])
        for _ in range(model.repeat):
            env.step(u[None].numpy())
        y.append(body(env).state.copy())
        shown.append(y[-1][0] + model.sigma_x * float(e[1]))
        frames.append(photograph(env, shown[-1]))
        if progress is not None:
            progress(t + 1)
    env.close()
    return Run(*(torch.from_numpy(np.stack(values)) for values in (y, shown, frames)))


def body(env: Any) -> Any:
    """Returns the simulator inside its wrappers; its ``state`` is (theta, omega) in float64."""
    return env.unwrapped


def photograph(env: Any, angle: float) -> np.ndarray:
    """Returns the picture ``3 32 32`` uint8 that Gymnasium renders of the pendulum at an angle.

    The state of the simulator is not changed.
    """
    pendulum = body(env)
    state, torque = pendulum.state, pendulum.last_u
    pendulum.state, pendulum.last_u = np.array([angle, state[1]]), None  # None: no arrow
    picture = env.render()
    pendulum.state, pendulum.last_u = state, torque
    edge = (len(picture) - IMAGE_SIDE * PIXEL_BLOCK) // 2
    middle = picture[edge : edge + IMAGE_SIDE * PIXEL_BLOCK, edge : edge + IMAGE_SIDE * PIXEL_BLOCK]
    means = middle.reshape(IMAGE_SIDE, PIXEL_BLOCK, IMAGE_SIDE, PIXEL_BLOCK, 3).mean((1, 3))
    return means.round().astype(np.uint8).transpose(2, 0, 1)


def noisy(frames: Tensor, pixel_noise: float, seed: int) -> Tensor:
    """Returns the pictures plus N(0, pixel_noise^2) on each value in [0, 1], clipped to uint8."""
    spoilt = frames + 255 * pixel_noise * pixels(frames.shape, seed)
    return spoilt.round().clamp(0, 255).to(torch.uint8)


def kept_run(model: PendulumModel, steps: int, seed: int) -> Run:
    """Returns `simulate_run` for these settings, from the cache if it is there."""
    packages = [installed(name) for name in ("gymnasium", "pygame-ce", "pygame")]
    return cached(
        "pendulum",
        [SIMULATION_VERSION, model._asdict(), steps, seed, *packages],
        load_run,
        lambda: simulate_run(model, steps, seed),
        lambda path, run: write_arrays(path, {k: v.numpy() for k, v in run._asdict().items()}),
    )


def load_run(path: Path) -> Run:
    """Reads a run that `kept_run` wrote."""
    with np.load(path, allow_pickle=False) as stored:
        return Run(*(torch.from_numpy(stored[name]) for name in Run._fields))


def write_recordings(
    path: str | os.PathLike[str],
    model: PendulumModel,
    runs: list[Run],
    seeds: list[int],
    pixel_noise: float,
) -> None:
    """Writes runs as a file of recordings that ``data=own`` reads.

    ``states`` ``n 3`` float64: (cos theta, sin theta, omega) with the speed in rad/s;
    ``observations`` ``n 3 32 32`` uint8; ``recording`` ``n``: the seed of the run that a step
    belongs to.
    """
    states = [model._replace(unit=1.0).embed(run.y) for run in runs]
    obs = [noisy(run.frames, pixel_noise, seed) for run, seed in zip(runs, seeds, strict=True)]
    ids = np.repeat(np.array(seeds), [len(run.y) for run in runs])
    arrays = {"states": torch.cat(states).numpy(), "observations": torch.cat(obs).numpy()}
    write_arrays(path, {**arrays, "recording": ids})

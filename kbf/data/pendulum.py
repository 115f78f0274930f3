"""A simulator that its field knows: Gymnasium's Pendulum-v1, driven by a noisy torque and seen as rendered images.

The state is z = (cos theta, sin theta, omega / unit): theta = 0 is upright and grows
counter-clockwise, omega = d theta / dt. An image shows the angle alone, so that the speed must be
inferred over time. States and images come from Gymnasium's own ``step`` and ``render``; the same
equations, written here for the filters that know the true model, are checked against it in the
tests.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.data.dmlab import installed, pixels
from kbf.data.download import cache_dir
from kbf.data.synthetic import check_lengths
from kbf.recording import Recording
from kbf.runtime.atomic_files import replacing
from kbf.runtime.html_repr import Shown
from kbf.runtime.optional_dependencies import need
from kbf.ssm import OrientationModel, normal, rotate

GRAVITY, DT, MAX_SPEED, MAX_TORQUE = 10.0, 0.05, 8.0, 2.0
"""Of Pendulum-v1; its mass and length are 1."""
IMAGE_SIDE, PIXEL_BLOCK = 32, 10
"""Pixels along a side of an observation, each the mean over so many rendered ones; the pendulum stays within them."""


class PendulumModel(NamedTuple):
    """The pendulum under its noisy driver, seen as its angle + N(0, sigma_x^2).

    A torque u = gain omega (energy - E) + N(0, sigma_u^2), within +-2, is held for ``repeat`` steps
    of the simulator, in each of which omega' = omega + (15 sin theta + 3 u) 0.05, within +-8, and
    theta' = theta + 0.05 omega'. E = omega^2 / 30 + cos theta is the energy: -1 hanging at rest, 1
    standing. The driver swings the pendulum to just below the top; noise carries it over or not.

    Attributes:
        sigma_u: standard deviation of the torque, in N m. gain: of the driver. energy: where to.
        repeat: steps of 0.05 s that a torque is held, and from one observation to the next.
        sigma_x: standard deviation of the shown angle, in radians.
        unit: of the state's speed, in rad/s: with 4 all three components are of one size.
    """

    sigma_u: float = 1.0
    gain: float = 0.5
    energy: float = 0.9
    repeat: int = 4
    sigma_x: float = 0.15
    unit: float = 4.0

    def torque(self, y: Float[Tensor, "*b 2"], e: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """What the driver does at y = (theta, omega), with the standard normal number e."""
        theta, omega = y.unbind(-1)
        energy = omega.square() / 30 + theta.cos()
        return (self.gain * omega * (self.energy - energy) + self.sigma_u * e).clamp(
            -MAX_TORQUE, MAX_TORQUE
        )

    def f(self, y: Float[Tensor, "*b 2"], e: Float[Tensor, "*b 1"]) -> Float[Tensor, "*b 2"]:
        """The move of y = (theta, omega), whose only noise is e ~ N(0, 1)."""
        u = self.torque(y, e[..., 0])
        theta, omega = y.unbind(-1)
        for _ in range(self.repeat):
            omega = (omega + (1.5 * GRAVITY * theta.sin() + 3 * u) * DT).clamp(
                -MAX_SPEED, MAX_SPEED
            )
            theta = theta + omega * DT
        return torch.stack([theta, omega], -1)

    def chart(self, z: Float[Tensor, "*b 3"]) -> Float[Tensor, "*b 2"]:
        """(theta, omega) of a state, theta in (-pi, pi]."""
        return torch.stack([torch.atan2(z[..., 1], z[..., 0]), self.unit * z[..., 2]], -1)

    def embed(self, y: Float[Tensor, "*b 2"]) -> Float[Tensor, "*b 3"]:
        """The state of (theta, omega)."""
        return torch.stack([y[..., 0].cos(), y[..., 0].sin(), y[..., 1] / self.unit], -1)

    def move(
        self, z: Float[Tensor, "*b 3"], generator: Generator | None = None
    ) -> Float[Tensor, "*b 3"]:
        """Draw z' given z."""
        return self.embed(self.f(self.chart(z), normal(z[..., :1], generator)))

    def observe(
        self, z: Float[Tensor, "*b 3"], generator: Generator | None = None
    ) -> Float[Tensor, "*b 2"]:
        """Draw the shown angle, as (cos, sin)."""
        return rotate(z[..., :2], self.sigma_x * normal(z[..., 0], generator))

    def log_likelihood(
        self, x: Float[Tensor, "*b 2"], z: Float[Tensor, "*c 3"]
    ) -> Float[Tensor, "*e"]:
        """Log density of the wrapped normal."""
        return OrientationModel(sigma_x=self.sigma_x).log_likelihood(x, z[..., :2])


class Run(NamedTuple):
    """A run of the simulator: ``T`` decisions of the driver.

    Attributes:
        y: ``T 2`` float64, theta (not wrapped) and omega in rad/s, after each decision.
        shown: ``T`` float64, the angle that the camera shows.
        frames: ``T 3 32 32`` uint8, without pixel noise.
    """

    y: Tensor
    shown: Tensor
    frames: Tensor


class Pendulum(Shown):
    """One run of Gymnasium's Pendulum-v1: its first ``n_train`` steps to learn from, the ``n_test`` steps after them as the test.

    It starts as Gymnasium's ``reset(seed=seed)`` has it, moves, and is then shown: the middle of
    the picture that ``render`` draws of it at the angle theta + N(0, sigma_x^2), in 32 x 32 pixels
    with noise on each, clipped to uint8. The arrow of the torque is left out: it would tell what
    the filters are to find out. With one seed, a longer training part begins with the shorter.

    Attributes:
        train: a list of one sequence, states ``T 3`` float64, observations ``T 3 32 32`` uint8.
            test: likewise.
        problem: the true model, whose observation is the shown angle as (cos, sin).
        decoded: the test sequence with these in place of the images, for the floor.
        renderer: who simulated and rendered.
    """

    def __init__(
        self,
        n_train: int,
        n_test: int = 400,
        seed: int = 0,
        *,
        problem: PendulumModel | None = None,
        pixel_noise: float = 0.1,
    ) -> None:
        """Simulate and render, or take the run from the cache.

        Args:
            n_train: steps to learn from.
            n_test: steps to score on.
            seed: of the start, the driver and the noises.
            problem: driver and camera; None for the defaults.
            pixel_noise: standard deviation, of numbers in [0, 1].

        Raises:
            ValueError: fewer than two training steps or no test step, or Gymnasium or pygame are
                not installed.
        """
        check_lengths("image", n_train, n_test)
        self.problem: PendulumModel = problem or PendulumModel()
        run = kept_run(self.problem, n_train + n_test, seed)
        states, obs = self.problem.embed(run.y), noisy(run.frames, pixel_noise, seed)
        angle = torch.stack([run.shown.cos(), run.shown.sin()], -1)
        self.train: list[Recording] = [Recording(states[:n_train], obs[:n_train])]
        self.test: list[Recording] = [Recording(states[n_train:], obs[n_train:])]
        self.decoded: list[Recording] = [Recording(states[n_train:], angle[n_train:])]
        self.renderer: str = f"Gymnasium {installed('gymnasium')}, Pendulum-v1"


def simulate_run(
    model: PendulumModel, steps: int, seed: int, progress: Callable[[int], None] | None = None
) -> Run:
    """Run the simulator under the driver of ``model``, and photograph it after each decision.

    Args:
        model: driver and camera.
        steps: decisions.
        seed: of Gymnasium's reset, and of the noises.
        progress: called with the number of steps that are done.

    Raises:
        ValueError: Gymnasium or pygame are not installed.
    """
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # no screen is needed
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    need("pygame", "examples", "the pendulum")  # Gymnasium looks for it when it renders
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
    """The simulator behind its wrappers: its ``state`` is (theta, omega) in float64."""
    return env.unwrapped


def photograph(env: Any, angle: float) -> np.ndarray:
    """The picture ``3 32 32`` uint8 that Gymnasium renders of the pendulum at another angle; the simulator is left as it was."""
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
    """The pictures with N(0, pixel_noise^2) on each number in [0, 1], clipped to uint8 again."""
    return (
        (frames + 255 * pixel_noise * pixels(frames.shape, seed))
        .round()
        .clamp(0, 255)
        .to(torch.uint8)
    )


def kept_run(model: PendulumModel, steps: int, seed: int) -> Run:
    """`simulate_run`, once: the run is kept in the cache under a hash of all that it depends on, and taken from there later."""
    source = Path(__file__).read_text(encoding="utf-8")
    key = json.dumps(
        [
            model._asdict(),
            steps,
            seed,
            source,
            installed("gymnasium"),
            installed("pygame-ce"),
            installed("pygame"),
        ]
    )
    path = cache_dir() / f"pendulum-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npz"
    try:
        with np.load(path, allow_pickle=False) as stored:
            return Run(*(torch.from_numpy(stored[name]) for name in Run._fields))
    except Exception:  # not yet there; or damaged, and what that raises has no common class
        pass
    run = simulate_run(model, steps, seed)
    try:
        write_arrays(path, {name: values.numpy() for name, values in run._asdict().items()})
    except OSError as error:
        warnings.warn(
            f"the simulated run cannot be kept ({error}): name a writable folder in KBF_CACHE",
            stacklevel=2,
        )
    return run


def write_arrays(path: str | os.PathLike[str], arrays: dict[str, Any]) -> None:
    """Write arrays as a compressed npz in one step."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)


def write_recordings(
    path: str | os.PathLike[str],
    model: PendulumModel,
    runs: list[Run],
    seeds: list[int],
    pixel_noise: float,
) -> None:
    """Write runs as a file of recordings that ``data=own`` reads.

    ``states`` ``n 3`` float64: (cos theta, sin theta, omega) with the speed in rad/s;
    ``observations`` ``n 3 32 32`` uint8; ``sequence`` ``n``: the seed of the run that a step
    belongs to.
    """
    states = [model._replace(unit=1.0).embed(run.y) for run in runs]
    obs = [noisy(run.frames, pixel_noise, seed) for run, seed in zip(runs, seeds, strict=True)]
    ids = np.repeat(np.array(seeds), [len(run.y) for run in runs])
    write_arrays(
        path,
        {
            "states": torch.cat(states).numpy(),
            "observations": torch.cat(obs).numpy(),
            "recording": ids,
        },
    )

"""The DeepMind Lab problem of Xu et al. (2022): a turning heading, observed as views in a maze."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.data.cache import cached, installed
from kbf.data.frames import (
    Frames,
    as_observations,
    check_frames,
    nearest,
    read_frames,
    write_frames,
)
from kbf.data.synthetic import check_lengths, split_at
from kbf.recording import Recording
from kbf.runtime.html_repr import Shown
from kbf.runtime.memory_limit import BYTES_OF_A_PIXEL
from kbf.ssm import OrientationModel, simulate

# Views of the table that is rendered if no frames file is given: one every 0.2 degrees.
VIEWS = 1800

# To be raised when a change of `kbf.data.render` changes pixels: cached views are then made again.
RENDERER_VERSION = 1


class OrientationImages(Shown):
    """theta' = theta + turn + N(0, sigma_z^2); z = (cos, sin)(theta); x: the view at theta + noise.

    The view is that at theta + N(0, sigma_x^2). One trajectory from theta = 0: ``n_train`` training
    steps, followed by ``n_test`` test steps. Each step moves the state and then observes it. For
    one seed, the training part for a smaller `n_train` is the beginning of that for a larger one.

    Attributes:
        train: a list of one recording, states ``T 2`` float64, observations ``T 3 h w`` float32: in
            [0, 1], plus pixel noise.
        test: a list of one recording.
        problem: the true model, whose observation is the noisy heading as (cos, sin).
        decoded: the test recording with these headings in place of the images, for the floor.
        renderer: a description of what rendered the views.

    References: Xu et al. (2022), section 6.3.
    """

    @staticmethod
    def memory_needed(
        n_train: int = 0, n_test: int = 200, size: tuple[int, int] = (36, 48), **_: Any
    ) -> int:
        """Returns the bytes of the images at most, for data sets that files describe."""
        return BYTES_OF_A_PIXEL * (n_train + n_test) * 3 * math.prod(size)

    def __init__(
        self,
        n_train: int,
        n_test: int = 200,
        seed: int = 0,
        *,
        frames: str | os.PathLike[str] | None = None,
        renderer: str = "maze",
        level: str | None = None,
        render_seed: int = 0,
        size: tuple[int, int] = (36, 48),
        turn: float = 0.4,
        sigma_z: float = 0.2,
        sigma_x: float = 0.2,
        pixel_noise: float = 0.1,
    ) -> None:
        """Simulate the headings and look up their views.

        Args:
            n_train: number of training steps.
            n_test: number of test steps.
            seed: of the headings and the noise.
            frames: a frames file; None for views of ``renderer``, which are rendered once and kept
                in the cache (`kbf.data.cache.cache_dir`).
            renderer: a renderer of `kbf.data.render` ("maze", "vizdoom").
            level: its scene; None for its default. render_seed: of the scene.
            size: (height, width) of the observations.
            turn: radians a step. sigma_z, sigma_x: radians. pixel_noise: standard deviation; noisy
                pixels may leave [0, 1].

        Raises:
            ValueError: fewer than two training steps or no test step, or frames that are not a full
                turn.
            FileNotFoundError: no such frames file.
        """
        check_lengths("image", n_train, n_test)
        height, width = size
        if frames is None:
            table = embedded(renderer, level, render_seed, (2 * height, 2 * width))
        else:
            table = checked(Path(frames).expanduser())
        self.renderer: str = described(table.about, frames)
        self.problem: OrientationModel = OrientationModel(turn, sigma_z, sigma_x)
        states, headings, *_ = simulate(
            self.problem,
            torch.tensor([1.0, 0.0], dtype=torch.float64),
            n_train + n_test,
            Generator().manual_seed(seed),
        )
        shown, which = nearest(
            table.yaw_degrees, torch.atan2(headings[:, 1], headings[:, 0])
        ).unique(return_inverse=True)
        views = as_observations(table.images[shown], (height, width))[which]
        self.train, self.test = split_at(
            n_train, states, views + pixel_noise * pixels(views.shape, seed)
        )
        self.decoded: list[Recording] = split_at(n_train, states, headings)[1]


def pixels(shape: torch.Size, seed: int) -> Float[Tensor, "T *x"]:
    """Returns standard normal numbers; those of a step do not depend on the number of steps.

    Their random stream is not that of `simulate` with the same seed.
    """
    own = int(torch.randint(2**32, (), generator=Generator().manual_seed(seed)))
    generator = Generator().manual_seed(own)
    return torch.stack([torch.randn(shape[1:], generator=generator) for _ in range(shape[0])])


def checked(path: Path) -> Frames:
    """Reads a frames file and checks that it is a full turn; errors name the file."""
    table = read_frames(path)
    try:
        check_frames(table)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return table


def described(about: dict[str, Any], path: str | os.PathLike[str] | None) -> str:
    """Returns renderer, level and seed as text, and the file's name if there is a file."""
    words = [str(about.get("renderer") or "unnamed renderer")]
    words += [f"{key} {about[key]}" for key in ("level", "seed") if about.get(key) is not None]
    return ", ".join(words + ([f"frames of {Path(path).name}"] if path is not None else []))


def embedded(renderer: str, level: str | None, seed: int, size: tuple[int, int]) -> Frames:
    """Returns `VIEWS` views of a renderer of `kbf.data.render`, from the cache if possible."""
    if renderer == "dmlab":
        raise ValueError(
            "the views of DeepMind Lab come from a file: "
            "'kbf data render dmlab out=FILE', then data.frames=FILE"
        )
    packages = installed("labmaze"), installed("vizdoom")

    def make() -> Frames:
        table = render_turn(renderer, VIEWS, level, seed, size)
        check_frames(table)
        return table

    return cached(
        renderer,
        [RENDERER_VERSION, renderer, level, seed, size, VIEWS, *packages],
        checked,
        make,
        write_frames,
    )


def render_turn(
    renderer: str,
    views: int,
    level: str | None,
    seed: int,
    size: tuple[int, int],
    progress: Callable[[int], None] | None = None,
) -> Frames:
    """Renders one turn in ``views`` even steps with a renderer of `kbf.data.render`.

    Raises:
        ValueError: unknown renderer or level, or a required package is not installed.
    """
    import kbf.data.render

    yaw = torch.arange(views, dtype=torch.float64) * (360 / views) - 180
    try:
        rendered = kbf.data.render.render(
            renderer, yaw, level=level, seed=seed, size=size, progress=progress
        )
    except ModuleNotFoundError as error:
        raise ValueError(f"renderer {renderer}: {error}") from error
    return rendered._replace(about={**rendered.about, "size": list(size)})

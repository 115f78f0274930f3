"""The DeepMind Lab problem of Xu et al.: a heading that turns, seen as the views at a place in a maze."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.data.download import cache_dir
from kbf.data.frames import (
    Frames,
    as_observations,
    check_frames,
    nearest,
    read_frames,
    write_frames,
)
from kbf.data.synthetic import check_lengths
from kbf.recording import Recording
from kbf.runtime.html_repr import Shown
from kbf.ssm import OrientationModel, simulate

VIEWS = 1800
"""Views of the table that is rendered where no frames file is given: one every 0.2 degrees."""


class OrientationImages(Shown):
    """theta' = theta + turn + N(0, sigma_z^2) from theta = 0; z = (cos, sin)(theta); x = the view at theta + N(0, sigma_x^2).

    One trajectory: its first ``n_train`` steps to learn from, the ``n_test`` steps after them as
    the test. It moves, then observes. With one seed, a longer training part begins with the
    shorter.

    Attributes:
        train: a list of one sequence, states ``T 2`` float64, observations ``T 3 h w`` float32: in
            [0, 1], plus pixel noise.
        test: a list of one sequence.
        problem: the true model, whose observation is the noisy heading as (cos, sin).
        decoded: the test sequence with these headings in place of the images, for the floor.
        renderer: what made the views, in words.

    References: Xu et al. (2022), section 6.3.
    """

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
        """Draw the data.

        Args:
            n_train: steps to learn from.
            n_test: steps to score on.
            seed: of the headings and the noise.
            frames: a frames file; None for views of ``renderer``, which are rendered once and kept
                (see `cache_dir`).
            renderer: a renderer of `kbf.data.render` ("maze", "vizdoom"). level: its scene; None
                for its own choice. render_seed:
            of
                the scene.
            size: (height, width) of the observations.
            turn: radians a step. sigma_z, sigma_x: radians. pixel_noise: standard deviation; pixels
                are not clipped.

        Raises:
            ValueError: fewer than two training steps or no test step, or frames that are no full
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
        start = torch.tensor([1.0, 0.0], dtype=torch.float64)
        states, headings, *_ = simulate(
            self.problem, start, n_train + n_test, Generator().manual_seed(seed)
        )
        shown, which = nearest(
            table.yaw_degrees, torch.atan2(headings[:, 1], headings[:, 0])
        ).unique(return_inverse=True)
        views = as_observations(table.images[shown], (height, width))[which]
        obs = views + pixel_noise * pixels(views.shape, seed)
        self.train: list[Recording] = [Recording(states[:n_train], obs[:n_train])]
        self.test: list[Recording] = [Recording(states[n_train:], obs[n_train:])]
        self.decoded: list[Recording] = [Recording(states[n_train:], headings[n_train:])]


def pixels(shape: torch.Size, seed: int) -> Float[Tensor, "T *x"]:
    """Standard normal numbers, step after step, from a stream of its own: how many steps there are changes none of them."""
    own = int(torch.randint(2**32, (), generator=Generator().manual_seed(seed)))
    generator = Generator().manual_seed(own)
    return torch.stack([torch.randn(shape[1:], generator=generator) for _ in range(shape[0])])


def checked(path: Path) -> Frames:
    """Read a frames file and check that it is a full turn; its name is in the error."""
    table = read_frames(path)
    try:
        check_frames(table)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return table


def described(about: dict[str, Any], path: str | os.PathLike[str] | None) -> str:
    """Renderer, level and seed in words; the name of a file that does not tell them."""
    words = [str(about["renderer"])] if about.get("renderer") else ["unnamed renderer"]
    words += [f"{key} {about[key]}" for key in ("level", "seed") if about.get(key) is not None]
    return ", ".join(words + ([f"frames of {Path(path).name}"] if path is not None else []))


def embedded(renderer: str, level: str | None, seed: int, size: tuple[int, int]) -> Frames:
    """Views of a renderer of `kbf.data.render`, `VIEWS` of them, rendered the first time and kept in the cache.

    The name of the file holds a hash of everything that the views depend on. Processes that come at
    once each render them; the last one's file stays.
    """
    import kbf.data.render

    if renderer == "dmlab":
        raise ValueError(
            "the views of DeepMind Lab come from a file: 'kbf data render dmlab out=FILE', then data.frames=FILE"
        )
    sources = [
        path.read_text(encoding="utf-8")
        for path in sorted(Path(kbf.data.render.__path__[0]).glob("*.py"))
    ]
    key = json.dumps(
        [renderer, level, seed, size, VIEWS, sources, installed("labmaze"), installed("vizdoom")]
    )
    path = cache_dir() / f"{renderer}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npz"
    try:
        return checked(path)
    except (FileNotFoundError, ValueError):  # not yet there, or damaged
        pass
    table = render_turn(renderer, VIEWS, level, seed, size)
    check_frames(table)
    try:
        write_frames(path, table)
    except OSError as error:
        warnings.warn(
            f"the rendered views cannot be kept ({error}): name a writable folder in KBF_CACHE",
            stacklevel=2,
        )
    return table


def render_turn(
    renderer: str,
    views: int,
    level: str | None,
    seed: int,
    size: tuple[int, int],
    progress: Callable[[int], None] | None = None,
) -> Frames:
    """One turn in ``views`` even steps, by a renderer of `kbf.data.render`.

    Raises:
        ValueError: there is no such renderer or level, or it needs a package that is not installed.
    """
    import kbf.data.render

    yaw = torch.arange(views, dtype=torch.float64) * (360 / views) - 180
    try:
        rendered = kbf.data.render.render(
            renderer, yaw, level=level, seed=seed, size=size, progress=progress
        )
    except ModuleNotFoundError as error:
        raise ValueError(f"renderer {renderer}: {error}") from error
    return Frames(rendered.images, rendered.yaw_degrees, {**rendered.about, "size": list(size)})


def installed(package: str) -> str | None:
    """The version of a package that is installed, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

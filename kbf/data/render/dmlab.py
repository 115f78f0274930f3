"""Views of the real DeepMind Lab: an agent that stands at its spawn point and turns, with the yaw read back from the engine."""

from __future__ import annotations

import importlib
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from kbf.runtime.atomic_files import replacing

LEVEL = "nav_maze_static_01"
LOOK = 2
"""Units of the look action in each frame, unless others are asked for; positive ones turn to the right."""
MOST_LOOK = 47
"""With more of them views would be more than 5 degrees apart (`kbf.data.frames.check_frames`)."""
STEP = 0.1056
"""Degrees that one unit turns in one frame, at 60 frames a second."""
SETTLE = 60
"""Frames without action before the first view: a second, after which the agent stands on the ground and every run sees the same."""
EVERY = 300
"""Views before the first writing of the part file; it is written again when three times as much is there."""
VIEW = "DEBUG.CAMERA_INTERLEAVED.PLAYER_VIEW_NO_RETICLE"  # without the heads-up display
ROTATION = "DEBUG.POS.ROT"  # pitch, yaw, roll in degrees
POSITION = "DEBUG.POS.TRANS"
STAY = np.zeros(7, dtype=np.intc)
SEEDS = range(-(2**31), 2**31)
"""What fits a C int."""
MISSING = (
    "the Python module deepmind_lab is not installed, and no wheel of it is published. Build one: with Bazel from the sources at "
    "github.com/google-deepmind/lab (python/pip_package there), or with the package dmlab-gym (Python 3.13; 'dmlab-gym build' "
    "needs Docker or Podman). Then 'pip install' the wheel, or 'docker build --build-context lab=DIR' with DIR holding it. "
    "Without it, data=dmlab works with the embedded renderer (data.renderer=maze)"
)


class Views(NamedTuple):
    """Images ``N H W 3`` uint8, yaw ``N`` float32 in [-180, 180) and ascending, what made them, position ``N 3`` float64."""

    images: Tensor
    yaw_degrees: Tensor
    about: dict[str, Any]
    position: Tensor


class View(NamedTuple):
    """One observation: image ``H W 3`` uint8, yaw in degrees, position ``3``."""

    image: np.ndarray
    yaw: float
    position: np.ndarray


@runtime_checkable
class Engine(Protocol):
    """What is used of ``deepmind_lab.Lab``."""

    def reset(self, *, seed: int) -> object:
        """Begin an episode at the spawn point."""
        ...

    def step(self, action: np.ndarray, num_steps: int = 1) -> object:
        """Advance by frames."""
        ...

    def is_running(self) -> bool:
        """False once the episode is over."""
        ...

    def observations(self) -> dict[str, Any]:
        """What was asked for when the engine was made, all of one moment."""
        ...

    def close(self) -> object:
        """Release the engine."""
        ...


def turn_round(
    part: str | os.PathLike[str],
    *,
    level: str | None = None,
    seed: int = 0,
    size: tuple[int, int] = (72, 96),
    turns: int = 1,
    look: int = LOOK,
    progress: Callable[[int], object] | None = None,
) -> Views:
    """Turn an agent through full turns, and look.

    What was seen is kept in the file ``part``, every `EVERY` views and when the work ends, by an
    error and Ctrl-C too. With a part of the same level, seed, size and look, the engine repeats the
    same actions and goes on behind its last view; if that view does not come out the same, the work
    begins again with a new engine. The caller removes the part; after a failure that would come
    again it is removed here.

    Args:
        part: file for what is unfinished.
        level: level script; None for `LEVEL`. Levels of DMLab-30 need their folder:
            ``contributed/dmlab30/NAME``.
        seed: of the engine, a C int.
        size: (height, width) of the images.
        turns: full turns; the views of one are 0.21 degrees apart, those of the next lie between
            them.
        look: units of the look action in each frame, 0.1056 degrees each: more of them for levels
            with short episodes.
        progress: called with the number of views that are done.

    Returns:
        The views, one for each yaw.

    Raises:
        ValueError: the module is missing or does not load, the level cannot be opened or loaded,
            does not let the agent turn, or its episode is too short; or a seed, look, size or
            number of turns that cannot be.
    """
    if turns < 1 or min(size) < 1:
        raise ValueError(
            f"turns and size must be at least 1, got turns {turns} and size {tuple(size)}"
        )
    if seed not in SEEDS:
        raise ValueError(f"DeepMind Lab takes seeds from {SEEDS[0]} to {SEEDS[-1]}, got {seed}")
    if not 1 <= look <= MOST_LOOK:
        raise ValueError(f"look must be from 1 to {MOST_LOOK} units a frame, got {look}")
    part, level = Path(part), level or LEVEL
    about = {
        "renderer": "DeepMind Lab",
        "level": level,
        "seed": seed,
        "size": list(size),
        "look": look,
    }
    engine = open_engine(level, size)
    try:
        views = read_part(part, about)
        stream = look_around(engine, level, seed, look, skip=max(0, len(views) - 1))
        if views and not same(next(stream), views[-1]):
            engine.close()  # reset alone would not bring the same views as a fresh run
            engine = open_engine(level, size)
            views, stream = [], look_around(engine, level, seed, look)
        known, angle, lasting = len(views), way(views)[-1], False
        try:
            while angle < 360 * turns:
                view = next(stream)
                angle += abs(wrapped(view.yaw - views[-1].yaw)) if views else 0.0
                views.append(view)
                if len(views) > 20 and angle < 1:
                    raise ValueError(
                        f"level {level} does not let the agent turn: its yaw stays at {view.yaw:.2f} degrees"
                    )
                if len(views) - known >= max(EVERY, 2 * known):
                    write_part(part, views, about)
                    known = len(views)
                if progress is not None:
                    progress(len(views))
        except ValueError:
            lasting = True
            part.unlink(missing_ok=True)
            raise
        finally:
            if len(views) > known and not lasting:
                write_part(part, views, about)
    finally:
        engine.close()
    return arranged(views, turns, about)


def expected_views(turns: int, look: int = LOOK) -> int:
    """About how many views `turn_round` will see."""
    return math.ceil(360 * turns / (STEP * look))


def look_around(
    engine: Engine, level: str, seed: int, look: int = LOOK, skip: int = 0
) -> Iterator[View]:
    """Views of an agent that turns without end, from the ``skip``-th on: those before it are passed without looking.

    Raises:
        ValueError: the level cannot be loaded, or its episode ends.
    """
    said: list[str] = []
    try:
        with stderr_of_engine(said):
            engine.reset(seed=seed)
    except Exception as error:
        raise ValueError(
            f"DeepMind Lab does not load level {level!r}: {why(error, said)}"
        ) from error
    for _ in range(SETTLE):
        engine.step(STAY)
    turn, k = np.array([look, 0, 0, 0, 0, 0, 0], dtype=np.intc), 0
    while engine.is_running():
        if k >= skip:
            seen = engine.observations()  # one call: image and yaw of the same moment
            yield View(
                np.array(seen[VIEW]),
                wrapped(float(seen[ROTATION][1])),
                np.array(seen[POSITION], dtype=np.float64),
            )
        engine.step(turn)
        k += 1
    done = k * look * STEP / 360
    faster = math.ceil(look / done) if done else MOST_LOOK + 1
    remedy = (
        f"look={faster} makes one turn"
        if faster <= MOST_LOOK
        else "take a level with longer episodes"
    )
    remedy = f"ask for turns={int(done)}" if done >= 1 else remedy
    raise ValueError(
        f"the episode of level {level} ended after {k} views, {done:.1f} turns: {remedy}"
    )


def arranged(views: list[View], turns: int, about: dict[str, Any]) -> Views:
    """The views of the first ``turns`` turns by ascending yaw; of several with one yaw, the first."""
    kept = [view for view, angle in zip(views, way(views), strict=True) if angle < 360 * turns]
    yaw, first = np.unique(
        np.array([view.yaw for view in kept], dtype=np.float32), return_index=True
    )
    return Views(
        torch.from_numpy(np.stack([kept[k].image for k in first])),
        torch.from_numpy(yaw),
        about,
        torch.from_numpy(np.stack([kept[k].position for k in first])),
    )


def way(views: list[View]) -> list[float]:
    """Degrees from the first view to each, along the way."""
    return list(accumulate((abs(wrapped(b.yaw - a.yaw)) for a, b in pairwise(views)), initial=0.0))


def wrapped(degrees: float) -> float:
    """An angle in [-180, 180)."""
    return (degrees + 180) % 360 - 180


def same(a: View, b: View) -> bool:
    """Whether two views agree in every number."""
    return (
        a.yaw == b.yaw
        and np.array_equal(a.position, b.position)
        and np.array_equal(a.image, b.image)
    )


def write_part(path: Path, views: list[View], about: dict[str, Any]) -> None:
    """Keep views in the order in which they were seen, in one step."""
    values: dict[str, Any] = {
        "images": np.stack([view.image for view in views]),
        "yaw": np.array([view.yaw for view in views]),
        "position": np.stack([view.position for view in views]),
        "about": np.array(json.dumps(about)),
    }
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **values)


def read_part(path: Path, about: dict[str, Any]) -> list[View]:
    """The views of a part file, none if it is absent, damaged, or of another level, seed or size."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            if json.loads(str(stored["about"])) != about:
                return []
            rows = zip(stored["images"], stored["yaw"], stored["position"], strict=True)
            return [View(image, float(yaw), position) for image, yaw, position in rows]
    except (
        Exception
    ):  # what a damaged file raises has no common class; it is only work to be done again
        return []


def open_engine(level: str, size: tuple[int, int]) -> Engine:
    """Start DeepMind Lab in software, which draws the same everywhere.

    Raises:
        ValueError: the module is missing or does not load, or the engine does not start.
    """
    try:
        lab = importlib.import_module("deepmind_lab")
    except ModuleNotFoundError as error:
        if error.name != "deepmind_lab":
            raise ValueError(f"the Python module deepmind_lab does not load: {error}") from error
        raise ValueError(MISSING) from error
    except (ImportError, OSError) as error:
        raise ValueError(
            f"the Python module deepmind_lab does not load: {error}. A wheel of it runs with the version of Python that it was "
            f"built for, whatever its name says (this is {sys.version_info.major}.{sys.version_info.minor}), and needs libosmesa6 "
            "and libsdl2-2.0-0"
        ) from error
    config = {
        "height": str(size[0]),
        "width": str(size[1]),
        "fps": "60",
    }  # the engine takes strings alone
    said: list[str] = []
    try:
        with stderr_of_engine(said):
            return lab.Lab(level, [VIEW, ROTATION, POSITION], config=config, renderer="software")
    except Exception as error:
        raise ValueError(
            f"DeepMind Lab does not start level {level!r} with views of {size[0]} x {size[1]}: {why(error, said)}"
        ) from error


@contextmanager
def stderr_of_engine(said: list[str]) -> Iterator[None]:
    """The lines that the engine, which is no Python, writes to stderr inside of ``with``: only there it says why something fails.

    They go into the list ``said``, and to no terminal.
    """
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            said += filter(None, map(str.strip, file.read().decode(errors="replace").splitlines()))


def why(error: Exception, said: list[str]) -> str:
    """What the engine raised, what it wrote, and what can be done about it."""
    told = " / ".join([str(error), *said[-3:]])
    if any(library in told for library in ("libOSMesa", "libSDL2", "shared object")):
        return f"{told}. It needs two libraries: apt-get install libosmesa6 libsdl2-2.0-0"
    if "compile map" in told and shutil.which("zip") is None:
        return f"{told}. Such levels are packed with the program zip, which is not installed: apt-get install zip"
    return f"{told}. Levels of DMLab-30 need their folder, as in level=contributed/dmlab30/NAME"

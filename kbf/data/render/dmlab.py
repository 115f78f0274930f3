"""Views of the real DeepMind Lab from an agent that turns at its spawn point."""

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
from typing import Any, NamedTuple

import numpy as np
import torch

from kbf.data.frames import Frames
from kbf.runtime.atomic_files import replacing

DEFAULT_LEVEL = "nav_maze_static_01"

# Units of the look action in each frame by default; positive ones turn to the right.
DEFAULT_LOOK = 2

# With more units the views would be more than 5 degrees apart (`kbf.data.frames.check_frames`).
MAX_LOOK = 47

# Degrees that one unit turns in one frame, at 60 frames a second.
DEGREES_PER_UNIT = 0.1056

# Frames without action before the first view: after one second the agent stands on the ground, and
# the views of all runs agree.
SETTLE_FRAMES = 60

# Views before the part file is written first; it is written again when their number has tripled.
VIEWS_BEFORE_FIRST_SAVE = 300

# Without the heads-up display.
VIEW = "DEBUG.CAMERA_INTERLEAVED.PLAYER_VIEW_NO_RETICLE"

# Pitch, yaw, roll in degrees.
ROTATION = "DEBUG.POS.ROT"

POSITION = "DEBUG.POS.TRANS"

STAY = np.zeros(7, dtype=np.intc)

# The range of a C int.
SEEDS = range(-(2**31), 2**31)

MISSING = (
    "the Python module deepmind_lab is not installed, and no wheel of it is published. Build one: "
    "with Bazel from the sources at github.com/google-deepmind/lab (python/pip_package there), or "
    "with the package dmlab-gym (Python 3.13; 'dmlab-gym build' needs Docker or Podman). Then 'pip "
    "install' the wheel, or 'docker build --build-context lab=DIR' with the folder DIR of the "
    "wheel. Without it, data=dmlab works with the embedded renderer (data.renderer=maze)"
)


class View(NamedTuple):
    """One view: image ``H W 3`` uint8, yaw in degrees, position ``3``."""

    image: np.ndarray
    yaw: float
    position: np.ndarray


# ``deepmind_lab.Lab``, whose methods are used: ``reset(seed=...)`` starts an episode at the
# spawn point, ``step(action, num_steps=1)`` advances by frames, ``is_running()`` is False once the
# episode has ended, ``observations()`` returns those named at the construction, all of one moment,
# and ``close()`` releases the engine.
Engine = Any


def turn_round(
    part: str | os.PathLike[str],
    *,
    level: str | None = None,
    seed: int = 0,
    size: tuple[int, int] = (72, 96),
    turns: int = 1,
    look: int = DEFAULT_LOOK,
    progress: Callable[[int], object] | None = None,
) -> Frames:
    """Records the views of an agent that turns through full turns.

    Unfinished views are saved in the file ``part`` (`VIEWS_BEFORE_FIRST_SAVE`), also after an error
    and Ctrl-C. If there is a part of the same level, seed, size and look, the engine repeats the
    same actions and continues after its last view; if that view differs, all views are recorded
    again with a new engine. The caller removes the part; after a permanent failure it is removed
    here.

    Args:
        part: file for unfinished views.
        level: level script; None for `DEFAULT_LEVEL`. Levels of DMLab-30 need their folder:
            ``contributed/dmlab30/NAME``.
        seed: of the engine, a C int.
        size: (height, width) of the images.
        turns: full turns; the views of one are 0.21 degrees apart, those of the next lie between
            them.
        look: units of the look action in each frame, 0.1056 degrees each: more of them suit levels
            with short episodes.
        progress: called with the number of finished views.

    Returns:
        The views, one for each yaw, by ascending yaw in [-180, 180).

    Raises:
        ValueError: the module is missing or does not load, the level cannot be opened or loaded,
            the agent cannot turn in it, or its episode is too short; or an invalid seed, look, size
            or number of turns.
    """
    if turns < 1 or min(size) < 1:
        raise ValueError(
            f"turns and size must be at least 1, got turns {turns} and size {tuple(size)}"
        )
    if seed not in SEEDS:
        raise ValueError(f"DeepMind Lab takes seeds from {SEEDS[0]} to {SEEDS[-1]}, got {seed}")
    if not 1 <= look <= MAX_LOOK:
        raise ValueError(f"look must be from 1 to {MAX_LOOK} units a frame, got {look}")
    part, level = Path(part), level or DEFAULT_LEVEL
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
            engine.close()  # after a mere reset the views differ from those of a new engine
            engine = open_engine(level, size)
            views, stream = [], look_around(engine, level, seed, look)
        saved, angle = len(views), way(views)[-1]
        try:
            while angle < 360 * turns:
                view = next(stream)
                angle += abs(wrapped(view.yaw - views[-1].yaw)) if views else 0.0
                views.append(view)
                if len(views) > 20 and angle < 1:
                    raise ValueError(
                        f"level {level} does not let the agent turn: "
                        f"its yaw stays at {view.yaw:.2f} degrees"
                    )
                if len(views) - saved >= max(VIEWS_BEFORE_FIRST_SAVE, 2 * saved):
                    write_part(part, views, about)
                    saved = len(views)
                if progress is not None:
                    progress(len(views))
        except ValueError:  # permanent: the same views would fail again
            part.unlink(missing_ok=True)
            saved = len(views)
            raise
        finally:
            if len(views) > saved:
                write_part(part, views, about)
    finally:
        engine.close()
    return arranged(views, turns, about)


def expected_views(turns: int, look: int = DEFAULT_LOOK) -> int:
    """Returns the approximate number of views that `turn_round` records."""
    return math.ceil(360 * turns / (DEGREES_PER_UNIT * look))


def look_around(
    engine: Engine, level: str, seed: int, look: int = DEFAULT_LOOK, skip: int = 0
) -> Iterator[View]:
    """Yields the views of an agent that turns on and on, without the first ``skip`` of them.

    Raises:
        ValueError: the level cannot be loaded, or its episode ends.
    """
    with engine_errors(f"DeepMind Lab does not load level {level!r}"):
        engine.reset(seed=seed)
    for _ in range(SETTLE_FRAMES):
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
    done = k * look * DEGREES_PER_UNIT / 360
    faster = math.ceil(look / done) if done else MAX_LOOK + 1
    if done >= 1:
        remedy = f"ask for turns={int(done)}"
    elif faster <= MAX_LOOK:
        remedy = f"look={faster} makes one turn"
    else:
        remedy = "take a level with longer episodes"
    raise ValueError(
        f"the episode of level {level} ended after {k} views, {done:.1f} turns: {remedy}"
    )


def arranged(views: list[View], turns: int, about: dict[str, Any]) -> Frames:
    """Returns the views of the first turns by ascending yaw; of several with one yaw, the first."""
    kept = [view for view, angle in zip(views, way(views), strict=True) if angle < 360 * turns]
    yaw, first = np.unique(
        np.array([view.yaw for view in kept], dtype=np.float32), return_index=True
    )
    return Frames(
        torch.from_numpy(np.stack([kept[k].image for k in first])),
        torch.from_numpy(yaw),
        about,
        torch.from_numpy(np.stack([kept[k].position for k in first])),
    )


def way(views: list[View]) -> list[float]:
    """Returns the degrees turned from the first view to each."""
    return list(accumulate((abs(wrapped(b.yaw - a.yaw)) for a, b in pairwise(views)), initial=0.0))


def wrapped(degrees: float) -> float:
    """Returns the angle in [-180, 180)."""
    return (degrees + 180) % 360 - 180


def same(a: View, b: View) -> bool:
    """Whether two views are equal in every number."""
    return (
        a.yaw == b.yaw
        and np.array_equal(a.position, b.position)
        and np.array_equal(a.image, b.image)
    )


def write_part(path: Path, views: list[View], about: dict[str, Any]) -> None:
    """Writes views in the order of their recording, atomically."""
    values: dict[str, Any] = {
        "images": np.stack([view.image for view in views]),
        "yaw": np.array([view.yaw for view in views]),
        "position": np.stack([view.position for view in views]),
        "about": np.array(json.dumps(about)),
    }
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **values)


def read_part(path: Path, about: dict[str, Any]) -> list[View]:
    """Reads a part file; [] if it is absent, damaged, or of another level, seed or size."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            if json.loads(str(stored["about"])) != about:
                return []
            rows = zip(stored["images"], stored["yaw"], stored["position"], strict=True)
            return [View(image, float(yaw), position) for image, yaw, position in rows]
    except Exception:  # errors of damaged files share no base class; the views are recorded again
        return []


def open_engine(level: str, size: tuple[int, int]) -> Engine:
    """Starts DeepMind Lab with its software renderer, whose pictures do not depend on the machine.

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
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise ValueError(
            f"the Python module deepmind_lab does not load: {error}. A wheel of it runs only with "
            f"the version of Python that it was built for (this is {version}), and needs "
            "libosmesa6 and libsdl2-2.0-0"
        ) from error
    # the engine takes only strings
    config = {"height": str(size[0]), "width": str(size[1]), "fps": "60"}
    views = f"views of {size[0]} x {size[1]}"
    with engine_errors(f"DeepMind Lab does not start level {level!r} with {views}"):
        return lab.Lab(level, [VIEW, ROTATION, POSITION], config=config, renderer="software")


@contextmanager
def engine_errors(problem: str) -> Iterator[None]:
    """Turns exceptions of the engine into ValueErrors with what it wrote to stderr, and a remedy.

    The engine is not written in Python and reports causes of failures only on the file descriptor
    of stderr, which is redirected meanwhile.

    Raises:
        ValueError: ``problem`` and its cause.
    """
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        except Exception as error:
            file.seek(0)
            lines = map(str.strip, file.read().decode(errors="replace").splitlines())
            cause = " / ".join([str(error), *[line for line in lines if line][-3:]])
            raise ValueError(f"{problem}: {cause}. {remedy_for(cause)}") from error
        finally:
            os.dup2(before, 2)
            os.close(before)


def remedy_for(cause: str) -> str:
    """Returns a remedy for a failure of the engine."""
    if any(library in cause for library in ("libOSMesa", "libSDL2", "shared object")):
        return "It needs two libraries: apt-get install libosmesa6 libsdl2-2.0-0"
    if "compile map" in cause and shutil.which("zip") is None:
        return (
            "Such levels are packed with the program zip, which is not installed: "
            "apt-get install zip"
        )
    return "Levels of DMLab-30 need their folder, as in level=contributed/dmlab30/NAME"

"""Recordings from installed packages: a rat's path, a pulse, a watch, and a cart-pole.

They are real data rather than a textbook model: states are hardly Markov, errors are correlated in
time, and the true model is unknown, so that there is no floor. ``pip install "kbf[recordings]"``
installs the packages. Recordings made from their files are kept in the cache
(`kbf.data.cache.cache_dir`) and made again if they are damaged.
"""

import hashlib
import importlib.util
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from kbf.data.cache import cached, installed, show_progress, write_arrays
from kbf.data.files.column_schema import column_schema_of
from kbf.data.windows import cut, take
from kbf.recording import Recording
from kbf.runtime.html_repr import Shown
from kbf.runtime.optional_dependencies import missing, need

# To be raised when a change of this file changes the arrays: cached ones are then made again.
RECIPE_VERSION = 1

# Steps a second of the rat's path.
RAT_HZ = 10

# Simulated place cells.
PLACE_CELLS = 40

# Standard deviation of a place field; the box is 1 wide.
FIELD_WIDTH = 0.12

# Rates of a place cell in the middle of its field and far from it, in spikes a second.
PEAK_RATE = 12.0
REST_RATE = 0.3

# Steps a second of the pulse.
PULSE_HZ = 50

# Frequencies at which beats are searched for.
BEAT_BAND_HZ = (0.7, 3.5)

# 0.4 s, a pulse of 150 a minute.
MIN_STEPS_BETWEEN_BEATS = 20

# Steps of the cart, 0.05 s each.
CART_STEPS = 3000

# Steps of the simulator in each step.
CART_REPEAT = 5


class Arrays(NamedTuple):
    """Recordings: states ``n d``, obs ``n q``, controls ``n k`` (k >= 0), lengths."""

    states: np.ndarray
    obs: np.ndarray
    controls: np.ndarray
    lengths: np.ndarray


class RecordedData(Shown):
    """Recordings of one kind, split in time: a test block and the training part before it.

    Attributes:
        train, test: lists of `Recording`, float64. column_schema: names and kinds of their
            columns.
    """

    def __init__(
        self,
        name: str,
        test: Sequence[float] = (0.8, 1.0),
        n_train: int | None = None,
        seed: int = 0,
        by: str = "step",
    ) -> None:
        """Make the recordings, or load them from the cache, and split them.

        Args:
            name: one of `RECORDED`.
            test: start and end of the test part, as shares of all steps; with ``by="recording"`` of
                all recordings. Rolling splits are (0.5, 0.6), (0.6, 0.7), ...; steps after the test
                part are not used.
            n_train: number of training steps that are used, from the first on; None for all.
            seed: of the simulated parts: spikes, sensor noise, the force on the cart. Recordings
                without simulated parts ignore it.
            by: "step" splits inside recordings, "recording" between them.

        Raises:
            ValueError: an unknown name, a missing or damaged package, or an empty part.
        """
        if name not in RECORDED:
            raise ValueError(f"there is no recording {name!r}; there are {', '.join(RECORDED)}")
        if by not in ("step", "recording"):
            raise ValueError(f"data.by must be step or recording, got {by!r}")
        bounds = tuple(test)
        if len(bounds) != 2 or not 0 < bounds[0] < bounds[1] <= 1:
            raise ValueError(
                "data.test must be two shares such as [0.8, 1.0], the first above 0; "
                f"got {list(bounds)}"
            )
        whole = kept(name, seed)
        lengths = [int(n) for n in whole.lengths]
        edges = [0, *np.cumsum(lengths).tolist()]
        if by == "recording":
            first, last = (edges[round(share * len(lengths))] for share in bounds)
        else:
            first, last = (edges[-1] - round((1 - share) * edges[-1]) for share in bounds)
        if n_train is not None and not 2 <= n_train <= first:
            raise ValueError(
                f"n_train={n_train}: {name} has {first} training steps; "
                "without n_train all of them are used"
            )
        train, test_spans = (
            cut(lengths, bounds_of_part)[0]
            for bounds_of_part in ([0, first if n_train is None else n_train], [first, last])
        )
        if not train or not test_spans:
            raise ValueError(
                f"data.test={list(bounds)} leaves {first} training steps of {name} "
                f"and {last - first} test steps"
            )
        parts = (torch.from_numpy(np.ascontiguousarray(each)).split(lengths) for each in whole[:3])
        recordings = [
            Recording(z, x, controls=u if u.shape[1] else None)
            for z, x, u in zip(*parts, strict=True)
        ]
        self.train, self.test = take(recordings, train), take(recordings, test_spans)
        self.column_schema = (
            column_schema_of(*COLUMNS[name], rotations=[]) if name in COLUMNS else None
        )


def rat(seed: int, progress: Callable[[float], None]) -> Arrays:
    """Makes a rat's path through a box of 1 x 1, observed as spike counts of place cells.

    States are (x, y). The path is measured: ten minutes, interpolated to 10 Hz and smoothed by a
    Gaussian of one step. The 40 cells are simulated: centres c uniform over the box, rate 12
    exp(-|z - c|^2 / (2 0.12^2)) + 0.3 spikes a second, counts in 100 ms from a Poisson
    distribution.

    References: Sargolini et al. (2006) for the path, from the package ratinabox (George et al.,
    2024).
    """
    from scipy.ndimage import gaussian_filter1d

    with np.load(package_file("rat"), allow_pickle=False) as stored:
        time, path = stored["t"], stored["pos"]
    steps = np.arange(time[0], time[-1], 1 / RAT_HZ)
    place = np.stack([np.interp(steps, time, path[:, k]) for k in range(2)], 1)
    place = gaussian_filter1d(place, 1.0, axis=0)
    random = np.random.default_rng(seed)
    centres = random.uniform(size=(PLACE_CELLS, 2))
    square = ((place[:, None] - centres) ** 2).sum(-1)
    rate = PEAK_RATE * np.exp(-square / (2 * FIELD_WIDTH**2)) + REST_RATE
    counts = random.poisson(rate / RAT_HZ).astype(np.float64)
    return Arrays(place, counts, np.zeros((len(place), 0)), np.array([len(place)]))


def pulse(seed: int, progress: Callable[[float], None]) -> Arrays:
    """Makes a pulse signal of eleven minutes at 50 Hz; states: the heart's phase and rate.

    States are (cos, sin) of the phase, and the rate. Beats are the peaks of the signal between 0.7
    and 3.5 Hz, filtered forwards and backwards, at least 20 steps apart and half a standard
    deviation high. The phase grows by 2 pi between two beats; the rate is the reciprocal of the
    time between them.

    References: van Gent et al. (2019), the third example of their package heartpy.
    """
    from scipy.signal import butter, filtfilt, find_peaks

    rows = package_file("ppg").read_text(encoding="utf-8").split("\n")[1:]
    cells = [row.split(",") for row in rows if row]
    time = np.array(
        [
            (datetime.fromisoformat(cell[0]) - datetime.fromisoformat(cells[0][0])).total_seconds()
            for cell in cells
        ]
    )
    steps = np.arange(0, time[-1], 1 / PULSE_HZ)
    signal = np.interp(steps, time, np.array([float(cell[1]) for cell in cells]))
    band: Any = butter(3, [edge / (PULSE_HZ / 2) for edge in BEAT_BAND_HZ], "band")
    filtered = filtfilt(band[0], band[1], signal)
    beats, _ = find_peaks(
        filtered, distance=MIN_STEPS_BETWEEN_BEATS, prominence=0.5 * filtered.std()
    )
    inside = np.arange(beats[0], beats[-1])
    phase = np.interp(inside, beats, 2 * np.pi * np.arange(len(beats)))
    rate = PULSE_HZ / np.diff(beats)[np.searchsorted(beats, inside, side="right") - 1]
    return Arrays(
        np.stack([np.cos(phase), np.sin(phase), rate], 1),
        signal[inside, None],
        np.zeros((len(inside), 0)),
        np.array([len(inside)]),
    )


def watch(seed: int, progress: Callable[[float], None]) -> Arrays:
    """Makes 140 recordings of watches during exercises: angular rate from acceleration.

    States (gyroscope) and observations (accelerometer) have three components each; the recordings
    are ordered by person.

    References: Burns et al. (2018), from the package seglearn. Its file is a pickle, which only its
    own loader reads.
    """
    package_file("watch")
    data = need("seglearn.datasets", "recordings", "data=watch").load_watch()
    runs = [
        np.asarray(data["X"][k], dtype=np.float64)
        for k in np.argsort(data["subject"], kind="stable")
    ]
    rows = np.concatenate(runs)
    return Arrays(
        rows[:, 3:6], rows[:, :3], np.zeros((len(rows), 0)), np.array([len(run) for run in runs])
    )


def cartpole(seed: int, progress: Callable[[float], None]) -> Arrays:
    """Simulates a cart with a swinging pole under a random force in MuJoCo; 3,000 steps of 0.05 s.

    States: position x, (cos, sin) of the pole's angle (0 is upright), their speeds v and w.
    Control: the force on the cart. Observations: x + 0.05 e and the horizontal position of the
    pole's tip x + sin(angle) + 0.1 e. The force is correlated in time, u = 0.5 a - 0.5 x - 0.3 v
    within +-1 with a' = 0.8 a + 0.6 e; the pole turns over occasionally.

    References: Tassa et al. (2018), DeepMind Control Suite, for the model of the cart-pole; Todorov
    et al. (2012).
    """
    simulator = need("mujoco", "recordings", "data=cartpole")
    model = simulator.MjModel.from_xml_path(str(package_file("cartpole")))
    data = simulator.MjData(model)
    data.qpos[:] = 0, np.pi
    random = np.random.default_rng(seed)
    states, obs, controls, push = [], [], [], 0.0
    for step in range(CART_STEPS):
        push = 0.8 * push + 0.6 * random.normal()
        force = float(np.clip(0.5 * push - 0.5 * data.qpos[0] - 0.3 * data.qvel[0], -1, 1))
        data.ctrl[:] = force
        for _ in range(CART_REPEAT):
            simulator.mj_step(model, data)
        (x, angle), (v, w) = data.qpos, data.qvel
        states.append([x, np.cos(angle), np.sin(angle), v, w])
        obs.append([x + 0.05 * random.normal(), x + np.sin(angle) + 0.1 * random.normal()])
        controls.append([force])
        progress((step + 1) / CART_STEPS)
    return Arrays(np.array(states), np.array(obs), np.array(controls), np.array([CART_STEPS]))


class Source(NamedTuple):
    """The origin of a recording.

    Attributes:
        make: function that makes it. package: the package that contains its file. file: the path
            inside the package.
        sha256: checksum of the file; None where releases of the package differ in the file.
        drawn: whether the recording depends on a seed.
    """

    make: Callable[[int, Callable[[float], None]], Arrays]
    package: str
    file: str
    sha256: str | None
    drawn: bool


# The recordings, by their name in ``data=``.
RECORDED = {
    "rat": Source(
        rat,
        "ratinabox",
        "data/sargolini.npz",
        "6911a18f3c3216cf0e1cc5d9b41495640cf75b66bfe481fe6db7c4c5d4bbb1b2",
        drawn=True,
    ),
    "ppg": Source(
        pulse,
        "heartpy",
        "data/data3.csv",
        "16eedaa7c97c6ca873e7e424d27a84dcd043d4eca0e4f7611d2a37969192b7ea",
        drawn=False,
    ),
    "watch": Source(
        watch,
        "seglearn",
        "data/watch_dataset.npy",
        "eb122f23cdf06ef6bd6c6c5312958ec5cf9d038e2e6d457b8081662c75a42537",
        drawn=False,
    ),
    "cartpole": Source(cartpole, "dm_control", "suite/cartpole.xml", None, drawn=True),
}

AXES = ("x", "y", "z")

# Columns of states, observations and controls, and those of them that are angles.
COLUMNS: dict[str, tuple[list[str], list[str], list[str], list[str]]] = {
    "rat": (["x", "y"], [f"cell {k}" for k in range(PLACE_CELLS)], [], []),
    "ppg": (["phase", "rate"], ["signal"], [], ["phase"]),
    "watch": (
        [f"turning {axis}" for axis in AXES],
        [f"acceleration {axis}" for axis in AXES],
        [],
        [],
    ),
    "cartpole": (["place", "angle", "v", "w"], ["cart", "tip"], ["force"], ["angle"]),
}


def package_file(name: str) -> Path:
    """Returns the file of a package from which a recording is made, after checking its contents.

    The package is not imported.

    Raises:
        ValueError: the package is not installed, or its file has another size or checksum.
    """
    source = RECORDED[name]
    found = importlib.util.find_spec(source.package)
    if not (places := [] if found is None else list(found.submodule_search_locations or [])):
        raise ValueError(missing(source.package, "recordings", f"data={name}"))
    path = Path(places[0]) / source.file
    content = path.read_bytes() if path.is_file() else b""
    if not content or source.sha256 not in (None, hashlib.sha256(content).hexdigest()):
        raise ValueError(
            f"{path} ({len(content)} bytes) of the package {source.package} is not the file that "
            f"data={name} is made from: reinstall the package"
        )
    return path


def kept(name: str, seed: int, progress: Callable[[float], None] | None = None) -> Arrays:
    """Returns a recording from the cache, or makes and keeps it.

    Args:
        name: one of `RECORDED`. seed: of its simulated parts.
        progress: called with the finished share while the recording is made; None shows it in the
            terminal.

    Raises:
        ValueError: see `package_file`.
    """
    source = RECORDED[name]
    seed = seed if source.drawn else 0
    progress = progress or partial(show_progress, f"making data={name}")
    return cached(
        name,
        [RECIPE_VERSION, name, seed, installed(source.package), installed("mujoco")],
        stored_arrays,
        lambda: source.make(seed, progress),
        lambda path, made: write_arrays(path, {**made._asdict(), "checksum": checksum(made)}),
    )


def stored_arrays(path: Path) -> Arrays:
    """Reads the arrays of a file in the cache.

    Raises:
        ValueError: their checksum is not that of the file. Other errors: absent or damaged.
    """
    with np.load(path, allow_pickle=False) as stored:
        arrays = Arrays(*(stored[name] for name in Arrays._fields))
        if checksum(arrays) != str(stored["checksum"]):
            raise ValueError(f"{path} is damaged")
    return arrays


def checksum(arrays: Arrays) -> str:
    """Returns a checksum of shapes and numbers."""
    sums = hashlib.sha256()
    for each in arrays:
        sums.update(
            str(each.shape).encode() + np.ascontiguousarray(each, dtype=np.float64).tobytes()
        )
    return sums.hexdigest()

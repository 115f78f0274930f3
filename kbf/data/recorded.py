"""Recordings that installed packages carry or make: a rat's path, a pulse, a watch on an arm, and a simulated cart with a pole.

They are what people bring, not a textbook's model: states are hardly Markov, errors go on from step
to step, and nobody knows the true model, so that there is no floor. ``pip install
"kbf[recordings]"`` brings the packages. What is made of their files is kept in the cache
(`kbf.data.download.cache_dir`) and made anew where it is damaged.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from kbf.data.download import cache_dir, one_at_a_time
from kbf.data.files.column_schema import column_schema_of
from kbf.data.windows import cut, take
from kbf.recording import Recording
from kbf.runtime.atomic_files import replacing
from kbf.runtime.html_repr import Shown
from kbf.runtime.optional_dependencies import missing, need

DAMAGED = "{path} ({size} bytes) of the package {package} is not the file that data={name} is made from: install the package anew"
RAT_HZ, CELLS, FIELD, PEAK, REST = 10, 40, 0.12, 12.0, 0.3
"""Of the rat: steps a second, place cells, width of a field (the box is 1 wide), largest rate and rate at rest, spikes a second."""
PULSE_HZ, BAND, APART = 50, (0.7, 3.5), 20
"""Of the pulse: steps a second, the band in Hz that beats are searched in, least steps between two beats."""
CART_STEPS, CART_REPEAT = 3000, 5
"""Of the cart: steps, and steps of the simulator in each."""


class Arrays(NamedTuple):
    """Recordings one behind the other: states ``n d``, obs ``n q``, controls ``n k`` (k may be 0), and the lengths of each."""

    states: np.ndarray
    obs: np.ndarray
    controls: np.ndarray
    lengths: np.ndarray


class RecordedData(Shown):
    """Recordings of one kind, cut in time: the test is a stretch of them, the training part all that is before it.

    Attributes:
        train, test: lists of `Recording`, float64. column_schema: names of their columns.
    """

    train: list[Recording]
    test: list[Recording]

    def __init__(
        self,
        name: str,
        test: Sequence[float] = (0.8, 1.0),
        n_train: int | None = None,
        seed: int = 0,
        by: str = "step",
    ) -> None:
        """Make the recordings, or take them from the cache, and cut them.

        Args:
            name: one of `RECORDED`.
            test: where the test part begins and ends, as shares of all steps; with
                ``by="recording"`` of all recordings. Rolling splits are (0.5, 0.6), (0.6, 0.7),
                ...: what is after the test part is not used.
            n_train: only the first so many training steps; None for all.
            seed: of what is drawn: spikes, errors of sensors, the torque. A recording of nothing
                but sensors ignores it.
            by: step or recording: whether recordings are cut, or stay whole.

        Raises:
            ValueError: an unknown name, a missing or damaged package, or parts that nothing is left
                of.
        """
        if name not in RECORDED:
            raise ValueError(f"there is no recording {name!r}; there are {', '.join(RECORDED)}")
        if by not in ("step", "recording"):
            raise ValueError(f"data.by must be step or recording, got {by!r}")
        bounds = tuple(test)
        if len(bounds) != 2 or not 0 < bounds[0] < bounds[1] <= 1:
            raise ValueError(
                f"data.test must be two shares, as [0.8, 1.0], the first above 0; got {list(bounds)}"
            )
        whole = kept(name, seed)
        lengths = [int(n) for n in whole.lengths]
        sequences = sequences_of(whole)
        if by == "recording":
            edges = [0, *np.cumsum(lengths).tolist()]
            first, last = (edges[round(share * len(lengths))] for share in bounds)
        else:
            total = sum(lengths)
            first, last = (
                total - round((1 - bounds[0]) * total),
                total - round((1 - bounds[1]) * total),
            )
        if n_train is not None and not 2 <= n_train <= first:
            raise ValueError(
                f"n_train={n_train}: {name} has {first} training steps; leave n_train out to take them all"
            )
        train, tested = (
            cut(lengths, [0, first if n_train is None else n_train])[0],
            cut(lengths, [first, last])[0],
        )
        if not train or not tested:
            raise ValueError(
                f"data.test={list(bounds)} leaves {first} steps of {name} to learn from and {last - first} to test on"
            )
        self.train, self.test = take(sequences, train), take(sequences, tested)
        self.column_schema = (
            column_schema_of(*COLUMNS[name], rotations=[]) if name in COLUMNS else None
        )


def sequences_of(arrays: Arrays) -> list[Recording]:
    """The recordings as tensors, float64."""
    ends = np.cumsum(arrays.lengths)
    states, obs, controls = (torch.from_numpy(np.ascontiguousarray(each)) for each in arrays[:3])
    spans = [slice(int(stop - n), int(stop)) for n, stop in zip(arrays.lengths, ends, strict=True)]
    return [
        Recording(states[s], obs[s], controls=controls[s] if controls.shape[1] else None)
        for s in spans
    ]


def training_steps(source: dict[str, Any]) -> int:
    """Training steps that a ``data.source`` configuration has without ``n_train``."""
    data = RecordedData(
        **{key: value for key, value in source.items() if key not in ("_target_", "n_train")}
    )
    return sum(len(s.states) for s in data.train)


# the recordings


def rat(seed: int, progress: Callable[[float], None]) -> Arrays:
    """A rat's path through a box of 1 x 1, seen by the spike counts of 40 place cells in 100 ms. States (x, y).

    The path is a real one of ten minutes, at 10 Hz by interpolation, smoothed by a Gaussian of one
    step. The cells are simulated: centres uniform over the box, rate 12 exp(-|z - c|^2 / (2
    0.12^2)) + 0.3 spikes a second, counts from a Poisson law.

    References: Sargolini et al. (2006), the path, as the package ratinabox has it (George et al.
    (2024)).
    """
    from scipy.ndimage import gaussian_filter1d

    with np.load(package_file("rat"), allow_pickle=False) as stored:
        time, path = stored["t"], stored["pos"]
    steps = np.arange(time[0], time[-1], 1 / RAT_HZ)
    place = np.stack([np.interp(steps, time, path[:, k]) for k in range(2)], 1)
    place = gaussian_filter1d(place, 1.0, axis=0)
    random = np.random.default_rng(seed)
    centres = random.uniform(size=(CELLS, 2))
    square = ((place[:, None] - centres) ** 2).sum(-1)
    rate = PEAK * np.exp(-square / (2 * FIELD**2)) + REST
    counts = random.poisson(rate / RAT_HZ).astype(np.float64)
    progress(1.0)
    return Arrays(place, counts, np.zeros((len(place), 0)), np.array([len(place)]))


def pulse(seed: int, progress: Callable[[float], None]) -> Arrays:
    """A raw pulse signal through eleven minutes, at 50 Hz. States: (cos, sin) of the heart's phase, and its rate.

    Beats are the peaks of the signal between 0.7 and 3.5 Hz, filtered forwards and backwards, at
    least 20 steps apart and half a standard deviation high. The phase grows by 2 pi from one to the
    next, the rate is one over the time between them.

    References: van Gent et al. (2019), the package heartpy, its third example.
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
    progress(0.7)
    steps = np.arange(0, time[-1], 1 / PULSE_HZ)
    signal = np.interp(steps, time, np.array([float(cell[1]) for cell in cells]))
    band: Any = butter(3, [edge / (PULSE_HZ / 2) for edge in BAND], "band")
    filtered = filtfilt(band[0], band[1], signal)
    beats, _ = find_peaks(filtered, distance=APART, prominence=0.5 * filtered.std())
    inside = np.arange(beats[0], beats[-1])
    phase = np.interp(inside, beats, 2 * np.pi * np.arange(len(beats)))
    rate = PULSE_HZ / np.diff(beats)[np.searchsorted(beats, inside, side="right") - 1]
    states = np.stack([np.cos(phase), np.sin(phase), rate], 1)
    progress(1.0)
    return Arrays(states, signal[inside, None], np.zeros((len(inside), 0)), np.array([len(inside)]))


def watch(seed: int, progress: Callable[[float], None]) -> Arrays:
    """A watch on an arm that does exercises: how fast it turns (gyroscope), from its acceleration. 140 recordings of ten people.

    States and observations have three components each; the recordings are in the order of the
    people.

    References: Burns et al. (2018), as the package seglearn has it. Its file is a pickle: only its
    own loader reads it.
    """
    package_file("watch")
    data = need("seglearn.datasets", "recordings", "data=watch").load_watch()
    progress(0.7)
    runs = [
        np.asarray(data["X"][k], dtype=np.float64)
        for k in np.argsort(data["subject"], kind="stable")
    ]
    rows = np.concatenate(runs)
    progress(1.0)
    return Arrays(
        rows[:, 3:6], rows[:, :3], np.zeros((len(rows), 0)), np.array([len(run) for run in runs])
    )


def cartpole(seed: int, progress: Callable[[float], None]) -> Arrays:
    """A cart on a rail with a pole that swings, pushed about at random, in MuJoCo; 3,000 steps of 0.05 s.

    States: place x, (cos, sin) of the pole's angle (0 is upright), their speeds v and w. Control:
    the force on the cart, known. Observations: x + 0.05 e and the horizontal place of the pole's
    tip x + sin(angle) + 0.1 e. The force goes on from step to step, u = 0.5 a - 0.5 x - 0.3 v
    within +-1 with a' = 0.8 a + 0.6 e; the pole turns over now and then.

    References: Tassa et al. (2018), DeepMind Control Suite, whose model of the cart-pole it is;
    Todorov et al. (2012).
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
    """Where a recording comes from.

    Attributes:
        make: what makes it. package: whose file it is. file: its place inside the package.
        size: of the file, in bytes. sha256: its checksum; None where releases of the package differ
            in it.
        drawn: whether a seed changes it.
    """

    make: Callable[[int, Callable[[float], None]], Arrays]
    package: str
    file: str
    size: int | None
    sha256: str | None
    drawn: bool


RECORDED = {
    "rat": Source(
        rat,
        "ratinabox",
        "data/sargolini.npz",
        715_694,
        "6911a18f3c3216cf0e1cc5d9b41495640cf75b66bfe481fe6db7c4c5d4bbb1b2",
        drawn=True,
    ),
    "ppg": Source(
        pulse,
        "heartpy",
        "data/data3.csv",
        2_190_153,
        "16eedaa7c97c6ca873e7e424d27a84dcd043d4eca0e4f7611d2a37969192b7ea",
        drawn=False,
    ),
    "watch": Source(
        watch,
        "seglearn",
        "data/watch_dataset.npy",
        18_118_091,
        "eb122f23cdf06ef6bd6c6c5312958ec5cf9d038e2e6d457b8081662c75a42537",
        drawn=False,
    ),
    "cartpole": Source(cartpole, "dm_control", "suite/cartpole.xml", None, None, drawn=True),
}
"""The recordings, by the names of ``data=``."""
AXES = ("x", "y", "z")
COLUMNS: dict[str, tuple[list[str], list[str], list[str], list[str]]] = {
    "rat": (["x", "y"], [f"cell {k}" for k in range(CELLS)], [], []),
    "ppg": (["phase", "rate"], ["signal"], [], ["phase"]),
    "watch": (
        [f"turning {axis}" for axis in AXES],
        [f"acceleration {axis}" for axis in AXES],
        [],
        [],
    ),
    "cartpole": (["place", "angle", "v", "w"], ["cart", "tip"], ["force"], ["angle"]),
}
"""Columns of states, observations and controls, and which of them are angles."""


# files


def package_file(name: str) -> Path:
    """The file of a package that a recording is made from, checked by size and checksum; the package is not imported.

    Raises:
        ValueError: the package is not installed, or its file is another.
    """
    source = RECORDED[name]
    found = importlib.util.find_spec(source.package)
    places = [] if found is None else list(found.submodule_search_locations or [])
    if not places:
        raise ValueError(missing(source.package, "recordings", f"data={name}"))
    path = Path(places[0]) / source.file
    size = path.stat().st_size if path.is_file() else 0
    told = DAMAGED.format(path=path, size=size, package=source.package, name=name)
    if not size or (source.size is not None and size != source.size):
        raise ValueError(told)
    if source.sha256 is not None and hashlib.sha256(path.read_bytes()).hexdigest() != source.sha256:
        raise ValueError(told)
    return path


def kept(name: str, seed: int, progress: Callable[[float], None] | None = None) -> Arrays:
    """A recording from the cache, or made and kept there. A file in the cache whose content has another checksum is made anew.

    Args:
        name: one of `RECORDED`. seed: of what is drawn.
        progress: called with the share that is done, while it is made; None writes it to a
            terminal.

    Raises:
        ValueError: as `package_file`.
    """
    source = RECORDED[name]
    seed, progress = seed if source.drawn else 0, progress or Bar(name)
    code = Path(__file__).read_text(encoding="utf-8")
    key = json.dumps([name, seed, code, version_of(source.package), version_of("mujoco")])
    path = cache_dir() / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npz"
    if (found := stored_arrays(path)) is not None:
        return found
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(path):
            if (found := stored_arrays(path)) is None:
                found = source.make(seed, progress)
                with replacing(path) as temporary, temporary.open("wb") as file:
                    np.savez_compressed(file, **found._asdict(), checksum=np.array(digest(found)))
    except OSError as error:
        warnings.warn(
            f"data={name} cannot be kept ({error}): name a writable folder in KBF_CACHE",
            stacklevel=2,
        )
        found = source.make(seed, progress)
    return found


class Bar:
    """Progress as a line of a terminal, on standard error; nothing where that is a file."""

    name: str
    shown: int

    def __init__(self, name: str) -> None:
        self.name, self.shown = name, -1

    def __call__(self, share: float) -> None:
        """The share that is done."""
        percent = round(100 * share)
        if percent != self.shown and sys.stderr.isatty():
            print(
                f"\rmaking data={self.name}: {percent} %",
                end="\n" if percent == 100 else "",
                file=sys.stderr,
                flush=True,
            )
        self.shown = percent


def stored_arrays(path: Path) -> Arrays | None:
    """The arrays of a file in the cache; None where there is none, or a damaged one."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays, checksum = (
                Arrays(*(stored[name] for name in Arrays._fields)),
                str(stored["checksum"]),
            )
    except Exception:  # not yet there; or damaged, and what that raises has no common class
        return None
    return arrays if digest(arrays) == checksum else None


def digest(arrays: Arrays) -> str:
    """A checksum of shapes and numbers."""
    sums = hashlib.sha256()
    for each in arrays:
        sums.update(
            str(each.shape).encode() + np.ascontiguousarray(each, dtype=np.float64).tobytes()
        )
    return sums.hexdigest()


def version_of(package: str) -> str | None:
    """The installed version, None without it."""
    try:
        return importlib.metadata.version(package.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return None

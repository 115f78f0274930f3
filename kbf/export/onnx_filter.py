"""`load_onnx`: an exported ONNX program as a running filter, in NumPy, without PyTorch.

The program computes in the components that filters use; here are the columns, angles, rotations,
bounds and intervals of the filter that it was exported from (`kbf.fitted.program.export_step`).
"""

import bisect
import hashlib
import json
import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any
from zipfile import BadZipFile

import numpy as np

from kbf.export.numpy_columns import from_quaternion, numbers_by_name, rotation_columns
from kbf.runtime.atomic_files import replacing
from kbf.runtime.column_values import ColumnValues
from kbf.runtime.errors import DataError, DataWarning
from kbf.runtime.optional_dependencies import need

Array = np.ndarray

# Components that filters use, by kind of part (`kbf.data.files.column_schema.WIDTH_OF_KIND`).
WIDTHS = {"number": 1, "angle": 2, "rotation": 9}

# Time steps after which a filter with durations as a control starts again from the prior
# (`kbf.data.files.timestamps.LARGEST_GAP`).
LARGEST_GAP = 5.0

# Entries of a file of a state: the SHA-256 sum of the program, and the state of the random numbers.
PROGRAM = "program"
RANDOM = "random"


class ProgramEstimate(ColumnValues):
    """The estimate of one step of a program."""

    def __init__(
        self, values: dict[str, float], std: dict[str, float], rejected: bool, program: "OnnxFilter"
    ) -> None:
        """Take the values of the columns."""
        super().__init__(values, std, rejected)
        self._program = program

    def __repr__(self) -> str:
        return f"Estimate({', '.join(f'{name}={v:.6g}' for name, v in self._values.items())})"

    def interval(self, level: float = 0.95) -> dict[str, tuple[float, float]]:
        """Return lower and upper end by column, as of `kbf.Estimates.interval`.

        Raises:
            ValueError: a level that is not between 0 and 1, or a filter without covariances.
        """
        if not self.std:
            raise ValueError("this filter has no covariances, so there are no intervals")
        factors = self._program.factors(level)
        ends = {}
        for name, value in self._values.items():
            half = factors[name] * self.std[name]
            ends[name] = self._program.bounded(name, value - half, value + half)
        return ends


class OnnxFilter:
    """A program of ``kbf export format=onnx``, one observation at a time; `load_onnx` reads one.

    Attributes:
        about: the description of the program, in its metadata.
        columns: names of the columns of states, observations and controls.
        estimate: the last estimate; None before the first step.
    """

    def __init__(self, path: str | os.PathLike[str], *, threads: int = 1, seed: int = 0) -> None:
        """Read the program; arguments as of `load_onnx`."""
        onnxruntime = need("onnxruntime", "serve", "kbf.load_onnx")
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no file {path}")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 4
        try:
            self._session: Any = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
            stored = self._session.get_modelmeta().custom_metadata_map["kbf"]
            self._program: str = hashlib.sha256(Path(path).read_bytes()).hexdigest()
            self.about: dict[str, Any] = json.loads(stored)
            self._schema: dict[str, Any] = self.about["column_schema"]
            self._sensors: dict[str, list[str]] = self._schema.get("sensors", {})
            self._inputs: dict[str, Any] = {each["name"]: each for each in self.about["inputs"]}
            self._outputs: list[str] = [each["name"] for each in self.about["outputs"]]
        except Exception as error:  # ONNX Runtime's own types, and entries that are missing
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"{path} is no program of FittedFilter.export, or damaged: {reason}"
            ) from error
        self.columns: dict[str, list[str]] = {
            side: [name for _, names in self._schema[side] for name in names]
            for side in ("states", "observations")
        } | {"controls": list(self._schema["controls"])}
        self._seed: int = seed
        self._turn: float = 180 / math.pi if self._schema["unit"] == "degrees" else 1.0
        for name, late in (self.about.get("latency") or {}).items():
            unit = "steps" if self.about.get("time_step") is None else "s"
            text = (
                f"the readings of {name} are {late:g} {unit} late in the training: give the "
                "program each reading in the step of its own time"
            )
            warnings.warn(text, DataWarning, stacklevel=3)
        self.reset()

    def reset(self) -> None:
        """Return to the prior, and to the first random number."""
        self._rng = np.random.default_rng(self._seed)
        self._state: dict[str, Array] = self._prior()
        self.estimate: ProgramEstimate | None = None

    def _prior(self) -> dict[str, Array]:
        return {
            name: np.array(value, self._inputs[name]["dtype"])
            for name, value in self.about["initial"].items()
        }

    def step(
        self, obs: Any = None, *, control: Any = None, dt: float | None = None
    ) -> ProgramEstimate:
        """Move to the next step and take in its observation.

        Args:
            obs: a mapping from observation columns or sensors to numbers, an array ``q``, or an
                image; None, or with a missing number, where nothing was observed. If the filter
                allows missing sensors, columns may be absent.
            control: of the move, a mapping or an array ``k``.
            dt: seconds since the step before; the filter moves round(dt / time_step) times, or
                once where the duration is a control.

        Raises:
            DataError: columns that are unknown or missing, or a time that is no multiple of the
                time step.
        """
        given, acted = self._observation(obs), self._control(control, dt)
        if self._is_gap(dt):
            self._state = self._prior()
        for _ in range(self._moves(dt) - 1):
            self._run(None, acted)
        self.estimate = self._run(given, acted)
        return self.estimate

    def predict(self, dt: float | None = None, *, control: Any = None) -> ProgramEstimate:
        """Move to the next step, without an observation; arguments as of `step`."""
        return self.step(None, dt=dt, control=control)

    def forecast(self, horizon: int, *, controls: Any = None) -> list[ProgramEstimate]:
        """Return the predictions of the next ``horizon`` steps; the state does not change.

        Args:
            horizon: number of steps.
            controls: one for each step, for a filter with controls.

        Raises:
            ValueError: a horizon below 1, or another number of controls.
        """
        if horizon < 1:
            raise ValueError(f"the horizon must be a whole number of at least 1, got {horizon!r}")
        acted = [None] * horizon if controls is None else list(controls)
        if len(acted) != horizon:
            raise ValueError(f"there are {len(acted)} controls for {horizon} steps")
        before = self._state
        found = [self._run(None, self._control(each)) for each in acted]
        self._state = before
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state as an ``.npz`` file, which `load` reads."""
        random = json.dumps(self._rng.bit_generator.state)
        leaves: dict[str, Any] = {**self._state, PROGRAM: self._program, RANDOM: random}
        with replacing(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, **leaves)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Continue from a state that `save` has written.

        Raises:
            ValueError: a state of another program.
        """
        try:
            with np.load(path) as stored:
                leaves = dict(stored)
            program, random = str(leaves.pop(PROGRAM)), json.loads(str(leaves.pop(RANDOM)))
        except (ValueError, EOFError, KeyError, BadZipFile) as error:
            raise ValueError(f"state: {path} is no state of a program, or damaged") from error
        if program != self._program or list(leaves) != list(self._state):
            raise ValueError(f"state: {path} was written by another program")
        self._rng.bit_generator.state = random
        self._state = leaves

    def factors(self, level: float) -> dict[str, float]:
        """Return half the widths of intervals in standard deviations, by column.

        As `kbf.evaluation.calibration.Calibration.column_quantile`; NaN for rotations.
        """
        if not 0 < level < 1:
            raise ValueError(f"level must be between 0 and 1, got {level}")
        found: dict[str, float] = {}
        for k, (kind, names) in enumerate(self._schema["states"]):
            single = self._factor(level, k) if kind != "rotation" else math.nan
            found |= dict.fromkeys(names, single)
        return found

    def bounded(self, name: str, *values: float) -> Any:
        """Return values of a column, clipped to its bounds."""
        low, high = (self.about.get("bounds") or {}).get(name, (None, None))
        ends = (-math.inf if low is None else low, math.inf if high is None else high)
        return tuple(min(max(value, ends[0]), ends[1]) for value in values)

    def _factor(self, level: float, part: int) -> float:
        gaussian = NormalDist().inv_cdf((1 + level) / 2)
        if (held := self.about.get("intervals")) is None:
            return gaussian
        rank, scores = math.ceil((held["steps"] + 1) * level - 1e-9), held["scores"]
        if rank > held["steps"]:
            return max(scores[-1][part], gaussian)
        return scores[bisect.bisect_left(held["ranks"], rank)][part]

    def _run(self, obs: Array | None, control: Array | None) -> ProgramEstimate:
        """One run of the program; None is a step without an observation."""
        entry = self._inputs["obs"]
        given = {**self._state, "seen": np.array([obs is not None])}
        given["obs"] = np.zeros(entry["shape"], entry["dtype"]) if obs is None else obs
        if control is not None:
            given["control"] = control
        for kind in ("uniform", "normal"):
            if kind in self._inputs:
                shape = self._inputs[kind]["shape"]
                draw = self._rng.random if kind == "uniform" else self._rng.standard_normal
                given[kind] = draw(shape)
        results = dict(zip(self._outputs, self._session.run(None, given), strict=True))
        self._state = {name: results[f"next_{name.removeprefix('state_')}"] for name in self._state}
        values, std = self._decode(results["estimate"][0], results.get("covariance"))
        clipped = {name: self.bounded(name, value)[0] for name, value in values.items()}
        return ProgramEstimate(clipped, std, bool(results["rejected"][0]), self)

    def _decode(
        self, mean: Array, covariance: Array | None
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Columns and their standard deviations, as `ColumnSchema.decode`."""
        values: dict[str, float] = {}
        std: dict[str, float] = {}
        at = 0
        for kind, names in self._schema["states"]:
            own = slice(at, at + WIDTHS[kind])
            at, m = own.stop, mean[own]
            variance = 0.0 if covariance is None else max(0.0, covariance[0].diagonal()[own].sum())
            if kind == "number":
                found, spread = [m[0]], math.sqrt(variance)
            elif kind == "angle":
                found = [math.atan2(m[1], m[0]) * self._turn]
                spread = math.sqrt(math.log1p(variance / (m @ m))) * self._turn
            else:
                found, spread = (
                    rotation_columns(m, len(names)),
                    math.sqrt(variance / 2) * self._turn,
                )
            values |= dict(zip(names, map(float, found), strict=True))
            std |= {} if covariance is None else dict.fromkeys(names, float(spread))
        return values, std

    def _observation(self, obs: Any) -> Array | None:
        """An observation as the program takes it; None where a number of it is missing."""
        if obs is None:
            return None
        entry, names = self._inputs["obs"], self.columns["observations"]
        if not names:
            image = np.asarray(obs)
            scale = 255 if image.dtype == np.uint8 else 1
            return (image.reshape(entry["shape"]) / scale).astype(entry["dtype"])
        allowed = bool(self.about.get("allow_missing_sensors"))
        values = numbers_by_name(self._by_column(obs), names, "observations", missing=allowed)
        codes = self.about.get("missing") or [[] for _ in names]
        values = [math.nan if v in marks else v for v, marks in zip(values, codes, strict=True)]
        for columns in self._sensors.values():  # one that lacks a column is missing as a whole
            own = [names.index(name) for name in columns]
            if any(math.isnan(values[k]) for k in own):
                values = [math.nan if k in own else v for k, v in enumerate(values)]
        missing = list(map(math.isnan, values))
        if all(missing) or (any(missing) and not allowed):
            return None
        encoded, at = [], 0
        for kind, own in self._schema["observations"]:
            block = values[at : at + len(own)]
            at += len(own)
            if kind == "angle":
                angle = block[0] / self._turn
                block = [math.cos(angle), math.sin(angle)]
            elif kind == "rotation" and len(own) == 4:
                known = not any(map(math.isnan, block))
                block = from_quaternion(block) if known else [math.nan] * 9
            encoded += block
        return np.array([encoded], entry["dtype"])

    def _by_column(self, obs: Any) -> Any:
        """A mapping with the columns of sensors in place of their names."""
        if not isinstance(obs, Mapping):
            return obs
        found = dict(obs)
        for sensor, columns in self._sensors.items():
            if sensor in found and sensor not in columns:
                given = found.pop(sensor)
                none = [math.nan] * len(columns)
                numbers = none if given is None else numbers_by_name(given, columns, sensor)
                found |= dict(zip(columns, numbers, strict=True))
        return found

    def _control(self, control: Any, dt: float | None = None) -> Array | None:
        """A control as the program takes it, with the seconds of the move where these are one."""
        names, taken = self.columns["controls"], list[float]()
        if self.about.get("time_as_control"):
            step = float(self.about["time_step"])
            taken = [step if dt is None or self._is_gap(dt) else dt]
        if not names and control is None:
            return np.array([taken], self._inputs["control"]["dtype"]) if taken else None
        if not names or control is None:
            needs = f"needs controls: {', '.join(names)}" if names else "has no controls"
            raise DataError(f"this filter {needs}")
        numbers = numbers_by_name(control, names, "controls")
        codes = self.about.get("missing_controls") or [[] for _ in names]
        for name, number, marks in zip(names, numbers, codes, strict=True):
            if not math.isfinite(number) or number in marks:
                raise DataError(f"the control {name} is missing; a filter requires all controls")
        return np.array([numbers + taken], self._inputs["control"]["dtype"])

    def _is_gap(self, dt: float | None) -> bool:
        """Whether the filter starts again from the prior (`kbf.fitted.durations`)."""
        if dt is None or not self.about.get("time_as_control"):
            return False
        return dt > LARGEST_GAP * self.about["time_step"]

    def _moves(self, dt: float | None) -> int:
        """Number of moves for an elapsed time."""
        step = self.about.get("time_step")
        if dt is not None and dt < 0:
            raise DataError(f"{dt:.6g} s since the last step: time must not run backwards")
        if dt is not None and step is None:
            raise DataError(
                "this filter learned from recordings without times, so that each step is one "
                "move: leave dt out"
            )
        if dt is None or step is None or self.about.get("time_as_control"):
            return 1
        moves = round(dt / step)
        if moves < 1 or abs(dt / step - moves) > 0.25:
            raise DataError(
                f"{dt:.6g} s since the last step are no multiple of the time step of the training, "
                f"{step:.6g} s"
            )
        return moves


def load_onnx(path: str | os.PathLike[str], *, threads: int = 1, seed: int = 0) -> OnnxFilter:
    """Read a program of ``FittedFilter.export("step.onnx")`` as a running filter.

    It requires NumPy and ONNX Runtime (extra ``serve``), not PyTorch, and imports neither PyTorch
    nor the rest of kbf.

    Args:
        path: of the program.
        threads: of ONNX Runtime in a step.
        seed: of the random numbers of a filter that draws, from NumPy's default generator.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no such program, or ONNX Runtime is not installed.
    """
    return OnnxFilter(path, threads=threads, seed=seed)

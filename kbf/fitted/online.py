"""`OnlineFilter`: one observation in, one estimate out, by the names of the columns.

A reading may be late: within ``max_delay`` it is taken in at its time, and the steps after it are
repeated.
"""

import hashlib
import os
import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kbf.data.files.layout import codes_by_column
from kbf.filters.compile import CompiledStep
from kbf.filters.gating import observe
from kbf.filters.online import read_leaves
from kbf.fitted.compatibility import Comparison
from kbf.fitted.durations import Durations, seconds_of
from kbf.fitted.estimates import Estimates
from kbf.fitted.joint_step import step_together
from kbf.fitted.online_estimator import OnlineEstimator, StepInputs, result_of
from kbf.fitted.program import compiled_step
from kbf.fitted.results import Source
from kbf.fitted.runs import check_controls, check_horizon, future_controls, moved, numbers_of
from kbf.fitted.summary import Summary
from kbf.recording import as_float
from kbf.runtime.column_values import ColumnValues
from kbf.runtime.errors import DataError, DataWarning

# Observations after which their ranges are compared with those of the training.
STEPS_TO_COMPARE = 100


class Estimate(ColumnValues):
    """The estimate of one step: a mapping from state columns to numbers.

    Attributes:
        alarm: out_of_distribution, innovation_outlier or diverged; None where there is none.
    """

    def __init__(self, estimates: Estimates, rejected: bool, row: int = 0) -> None:
        """Take a row of ``estimates``."""
        names = estimates.columns
        spread = [] if estimates.std is None else estimates.std[row].tolist()
        super().__init__(
            dict(zip(names, estimates.mean[row].tolist(), strict=True)),
            dict(zip(names, spread, strict=False)),
            rejected,
        )
        self._estimates, self._row = estimates, row
        self.alarm: str | None = None if estimates.alarms is None else str(estimates.alarms[row])
        self.alarm = self.alarm or None

    def __repr__(self) -> str:
        numbers = (
            f"{name}={value:.6g}" + (f"±{self.std[name]:.2g}" if name in self.std else "")
            for name, value in self._values.items()
        )
        return f"Estimate({', '.join(numbers)}{f', alarm={self.alarm}' if self.alarm else ''})"

    def interval(self, level: float = 0.95) -> dict[str, tuple[float, float]]:
        """Return lower and upper end by column, as of `Estimates.interval`."""
        low, high = (end[self._row].tolist() for end in self._estimates.interval(level))
        return dict(zip(self._values, zip(low, high, strict=True), strict=True))


class Inputs(NamedTuple):
    """The inputs of a step, in components; ``moves`` to it, and its time in seconds.

    At a ``gap`` the filter starts again from the prior.
    """

    obs: Tensor | None
    control: Tensor | None
    moves: int
    time: float | None
    gap: bool = False


class Past(NamedTuple):
    """A step that may be repeated: what was before it, and its inputs."""

    before: tuple[Any, ...]
    inputs: Inputs


class OnlineFilter:
    """A fitted filter that takes one observation at a time; `FittedFilter.online` makes one.

    Attributes:
        estimate: the last `Estimate`; None before the first step.
        time: of the last step in seconds; None without times.
        rejections: number of observations that were rejected as implausible.
        dropped: number of readings that were later than ``max_delay``.
        differences: sentences about differences from the training, of which a warning was given.
    """

    def __init__(
        self,
        fitted: Summary,
        *,
        state: str | os.PathLike[str] | None = None,
        max_delay: float = 0.0,
        compile: bool | CompiledStep = False,
        seed: int = 0,
    ) -> None:
        """Start from the prior, or from a saved state; arguments as of `FittedFilter.online`."""
        trained = fitted.trained
        self._fitted = fitted
        self._device = trained.module.device
        self._dtype = trained.module.input_dtype
        self._estimator = OnlineEstimator(
            trained,
            fitted.schema,
            compiled=compiled_step(trained) if compile is True else compile or None,
            generator=torch.Generator(self._device).manual_seed(seed),
        )
        # `FittedFilter.filter` begins a recording like this: equal numbers where priors are drawn.
        self._estimator.restart()
        if max_delay < 0:
            raise ValueError(f"max_delay must be at least 0 seconds, got {max_delay}")
        self.max_delay: float = max_delay
        self.estimate: Estimate | None = None
        self.time: float | None = None
        self.dropped: int = 0
        self.differences: list[str] = []
        self._past: deque[Past] = deque()
        self._comparison: Comparison | None = Comparison(trained, fitted.reference, live=True)
        self._compared: list[tuple[Tensor | None, Tensor | None]] = []
        self._data: dict[str, Any] = trained.module.config.get("data") or {}
        self._durations = Durations(fitted.time_step, bool(self._data.get("time_as_control")))
        codes = self._data.get("missing") if self._data.get("column_schema") else None
        self._codes = codes_by_column(codes, fitted.schema.columns("observations"))
        self._control_codes = codes_by_column(codes, list(fitted.schema.controls))
        if state is not None:
            self._load(state)

    @property
    def rejections(self) -> int:
        """Number of observations that were rejected as implausible."""
        return self._estimator.live.rejected

    def step(
        self, obs: Any = None, *, control: Any = None, dt: float | None = None, time: Any = None
    ) -> Estimate:
        """Move to the next step and take in its observation.

        Args:
            obs: a mapping from columns to numbers (or sensors to several), None or NaN where they
                are missing; an array ``q``, or an image; None where nothing was observed.
            control: of the move, a mapping or an array ``k``.
            dt: seconds since the step before; the filter moves round(dt / time_step) times, or
                once where the duration is a control (``time_as_control``).
            time: of this step, seconds or a datetime, in place of ``dt``. An earlier time than
                the last one is a late reading, as of `update`.

        Raises:
            DataError: unknown or missing columns, or a time that is not on the grid of steps.
        """
        now = None if time is None else seconds_of(time)
        if now is not None and self.time is not None and now < self.time:
            return self.update(obs, time=now)
        return self.take(self.inputs(obs, control=control, dt=dt, time=now))

    def inputs(
        self, obs: Any, *, control: Any = None, dt: float | None = None, time: float | None = None
    ) -> Inputs:
        """Return the inputs of a step after the last one; arguments and errors as of `step`."""
        elapsed = self._durations.elapsed(dt, time, self.time)
        x, u = self._observation(obs), self._control(control)
        found = self._timed(Inputs(x, u, 1, self._clock(dt, time)), elapsed)
        self._compare(x, found.control)
        return found

    def _timed(self, inputs: Inputs, elapsed: float | None) -> Inputs:
        """The inputs of a step that is some seconds after the last one."""
        times, named = self._durations, len(self._fitted.schema.controls)
        return inputs._replace(
            control=times.with_duration(inputs.control, named, elapsed, self._dtype, self._device),
            moves=times.moves(elapsed),
            gap=times.is_gap(elapsed),
        )

    def take(self, inputs: Inputs) -> Estimate:
        """Take a step."""
        if self.joins(inputs):
            return take_together([self], [inputs])[0]
        return self._advance(inputs)

    def joins(self, inputs: Inputs) -> bool:
        """Return whether `take_together` can take a step: one move with an observation."""
        compiled = self._estimator.live.compiled is not None
        one = inputs.obs is not None and inputs.moves == 1 and not inputs.gap
        return one and not compiled

    def predict(self, dt: float | None = None, *, control: Any = None) -> Estimate:
        """Move to the next step, without an observation; arguments as of `step`."""
        return self.step(None, dt=dt, control=control)

    def update(self, obs: Any, *, time: Any = None) -> Estimate:
        """Take in an observation without a move: of now, or a late one of an earlier ``time``.

        A late reading is taken in at its time, and the steps after it are repeated. One that is
        later than ``max_delay`` seconds is dropped, and counted in ``dropped``.

        Raises:
            DataError: as `step`; no time was given before.
        """
        x = self._observation(obs)
        now = None if time is None else seconds_of(time)
        if now is None or self.time is None or now >= self.time:
            self._advance(Inputs(x, None, 0, self.time))
        elif self.time - now > self.max_delay or not self._past:
            self.dropped += 1
        else:
            self._replay(x, now)
        if self.estimate is None:
            raise DataError("there is no step yet: call step first")
        return self.estimate

    def forecast(self, horizon: int, *, controls: Any = None) -> Estimates:
        """Forecast the next ``horizon`` steps; the state does not change.

        Args:
            horizon: number of steps.
            controls: ``horizon k``, or a mapping for each step, for a filter with controls.

        Raises:
            ValueError: a horizon below 1, or controls of another shape.
        """
        check_horizon(horizon)
        trained, live = self._fitted.trained, self._estimator.live
        future = future_controls(trained, controls, horizon)
        generator = torch.Generator(self._device).manual_seed(0)
        found = moved(trained, live.state, future, horizon, generator)
        return self._fitted.estimates(found, Source([""] * horizon))

    def reset(self) -> None:
        """Return to the prior."""
        self._estimator.restart()
        self.estimate, self.time = None, None
        self._past.clear()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state, atomically; ``online(state=path)`` continues from it."""
        others = {"fingerprint": fingerprint(self._fitted)}
        if self.time is not None:
            others["time"] = torch.tensor(self.time, dtype=torch.float64)
        if self._estimator.recent is not None:
            others["recent"] = self._estimator.recent
        others["rejected"] = torch.tensor(self.rejections)
        self._estimator.live.save(path, **others)

    def _load(self, path: str | os.PathLike[str]) -> None:
        """Continue from a saved state.

        Raises:
            ValueError: a state of another filter, or that cannot be read.
        """
        stored = read_leaves(path)
        own = fingerprint(self._fitted)
        if "fingerprint" not in stored or not torch.equal(stored["fingerprint"], own):
            raise ValueError(f"state: {path} was not written by this filter")
        self._estimator.live.load(path)
        self._estimator.live.rejected = int(stored["rejected"])
        self._estimator.recent = stored.get("recent")
        self.time = float(stored["time"]) if "time" in stored else None

    def _compare(self, obs: Tensor | None, control: Tensor | None) -> None:
        """Warn once, after `STEPS_TO_COMPARE` observations, if they differ from the training."""
        if obs is None or (comparison := self._comparison) is None:
            return
        self._compared.append((obs if obs.ndim == 2 else None, control))  # images are not compared
        if len(self._compared) == STEPS_TO_COMPARE:
            sides = zip(*self._compared, strict=True)
            rows = [[each for each in side if each is not None] for side in sides]
            seen, controls = (torch.cat(side) if side else None for side in rows)
            comparison.add(seen, controls)
            self.differences = comparison.differences()
            self._comparison, self._compared = None, []
            for text in self.differences:
                warnings.warn(text, DataWarning, stacklevel=4)

    def _snapshot(self) -> tuple[Any, ...]:
        live = self._estimator.live
        return live.state, live.rejections, live.rejected, self._estimator.recent, self.time

    def _restore(self, snapshot: tuple[Any, ...]) -> None:
        live = self._estimator.live
        live.state, live.rejections, live.rejected, self._estimator.recent, self.time = snapshot

    def _advance(self, inputs: Inputs) -> Estimate:
        """Move a number of times and take in the observation."""
        estimator, before, rejected = self._estimator, self._snapshot(), self.rejections
        obs, control, moves, _, gap = inputs
        if gap:
            estimator.restart()
        if moves:
            rows = [*[StepInputs(None, control)] * (moves - 1), StepInputs(obs, control)]
            states, alarms = estimator.advance(rows)
        else:
            live, alarms = estimator.live, [""]
            if obs is not None:
                live.state = observe(estimator.filter, live.state, obs, None)[0]
            states = live.state
        found = self._fitted.estimates(result_of(estimator, states, alarms).last(), Source([""]))
        return self._conclude(Estimate(found, self.rejections > rejected), inputs, before)

    def _conclude(self, estimate: Estimate, inputs: Inputs, before: tuple[Any, ...]) -> Estimate:
        """Keep the estimate of a step, and the step if it may be repeated."""
        self.estimate, self.time = estimate, inputs.time
        if self.max_delay and inputs.time is not None:
            self._past.append(Past(before, inputs))
            oldest = inputs.time - self.max_delay
            while self._past and (self._past[0].inputs.time or inputs.time) < oldest:
                self._past.popleft()
        return estimate

    def _replay(self, obs: Tensor | None, now: float) -> None:
        """Go back to the step at or before ``now``, take the reading in, and repeat the rest."""
        later = [k for k, each in enumerate(self._past) if (each.inputs.time or 0.0) > now]
        first = later[0] if later else len(self._past)
        again = list(self._past)[first:]
        before = again[0].before[-1]  # the time of this snapshot
        self._durations.moves(self._durations.elapsed(None, now, before))  # or an error, before
        while len(self._past) > first:
            self._past.pop()
        self._restore(again[0].before)
        first_input = Inputs(obs, again[0].inputs.control, 0, now)
        for each in (first_input, *(past.inputs for past in again)):
            elapsed = self._durations.elapsed(None, each.time, self.time)
            self._advance(self._timed(each, elapsed))

    def _clock(self, dt: float | None, now: float | None) -> float | None:
        """The time after a step."""
        if now is not None:
            return now
        step = dt if dt is not None else self._fitted.time_step
        return None if self.time is None or step is None else self.time + step

    def _observation(self, obs: Any) -> Tensor | None:
        """An observation ``1 *x`` in the components that the filter takes."""
        if obs is None:
            return None
        schema = self._fitted.schema
        if not schema.observations:
            image = torch.as_tensor(np.asarray(obs))
            return (
                as_float(image, self._dtype)
                .reshape(1, *(self._fitted.trained.module.observation or ()))
                .to(self._device)
            )
        names = schema.columns("observations")
        missing = self._estimator.live.allow_missing_sensors
        values = numbers_of(
            schema.by_column(obs),
            names,
            "observations",
            missing=missing,
            left_out=self._data.get("observations"),
        )
        for k, codes in enumerate(self._codes):
            values[k] = np.nan if values[k] in codes else values[k]
        found = schema.encode(torch.from_numpy(values[None]), "observations")
        known = found.isfinite()
        if not bool(known.any() if missing else known.all()):
            return None
        return as_float(found, self._dtype).to(self._device)

    def _control(self, control: Any) -> Tensor | None:
        """A control ``1 k``.

        Raises:
            DataError: it is missing, or the filter has no controls.
        """
        names = list(self._fitted.schema.controls)
        if not names and control is None:
            return None
        if not names or control is None:
            needs = f"needs controls: {', '.join(names)}" if names else "has no controls"
            raise DataError(f"this filter {needs}")
        left_out = self._data.get("controls")
        values = numbers_of(control, names, "controls", missing=False, left_out=left_out)
        check_controls(values, names, self._control_codes)
        return torch.from_numpy(values[None]).to(self._device, self._dtype)


def take_together(filters: Sequence[OnlineFilter], inputs: Sequence[Inputs]) -> list[Estimate]:
    """Take one step of several filters of a checkpoint as one batch (`kbf.fitted.joint_step`).

    Args:
        filters: more than one only of a filter without random numbers
            (`kbf.fitted.joint_step.draws`).
        inputs: of each; ones that `OnlineFilter.joins` allows.
    """
    before = [each._snapshot() for each in filters]
    rejected = [each.rejections for each in filters]
    result = step_together(
        [each._estimator for each in filters], [StepInputs(x.obs, x.control) for x in inputs]
    )
    found = filters[0]._fitted.estimates(result, Source([""] * len(filters)))
    return [
        each._conclude(Estimate(found, each.rejections > rejected[k], k), inputs[k], before[k])
        for k, each in enumerate(filters)
    ]


def fingerprint(fitted: Summary) -> Tensor:
    """Return a hash of everything that a fitted filter has learned, 32 bytes."""
    hashed = hashlib.sha256()
    for name, leaf in sorted(fitted.trained.module.state_dict().items()):
        hashed.update(name.encode())
        hashed.update(leaf.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return torch.tensor(list(hashed.digest()), dtype=torch.uint8)

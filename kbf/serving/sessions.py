"""Sessions of ``kbf serve``: running filters by their ids, with a limit and an expiry.

A session is an `OnlineFilter` and the last steps that the page at ``/`` shows. Requests are
dictionaries of JSON, independent of HTTP; input that cannot be used raises `Refused`.
"""

import asyncio
import math
import tempfile
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kbf.evaluation.calibration import calibrated_covariance
from kbf.fitted.compatibility import MIN_ROWS, Comparison
from kbf.fitted.durations import seconds_of
from kbf.fitted.fitted_filter import FittedFilter
from kbf.fitted.online import Estimate, Inputs, OnlineFilter
from kbf.fitted.program import compiled_step
from kbf.runtime.errors import nearest
from kbf.serving.values import Refused, check_numbers, finite, image_of, one_line, png_of

# Level of the intervals in responses and on the page.
INTERVAL_LEVEL = 0.95
# Steps of a session that the page shows.
MAX_HISTORY = 300
# Moves of one step, at most: a duration of more time steps would take long, and is a mistake.
MAX_MOVES = 1000


class Past(NamedTuple):
    """A step that the page shows.

    Attributes:
        step: its number, from 1. time: in seconds, or None.
        values, lower, upper: by state column; the ends are empty for a filter without intervals.
        readings: by sensor, NaN where missing; empty for images.
        rejected: whether the observation was rejected. alarm: its kind, or None.
    """

    step: int
    time: float | None
    values: list[float]
    lower: list[float]
    upper: list[float]
    readings: list[float]
    rejected: bool
    alarm: str | None


class Asked(NamedTuple):
    """A request for a step that was checked; ``inputs`` is None for a late reading."""

    obs: Any
    time: float | None
    inputs: Inputs | None


@contextmanager
def refusing() -> Iterator[None]:
    """Turn errors about data into `Refused`."""
    try:
        yield
    except Refused:
        raise
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise Refused(422, one_line(error)) from error


class Session:
    """A running filter with its last steps."""

    def __init__(self, name: str, online: OnlineFilter, fitted: FittedFilter) -> None:
        """Start with a filter at its prior, or at a restored state."""
        self.name: str = name
        self.online: OnlineFilter = online
        self.fitted: FittedFilter = fitted
        self.sensors: list[str] = fitted.columns["observations"]
        self.used: float = time.monotonic()
        self.steps: int = 0
        self.lock: asyncio.Lock = asyncio.Lock()  # of steps that run in threads
        self.history: deque[Past] = deque(maxlen=MAX_HISTORY)
        self.image: np.ndarray | None = None
        self.last: dict[str, Any] | None = None
        self._shown: int = 0  # differences that were in a response

    def step(self, request: dict[str, Any]) -> dict[str, Any]:
        """Take in one observation, and return the response.

        Args:
            request: ``obs`` (a mapping from sensors to numbers, null where missing; null where
                nothing was observed; an image for a filter of images), ``control``, and ``dt`` or
                ``time``.

        Raises:
            Refused: an unknown entry or sensor, a value of another type, or a time that is no
                multiple of the time step.
        """
        return self.take(self.read(request))

    def read(self, request: dict[str, Any]) -> Asked:
        """Check a request, without a step; arguments and errors as of `step`."""
        if unknown := sorted(request.keys() - {"obs", "control", "dt", "time"}):
            raise Refused(
                422, f"there is no {unknown[0]!r} in a step; it has obs, control, and dt or time"
            )
        if "obs" not in request:
            raise Refused(422, "the step has no obs; null: nothing was observed")
        if request.get("dt") is not None and request.get("time") is not None:
            raise Refused(422, "a step has dt or time, not both")
        dt, now = request.get("dt"), request.get("time")
        obs, control = request["obs"], request.get("control")
        check_numbers(dt, "dt")
        check_numbers(control, "control")
        if not isinstance(now, str):
            check_numbers(now, "time")
        with refusing():
            now = None if now is None else seconds_of(now)
            self.check_moves(dt, now)
            if self.sensors:
                check_numbers(obs, "obs")
            elif obs is not None:
                obs = image_of(obs, self.fitted.trained.module.observation or ())
            late = now is not None and self.online.time is not None and now < self.online.time
            inputs = None
            if not late:
                inputs = self.online.inputs(obs, control=control, dt=dt, time=now)
        return Asked(obs, now, inputs)

    def take(self, asked: Asked) -> dict[str, Any]:
        """Take a step that `read` has checked.

        Raises:
            Refused: as `step`.
        """
        with refusing():
            if asked.inputs is None:
                estimate = self.online.update(asked.obs, time=asked.time)
            else:
                estimate = self.online.take(asked.inputs)
        return self.answer(estimate, asked.obs, late=asked.inputs is None)

    def check_moves(self, dt: int | float | None, now: float | None) -> None:
        """Raise `Refused` for a time that is not finite or takes more than `MAX_MOVES` moves."""
        step = self.fitted.time_step
        for value, start in ((dt, 0.0), (now, self.online.time)):
            if value is not None and not math.isfinite(value):
                raise Refused(422, "dt and time must be finite")
            if value is None or start is None or step is None:
                continue
            if (value - start) / step > MAX_MOVES:
                raise Refused(
                    422,
                    f"the step is more than {MAX_MOVES} time steps of {step:g} s after the one "
                    "before: start a new session after such a gap",
                )

    def answer(self, estimate: Estimate, obs: Any, *, late: bool = False) -> dict[str, Any]:
        """Keep the step for the page, and return its response."""
        self.steps += 1
        values, std = list(estimate.values()), estimate.std
        ends = estimate.interval(INTERVAL_LEVEL) if std else {}
        lower, upper = ([end[k] for end in ends.values()] for k in (0, 1))
        readings: list[float] = []
        if self.sensors:
            given = {} if obs is None else self.fitted.schema.by_column(obs)
            found = [given.get(name) for name in self.sensors] if isinstance(given, dict) else given
            readings = [math.nan if each is None else float(each) for each in found]
        elif obs is not None:
            self.image = obs
        self.history.append(
            Past(
                self.steps,
                self.online.time,
                values,
                lower,
                upper,
                readings,
                estimate.rejected,
                estimate.alarm,
            )
        )
        response: dict[str, Any] = {
            "step": self.steps,
            "time": self.online.time,
            "estimates": {
                name: {
                    "value": finite(value),
                    "std": finite(std.get(name)),
                    "lower": finite(ends[name][0]) if std else None,
                    "upper": finite(ends[name][1]) if std else None,
                }
                for name, value in estimate.items()
            },
            "rejected": estimate.rejected,
            "alarm": estimate.alarm,
            "late": late,
        }
        if new := self.online.differences[self._shown :]:
            response["warnings"] = new
            self._shown += len(new)
        self.last = response
        return response

    @property
    def spread(self) -> bool:
        """Whether estimates have intervals."""
        trained = self.fitted.trained
        state = trained.filter.init(1)
        return calibrated_covariance(trained.filter, state, trained.calibration) is not None

    def about(self) -> dict[str, Any]:
        """Return the columns of the session, and how far it is."""
        return {
            "session": self.name,
            **self.fitted.columns,
            "time_step": self.fitted.time_step,
            "steps": self.steps,
            "rejected": self.online.rejections,
            "late": self.online.dropped,
        }

    def columns(self) -> dict[str, list[Any]]:
        """Return the last steps by column, as the page draws them.

        Rejected readings are moved to the range of the others: they may be far away.
        """
        past, states = self.history, self.fitted.columns["states"]
        found: dict[str, list[Any]] = {"step": [each.step for each in past]}
        for k, name in enumerate(states):
            for key in ("values", "lower", "upper"):
                rows = (getattr(each, key) for each in past)
                found[f"{key}_{name}"] = [finite(row[k]) if row else None for row in rows]
            found[f"alarm_{name}"] = [finite(e.values[k]) if e.alarm else None for e in past]
        for k, name in enumerate(self.sensors):
            taken = [math.nan if each.rejected else each.readings[k] for each in past]
            known = [value for value in taken if math.isfinite(value)] or [0.0]
            low, high = min(known), max(known)
            found[f"obs_{name}"] = [finite(value) for value in taken]
            found[f"rejected_{name}"] = [
                finite(min(max(each.readings[k], low), high)) if each.rejected else None
                for each in past
            ]
        return found

    def saved(self) -> bytes:
        """Return the state of the filter, a file of `OnlineFilter.save`."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state.pt"
            self.online.save(path)
            return path.read_bytes()

    def picture(self) -> bytes:
        """Return the last image as PNG.

        Raises:
            Refused: a filter without images, or before the first image.
        """
        if self.image is None:
            raise Refused(404, "this session has no image")
        return png_of(self.image)


class Sessions:
    """The sessions of a server, the one used last at the end.

    Attributes:
        created, expired: numbers of sessions since the start.
    """

    def __init__(
        self, fitted: FittedFilter, *, limit: int, expiry: int | float, settings: dict[str, Any]
    ) -> None:
        """Serve a filter.

        Args:
            fitted: the filter.
            limit: number of sessions at a time.
            expiry: seconds without a step after which a session is deleted.
            settings: of `FittedFilter.online`. With ``compile`` the step is compiled here, and
                all sessions share it.

        Raises:
            ValueError: a step that cannot be compiled.
        """
        self.fitted: FittedFilter = fitted
        self.limit, self.expiry = limit, expiry
        self.settings: dict[str, Any] = dict(settings)
        if settings.get("compile"):
            self.settings["compile"] = compiled_step(fitted.trained)
        self.created: int = 0
        self.expired: int = 0
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def create(self, request: dict[str, Any] | None = None, state: bytes | None = None) -> Session:
        """Start a session at the prior, or from a saved state.

        Args:
            request: ``seed`` of a filter that draws random numbers; and what the client knows of
                its data, which is compared with the training: ``observations`` (names of the
                sensors), ``units`` (by column) and ``time_step`` (seconds).
            state: bytes of `Session.saved`.

        Raises:
            Refused: too many sessions, data that differs from the training, or a state of another
                filter.
        """
        asked = request or {}
        if unknown := sorted(asked.keys() - {"seed", "observations", "units", "time_step"}):
            raise Refused(
                422,
                f"there is no {unknown[0]!r} in a session; it has seed, observations, units and "
                "time_step, all optional",
            )
        self.purge()
        if len(self) >= self.limit:
            raise Refused(
                429, f"there are {self.limit} sessions, the limit of this server: delete one"
            )
        seed = asked.get("seed", 0)
        if type(seed) is not int or not 0 <= seed < 2**63:
            raise Refused(422, f"seed must be a whole number of at least 0, got {seed!r}")
        if wrong := self.differences(asked):
            raise Refused(422, "; ".join(wrong))
        with tempfile.TemporaryDirectory() as folder:
            path = None
            if state is not None:
                path = Path(folder) / "state"
                path.write_bytes(state)
            try:
                online = OnlineFilter(self.fitted, state=path, seed=seed, **self.settings)
            except ValueError as error:
                raise Refused(422, one_line(error).replace(str(path), "it")) from error
        session = Session(uuid.uuid4().hex, online, self.fitted)
        self._sessions[session.name] = session
        self.created += 1
        return session

    def differences(self, asked: dict[str, Any]) -> list[str]:
        """Return what differs between a client's data and the training, one sentence each."""
        found, data = [], self.fitted.config.get("data") or {}
        names, sensors = self.fitted.columns["observations"], dict(self.fitted.schema.sensors)
        given = asked.get("observations")
        if given is not None:
            if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
                return ["observations must be a list of names"]
            given = [column for name in given for column in sensors.get(name, (name,))]
            if odd := [name for name in given if name not in names]:
                found.append(f"{odd[0]!r} is not among the sensors, {', '.join(names)}")
            if absent := [name for name in names if name not in given]:
                found.append(f"the sensors {', '.join(absent)} are missing")
        units = asked.get("units")
        if units is not None and not isinstance(units, dict):
            return ["units must be a mapping from columns to units"]
        known = data.get("units") or {}
        columns = [name for side in self.fitted.columns.values() for name in side]
        for name, unit in (units or {}).items():
            if name not in columns:
                found.append(f"units: {nearest(name, columns, 'the columns are')}")
            elif name in known and known[name] != unit:
                found.append(f"{name} is in {known[name]} in the training, not in {unit}")
        step = asked.get("time_step")
        if step is not None:
            check_numbers(step, "time_step")
            if not step > 0:
                return ["time_step must be a positive number of seconds"]
            comparison = Comparison(self.fitted.trained, self.fitted.reference)
            comparison.add(None, durations=[step] * MIN_ROWS)
            found += comparison.differences()
        return found

    def get(self, name: str) -> Session:
        """Return a session, as the one used last.

        Raises:
            Refused: there is none of this name, or it has expired.
        """
        self.purge()
        session = self._sessions.get(name)
        if session is None:
            raise Refused(
                404, "there is no such session; POST /sessions starts one, and idle ones expire"
            )
        return session

    def touch(self, session: Session) -> None:
        """Start the time to the expiry of a session again."""
        session.used = time.monotonic()
        if session.name in self._sessions:
            self._sessions.move_to_end(session.name)

    def delete(self, name: str) -> None:
        """Delete a session.

        Raises:
            Refused: there is none of this name.
        """
        self.get(name)
        del self._sessions[name]

    def all(self) -> list[Session]:
        """Return the sessions, the one used last first."""
        self.purge()
        return [*reversed(self._sessions.values())]

    def purge(self) -> None:
        """Delete the sessions that have expired."""
        oldest = time.monotonic() - self.expiry
        while self._sessions and next(iter(self._sessions.values())).used < oldest:
            self._sessions.popitem(last=False)
            self.expired += 1

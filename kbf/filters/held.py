"""Readings that repeat the one before are missing: slow sensors are held, faulty ones stick.

A logger writes the last reading of a slow sensor again until the next one arrives, and a sensor
that sticks repeats its last reading. Such a repeat contains no information about the state of its
own step. `held_sensors` finds the sensors of which this is true; `HeldReadings` is a model whose
filter treats their repeats as missing.

Counts and rounded readings repeat by chance, too. Of these, `reading_periods` finds the sensors
that change every p-th step only: their readings are those of the steps p, 2p, ... after a change,
repeats or not, and all others are missing.
"""

import math
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Generator, Tensor

from kbf.filters.protocols import (
    Backward,
    Filter,
    FilterStep,
    HasLikelihood,
    control_components,
    covariance_of,
    diagnostics_of,
    log_likelihood_of,
    move,
    offers,
    sample_of,
    smoother_of,
)
from kbf.recording import Recording, observed

# Repeats that a sensor must have, as a number and as a share of its readings.
MIN_REPEATS = 5
MIN_SHARE_OF_REPEATS = 0.01
# Different values that readings must have, as a share of the readings that are no repeat. Counts
# and rounded readings have fewer: they repeat by chance.
MIN_SHARE_OF_VALUES = 0.95
# Different values that repeats must have, as a share of the runs of repeats. A sensor at the end
# of its range repeats few values.
MIN_SHARE_OF_REPEATED_VALUES = 0.9
# Log of the ratio by which changes at every p-th step must be improbable of a sensor that may
# change in each, and the largest p.
MIN_LOG_RATIO_OF_PERIOD = 20.0
MAX_PERIOD = 50


def held_sensors(recordings: list[Recording]) -> Bool[Tensor, " q"]:
    """Return which observations ``T q`` are held or stick, by their exact repeats.

    Steps that were not observed have no readings.

    >>> t = torch.arange(60.0)[:, None]
    >>> held_sensors([Recording(t, torch.cat([t.sin(), (t // 3).sin()], 1))])
    tensor([False,  True])
    """
    x = torch.cat([observed(each) for each in recordings])
    first = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    first[[sum(len(each.obs) for each in recordings[:k]) for k in range(len(recordings))]] = True
    found = torch.zeros(x.shape[1], dtype=torch.bool, device=x.device)
    for column, values in enumerate(x.mT):
        repeats = (values == values.roll(1)) & ~first
        fresh = values[values.isfinite() & ~repeats]
        runs = values[repeats & ~repeats.roll(1)]  # the first repeat of each run
        enough = max(MIN_REPEATS, MIN_SHARE_OF_REPEATS * len(values))
        found[column] = (
            int(repeats.sum()) >= enough
            and len(fresh.unique()) > 1  # else it is constant
            and len(fresh.unique()) >= MIN_SHARE_OF_VALUES * len(fresh)
            and len(runs.unique()) >= MIN_SHARE_OF_REPEATED_VALUES * len(runs)
        )
    return found


def reading_periods(recordings: list[Recording]) -> Int[Tensor, " q"]:
    """Return every how many steps observations ``T q`` may change; 1 if in each.

    It is the greatest common divisor p of the steps between changes, of all recordings. If changes
    were independent of p, n of them would agree by chance with probability p^-n.

    >>> t = torch.arange(300)[:, None]
    >>> reading_periods([Recording(t.double(), torch.cat([t % 7, t // 3 % 2], 1).double())])
    tensor([1, 3])
    """
    found = []
    for column in range(recordings[0].obs.shape[1]):
        steps: list[int] = []
        for each in recordings:
            x = observed(each)[:, column]
            changed = (x[1:] != x[:-1]) & x[1:].isfinite() & x[:-1].isfinite()
            steps += changed.nonzero()[:, 0].diff().tolist()
        p = math.gcd(*steps)
        certain = len(steps) * math.log(max(1, p)) >= MIN_LOG_RATIO_OF_PERIOD
        found.append(p if certain and p <= MAX_PERIOD else 1)
    return torch.tensor(found, device=recordings[0].obs.device)


def check_held(held: str | bool) -> str | bool:
    """Return a value of ``data.held``.

    Raises:
        ValueError: another value.
    """
    if held not in ("auto", True, False):
        raise ValueError(f"data.held must be auto, true or false, got {held!r}")
    return held


def held_by(held: str | bool, recordings: list[Recording]) -> Int[Tensor, " q"]:
    """Return how sensors are held, by a value of ``data.held``; empty for False.

    0: they are not. 1: repeats are missing. p > 1: one reading every p steps (`reading_periods`).
    """
    every = torch.ones_like(recordings[0].obs[0], dtype=torch.long)
    if held != "auto":
        return every if held else every[:0]
    periods = reading_periods(recordings)
    return torch.where(held_sensors(recordings), 1, torch.where(periods > 1, periods, 0))


def without_repeats(recording: Recording, held: Shaped[Tensor, " q"]) -> Recording:
    """Return the recording with NaN in place of readings of held sensors that repeat the last one.

    Args:
        recording: of observations ``T q``.
        held: as of `held_by`, or which sensors have missing repeats.
    """
    x, before, held = recording.obs, readings_before(observed(recording)), held.long()
    steps = torch.arange(len(x), device=x.device)[:, None]
    changed = (x != before) & x.isfinite() & before.isfinite()
    last = torch.where(changed, steps, 0).cummax(0).values  # 0 before the first change
    due = (held > 1) & (last > 0) & ((steps - last) % held.clamp_min(1) == 0)
    same = (x == before) & (held > 0) & ~due
    return recording._replace(obs=torch.where(same, torch.nan, x))


def readings_before(x: Float[Tensor, "t q"]) -> Float[Tensor, "t q"]:
    """Return the last reading of each sensor before each step; NaN before the first one.

    >>> readings_before(torch.tensor([[1.0], [torch.nan], [2.0], [3.0]]))[:, 0]
    tensor([nan, 1., 1., 2.])
    """
    return torch.cat([torch.full_like(x[:1], torch.nan), forward_filled(x)[:-1]])


def forward_filled(x: Float[Tensor, "t q"]) -> Float[Tensor, "t q"]:
    """Return x with the last value before it in place of each NaN; NaN before the first value.

    >>> forward_filled(torch.tensor([[torch.nan], [1.0], [torch.nan], [2.0]]))[:, 0]
    tensor([nan, 1., 1., 2.])
    """
    steps = torch.arange(len(x), device=x.device)[:, None]
    return x.gather(0, torch.where(x.isnan(), 0, steps).cummax(0).values)


class HeldReadings:
    """A model that allows missing sensors, with repeats of held sensors as missing readings."""

    def __init__(self, model: Any, held: Shaped[Tensor, " q"]) -> None:
        """Wrap a model that has ``allow_missing_sensors``, which is True while it is fitted.

        ``held`` is as of `without_repeats`.
        """
        self.model, self.held = model, held

    @contextmanager
    def with_missing_sensors(self) -> Iterator[Any]:
        """Context in which the model allows missing sensors."""
        before = self.model.allow_missing_sensors
        self.model.allow_missing_sensors = True
        try:
            yield self.model
        finally:
            self.model.allow_missing_sensors = before

    def fresh(self, memory: Recording | list[Recording]) -> list[Recording]:
        """Return the recordings without repeats."""
        recordings = [memory] if isinstance(memory, Recording) else memory
        return [without_repeats(each, self.held.to(each.obs.device)) for each in recordings]

    def prepare(self, memory: list[Recording], generator: Generator | None = None) -> None:
        """Prepare the model."""
        with self.with_missing_sensors() as model:
            model.prepare(self.fresh(memory), generator)

    def fit(self, memory: Recording | list[Recording]) -> "HeldFilter":
        """Return the filter of the model, which takes repeats as missing."""
        with self.with_missing_sensors() as model:
            return HeldFilter(model.fit(self.fresh(memory)), self.held)


class HeldFilter:
    """A filter whose observations have repeats of held sensors.

    The state is that of the inner filter; the last reading of each sensor, ``last`` ``b q``, NaN
    where there is none; and the steps since a change, ``age`` ``b q``, modulo the period of the
    sensor, NaN before the first change.
    """

    allow_missing_sensors: bool = True

    def __init__(self, inner: Filter[Any], held: Shaped[Tensor, " q"]) -> None:
        """Wrap a filter that accepts missing sensors; ``held`` is as of `without_repeats`."""
        self.inner: Filter[Any] = inner
        self.held: Tensor = held.long()
        self.controlled: int = control_components(inner)
        self.inner_kind: Any = type(inner.init(1))
        self.kind: Any = namedtuple("HeldState", [*self.inner_kind._fields, "last", "age"])

    def inner_state(self, state: Any) -> Any:
        """Return the state of the inner filter."""
        return self.inner_kind(*state[:-2])

    def init(self, batch: int, *, generator: Generator | None = None) -> Any:
        """Return the initial state of the inner filter, without readings."""
        inner = self.inner.init(batch, generator=generator)
        none = torch.full((batch, len(self.held)), torch.nan, device=inner[0].device).double()
        return self.kind(*inner, none, none.clone())

    def predict(
        self, state: Any, *, control: Tensor | None = None, generator: Generator | None = None
    ) -> Any:
        """Move the inner state."""
        moved = move(self.inner, self.inner_state(state), control=control, generator=generator)
        age, period = state.age + 1, self.held.clamp_min(1).to(state.age)
        return self.kind(*moved, state.last, torch.where(age < period, age, age - period))

    def fresh(self, state: Any, obs: Float[Tensor, "b q"]) -> Float[Tensor, "b q"]:
        """Return the observation with NaN in place of repeats, unless a reading is due."""
        held = self.held.to(obs.device)
        due = (held > 1) & (state.age == 0)
        repeats = (obs == state.last.to(obs)) & (held > 0) & ~due
        return torch.where(repeats, torch.nan, obs)

    def observe(self, state: Any, obs: Float[Tensor, "b q"]) -> tuple[Any, Tensor]:
        """Return the update with the readings that are no repeats, and whether it was possible.

        Without any reading left it changes nothing and is possible.
        """
        x, inner = self.fresh(state, obs), self.inner_state(state)
        if offers(type(self.inner), HasLikelihood):
            updated, possible = self.inner.observe(inner, x)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            updated = self.inner.update(inner, x)
            possible = self.inner.estimate(updated).isfinite().all(-1)
        nothing = ~x.isfinite().any(-1)
        last = torch.where(obs.isfinite(), obs.to(state.last), state.last)
        age = torch.where((last != state.last) & state.last.isfinite(), 0, state.age)
        likelihood = torch.where(nothing, torch.ones_like(possible), possible)
        return self.kind(*updated, last, age), likelihood

    def update(self, state: Any, obs: Float[Tensor, "b q"]) -> Any:
        """Return the updated state."""
        return self.observe(state, obs)[0]

    def estimate(self, state: Any) -> Tensor:
        """Return the inner filter's, ``b d``."""
        return self.inner.estimate(self.inner_state(state))

    def covariance(self, state: Any) -> Tensor | None:
        """Return the inner filter's, ``b d d``; None if it has none."""
        return covariance_of(self.inner, self.inner_state(state))

    def log_likelihood(self, state: Any, obs: Float[Tensor, "b q"]) -> Tensor | None:
        """Return the inner filter's of the readings that are no repeats; None if it has none."""
        return log_likelihood_of(self.inner, self.inner_state(state), self.fresh(state, obs))

    def weighted_sample(self, state: Any) -> tuple[Tensor, Tensor] | None:
        """Return the inner filter's, ``b n d`` and ``b n``; None if it has none."""
        return sample_of(self.inner, self.inner_state(state))

    def diagnostics(self, state: Any) -> dict[str, Tensor]:
        """Return the inner filter's."""
        return diagnostics_of(self.inner, self.inner_state(state))

    def smoother(self) -> Backward:
        """Return the inner filter's step back; ``last`` and ``age`` stay as they are.

        Raises:
            ValueError: the inner filter has no smoother.
        """
        inner = smoother_of(self.inner)

        def step_back(
            now: FilterStep,
            following: Any,
            *,
            control: Tensor | None = None,
            generator: Generator | None = None,
        ) -> Any:
            def observed(state: Any) -> Any:
                return self.inner_state(now.observe(self.kind(*state, *now.predicted[-2:])))

            step = FilterStep(
                self.inner_state(now.state), self.inner_state(now.predicted), observed
            )
            back = inner(step, self.inner_state(following), control=control, generator=generator)
            return self.kind(*back, *now.state[-2:])

        return step_back

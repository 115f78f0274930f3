"""A running filter of a checkpoint: observations in, calibrated estimates and alarms out.

`FittedFilter.filter`, ``kbf filter`` and ``kbf serve`` step through observations with this class,
so that they return equal numbers, up to the rounding of batches (`kbf.fitted.joint_step`).
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Generator, Tensor

from kbf.data.files.column_schema import ColumnSchema
from kbf.evaluation.alarms import WINDOW, Monitor, running_median
from kbf.evaluation.calibration import Calibration, calibrated_covariance
from kbf.filters.compile import CompiledStep
from kbf.filters.gating import GatedState
from kbf.filters.online import RunningFilter
from kbf.filters.parallel_rollout import (
    MIN_BLOCKS,
    Inputs,
    draws,
    reach_of,
    states_in_blocks,
    with_leaves,
)
from kbf.filters.protocols import control_components, diagnostics_of
from kbf.fitted.checkpoint import Trained
from kbf.fitted.results import Result

# Rows that are filtered one after the other, and whose outputs are computed in one batch.
ROWS_PER_BATCH = 256
# Rows of one recording that are filtered in blocks at a time, at least and at most, and the numbers
# that their states may hold.
MIN_ROWS_IN_BLOCKS = 256
MAX_ROWS_IN_BLOCKS = 8192
MAX_NUMBERS_IN_BLOCKS = 2**22
# Rows that are filtered after a track has diverged; the number grows by this factor afterwards.
ROWS_AFTER_DIVERGENCE = 1024
GROWTH_AFTER_DIVERGENCE = 2

# A row of the output: numbers and texts by column.
Values = dict[str, float | int | str | None]


@runtime_checkable
class Observed(Protocol):
    """The input of one step: ``obs`` ``1 *x`` or None, and ``control`` ``1 k`` or None."""

    @property
    def obs(self) -> Tensor | None:
        """NaN where a sensor is missing; None where nothing was observed."""
        ...

    @property
    def control(self) -> Tensor | None:
        """Of the move to this step; None for a filter without controls."""
        ...


class StepInputs(NamedTuple):
    """The input of one step, see `Observed`."""

    obs: Tensor | None
    control: Tensor | None = None


class OnlineEstimator:
    """A running filter: rows of observations in, rows of estimates and alarms out.

    Standard deviations and diagnostics of the filter are added where it has them.
    """

    def __init__(
        self,
        trained: Trained,
        column_schema: ColumnSchema,
        *,
        covariance: str = "std",
        alarms: bool = True,
        compiled: Tensor | CompiledStep | None = None,
        generator: Generator | None = None,
    ) -> None:
        """Initialise the filter at the prior.

        Args:
            trained: filter, calibration and monitor of a checkpoint.
            column_schema: names and kinds of the columns.
            covariance: std (a standard deviation for each column), full (all entries as well) or
                none.
            alarms: check each observation with the checkpoint's monitor, if it has one; a diverged
                track is re-initialised at the prior.
            compiled: as in `RunningFilter`.
            generator: randomness of filters that draw particles.

        Raises:
            ValueError: covariances of a filter that has none, or another word.
        """
        if covariance not in ("std", "full", "none"):
            raise ValueError(f"covariance must be std, full or none, got {covariance!r}")
        self.filter: Any = trained.filter
        self.live: RunningFilter = RunningFilter(
            trained.filter, compiled=compiled, generator=generator
        )
        self.column_schema: ColumnSchema = column_schema
        data = trained.module.config.get("data") or {}
        self.bounds: dict[str, Any] = data.get("bounds") or {}
        self.calibration: Calibration | None = trained.calibration
        self.monitor: Monitor | None = trained.monitor if alarms else None
        spread = calibrated_covariance(self.filter, self.live.state, self.calibration)
        has_covariance = spread is not None
        if covariance == "full" and not has_covariance:
            raise ValueError(
                "covariance=full: this model has no covariances, set covariance=std or none"
            )
        self.with_covariance: bool = has_covariance and covariance != "none"
        d = len(column_schema.components("states"))
        self.entries: list[tuple[int, int]] = (
            [(i, j) for i in range(d) for j in range(i, d)] if covariance == "full" else []
        )
        self.recent: Tensor | None = None  # the monitor's last scores, 1 WINDOW
        self.alarms: int = 0
        self.in_blocks: bool | None = None  # whether rows are; None before the first of them

    def restart(self) -> None:
        """Re-initialise the filter at the prior."""
        self.live.restart()
        self.recent = None

    def filter_rows(self, rows: Sequence[Observed]) -> list[Values]:
        """Return estimates of rows of one recording, one dictionary a row."""
        state, alarms = self.advance(rows)
        output = self.output_rows(state)
        if self.monitor is None:
            return output
        return [values | {"alarm": a} for values, a in zip(output, alarms, strict=True)]

    @torch.inference_mode()
    def advance(self, rows: Sequence[Observed]) -> tuple[Any, list[str]]:
        """Step through rows of one recording; return the filter states, as a batch, and alarms.

        The filter runs row by row, or in blocks of many rows (`step_in_blocks`); alarms are
        computed in one batch, which is cheaper. There are none without a monitor.
        """
        states, alarms, done, size = [], [], 0, len(rows)
        while done < len(rows):
            rest = rows[done : done + size]
            predicted, updated, rejected = self.step_through(rest)
            verdicts: list[str] = []
            if self.monitor is not None:
                verdicts = self.verdicts(self.monitor, predicted, rest)
            diverged = "diverged" in verdicts
            valid = verdicts.index("diverged") if diverged else len(rest)
            states.append(with_leaves(updated, itemgetter(slice(valid))))
            alarms += verdicts[:valid]
            done, size = done + valid, size * GROWTH_AFTER_DIVERGENCE
            # The rows behind it were filtered from a diverged track: start again at this one.
            if diverged:
                self.restart()
                self.live.rejected = rejected[valid]
                self.live.step(rest[valid].obs, rest[valid].control)
                states.append(self.live.state)
                alarms.append("diverged")
                done, size = done + 1, ROWS_AFTER_DIVERGENCE
        self.alarms += sum(alarm != "" for alarm in alarms)
        return concatenated(states), alarms

    def rows_at_a_time(self, obs: Tensor) -> int:
        """Return how many rows of a recording are best given at a time, if all are known.

        Args:
            obs: an example ``1 *x``.
        """
        if not self.runs_in_blocks(obs):
            return ROWS_PER_BATCH
        numbers = sum(leaf[0].numel() for leaf in (*self.live.state, obs))
        return max(ROWS_PER_BATCH, min(MAX_ROWS_IN_BLOCKS, MAX_NUMBERS_IN_BLOCKS // numbers))

    def runs_in_blocks(self, obs: Tensor) -> bool:
        """Return whether rows may be filtered in blocks.

        Not those of a filter that draws random numbers. The answer is False, too, once a filter
        turned out not to forget.
        """
        if self.in_blocks is None:
            self.in_blocks = self.live.compiled is None and not draws(
                self.filter, obs, control_components(self.filter)
            )
        return self.in_blocks

    def covariances(self, state: Any) -> Tensor | None:
        """Return the recalibrated covariances ``b d d`` of filter states; None without any."""
        if not self.with_covariance:
            return None
        return calibrated_covariance(self.filter, state, self.calibration)

    def step_through(self, rows: Sequence[Observed]) -> tuple[Any, Any, list[int]]:
        """Return predicted and updated states, and the number of earlier rejections, of each row.

        The predicted states are None without a monitor: nothing else requires them.
        """
        live, predicted, updated, rejected = self.live, [], [], []
        found = self.step_in_blocks(rows)
        if found is not None:
            predicted, updated, rejected = [found[0]], [found[1]], found[2]
        collect = None if self.monitor is None else lambda state, *_: predicted.append(state)
        for row in rows[len(rejected) :]:
            rejected.append(live.rejected)
            live.step(row.obs, row.control, before=collect)
            updated.append(live.state)
        before = None if self.monitor is None else concatenated(predicted)
        return before, concatenated(updated), rejected

    def step_in_blocks(self, rows: Sequence[Observed]) -> tuple[Any, Any, list[int]] | None:
        """Return `step_through` of the first rows, filtered in blocks; None if it is not faster."""
        live, seen = self.live, next((row.obs for row in rows if row.obs is not None), None)
        if len(rows) < MIN_ROWS_IN_BLOCKS or seen is None or not self.runs_in_blocks(seen):
            return None
        if len(rows) < MIN_BLOCKS * reach_of(self.filter, seen):
            return None
        empty = torch.zeros_like(seen)
        mask = torch.tensor([[row.obs is not None for row in rows]], device=empty.device)
        controls = [row.control for row in rows if row.control is not None]
        inputs = Inputs(
            torch.cat([empty if row.obs is None else row.obs for row in rows])[None],
            None if bool(mask.all()) else mask,
            torch.cat(controls)[None] if controls else None,
        )
        found = states_in_blocks(self.filter, GatedState(live.state, live.rejections), inputs)
        if found is None:
            self.in_blocks = False
            return None
        counts = (live.rejected + found.rejected.cumsum(0)).tolist()
        rejected = [live.rejected, *counts[:-1]]
        live.state, live.rejections = found.last.inner, found.last.rejections
        live.rejected = counts[-1]
        return found.predicted, found.updated, rejected

    def verdicts(self, monitor: Monitor, predicted: Any, rows: Sequence[Observed]) -> list[str]:
        """Return the alarm of each row, or an empty string, from its predicted state.

        Those after the first "diverged" are not valid.
        """
        obs = [None if row.obs is None or bool(row.obs.isnan().any()) else row.obs for row in rows]
        observed = [x for x in obs if x is not None]
        if not observed:
            if self.recent is not None:
                self.recent = torch.cat(
                    [self.recent, torch.full_like(self.recent, torch.nan)[: len(rows)]]
                )[-WINDOW:]
            return [""] * len(rows)
        mask = torch.tensor([x is not None for x in obs], device=observed[0].device)
        filled = torch.cat([torch.zeros_like(observed[0]) if x is None else x for x in obs])
        checks = monitor.check(self.filter, predicted, filled, mask=mask)
        scores = checks.recent[:, -1]
        window = scores.new_full((WINDOW,), torch.nan) if self.recent is None else self.recent
        series = torch.cat([window, scores])
        self.recent = series[-WINDOW:]
        diverged = checks.diverged
        if monitor.divergence is not None:
            diverged = monitor.divergence.p_value(running_median(series)[WINDOW:]) < monitor.rate
        return checks._replace(diverged=diverged).names(monitor.rate)

    @torch.inference_mode()
    def output_rows(self, state: Any) -> list[Values]:
        """Return a row of estimates, standard deviations and diagnostics for each filter state.

        A diagnostic with the name of a state is left out.
        """
        C = self.covariances(state)
        columns = self.column_schema.decode(self.filter.estimate(state), C)
        columns |= {k: columns[k].clamp(*ends) for k, ends in self.bounds.items() if k in columns}
        more = {} if C is None else {f"cov_{i}_{j}": C[:, i, j] for i, j in self.entries}
        more |= diagnostics_of(self.filter, state)
        columns |= {name: each for name, each in more.items() if name not in columns}
        return [
            dict(zip(columns, values, strict=True))
            for values in zip(*(c.tolist() for c in columns.values()), strict=True)
        ]


def concatenated(states: list[Any]) -> Any:
    """Return the filter states of single recordings as one of a batch."""
    return type(states[0])(*(torch.cat(leaves) for leaves in zip(*states, strict=True)))


@torch.no_grad()
def result_of(estimator: OnlineEstimator, state: Any, alarms: list[str]) -> Result:
    """Return estimates, covariances, alarms and diagnostics of filter states as a `Result`."""
    filter: Any = estimator.filter
    C = estimator.covariances(state)
    return Result(
        filter.estimate(state).double().cpu(),
        None if C is None else C.double().cpu(),
        None if estimator.monitor is None else alarms,
        {name: each.double().cpu() for name, each in diagnostics_of(filter, state).items()},
    )

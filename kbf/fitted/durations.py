"""Time in a running filter: seconds since the last step, as moves or as a control."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kbf.data.files.timestamps import LARGEST_GAP
from kbf.runtime.errors import DataError

# Share of the time step by which the time of a reading may be off the grid without an error.
MAX_OFF_GRID = 0.25


class Durations(NamedTuple):
    """How a filter takes the seconds between two steps.

    Attributes:
        step: the time step of the training in seconds; None without times.
        as_control: whether the duration of a move is a control (``time_as_control``), so that it
            need not be a multiple of the time step.
    """

    step: float | None
    as_control: bool

    def elapsed(self, dt: float | None, now: float | None, last: float | None) -> float | None:
        """Return the seconds since the last step, at the time ``last``; None if not known.

        Raises:
            DataError: negative ones, or ``dt`` for a filter without a time step.
        """
        if dt is not None and self.step is None:
            raise DataError(
                "this filter learned from recordings without times, so that each step is one "
                "move: leave dt out"
            )
        if now is not None:
            dt = None if last is None else now - last
        if dt is not None and dt < 0:
            raise DataError(f"{dt:.6g} s since the last step: time must not run backwards")
        return dt

    def moves(self, elapsed: float | None) -> int:
        """Return the number of moves; 1 if the duration is not known.

        Raises:
            DataError: seconds that are no multiple of the time step.
        """
        if elapsed is None or self.step is None:
            return 1
        if self.as_control:
            return int(elapsed > 0)
        moves = round(elapsed / self.step)
        if abs(elapsed / self.step - moves) > MAX_OFF_GRID:
            raise DataError(
                f"{elapsed:.6g} s since the last step are no multiple of the time step of the "
                f"training, {self.step:.6g} s"
            )
        return moves

    def is_gap(self, elapsed: float | None) -> bool:
        """Return whether the filter starts again from the prior, as at gaps in files.

        Only where durations are a control: a filter with moves can take many of them.
        """
        if not self.as_control or self.step is None or elapsed is None:
            return False
        return elapsed > LARGEST_GAP * self.step

    def with_duration(
        self,
        control: Tensor | None,
        named: int,
        elapsed: float | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor | None:
        """Return the control ``1 k`` of a move, with its duration at the end if that is a control.

        That of the first move, and of one after a gap, is the time step, as in files.

        Args:
            control: ``1 k``, with or without a duration; None without controls.
            named: number of controls without the duration.
            elapsed: seconds of the move.
            dtype, device: of the control.
        """
        if not self.as_control or self.step is None:
            return control
        taken = self.step if elapsed is None or self.is_gap(elapsed) else elapsed
        last = torch.full((1, 1), taken, dtype=dtype, device=device)
        return last if control is None else torch.cat([control[:, :named], last], 1)


def seconds_of(time: Any) -> float:
    """Return a time in seconds; dates since 1970, in UTC where they have no time zone."""
    if isinstance(time, int | float | np.integer | np.floating):
        return float(time)
    import pandas as pd

    if isinstance(time, timedelta | np.timedelta64):
        return pd.Timedelta(time).total_seconds()
    stamp: Any = pd.Timestamp(time)
    return (stamp.tz_localize("UTC") if stamp.tzinfo is None else stamp).timestamp()

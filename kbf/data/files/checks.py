"""Checks of recordings for faults that no error shows: codes, dead sensors, shifted controls.

Each function returns warnings as sentences, with the setting that mends the problem.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kbf.data.files.layout import FileRecording

# A code for missing values occurs at least this often, and in at least this share of the rows.
MIN_CODE_COUNT = 5
MIN_CODE_SHARE = 0.002

# Its distance from all other values, as a share of their range.
MIN_CODE_DISTANCE = 0.2

# That of a value which is a code of another column.
MIN_SHARED_DISTANCE = 0.05

# Other values of a column with a code, and their share; fewer are levels or counts.
MIN_OTHER_VALUES = 20
MIN_OTHER_SHARE = 0.05

# Codes of a column: below and above the range of a sensor, out of order, not installed.
MAX_CODES = 4

# Rows of each recording in which a value in the middle of a column is looked for.
MAX_ROWS_OF_VALUES = 20_000

# Share of the other values that are distinct in a column of which a value in the middle may be one
# that stands for a missing one; rounded values are not.
MIN_DISTINCT_SHARE = 0.9

# The median jump to such a value, in standard deviations of the others, and in comparison with the
# median move of the others. A wheel that stands still was slow before.
MIN_JUMP_SHARE = 0.4
MIN_JUMP_RATIO = 4.0

# Share of the rows at the end of a recording without any value of a column that had values before.
MIN_DEAD_SHARE = 0.2

# Rows, and their share of a recording, for which a sensor gives the same value: it is stuck if no
# more than a share of its other values are equal to the one before.
MIN_STUCK_ROWS = 30
MIN_STUCK_SHARE = 0.1
MAX_EQUAL_SHARE = 0.02

# Share of rows with all observations, below which sensors alternate.
MIN_COMPLETE_SHARE = 0.05

# Steps from which correlations are looked at.
MIN_STEPS = 50

# Largest autocorrelation of the first `LAGS` steps of rows in random order, with 3 standard errors.
MAX_SHUFFLED_CORRELATION = 0.1
LAGS = 5

# Share of the one-step error that remains if controls are shifted by a row, below which they are
# logged in the row that they act from.
MAX_SHIFTED_ERROR = 0.8

# Degrees: the least extent of a column that is declared to be in radians. 90 rad are 14 turns.
MIN_DEGREES = 90.0


def codes_in(values: Tensor, distance: float = MIN_CODE_DISTANCE) -> list[float]:
    """Returns the values of a column ``n`` that seem to stand for a missing one.

    They are the smallest or largest values, occur many times, and are far from all others: by more
    than ``distance`` of their range.
    """
    rest, found = values[values.isfinite()], []
    while len(found) < MAX_CODES:
        new = lowest_codes(rest, distance) or [-code for code in lowest_codes(-rest, distance)]
        if not new:
            break
        rest = rest[~torch.isin(rest, torch.tensor(new, dtype=rest.dtype))]
        found += new
    return found


def lowest_codes(values: Tensor, distance: float) -> list[float]:
    """Returns the smallest values if each occurs many times and all others are far above them."""
    least, rest = max(MIN_CODE_COUNT, MIN_CODE_SHARE * len(values)), values
    peeled: list[float] = []
    found: list[float] = []
    while len(rest) and len(peeled) < MAX_CODES:
        low = rest.min()
        others = rest[rest != low]
        if len(rest) - len(others) < least or len(others) < MIN_OTHER_SHARE * len(values):
            break
        peeled.append(float(low))
        ends = others.aminmax()
        far = float(ends.min - low) > distance * float(ends.max - ends.min)
        if far and len(others[:10_000].unique()) >= MIN_OTHER_VALUES:
            found = list(peeled)
        rest = others
    return found


def codes_of(columns: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Returns by column the values that seem to stand for a missing one, where there are some.

    A code of one column is looked for in the others at `MIN_SHARED_DISTANCE`.
    """
    found = {name: codes_in(values) for name, values in columns.items()}
    # zero is an ordinary value elsewhere
    shared = {code for codes in found.values() for code in codes if code}
    for name, values in columns.items() if shared else ():
        near = codes_in(values, MIN_SHARED_DISTANCE)
        found[name] += [code for code in near if code in shared and code not in found[name]]
    return {name: codes for name, codes in found.items() if codes}


def code_warnings(columns: Mapping[str, Tensor]) -> list[str]:
    """Returns a warning of the values that seem to stand for a missing one, with their columns."""
    codes = codes_of(columns)
    groups: dict[Any, list[str]] = {}
    for name, each in codes.items():  # zero may be an ordinary value of another column
        groups.setdefault((*each, name if 0 in each else ""), []).append(name)
    found = []
    for names in groups.values():
        first, each = names[0], codes[names[0]]
        values = columns[first]
        is_code = torch.isin(values, torch.tensor(each, dtype=values.dtype))
        others = values[~is_code & values.isfinite()]
        listed = ",".join(map(written, each))
        setting = f"{{{first}: [{listed}]}}" if 0 in each else f"[{listed}]"
        more = f"; so it does in {', '.join(names[1:])}" if names[1:] else ""
        shown = " and ".join(map(written, each))
        found.append(
            f"column {first}: {shown} {'occur' if each[1:] else 'occurs'} {int(is_code.sum())} "
            f"times, far from all other values ({float(others.min()):.4g} to "
            f"{float(others.max()):.4g}){more}. If {'they stand' if each[1:] else 'it stands'} "
            f"for a missing value: data.missing={setting}"
        )
    return found


def written(code: float) -> str:
    """Returns a code in its own digits."""
    return short if float(short := f"{code:g}") == code else f"{code:.10g}"


def repeated_value(columns: list[Tensor]) -> float | None:
    """Returns the value that a sensor seems to give where it has none; None without.

    It is one of the values in the middle of a column, as 0 is, occurs many times where no other
    value does, and is entered and left by jumps across a large part of the column's range.

    Args:
        columns: of a sensor, one for each recording.
    """
    columns = [column[column.isfinite()][:MAX_ROWS_OF_VALUES] for column in columns]
    values = torch.cat(columns)
    levels, counts = values.unique(return_counts=True)
    least = max(MIN_CODE_COUNT, MIN_CODE_SHARE * len(values))
    if not len(levels) or float(counts.max()) < least:
        return None
    value, rest = levels[counts.argmax()], values[values != levels[counts.argmax()]]
    if len(levels) - 1 < MIN_DISTINCT_SHARE * len(rest) or len(rest) < 0.5 * len(values):
        return None
    moves = torch.cat([column.diff().abs() for column in columns])
    at = torch.cat(
        [(column[1:] == value).int() + (column[:-1] == value).int() for column in columns]
    )
    jumps, others = moves[at == 1], moves[at == 0]
    if len(jumps) < MIN_CODE_COUNT or not len(others):
        return None
    large = max(MIN_JUMP_SHARE * float(rest.std()), MIN_JUMP_RATIO * float(others.median()))
    return float(value) if float(jumps.median()) > large else None


def sensor_warnings(
    recordings: list[FileRecording], names: list[str], *, allow_missing_sensors: bool
) -> list[str]:
    """Returns warnings of columns without values at an end, and of stuck and alternating ones."""
    if any(each.obs.ndim != 2 for each in recordings):
        return []
    found = []
    for k, name in enumerate(names):
        text = absent_warning(recordings, name, k)
        found += [] if text is None else [text]
    stuck = [stuck_warning(recordings, name, k) for k, name in enumerate(names)]
    others = [text for text in stuck if text is not None]
    if allow_missing_sensors:
        return found + others
    obs = torch.cat([each.obs for each in recordings])
    any_, all_ = obs.isfinite().any(1), obs.isfinite().all(1)
    if int(any_.sum()) and int(all_.sum()) < MIN_COMPLETE_SHARE * int(any_.sum()):
        found.append(f"only {int(all_.sum())} of {int(any_.sum())} rows have all observations")
    setting = "data.allow_missing_sensors=true uses the others"
    return [f"{text}; {setting}" for text in found] + others


def absent_warning(recordings: list[FileRecording], name: str, k: int) -> str | None:
    """Returns a warning of a column without values at the end or the beginning of a recording."""
    for recording in recordings:
        rows = len(recording.obs)
        present = recording.obs[:, k].isfinite().nonzero()[:, 0]
        if not len(present):
            continue
        first, last = int(present[0]), int(present[-1])
        for side, step, lacking in (("after", last, rows - 1 - last), ("before", first, first)):
            if lacking > MIN_DEAD_SHARE * rows:
                place = recording.place(step)
                return (
                    f"column {name} has no value {side} {place}: {lacking} of {rows} rows lack it"
                )
    return None


def stuck_warning(recordings: list[FileRecording], name: str, k: int) -> str | None:
    """Returns a warning of a sensor that gives one value for many rows, and usually never twice.

    A sensor at its smallest or largest value is saturated.
    """
    columns = [each.obs[:, k] for each in recordings]
    longest, where, equal, total = 0, (0, 0), 0, 0
    for number, column in enumerate(columns):
        rows = column.isfinite().nonzero()[:, 0]
        same = column[rows].diff() == 0
        equal, total = equal + int(same.sum()), total + len(same)
        breaks = torch.cat([torch.tensor([-1]), (~same).nonzero()[:, 0], torch.tensor([len(same)])])
        runs = breaks.diff()  # rows with one value
        if int(runs.max()) >= max(longest + 1, MIN_STUCK_ROWS, MIN_STUCK_SHARE * len(column)):
            longest = int(runs.max())
            where = (number, int(rows[int(breaks[int(runs.argmax())]) + 1]))
    if not longest or equal - (longest - 1) > MAX_EQUAL_SHARE * total:
        return None
    value, whole = columns[where[0]][where[1]], torch.cat(columns)
    known = whole[whole.isfinite()]
    if float(value) in (float(known.min()), float(known.max())):
        return None
    return (
        f"column {name} has the same value, {float(value):.6g}, in {longest} rows from "
        f"{recordings[where[0]].place(where[1])} on, and hardly ever twice elsewhere: was the "
        "sensor stuck?"
    )


def shuffle_warning(recordings: list[FileRecording]) -> list[str]:
    """Returns a warning of states that are unrelated to the next: rows in random order."""
    parts = [each.states for each in recordings if each.states is not None]
    parts = [each[each.isfinite().all(1)] for each in parts]
    steps = sum(map(len, parts))
    if steps < 2 * MIN_STEPS or min(map(len, parts)) <= LAGS:
        return []
    mean, std = torch.cat(parts).mean(0), torch.cat(parts).std(0)
    parts = [((each - mean) / std)[:, std > 0] for each in parts]
    limit = max(MAX_SHUFFLED_CORRELATION, 3 / math.sqrt(steps))
    for lag in range(1, LAGS + 1):
        products = torch.cat([each[lag:] * each[:-lag] for each in parts])
        if not products.shape[1] or bool((products.mean(0).abs() > limit).any()):
            return []
    return [
        f"states are unrelated to those of the {LAGS} rows before: were the rows shuffled? A "
        "filter needs them in the order of time"
    ]


def control_warning(recordings: list[FileRecording], timing: str) -> list[str]:
    """Returns a warning of controls that explain the next states better if shifted by a row.

    Compares the errors of linear regressions of z_t on z_{t-1} and u_t, or u_{t-1}.
    """
    errors: dict[str, float] = {}
    for name in ("as they are", "shifted"):
        inputs, targets = [], []
        for each in recordings:
            z, u = each.states, each.controls
            if z is None or u is None or len(z) < 3:
                continue
            earlier, acting = z[1:-1], u[2:] if name == "as they are" else u[1:-1]
            if timing == "from" and name == "shifted":
                acting = torch.cat([u[3:], u[-1:]])
            known = (earlier.isfinite() & z[2:].isfinite()).all(1) & acting.isfinite().all(1)
            inputs.append(torch.cat([earlier, acting], 1)[known])
            targets.append(z[2:][known])
        if sum(map(len, targets)) < MIN_STEPS:
            return []
        errors[name] = one_step_error(torch.cat(inputs), torch.cat(targets))
    here, shifted = errors["as they are"], errors["shifted"]
    if not shifted < MAX_SHIFTED_ERROR * here:
        return []
    other = "into" if timing == "from" else "from"
    row = "leads into" if other == "into" else "starts from"
    return [
        f"controls explain the next states better if they act in the move that {row} their row: "
        f"one-step error {shifted:.3g} in place of {here:.3g} (data.control_timing={other})"
    ]


def one_step_error(inputs: Tensor, targets: Tensor) -> float:
    """Returns the mean over columns of the share of variance that a linear regression leaves."""
    inputs, targets = inputs - inputs.mean(0), targets - targets.mean(0)
    inputs = inputs / inputs.norm(dim=0).clamp_min(1e-300)
    rest = targets - inputs @ torch.linalg.lstsq(inputs, targets).solution
    moved = targets.square().mean(0)
    return float((rest.square().mean(0) / moved.clamp_min(1e-300))[moved > 0].mean())


def unit_warnings(name: str, each: list[Tensor], unit: str) -> list[str]:
    """Returns a warning of an angle whose range or jumps are those of the other unit."""
    values = torch.cat(each)
    moves = torch.cat([column.diff().abs() for column in each])
    values, moves = values[values.isfinite()], moves[moves.isfinite()]
    if len(values) < 2:
        return []
    low, high = float(values.min()), float(values.max())
    if unit == "radians":
        within = (low >= -180.0 and high <= 180.0) or (low >= 0.0 and high <= 360.0)
        wraps = bool((moves > 0.8 * 360).any())
        drift = abs(float(values[-1] - values[0])) > 0.5 * (high - low)
        wrong = within and high - low > MIN_DEGREES and (wraps or not drift)
    else:
        turn = 2 * math.pi
        within = (low >= -3.1416 and high <= 3.1416) or (low >= 0.0 and high <= 6.2832)
        wrong = within and (high - low > 0.9 * turn or bool((moves > 0.8 * turn).any()))
    other = "degrees" if unit == "radians" else "radians"
    text = (
        f"column {name}: it is declared in {unit}, and from {low:.4g} to {high:.4g}, as an angle "
        f"in {other} is: data.angle_unit={other}"
    )
    return [text] if wrong else []


def looks_like_angle(each: list[Tensor]) -> float | None:
    """Returns 2 pi or 360 if a column has that range, jumps across it, and is smooth otherwise."""
    values = torch.cat(each)
    values = values[values.isfinite()]
    extent = float(values.max() - values.min()) if len(values) else 0.0
    if not any(0.9 * period < extent < 1.01 * period for period in (2 * math.pi, 360.0)):
        return None
    moves = torch.cat([column[column.isfinite()].diff().abs() for column in each])
    if not len(moves):
        return None
    for period in (2 * math.pi, 360.0):
        jumps = moves > 0.8 * period
        others = moves[~jumps] > 0.5 * period  # a few, where undeclared recordings meet
        if (
            (period == 360 or not are_whole(values))
            and 0.9 * period < extent < 1.01 * period
            and bool(jumps.any())
            and float(others.double().mean()) < 0.01
        ):
            return period
    return None


def are_whole(values: Tensor) -> bool:
    """Whether all values of a column are whole numbers: counts, or levels."""
    return bool(np.equal(np.mod(values.numpy(), 1), 0).all())

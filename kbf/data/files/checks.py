"""Checks of recordings for what makes results wrong without an error: codes, leaks, alignment.

Each function returns warnings as sentences, with the setting that mends the problem.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from kbf.data.files.column_schema import ColumnSchema
from kbf.data.files.layout import FileRecording
from kbf.rkhs.linalg import evenly

# A code for missing values occurs at least this often, and in at least this share of the rows.
MIN_CODE_COUNT = 5
MIN_CODE_SHARE = 0.002

# Its distance from all other values, as a share of their range.
MIN_CODE_DISTANCE = 0.2

# That of a value which is a code of another column.
MIN_SHARED_DISTANCE = 0.05

# Other values of a column with a code; fewer are levels or counts.
MIN_OTHER_VALUES = 20

# Share of the rows at the end of a recording without any value of a column that had values before.
MIN_DEAD_SHARE = 0.2

# Share of rows with all observations, below which sensors alternate.
MIN_COMPLETE_SHARE = 0.05

# Share of the variance of an observation that a linear function of the state leaves, below which it
# is no measurement. Float32 alone leaves 1e-14.
MAX_LEAKED_REST = 1e-9

# Rows between a state and an observation that is a function of it, and how a warning names them.
SHIFTS = {0: "", -1: " in the row before", 1: " in the row after"}

# Steps of a table that a function is looked for in, at most.
MAX_LEAK_STEPS = 2_000

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


def code_of(values: Tensor, distance: float = MIN_CODE_DISTANCE) -> float | None:
    """Returns a value that seems to stand for a missing one; None without.

    It is the smallest or largest value, occurs many times, and is far from all others: by more
    than ``distance`` of their range.
    """
    known = values[values.isfinite()]
    for code in {float(known.min()), float(known.max())} if len(known) else ():
        others = known[known != code]
        count = len(known) - len(others)
        if count < max(MIN_CODE_COUNT, MIN_CODE_SHARE * len(known)) or count > 0.95 * len(known):
            continue
        if len(others[:10_000].unique()) < MIN_OTHER_VALUES:
            continue
        low, high = others.min(), others.max()
        if float(torch.maximum(low - code, code - high)) > distance * float(high - low):
            return code
    return None


def codes_of(columns: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns by column the value that seems to stand for a missing one, where there is one.

    A code of one column is looked for in the others at `MIN_SHARED_DISTANCE`.
    """
    found = {name: code_of(values) for name, values in columns.items()}
    shared = {code for code in found.values() if code}  # zero is an ordinary value elsewhere
    for name, values in columns.items():
        if found[name] is None and code_of(values, MIN_SHARED_DISTANCE) in shared:
            found[name] = code_of(values, MIN_SHARED_DISTANCE)
    return {name: code for name, code in found.items() if code is not None}


def code_warnings(columns: Mapping[str, Tensor]) -> list[str]:
    """Returns a warning of each value that seems to stand for a missing one, with its columns."""
    codes = codes_of(columns)
    # Zero may be an ordinary value of another column.
    groups = [[name for name in codes if codes[name] == code] for code in {*codes.values()} - {0}]
    groups += [[name] for name, code in codes.items() if code == 0]
    found = []
    for names in sorted(groups, key=lambda names: list(codes).index(names[0])):
        first, code = names[0], codes[names[0]]
        values = columns[first]
        others = values[(values != code) & values.isfinite()]
        setting = f"{{{first}: [0]}}" if code == 0 else f"[{code:g}]"
        more = f"; so it does in {', '.join(names[1:])}" if names[1:] else ""
        found.append(
            f"column {first}: {code:g} occurs {int((values == code).sum())} times, far from all "
            f"other values ({float(others.min()):.4g} to {float(others.max()):.4g}){more}. If it "
            f"stands for a missing value: data.missing={setting}"
        )
    return found


def sensor_warnings(
    recordings: list[FileRecording], names: list[str], *, allow_missing_sensors: bool
) -> list[str]:
    """Returns warnings of columns that end before the recording, and of alternating sensors."""
    if any(each.obs.ndim != 2 for each in recordings):
        return []
    found = []
    for k, name in enumerate(names):
        for recording in recordings:
            present = recording.obs[:, k].isfinite().nonzero()[:, 0]
            rest = len(recording.obs) - 1 - int(present[-1]) if len(present) else 0
            if rest > MIN_DEAD_SHARE * len(recording.obs):
                found.append(
                    f"column {name} has no value after {recording.place(int(present[-1]))}: "
                    f"{rest} of {len(recording.obs)} rows lack it"
                )
                break
    if allow_missing_sensors:
        return found
    obs = torch.cat([each.obs for each in recordings])
    any_, all_ = obs.isfinite().any(1), obs.isfinite().all(1)
    if int(any_.sum()) and int(all_.sum()) < MIN_COMPLETE_SHARE * int(any_.sum()):
        found.append(f"only {int(all_.sum())} of {int(any_.sum())} rows have all observations")
    return [f"{text}; data.allow_missing_sensors=true uses the others" for text in found]


def leak_warnings(recordings: list[FileRecording], schema: ColumnSchema) -> list[str]:
    """Returns warnings of observations that are states, or exact functions of them."""
    states, names = schema.columns("states"), schema.columns("observations")
    same = [name for name in names if name in states]
    found = [f"{name} is a state and an observation: the error will be too low" for name in same]
    if any(each.obs.ndim != 2 or each.states is None for each in recordings):
        return found
    z = torch.cat([each.states for each in recordings if each.states is not None])
    x = torch.cat([each.obs for each in recordings])
    run = torch.cat([torch.full((len(each.obs),), k) for k, each in enumerate(recordings)])
    for k, name in enumerate(names):
        known = z.isfinite().all(1) & x[:, k].isfinite()
        if name in same or int(known.sum()) < MIN_STEPS:
            continue
        chosen = known.nonzero()[:, 0]
        chosen = chosen[evenly(len(chosen), MAX_LEAK_STEPS)]
        for shift, row in SHIFTS.items():
            rows = chosen[(chosen + shift >= 0) & (chosen + shift < len(z))]
            rows = rows[known[rows + shift] & (run[rows] == run[rows + shift])]
            if (state := function_of(x[rows, k], z[rows + shift], states)) is not None:
                found.append(
                    f"column {name} is an exact function of {state}{row}: it is no measurement of "
                    "an unknown state, and the error will be too low"
                )
                break
    return found


def function_of(seen: Tensor, states: Tensor, names: list[str]) -> str | None:
    """Returns the names of the states that a column ``n`` is a function of; None without.

    Functions that are found are linear and quadratic ones of all states ``n d``, roots of the
    latter, as distances, and monotone or rounded ones of a state.
    """
    if len(seen) < MIN_STEPS or float(seen.std()) == 0:
        return None
    states = (states - states.mean(0)) / states.std(0).clamp_min(1e-300)
    one = torch.ones(len(states), 1).to(states)
    pairs = torch.combinations(torch.arange(len(names)), with_replacement=True)
    squares = states[:, pairs[:, 0]] * states[:, pairs[:, 1]]
    for Z in (torch.cat([states, one], 1), torch.cat([states, squares, one], 1)):
        if len(seen) < 4 * Z.shape[1]:
            break
        for target in (seen, seen.square()):
            rest = target - Z @ torch.linalg.lstsq(Z, target[:, None]).solution[:, 0]
            if float(rest.var() / target.var()) < MAX_LEAKED_REST:
                return ", ".join(names)
    for name, column in zip(names, states.unbind(1), strict=True):
        ordered = seen[column.argsort(stable=True)].diff()
        increasing = bool((ordered >= 0).all()) or bool((ordered <= 0).all())
        levels = min(len(seen.unique()), len(column.unique()))
        if increasing and levels > 0.9 * len(seen):
            return name
    return None


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
    moves = torch.cat([column.diff().abs() for column in each])
    moves = moves[moves.isfinite()]
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

"""Detection of observations that are states themselves, or exact functions of them."""

import math

import torch
from torch import Tensor

from kbf.data.files.checks import MIN_STEPS
from kbf.data.files.column_schema import ColumnSchema
from kbf.data.files.layout import FileRecording
from kbf.rkhs.linalg import evenly

# Share of the variance of an observation that a linear function of the state leaves, below which it
# is no measurement. Float32 alone leaves 1e-14.
MAX_LEAKED_REST = 1e-9

# Rows between a state and an observation that is a function of it, and how a warning names them.
SHIFTS = {
    0: "",
    -1: " in the row before",
    1: " in the row after",
    **{-k: f" {k} rows before" for k in (2, 3)},
    **{k: f" {k} rows after" for k in (2, 3)},
}

# Steps of a table that a function is looked for in, at most.
MAX_LEAK_STEPS = 800

# Values of a rounded function, at least; and how far it may be from the function, in units of the
# last digit. Rounding alone is off by 0.5.
MIN_LEVELS = 20
MAX_ROUNDING = 0.55

# Share of the variance of (cos a, sin a) that the direction to a point leaves, below which an angle
# a is this direction.
MAX_DIRECTION_REST = 1e-8

# States whose pairs are taken as places in a plane; with more states there are too many pairs.
MAX_STATES_OF_PLANES = 8


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
            state = function_of(x[rows, k], z[rows + shift], states)
            if state is None and shift == -1:
                state, row = (
                    difference_of(x[rows, k], z[rows], z[rows - 1], states),
                    " and its moves",
                )
            if state is not None:
                found.append(
                    f"column {name} is an exact function of {state}{row}: it is no measurement of "
                    "an unknown state, and the error will be too low"
                )
                break
    return found


def function_of(seen: Tensor, states: Tensor, names: list[str]) -> str | None:
    """Returns the names of the states that a column ``n`` is a function of; None without.

    Functions that are found are linear and quadratic ones of all states ``n d``, roots of the
    latter, as distances, rounded linear ones, directions to a point in the plane of two states, and
    monotone functions of a state.
    """
    if len(seen) < MIN_STEPS or float(seen.std()) == 0:
        return None
    plane, states = states, (states - states.mean(0)) / states.std(0).clamp_min(1e-300)
    one = torch.ones(len(states), 1).to(states)
    pairs = torch.combinations(torch.arange(len(names)), with_replacement=True)
    for first, second in (pairs[:0].unbind(1), pairs.unbind(1)):
        if len(seen) < 4 * (states.shape[1] + len(first) + 1):
            break
        Z = torch.cat([states, states[:, first] * states[:, second], one], 1)
        for target in (seen, seen.square()):
            rest = residual(target, Z)
            if float(rest.var() / target.var()) < MAX_LEAKED_REST:
                return ", ".join(names)
            if target is seen and Z.shape[1] == len(names) + 1 and is_rounding(seen, rest):
                return ", ".join(names)
    for name, column in zip(names, states.unbind(1), strict=True):
        ordered = seen[column.argsort(stable=True)].diff()
        increasing = bool((ordered >= 0).all()) or bool((ordered <= 0).all())
        levels = min(len(seen.unique()), len(column.unique()))
        if increasing and levels > 0.9 * len(seen):
            return name
    planes = torch.combinations(torch.arange(len(names))).tolist()
    for i, j in planes if len(names) <= MAX_STATES_OF_PLANES else ():
        if is_direction(seen, plane[:, i], plane[:, j]):
            return f"{names[i]}, {names[j]}"
    return None


def difference_of(seen: Tensor, now: Tensor, before: Tensor, names: list[str]) -> str | None:
    """Returns the names of states if a column is a linear function of two rows of them ``n d``."""
    if len(seen) < max(MIN_STEPS, 4 * (2 * len(names) + 1)) or float(seen.std()) == 0:
        return None
    Z = torch.cat([now, now - before], 1)
    Z = (Z - Z.mean(0)) / Z.std(0).clamp_min(1e-300)
    Z = torch.cat([Z, torch.ones(len(Z), 1).to(Z)], 1)
    leaked = float(residual(seen, Z).var() / seen.var()) < MAX_LEAKED_REST
    return ", ".join(names) if leaked else None


def residual(target: Tensor, Z: Tensor) -> Tensor:
    """Returns what the linear regression of a target ``n`` on ``n c`` leaves."""
    return target - Z @ torch.linalg.lstsq(Z, target[:, None]).solution[:, 0]


def is_rounding(seen: Tensor, rest: Tensor) -> bool:
    """Whether a linear function leaves of a column no more than the rounding of its values."""
    levels = seen.unique()
    if not MIN_LEVELS <= len(levels) < 0.9 * len(seen):
        return False
    digit = float(levels.diff().min())
    return float(rest.abs().max()) < MAX_ROUNDING * digit


def is_direction(angle: Tensor, x: Tensor, y: Tensor) -> bool:
    """Whether a column is the direction to or from a point: (x - a) sin = (y - b) cos.

    Angles in radians and degrees are recognised.
    """
    for turn in (2 * math.pi, 360.0):
        if float(angle.max() - angle.min()) > 1.01 * turn:
            continue
        c, s = ((angle * (2 * math.pi / turn)).cos(), (angle * (2 * math.pi / turn)).sin())
        across = x * s - y * c
        if float(across.var()) > 0 and min(float(s.var()), float(c.var())) > 1e-3:
            rest = residual(across, torch.stack([s, c], 1))
            if float(rest.square().mean() / (x.var() + y.var())) < MAX_DIRECTION_REST:
                return True
    return False

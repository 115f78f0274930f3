"""Columns of a program with NumPy only: numbers by name, and rotations as columns."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from kbf.runtime.errors import DataError, nearest


def numbers_by_name(
    values: Any, names: list[str], side: str, *, missing: bool = False
) -> list[float]:
    """Return the numbers of columns, from a mapping or an array; NaN where one is missing.

    Args:
        values: by name, or in the order of ``names``.
        names: of the columns.
        side: for messages.
        missing: whether columns may be absent.

    Raises:
        KeyError: an unknown name. DataError: an absent name, or another number of values.
    """
    if hasattr(values, "to_dict"):
        values = values.to_dict()
    if isinstance(values, Mapping):
        if unknown := [name for name in values if name not in names]:
            hint = nearest(str(unknown[0]), names, "they are")
            raise KeyError(f"{unknown[0]!r} is not among the {side}; {hint}")
        absent = [name for name in names if name not in values]
        if absent and not missing:
            raise DataError(f"{side}: {', '.join(absent)} is missing; None stands for no reading")
        values = [values.get(name) for name in names]
    found = [math.nan if each is None else float(each) for each in np.ravel(values)]
    if len(found) != len(names):
        raise DataError(
            f"{side} must be {len(names)} numbers ({', '.join(names)}), got {len(found)}"
        )
    return found


def rotation_columns(m: np.ndarray, width: int) -> Any:
    """Return the nearest rotation to 9 numbers: its 9 entries, or a quaternion w x y z, w >= 0."""
    left, _, right = np.linalg.svd(m.reshape(3, 3))
    left[:, 2] *= np.linalg.det(left @ right)
    nearest_rotation = left @ right
    if width == 9:
        return nearest_rotation.ravel()
    from scipy.spatial.transform import Rotation

    q = np.roll(Rotation.from_matrix(nearest_rotation).as_quat(), 1)
    return -q if q[0] < 0 else q


def from_quaternion(q: list[float]) -> list[float]:
    """Return the 9 entries of the matrix of a quaternion w x y z."""
    from scipy.spatial.transform import Rotation

    return Rotation.from_quat(np.roll(q, -1)).as_matrix().ravel().tolist()

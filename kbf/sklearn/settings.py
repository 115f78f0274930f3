"""Settings that the scikit-learn estimators share: kernels by name, bandwidths, checks."""

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kbf.rkhs.kernels import KERNELS, Kernel, median_distance

Array = NDArray[np.float64]
# Upper bound on the points, evenly spaced, of a leave-one-out score: it bounds the cost.
MAX_LOO_POINTS = 1000


def bandwidth_of(x: Tensor, given: float | None) -> float:
    """Return the given bandwidth, or the median distance between the points."""
    return median_distance(x).item() if given is None else positive("bandwidth", given)


def kernel_of(name: str, bandwidth: float) -> Kernel:
    """Return a kernel with its bandwidth."""
    return partial(known("kernel", name, KERNELS), bandwidth=bandwidth)


def known(what: str, name: str, table: dict[str, Any]) -> Any:
    """Return the entry of a table.

    Raises:
        ValueError: no entry has this name.
    """
    if name not in table:
        raise ValueError(f"{what} must be one of {', '.join(table)}, got {name!r}")
    return table[name]


def positive(what: str, value: float) -> float:
    """Return the number.

    Raises:
        ValueError: it is not positive.
    """
    if not value > 0:
        raise ValueError(f"{what} must be positive, got {value!r}")
    return float(value)

"""The table of all forms of the conditional mean embedding."""

from __future__ import annotations

from collections.abc import Callable

from kbf.rkhs.conditional_means.all_points import exact, nadaraya_watson
from kbf.rkhs.conditional_means.base import ConditionalMean
from kbf.rkhs.conditional_means.local import nearest
from kbf.rkhs.conditional_means.low_rank import incomplete_cholesky, nystrom, random_fourier
from kbf.rkhs.conditional_means.parts import divide_and_conquer, subsample

CONDITIONAL_MEANS: dict[str, Callable[..., ConditionalMean]] = {
    "exact": exact,
    "incomplete_cholesky": incomplete_cholesky,
    "nystrom": nystrom,
    "random_fourier": random_fourier,
    "nearest": nearest,
    "subsample": subsample,
    "divide_and_conquer": divide_and_conquer,
    "nadaraya_watson": nadaraya_watson,
}
"""Every form by its name. All take (kernel, x, z, reg), but for `random_fourier` (a bandwidth, no kernel) and `nadaraya_watson`
(no ridge)."""

"""Scaling of states, observations and controls to unit variance, and filters in the data's units.

A kernel has one length scale for all components: without scaling, a component in millimetres would
hide one in metres.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn

from kbf.filters.protocols import Filter, covariance_of, sample_of
from kbf.filters.wrapper import FilterWrapper
from kbf.manifolds import manifold_of
from kbf.recording import Recording
from kbf.rkhs.kernels import Bandwidth, median_distance
from kbf.rkhs.linalg import evenly
from kbf.rkhs.weights import effective_sample_size
from kbf.runtime.errors import DataWarning
from kbf.runtime.html_repr import ShownModule

# Observations that are whole numbers from 0 on, up to this at most, are counts.
MOST_COUNTED = 100
# They are so up to ten times more if their mean is at most this: rates may have bursts.
MOST_MEAN_OF_BURSTS = 20


# Standard deviations of two columns, the larger over the smaller, above which a kernel with one
# length scale ignores the smaller column: its distances are a hundredth of the squared ones.
MAX_SCALE_RATIO = 10.0
# Mean over standard deviation of a column above which weights that sum to 0.9 or 1.1, as weights
# that are not normalised do, cost an error of more than one standard deviation.
MAX_OFFSET = 10.0

# Effective sample size of a row of the Gram matrix below which a point has no neighbour: 1 is the
# point itself.
MIN_NEIGHBOURS = 1.05
# Rows of the Gram matrix whose median is taken.
ROWS_OF_NEIGHBOURS = 100


class ScaleWarning(DataWarning):
    """Columns have scales or means that a filter without scaling does not take well."""


class Scaling(ShownModule):
    """x -> (x - mean) / scale for each component of states, observations and controls.

    Means and scales are buffers in float64.

    Counts among the observations stay as they are: their laws (Poisson, ...) are of counts, not of
    multiples of them.

    Attributes:
        z_mean, z_scale: ``d``. x_mean, x_scale: ``q``, without entries for images, which stay as
            they are. u_mean, u_scale: ``k``, without entries where there are no controls.
    """

    def __init__(self) -> None:
        """Without any components: `prepare` or a checkpoint brings them."""
        super().__init__()
        none = torch.zeros(0, dtype=torch.float64)
        self.z_mean: Tensor = nn.Buffer(none)
        self.z_scale: Tensor = nn.Buffer(none)
        self.x_mean: Tensor = nn.Buffer(none)
        self.x_scale: Tensor = nn.Buffer(none)
        self.u_mean: Tensor = nn.Buffer(none)
        self.u_scale: Tensor = nn.Buffer(none)

    def prepare(
        self,
        recordings: list[Recording],
        free_states: list[bool] | None = None,
        free_obs: list[bool] | None = None,
    ) -> Scaling:
        """Return the mean and standard deviation of the training part; counts are not scaled.

        Args:
            recordings: the training part.
            free_states: components of the state whose unit is of no matter; the others (of angles
                and rotations) are left as they are. None for all. Points on the circle are left as
                they are in any case.
            free_obs: the same for the observations.
        """
        sides = {"z": (torch.cat([s.states for s in recordings]), free_states)}
        if recordings[0].obs.ndim == 2:
            obs = torch.cat([s.obs if s.mask is None else s.obs[s.mask] for s in recordings])
            counts = are_counts(obs).tolist()
            sides["x"] = (
                obs,
                [
                    free and not count
                    for free, count in zip(free_obs or [True] * len(counts), counts, strict=True)
                ],
            )
        controls = [s.controls for s in recordings if s.controls is not None]
        if controls:
            sides["u"] = torch.cat(controls), None
        for side, (values, free) in sides.items():
            mean, scale = spread(values.double(), free)
            self.register_buffer(f"{side}_mean", mean)
            self.register_buffer(f"{side}_scale", scale)
        return self

    def forward(self, recording: Recording) -> Recording:
        """A recording in scaled units, float64."""
        return recording._replace(
            states=self.scaled("z", recording.states),
            obs=self.observation(recording.obs),
            controls=None if recording.controls is None else self.scaled("u", recording.controls),
        )

    def give_zero_reading(self, net: nn.Module) -> None:
        """Set the attribute ``zero_reading`` of parts of a net: ``q``, 0 in scaled units."""
        for each in net.modules() if len(self.x_mean) else ():
            if hasattr(each, "zero_reading"):
                each.zero_reading = -self.x_mean / self.x_scale

    def scaled(self, side: str, values: Tensor) -> Tensor:
        """Values ``*b c`` of one side (z, x, u) in scaled units, float64."""
        return (values.to(torch.float64) - getattr(self, f"{side}_mean")) / getattr(
            self, f"{side}_scale"
        )

    def unscaled(self, side: str, values: Float[Tensor, "*b c"]) -> Float[Tensor, "*b c"]:
        """Values of one side in the units of the data, the inverse of `scaled`, in float64.

        Far from zero single precision is not sufficient.
        """
        return getattr(self, f"{side}_mean") + getattr(self, f"{side}_scale") * values

    def observation(self, obs: Shaped[Tensor, "*b"]) -> Shaped[Tensor, "*b"]:
        """Observations in scaled units; images as they are."""
        return self.scaled("x", obs) if len(self.x_mean) else obs

    def states(self, scaled: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """Return scaled states in the units of the data, in float64."""
        return self.unscaled("z", scaled)

    def covariances(self, scaled: Float[Tensor, "*b d d"]) -> Float[Tensor, "*b d d"]:
        """S C S with S = diag(z_scale), float64."""
        return self.z_scale[:, None] * scaled * self.z_scale


def spread(
    values: Float[Tensor, "n c"], free: list[bool] | None
) -> tuple[Float[Tensor, " c"], Float[Tensor, " c"]]:
    """Return mean and standard deviation of each column over its finite entries.

    0 and 1 for columns that are not free, and a scale of 1 for constants.
    """
    kept = torch.ones(values.shape[1], dtype=torch.bool) if free is None else torch.tensor(free)
    for cosine in manifold_of(values).circles:
        kept[cosine : cosine + 2] = False
    known = values.isfinite()
    count = known.sum(0).clamp_min(1)
    mean = torch.where(known, values, 0).sum(0) / count
    std = (torch.where(known, values - mean, 0).square().sum(0) / count).sqrt()
    constant = std <= 1e-12 * mean.abs()  # what rounding leaves
    return torch.where(kept.to(mean.device), mean, 0), torch.where(
        kept.to(std.device) & ~constant, std, 1
    )


def warn_of_scales(values: Float[Tensor, "n c"], what: str, *, offset: bool = False) -> None:
    """Warn of columns whose scales differ by more than `MAX_SCALE_RATIO`.

    Constant columns are ignored.

    Args:
        values: states or observations, as a kernel takes them.
        what: their name in the message.
        offset: warn of means of more than `MAX_OFFSET` standard deviations as well.
    """
    mean, std = (each.tolist() for each in spread(values.double(), None))
    known = torch.where(values.isfinite(), values, values.nanmean(0))
    scales = {k: std[k] for k in range(len(std)) if bool((known[:, k] != known[0, k]).any())}
    if not scales:
        return
    advice = (
        "kbf.fit scales them; directly, use (x - mean) / std of each column, or "
        "kbf.filters.scaling.Scaling"
    )
    low, high = (key(scales, key=scales.__getitem__) for key in (min, max))
    if scales[high] > MAX_SCALE_RATIO * scales[low]:
        warnings.warn(
            f"{what}: column {high} varies by {scales[high]:.3g}, column {low} by "
            f"{scales[low]:.3g}, and one length scale for both hides the latter: {advice}",
            ScaleWarning,
            stacklevel=4,
        )
    far = [k for k, scale in scales.items() if abs(mean[k]) > MAX_OFFSET * scale]
    if offset and far:
        warnings.warn(
            f"{what}: column {far[0]} varies by {scales[far[0]]:.3g} around {mean[far[0]]:.3g}, "
            f"and estimates with weights that do not sum to 1 are off by a share of it: {advice}",
            ScaleWarning,
            stacklevel=4,
        )


@torch.no_grad()
def warn_of_isolation(
    values: Shaped[Tensor, "n c"], kernel: Callable[..., Tensor], bandwidth: Bandwidth, what: str
) -> None:
    """Warn of a bandwidth at which a training point resembles only itself.

    The effective sample size (sum_j k_ij)^2 / sum_j k_ij^2 of row i of the Gram matrix is the
    number of points that point i resembles. Where its median is below `MIN_NEIGHBOURS`, weights
    are those of single memory points, and estimates jump between them.

    Args:
        values: training points, as the kernel takes them.
        kernel: k. bandwidth: its bandwidth.
        what: the points' name in the message.
    """
    values = values if values.is_floating_point() else values.double()
    rows = values[evenly(len(values), ROWS_OF_NEIGHBOURS, values.device)]
    found = effective_sample_size(kernel(rows, values, bandwidth=bandwidth)).median().item()
    if len(values) > 1 and found < MIN_NEIGHBOURS:
        distance = median_distance(values, distinct=True)
        warnings.warn(
            f"{what}: at a bandwidth of {torch.as_tensor(bandwidth).max():.3g} a training point "
            f"resembles only itself (effective sample size {found:.2f} of {len(values)}; the "
            f"median distance of two points is {distance:.3g}): prepare(recordings) sets "
            "bandwidths by the data, and kbf.fit does so by itself",
            ScaleWarning,
            stacklevel=4,
        )


def are_counts(values: Float[Tensor, "n c"]) -> Bool[Tensor, " c"]:
    """Return which columns are counts: different whole numbers from 0 to `MOST_COUNTED`.

    Columns with a mean of at most `MOST_MEAN_OF_BURSTS` may have numbers ten times larger. Entries
    that are not finite are ignored.
    """
    finite = values.isfinite()
    known = torch.where(finite, values, 0)
    mean = known.sum(0) / finite.sum(0).clamp_min(1)
    largest = torch.where(mean <= MOST_MEAN_OF_BURSTS, 10 * MOST_COUNTED, MOST_COUNTED)
    whole = ((known >= 0) & (known <= largest) & (known == known.round())).all(0)
    least, most = (
        torch.where(finite, values, torch.inf).amin(0),
        torch.where(finite, values, -torch.inf).amax(0),
    )
    return whole & (least < most)


class ScaledFilter(FilterWrapper):
    """A filter of scaled units as a filter of the data's units."""

    def __init__(self, scaling: Scaling, inner: Filter[Any], dtype: torch.dtype) -> None:
        """``inner`` takes observations of type ``dtype`` (or images) in scaled units."""
        super().__init__(inner)
        self.scaling, self.dtype = scaling, dtype

    def observed(self, obs: Shaped[Tensor, "b *x"]) -> Shaped[Tensor, "b *x"]:
        """In scaled units."""
        scaled = self.scaling.observation(obs)
        return scaled.to(self.dtype) if scaled.is_floating_point() else scaled

    def acted(self, control: Float[Tensor, "b k"]) -> Float[Tensor, "b k"]:
        """In scaled units."""
        return self.scaling.scaled("u", control).to(self.dtype)

    def estimate(self, state: Any) -> Tensor:
        """In the units of the data, ``b d`` float64."""
        return self.scaling.states(self.inner.estimate(state))

    def covariance(self, state: Any) -> Tensor | None:
        """In the units of the data, ``b d d`` float64; None if the inner filter has none."""
        inner = covariance_of(self.inner, state)
        return None if inner is None else self.scaling.covariances(inner)

    def log_likelihood(self, state: Any, obs: Shaped[Tensor, "b *x"]) -> Tensor | None:
        """Of the observation in the units of the data, ``b``; None if the inner filter has none."""
        density = super().log_likelihood(state, obs)
        if density is None or len(self.scaling.x_scale) == 0:
            return density
        return density - (obs.isfinite() * self.scaling.x_scale.log()).sum(-1)

    def weighted_sample(self, state: Any) -> tuple[Tensor, Tensor] | None:
        """Return ``b n d`` float64 in the units of the data, and ``b n``; or None."""
        inner = sample_of(self.inner, state)
        return None if inner is None else (self.scaling.states(inner[0]), inner[1])

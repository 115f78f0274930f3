"""Weights by the density of a learned law: the update of a Kernel Bayes Filter whose sensors may be silent."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kbf.densities.per_sensor import PerSensorDensity
from kbf.filters.gaussian.moments import MAX_DEVIATIONS

LEAST = -0.5 * MAX_DEVIATIONS**2
"""Log density below which an observation is far from what any point of the memory lets expect."""


class DensityUpdate(nn.Module):
    """(ratio, x) -> weights w_i = r_i p(x | z_i), over the sensors that speak in x; the others have NaN.

    Kernel rules tend to this as draws grow and ridges fall. They would need features for every set
    of sensors that may speak; a law of each sensor is enough here. Weights are relative to the
    density at the point that explains x best: a belief that is far from all such points has none,
    and the loop passes the observation over.
    """

    allow_missing_sensors = True

    def __init__(self, density: PerSensorDensity, states: Float[Tensor, "n d"]) -> None:
        """``density``: of observations. states: of the memory, in whose type densities are computed."""
        super().__init__()
        self.likelihood = density.at(states)
        self.dtype: torch.dtype = states.dtype

    def forward(
        self, ratio: Float[Tensor, "b n"], obs: Float[Tensor, "b q"]
    ) -> Float[Tensor, "b n"]:
        """The posterior's weights."""
        log_p = self.likelihood(obs.to(self.dtype))
        return ratio * (log_p - log_p.amax(-1, keepdim=True).clamp_min(LEAST)).exp().to(ratio)

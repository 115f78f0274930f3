"""Update by a learned likelihood, for observations with missing sensors."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kbf.densities.base import Likelihood
from kbf.densities.per_sensor import PerSensorDensity
from kbf.filters.gaussian.moments import MAX_DEVIATIONS

# Log density below which an observation is far from the predictions at all points of the memory.
MIN_LOG_DENSITY = -0.5 * MAX_DEVIATIONS**2


class DensityUpdate(nn.Module):
    """(ratio, x) -> weights w_i = r_i p(x | z_i), over the sensors that are not NaN in x.

    It is the limit of kernel rules for many draws and small ridges. Those require features for
    every set of sensors, this one density for each sensor. Weights are relative to the density at
    the point that explains x best: if the belief is far from all such points the weights vanish,
    and the observation is rejected.
    """

    allow_missing_sensors = True

    def __init__(self, density: PerSensorDensity, states: Float[Tensor, "n d"]) -> None:
        """Evaluate the density of observations at the states of the memory, in their dtype."""
        super().__init__()
        self.likelihood: Likelihood = density.at(states)
        self.dtype: torch.dtype = states.dtype

    def forward(
        self, ratio: Float[Tensor, "b n"], obs: Float[Tensor, "b q"]
    ) -> Float[Tensor, "b n"]:
        """Return the weights of the posterior."""
        log_p = self.likelihood(obs.to(self.dtype))
        return ratio * (log_p - log_p.amax(-1, keepdim=True).clamp_min(MIN_LOG_DENSITY)).exp().to(
            ratio
        )

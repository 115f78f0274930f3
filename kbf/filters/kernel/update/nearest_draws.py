"""The importance-weighted rule restricted to the draws nearest to the observation."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from kbf.rkhs.linalg import column_medians

# Draws of each point over which `LocalUpdate.features` are averaged.
DRAWS_FOR_FEATURES = 8

# Ratios below this share of the largest are treated as 0.
NEGLIGIBLE_RATIO = 1e-3


class LocalUpdate(nn.Module):
    """(ratio, x) -> weights, from the ``near`` draws of observations that are nearest to x.

    Each memory point has k draws of its observation.

    1. Among the draws of points with a ratio above `NEGLIGIBLE_RATIO`, the m nearest to x are used.
       The bandwidth is ``width`` times the distance of the farthest one: small where draws are
       dense, large in the tails.
    2. Draw j of point i has the weight r_i g(x_ij, x), a kernel estimate of the likelihood times
       the ratio. This is the limit of `kbf.rkhs.rules.importance_weighted` for a large ridge, up to
       a constant; it is never negative.
    3. The weight of a point is the sum over its draws.

    Observations are compared in units of the draws' median deviation. If they have more components
    than the state, they are replaced by d linear predictions of the state, so that the resolution
    of the kernel does not depend on their number.

    References: Fearnhead and Prangle (2012) for regressions of the parameter as statistics; `near`
    of n points is the local conditional mean embedding (LCKME).
    """

    def __init__(
        self,
        obs: Float[Tensor, "n k q"],
        states: Float[Tensor, "n d"],
        *,
        near: int = 512,
        width: float = 0.5,
        psi: nn.Module | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Store the draws of a memory.

        Args:
            obs: k draws for each point. states: of the points.
            near: m. width: of the kernel, over the distance of the m-th draw.
            psi: features of observations ``m q`` -> ``m p``. The update does not use them. From
                those of `DRAWS_FOR_FEATURES` draws of each point, ``n p``, the predicted
                observation is computed (`kbf.evaluation.alarms.innovation_score`).
            dtype: of the arithmetic.
        """
        super().__init__()
        (n, k, q), d = obs.shape, states.shape[1]
        flat = obs.flatten(0, 1)
        shift = column_medians(flat)
        if q > d:
            centred, target = flat - flat.mean(0), states.repeat_interleave(k, 0)
            gram = centred.mT @ centred
            gram.diagonal().add_(1e-6 * gram.diagonal().mean().clamp_min(1e-30))
            projection = torch.linalg.solve(gram, centred.mT @ (target - target.mean(0)))
        else:
            deviation = column_medians((flat - shift).abs())
            projection = torch.where(deviation > 0, 1 / deviation, 1).diag()
        self.k, self.near, self.width = k, min(near, n * k), width
        self.psi = psi
        features = None
        if psi is not None:
            some = obs[:, :DRAWS_FOR_FEATURES]
            features = psi(some.flatten(0, 1)).unflatten(0, some.shape[:2]).mean(1).to(dtype)
        self.features: Tensor | None = None if features is None else nn.Buffer(features)
        self.projection: Tensor = nn.Buffer(projection.to(dtype))
        self.shift: Tensor = nn.Buffer(shift.to(dtype))
        self.draws: Tensor = nn.Buffer(((flat - shift) @ projection).to(dtype).mT.contiguous())
        self.squares: Tensor = nn.Buffer(self.draws.square().sum(0))

    def forward(
        self, ratio: Float[Tensor, "b n"], obs: Shaped[Tensor, "b *x"]
    ) -> Float[Tensor, "b n"]:
        """Return the weights of the posterior."""
        x = (obs.flatten(1).to(self.shift) - self.shift) @ self.projection
        idle = ratio <= NEGLIGIBLE_RATIO * ratio.amax(-1, keepdim=True)
        distances = torch.addmm(self.squares, x, self.draws, alpha=-2)  # squared, less |x|^2
        distances.unflatten(-1, (-1, self.k)).masked_fill_(idle[..., None], torch.inf)
        found, rows = distances.topk(self.near, largest=False, sorted=False)
        inside, points = found.isfinite(), rows // self.k
        squared = (x[:, None] - self.draws[:, rows].movedim(0, -1)).square().sum(-1)
        farthest = torch.where(inside, squared, 0).amax(-1, keepdim=True).clamp_min(1e-20)
        scale = 2 * self.width**2 * farthest
        r = torch.where(inside, ratio.gather(-1, points), 0)
        g = torch.where(inside, (-squared / scale).exp(), 0)
        return torch.zeros_like(ratio).scatter_add(-1, points, (r * g).to(ratio))

"""Updates over the memory, (ratio, x) -> weights: by a kernel Bayes' rule, or by a likelihood."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from kbf.densities.base import Likelihood
from kbf.densities.per_sensor import PerSensorDensity
from kbf.filters.gaussian.moments import MAX_DEVIATIONS
from kbf.rkhs import rules
from kbf.rkhs.features import POINTS_AT_A_TIME
from kbf.rkhs.linalg import ROUNDING, two_factors
from kbf.rkhs.rules import RULES
from kbf.runtime.html_repr import ShownModule

# Batch size from which stored products of features are faster than new ones.
MIN_BATCH_FOR_MOMENTS = 8

# Largest size of the stored products on a CPU, about that of its caches.
MAX_BYTES_OF_MOMENTS = 2**26

# Largest size of the stored products on a GPU, a small part of its memory.
MAX_BYTES_OF_MOMENTS_ON_GPU = 2**30

# Log density below which an observation is far from the predictions at all points of the memory.
MIN_LOG_DENSITY = -0.5 * MAX_DEVIATIONS**2


class DenseUpdate(nn.Module):
    """A rule over the full Gram matrix of the memory's observations: (ratio, x) -> weights.

    A step costs O(n^3).
    """

    obs: Tensor
    bandwidth: Tensor
    gram: Tensor
    reg: Tensor
    rule: Callable[..., Tensor]
    kernel: Callable[..., Tensor]

    def __init__(
        self,
        rule: Callable[..., Tensor],
        kernel: Callable[..., Tensor],
        bandwidth: Tensor,
        obs: Float[Tensor, "n q"],
        reg: float | Tensor,
    ) -> None:
        """Compute the Gram matrix of a memory.

        Args:
            rule: the dense form of a `kbf.rkhs.rules.Rule`.
            kernel: k_X, of `kbf.rkhs.kernels`.
            bandwidth: of k_X.
            obs: observations of the memory points ``n q``.
            reg: lambda (delta of the original rule).
        """
        super().__init__()
        self.rule, self.kernel = rule, kernel
        self.register_buffer("obs", obs)
        self.register_buffer("bandwidth", bandwidth)
        self.register_buffer("gram", kernel(obs, obs, bandwidth=bandwidth))
        self.register_buffer("reg", torch.as_tensor(reg, dtype=obs.dtype))

    def forward(
        self, ratio: Float[Tensor, "b n"], obs: Shaped[Tensor, "b *x"]
    ) -> Float[Tensor, "b n"]:
        """Return the weights of the posterior given the ratios of the prior and observations."""
        query = self.kernel(obs.flatten(1).to(self.obs), self.obs, bandwidth=self.bandwidth)
        return self.rule(ratio, self.gram, query, self.reg)

    def regress(self, obs: Shaped[Tensor, "b *x"], reg: float) -> Float[Tensor, "b n"]:
        """Return the weights of the conditional mean embedding: the rule without a prior."""
        query = self.kernel(obs.flatten(1).to(self.obs), self.obs, bandwidth=self.bandwidth)
        return rules.importance_weighted(torch.ones_like(query), self.gram, query, reg)


class PrimalUpdate(ShownModule):
    """A rule over features psi of the observations: (ratio, x) -> weights w = D Psi c.

    The coefficients c are a function of C = sum_i r_i (1/k) sum_j psi_ij psi_ij^T and psi(x)
    (`kbf.rkhs.rules.Rule.primal`), and a step costs O(n p^2). A memory point may have k
    observations x_i1 ... x_ik: row i of Psi is then the mean of their features, and w the weights
    of the rule over all n k observations with the same lambda, each ratio repeated k times, summed
    over the observations of each point. With ``local`` only the points of the largest ratios take
    part, O(local p^2); the ridge remains that of all n points.
    """

    features: Tensor
    moments: Tensor | None
    basis: Tensor | None
    place: Tensor
    reg: Tensor

    def __init__(
        self,
        psi: nn.Module,
        obs: Shaped[Tensor, "n k *x"],
        reg: float | Tensor,
        *,
        rule: str = "importance_weighted",
        dtype: torch.dtype | None = None,
        local: int | None = None,
    ) -> None:
        """Compute the features of a memory.

        Args:
            psi: features ``m *x`` -> ``m p``, differentiable.
            obs: k observations of each memory point.
            reg: lambda (delta of the original rule).
            rule: a name in `kbf.rkhs.rules.RULES`, of a rule with a primal form.
            dtype: of the rule's arithmetic; None for that of the features.
            local: number of points in an update, those of the largest ratios; None for all.

        Raises:
            ValueError: a rule without a primal form; or ``local`` or several observations of a
                point with a rule that is not a weighted regression
                (`kbf.rkhs.rules.Rule.regression`).
        """
        super().__init__()
        k, form = obs.shape[1], RULES[rule]
        if form.primal is None or not (form.regression or (k == 1 and local is None)):
            possible = ", ".join(
                name if other.regression else f"{name} with k = 1 and all points"
                for name, other in RULES.items()
                if other.primal is not None
            )
            raise ValueError(
                f"a rule over features is one of {possible}; "
                f"got {rule} with k = {k}, local = {local}"
            )
        if local is not None and local < 1:
            raise ValueError(f"local must be at least 1, got {local}")
        parts = obs.split(POINTS_AT_A_TIME)
        features = torch.cat([psi(x.flatten(0, 1)).unflatten(0, (len(x), k)) for x in parts])
        features = features.to(dtype or features.dtype)
        self.psi: nn.Module = psi
        self.coefficients: Callable[..., Tensor] = form.primal
        self.local: int | None = local
        self.several: bool = k > 1
        self.scale: int = len(obs) if form.ridge_scales_with_n else 1
        p = features.shape[-1]
        size = len(obs) * p * (p + 1) // 2 * features.element_size()
        limit = MAX_BYTES_OF_MOMENTS_ON_GPU if features.is_cuda else MAX_BYTES_OF_MOMENTS
        keep = form.regression and (self.several or size <= limit)
        moments, basis = rules.second_moments(features) if keep else None, None
        if (
            moments is not None
            and self.several
            and moments.dtype == torch.float32
            and not moments.requires_grad
        ):
            moments, basis = two_factors(moments, ROUNDING) or (moments, None)
        self.register_buffer("features", features.mean(1) if self.several else features[:, 0])
        self.register_buffer("moments", moments)
        self.register_buffer("basis", basis)
        self.register_buffer("place", rules.places(p, features.device), persistent=False)
        self.register_buffer("reg", torch.as_tensor(reg, dtype=features.dtype))

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **named: Any
    ) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Overrides `nn.Module`: ``moments``, ``basis``, ``place`` become those of the stored rank.

        Products are kept if they are stored, since a stored filter of another rank may have kept
        what this one does not.
        """
        for name in ("moments", "basis"):
            stored = state_dict.get(f"{prefix}{name}")
            if (stored is None) != (getattr(self, name) is None):
                device = self.features.device
                empty = None if stored is None else torch.empty_like(stored, device=device)
                setattr(self, name, empty)
        if (stored := state_dict.get(f"{prefix}features")) is not None:
            self.place = rules.places(stored.shape[-1], self.place.device)
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)

    def forward(
        self, ratio: Float[Tensor, "b n"], obs: Shaped[Tensor, "b *x"]
    ) -> Float[Tensor, "b n"]:
        """Return the weights of the posterior given the ratios of the prior and observations."""
        query = self.psi(obs).to(self.features.dtype)
        if self.local is None or self.local >= len(self.features):
            return self.over(ratio, self.features, self.moments, query)
        rows = ratio.topk(self.local, sorted=False).indices
        moments = take(self.moments, rows) if self.moments is not None and self.several else None
        w = self.over(ratio.gather(-1, rows), take(self.features, rows), moments, query)
        return torch.zeros_like(ratio).scatter(-1, rows, w)

    def over(
        self, ratio: Tensor, features: Tensor, moments: Tensor | None, query: Tensor
    ) -> Float[Tensor, "b m"]:
        """Apply the rule to some of the points.

        Args:
            ratio: r ``b m``.
            features: Psi ``m p`` or ``b m p``.
            moments: stored products of the points, which are used where they are faster.
            query: psi(x) ``b p``.
        """
        if moments is not None and (self.several or len(ratio) >= MIN_BATCH_FOR_MOMENTS):
            C = rules.covariance_from_moments(ratio, moments, self.place, self.basis)
        else:
            C = rules.weighted_covariance(ratio, features)
        c = self.coefficients(C, query, self.scale * self.reg)
        return rules.from_coefficients(ratio, features, c)

    def regress(self, obs: Shaped[Tensor, "b *x"], reg: float) -> Float[Tensor, "b n"]:
        """Return the weights of the conditional mean embedding: the rule without a prior."""
        query = self.psi(obs).to(self.features.dtype)
        ones = query.new_ones(len(query), len(self.features))
        if self.moments is not None and self.several:
            C = rules.covariance_from_moments(ones, self.moments, self.place, self.basis)
        else:
            C = rules.weighted_covariance(ones, self.features)
        c = rules.importance_weighted_coefficients(C, query, len(self.features) * reg)
        return rules.from_coefficients(ones, self.features, c)


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


def take(table: Float[Tensor, "n p"], rows: Int[Tensor, "b m"]) -> Float[Tensor, "*b m p"]:
    """Return rows of a table for each element of a batch, ``m p`` if the batch has only one.

    Without the batch dimension the products that follow are several times faster.
    """
    return table.index_select(0, rows[0]) if len(rows) == 1 else table[rows]

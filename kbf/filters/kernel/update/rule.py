"""The updates of a Kernel Bayes Filter: a rule of `kbf.rkhs.rules` over the observations of a memory, (ratio, x) -> weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from kbf.rkhs import rules
from kbf.rkhs.features import POINTS_AT_A_TIME
from kbf.rkhs.linalg import ROUNDING, two_factors
from kbf.rkhs.rules import RULES
from kbf.runtime.distributed import OverPoints

BATCH_FOR_MOMENTS = 8
"""Sequences in a batch from which products of features that are kept (`kbf.rkhs.rules.second_moments`) are faster than new ones."""

MOST_BYTES_OF_MOMENTS, ON_GPU = 2**26, 2**30
"""Bytes up to which these products are kept: on a processor about what its caches hold, on a graphics card by what it has."""


class DenseUpdate(nn.Module):
    """A rule over the full Gram matrix of the memory's observations, O(n^3) a step: (ratio, x) -> weights."""

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
        """The update of a memory.

        Args:
            rule: the dense form of a `kbf.rkhs.rules.Rule`.
            kernel: k_X, of `kbf.rkhs.kernels`. bandwidth: its bandwidth.
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
        """Weights ``b n`` of the posterior embedding, given the ratios of the prior and one observation of each sequence."""
        query = self.kernel(obs.flatten(1).to(self.obs), self.obs, bandwidth=self.bandwidth)
        return self.rule(ratio, self.gram, query, self.reg)


class PrimalUpdate(OverPoints):
    """A rule over features psi of the observations, O(n p^2) a step: (ratio, x) -> weights.

    Each memory point may come with k observations (`kbf.rkhs.rules.importance_weighted_moments`).
    With ``local`` only the points of the largest ratios take part, O(local p^2); the ridge stays
    that of all n points.
    """

    features: Tensor
    moments: Tensor | None
    basis: Tensor | None
    place: Tensor
    reg: Tensor
    psi: nn.Module
    coefficients: Callable[..., Tensor]
    local: int | None
    several: bool

    def __init__(
        self,
        psi: nn.Module,
        obs: Shaped[Tensor, "n k *x"],
        reg: float | Tensor,
        *,
        rule: str = "importance_weighted",
        dtype: torch.dtype | None = None,
        local: int | None = None,
        n: int | None = None,
    ) -> None:
        """The update of a memory.

        Args:
            psi: features ``m *x`` -> ``m p``, differentiable.
            obs: k observations of each memory point.
            reg: lambda (delta of the original rule).
            rule: a name in `kbf.rkhs.rules.RULES`, of a rule that has a primal form.
            dtype: of the rule's arithmetic, when it is not that of the features.
            local: how many points take part, those with the largest ratios; None for all.
            n: points of the memory, where ``obs`` is a part of it.

        Raises:
            ValueError: a rule without a primal form; or ``local`` or several observations of a
                point with a rule that is no weighted regression (`kbf.rkhs.rules.Rule.regression`).
        """
        super().__init__()
        k, form = obs.shape[1], RULES[rule]
        if form.primal is None or not (form.regression or (k == 1 and local is None)):
            regressions = ", ".join(name for name, other in RULES.items() if other.regression)
            others = ", ".join(
                name
                for name, other in RULES.items()
                if other.primal is not None and not other.regression
            )
            possible = f"{regressions}, or {others} with k = 1 and all points"
            raise ValueError(
                f"a rule over features is {possible}; got {rule} with k = {k}, local = {local}"
            )
        if local is not None and local < 1:
            raise ValueError(f"local must be at least 1, got {local}")
        features = torch.cat(
            [
                psi(part.flatten(0, 1)).unflatten(0, (len(part), k))
                for part in obs.split(POINTS_AT_A_TIME)
            ]
        )
        features = features.to(dtype or features.dtype)
        self.psi, self.coefficients, self.local, self.several = psi, form.primal, local, k > 1
        self.scale: int = (n or len(obs)) if form.ridge_scales_with_n else 1
        self.register_buffer("features", features.mean(1) if self.several else features[:, 0])
        p = features.shape[-1]
        size = len(obs) * p * (p + 1) // 2 * features.element_size()
        most = ON_GPU if features.is_cuda else MOST_BYTES_OF_MOMENTS
        keep = form.regression and (self.several or size <= most)
        moments, basis = rules.second_moments(features) if keep else None, None
        if (
            moments is not None
            and self.several
            and moments.dtype == torch.float32
            and not moments.requires_grad
        ):
            moments, basis = two_factors(moments, ROUNDING) or (moments, None)
        self.register_buffer("moments", moments)
        self.register_buffer("basis", basis)
        self.register_buffer("place", rules.places(p, features.device), persistent=False)
        self.register_buffer("reg", torch.as_tensor(reg, dtype=features.dtype))

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **named: Any
    ) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As always; the places of the entries, which are not stored, become those of the rank that comes.

        Moments are kept if they are stored: which are worth keeping, another rank may have decided
        otherwise.
        """
        for name in ("moments", "basis"):
            stored = state_dict.get(f"{prefix}{name}")
            if (stored is None) != (getattr(self, name) is None):
                setattr(
                    self,
                    name,
                    None
                    if stored is None
                    else torch.empty_like(stored, device=self.features.device),
                )
        if (stored := state_dict.get(f"{prefix}features")) is not None:
            self.place = rules.places(stored.shape[-1], self.place.device)
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)

    def forward(
        self, ratio: Float[Tensor, "b n"], obs: Shaped[Tensor, "b *x"]
    ) -> Float[Tensor, "b n"]:
        """Weights ``b n`` of the posterior embedding, given the ratios of the prior and one observation of each sequence."""
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
        """The rule over some points.

        Args:
            ratio: r ``b m``. features: Psi ``m p`` or ``b m p``. moments: of the points, as kept.
                query: psi(x) ``b p``.
        """
        covariance = self.reduce(self.covariance(ratio, features, moments))
        return rules.from_coefficients(
            ratio, features, self.coefficients(covariance, query, self.scale * self.reg)
        )

    def covariance(
        self, ratio: Tensor, features: Tensor, moments: Tensor | None
    ) -> Float[Tensor, "b p p"]:
        """C = Psi^T D Psi of these points, by the products of their features where these are kept and faster."""
        if moments is not None and (self.several or len(ratio) >= BATCH_FOR_MOMENTS):
            return rules.covariance_from_moments(ratio, moments, self.place, self.basis)
        return rules.weighted_covariance(ratio, features)


def take(table: Float[Tensor, "n p"], rows: Int[Tensor, "b m"]) -> Float[Tensor, "*b m p"]:
    """Rows of a table for each of a batch; those of a single one without the batch, which is several times faster."""
    return table.index_select(0, rows[0]) if len(rows) == 1 else table[rows]

"""What is constant in time in a Kernel Bayes Filter, made once from the memory.

P moves weights one step in time, A turns a predicted embedding into a density ratio at the memory points, and an update is a rule
of `kbf.rules` over the memory's observations. Each comes from full Gram matrices, or from features ("primal"): then it costs
O(n r) or O(n p^2) a step, and its sums over the memory may be spread over processes (``total``, `kbf.distributed`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from kbf import ratios, rules
from kbf.distributed import Total, alone
from kbf.filters.moments import match_means
from kbf.linalg import psd_solve
from kbf.sequence import Transitions

PACKED = 8
"""Sequences in a batch from which products of features that are kept (`kbf.rules.second_moments`) are faster than new ones."""
KEPT = 2**26
"""Bytes up to which these products are kept."""
BLOCK = 16_384
"""Memory points whose features are made at a time."""
SAMPLE = 4096
"""Points of each process among which processes that share a memory look for landmarks."""


class Operator(nn.Module):
    """A linear map of weights, w -> left (right^T w): ``n r`` twice; dense when right is None (then left is ``n n``)."""

    left: Tensor
    right: Tensor | None

    def __init__(self, left: Float[Tensor, "n r"], right: Float[Tensor, "n r"] | None = None, total: Total = alone) -> None:
        super().__init__()
        self.register_buffer("left", left)
        self.register_buffer("right", right)
        self.total = total

    def forward(self, w: Float[Tensor, "b n"]) -> Float[Tensor, "b n"]:
        """Apply it to a batch of weights."""
        return w @ self.left.mT if self.right is None else self.total(w @ self.right) @ self.left.mT


def transition_operator(gram: Float[Tensor, "n n"], pairs: Transitions, reg: float | Tensor) -> Operator:
    """P: the conditional mean embedding of the next state. Row target(i) of P is row i of (G_ss + m reg I)^-1 G_s:.

    Args:
        gram: G_Z ``n n``.
        pairs: m transitions (source, target).
        reg: lambda'.

    References: Xu et al. (2022), Algorithm 2, step 4; Fukumizu et al., equation 18, the two factors on the right.
    """
    source = gram[pairs.source]
    solved = psd_solve(source[:, pairs.source], source, reg=len(pairs.source) * reg)
    return Operator(torch.zeros_like(gram).index_copy(0, pairs.target, solved))


def transition_operator_primal(
    features: Float[Tensor, "n r"], pairs: Transitions, reg: float | Tensor, total: Total = alone
) -> Operator:
    """The same from features, G_Z = F F^T: rows F_s (F_s^T F_s + m reg I_r)^-1 on the left, F on the right."""
    source = features[pairs.source]
    solved = psd_solve(total(source.mT @ source), source.mT, reg=count(source, total) * reg).mT
    return Operator(torch.zeros_like(features).index_copy(0, pairs.target, solved), features, total)


class ControlledTransition(nn.Module):
    """P(u): the conditional mean embedding of the next state given state *and* control, with the product kernel k_Z k_U.

    The embedding of a filter's (z, u), weights w over the memory and one control u, has at a pair (z_l, u_l) the value
    (right^T w)_l k_U(u_l, u), right = k_Z(Z, z_l). So P(u) w = left ((right^T w) * k_U(u_l, u)), O(n r) a step, with

    - all m recorded pairs for l: left = (G_Z * G_U + m reg I)^-1, as in `transition_operator`;
    - r of them, landmarks of features psi = W^T k(l, .), Psi of all pairs: left = Psi (Psi^T Psi + m reg I)^-1 W^T.

    References: Song, Huang, Smola, Fukumizu (2009) for embeddings of controlled (conditioned) transitions.
    """

    left: Tensor
    right: Tensor
    controls: Tensor
    bandwidth: Tensor

    def __init__(
        self,
        left: Float[Tensor, "n r"],
        right: Float[Tensor, "n r"],
        controls: Float[Tensor, "r k"],
        kernel: Callable[..., Tensor],
        bandwidth: Float[Tensor, " k"],
        total: Total = alone,
    ) -> None:
        """left, right and u_l as above; k_U and its bandwidth, one length for each control."""
        super().__init__()
        for name, value in (("left", left), ("right", right), ("controls", controls), ("bandwidth", bandwidth)):
            self.register_buffer(name, value)
        self.kernel, self.total, self.controlled = kernel, total, controls.shape[1]

    def forward(self, w: Float[Tensor, "b n"], control: Float[Tensor, "b k"]) -> Float[Tensor, "b n"]:
        """P(u) w."""
        near = self.kernel(control.to(self.controls), self.controls, bandwidth=self.bandwidth)
        return (self.total(w @ self.right) * near) @ self.left.mT


def ratio_operator(gram: Float[Tensor, "n n"], reg: float | Tensor) -> Operator:
    """A = n (G_Z + n reg I)^-1 G_Z: from the weights of a prior over the memory points to gamma at these points.

    References: Xu et al. (2022), equation 1, with the prior m_Pi = sum_i w_i phi(z_i).
    """
    n = len(gram)
    return Operator(n * psd_solve(gram, gram, reg=n * reg))


def ratio_operator_primal(features: Float[Tensor, "n r"], reg: float | Tensor, total: Total = alone) -> Operator:
    """The same from features, G_Z = F F^T: n F (F^T F + n reg I_r)^-1 on the left, F on the right."""
    n = count(features, total)
    return Operator(n * psd_solve(total(features.mT @ features), features.mT, reg=n * reg).mT, features, total)


def compose(outer: nn.Module | None, inner: nn.Module) -> Operator | None:
    """w -> outer (inner w) as one operator, where both are of low rank: half the work. None where they are not."""
    if not (isinstance(outer, Operator) and isinstance(inner, Operator)) or outer.right is None or inner.right is None:
        return None
    return Operator(outer.left @ outer.total(outer.right.mT @ inner.left), inner.right, outer.total)


def density_transition(
    log_density: Float[Tensor, "n n"], mass: Float[Tensor, " n"], points: Float[Tensor, "n d"], means: Float[Tensor, "n d"]
) -> Operator:
    """P from a transition density: points weighed by volume times density, each column tilted to have the mean E[z' | z_j].

        P_ij = v_i q(z_i | z_j) exp(l_j . z_i) / sum_k v_k q(z_k | z_j) exp(l_j . z_k),    v_i = m_i / p(z_i),
        sum_i P_ij z_i = E[z' | z_j]

    p(z_i) = sum_k m_k q(z_i | z_k) is the density of the memory after a move, and v_i the volume that point i stands for.
    Where moves are small beside the gaps between points, these weights alone stick to points or run ahead: the tilt
    (`kbf.filters.moments`) makes every predicted mean exact (Z^T P = E[z' | z], a column's sum is 1). On a fine memory it hardly
    matters. So P w is the predicted embedding as a weighted sample of the memory, and n P w, n m_i r_i at point i, what the rule
    needs (where each point counts 1/n): the operator A is then n I.

    Args:
        log_density: log q(z_i | z_j), row i the target, column j the source; a constant is of no matter.
        mass: m ``n``, the share of the memory's distribution that each point stands for, sum 1; 1/n for a plain sample.
        points: z ``n d``. means: E[z' | z_j] ``n d``.
    """
    log_mass = mass.log()
    log_weight = log_mass[:, None] + log_density - (log_density + log_mass).logsumexp(-1, keepdim=True)
    return Operator(match_means(log_weight.mT, points, means).mT)


class RelativeRatio(nn.Module):
    """The relative ratio (`kbf.ratios.relative`) of the predicted embedding, from the memory points' Gram matrix G_Z ..."""

    gram: Tensor
    reg: Tensor

    def __init__(self, gram: Float[Tensor, "n n"], reg: float | Tensor, alpha: float) -> None:
        super().__init__()
        self.register_buffer("gram", gram)
        self.register_buffer("reg", torch.as_tensor(reg, dtype=gram.dtype))
        self.alpha = alpha

    def forward(self, w: Float[Tensor, "b n"]) -> Float[Tensor, "b n"]:
        """r_alpha at the memory points."""
        return ratios.relative(self.gram, self.gram, w, self.reg, self.alpha)


class RelativeRatioPrimal(nn.Module):
    """... and from features F, G_Z = F F^T (`kbf.ratios.relative_primal`)."""

    features: Tensor
    reg: Tensor

    def __init__(self, features: Float[Tensor, "n r"], reg: float | Tensor, alpha: float) -> None:
        super().__init__()
        self.register_buffer("features", features)
        self.register_buffer("reg", torch.as_tensor(reg, dtype=features.dtype))
        self.alpha = alpha

    def forward(self, w: Float[Tensor, "b n"]) -> Float[Tensor, "b n"]:
        """r_alpha at the memory points."""
        return ratios.relative_primal(self.features, self.features, w, self.reg, self.alpha, check=False)


class DenseUpdate(nn.Module):
    """A rule of `kbf.rules` over the full Gram matrix of the memory's observations: (ratio, x) -> weights."""

    obs: Tensor
    bandwidth: Tensor
    gram: Tensor
    reg: Tensor

    def __init__(
        self,
        rule: Callable[..., Tensor],
        kernel: Callable[..., Tensor],
        bandwidth: Tensor,
        obs: Float[Tensor, "n q"],
        reg: float | Tensor,
    ) -> None:
        """The update of a rule (ratio, gram, query, reg) and a kernel of `kbf.kernels` with its bandwidth."""
        super().__init__()
        self.rule, self.kernel = rule, kernel
        self.register_buffer("obs", obs)
        self.register_buffer("bandwidth", bandwidth)
        self.register_buffer("gram", kernel(obs, obs, bandwidth=bandwidth))
        self.register_buffer("reg", torch.as_tensor(reg, dtype=obs.dtype))

    def forward(self, ratio: Float[Tensor, "b n"], obs: Float[Tensor, "b *x"]) -> Float[Tensor, "b n"]:
        """The posterior's weights."""
        query = self.kernel(obs.flatten(1).to(self.obs), self.obs, bandwidth=self.bandwidth)
        return self.rule(ratio, self.gram, query, self.reg)


class PrimalUpdate(nn.Module):
    """The importance-weighted or the original rule over features psi of the observations, O(n p^2) a step: (ratio, x) -> weights.

    Each memory point may come with k observations (`kbf.rules.importance_weighted_moments`). With ``local`` only the points of the
    largest ratios take part, O(local p^2).
    """

    features: Tensor
    moments: Tensor | None
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
        total: Total = alone,
    ) -> None:
        """The update of a feature map.

        Args:
            psi: ``m *x`` -> ``m p``, differentiable.
            obs: k observations of each memory point.
            reg: lambda (delta for the original rule).
            rule: "importance_weighted" or "original" (the latter for k = 1).
            dtype: of the rule's arithmetic, when it is not that of the features.
            local: the points that take part, those with the largest ratios; None for all.
            total: adds up over processes that share the memory.

        Raises:
            ValueError: another rule, or the original rule with several observations of a point, with ``local`` or shared.
        """
        super().__init__()
        n, k = obs.shape[:2]
        plain = k == 1 and local is None and total is alone
        if rule not in ("importance_weighted", "original") or (rule == "original" and not plain):
            told = f"{rule} with k = {k}, local = {local}{'' if total is alone else ', shared'}"
            raise ValueError(f"a rule over features is importance_weighted, or original with k = 1 and all points; got {told}")
        if local is not None and local < 1:
            raise ValueError(f"local must be at least 1, got {local}")
        features = torch.cat([psi(part.flatten(0, 1)).unflatten(0, (len(part), k)) for part in obs.split(BLOCK)])
        features = features.to(dtype or features.dtype)
        self.psi, self.rule, self.local, self.several, self.total = psi, rule, local, k > 1, total
        self.register_buffer("features", features.mean(1) if self.several else features[:, 0])
        p = features.shape[-1]
        keep = rule == "importance_weighted" and (self.several or n * p * (p + 1) // 2 * features.element_size() <= KEPT)
        self.register_buffer("moments", rules.second_moments(features) if keep else None)
        share = count(obs, total) / n if rule == "importance_weighted" else 1  # a rule's ridge is reg times its own points
        self.register_buffer("reg", torch.as_tensor(reg * share, dtype=features.dtype))

    def forward(self, ratio: Float[Tensor, "b n"], obs: Tensor) -> Float[Tensor, "b n"]:
        """The posterior's weights."""
        query = self.psi(obs).to(self.features.dtype)
        if self.rule == "original":
            return rules.original_primal(ratio, self.features, query, self.reg)
        n = len(self.features)
        if self.local is None or self.local >= n:
            return self.over(ratio, self.features, self.moments, query, self.reg)
        rows = ratio.topk(self.local, sorted=False).indices
        moments = take(self.moments, rows) if self.moments is not None and self.several else None
        w = self.over(ratio.gather(-1, rows), take(self.features, rows), moments, query, self.reg * (n / self.local))
        return torch.zeros_like(ratio).scatter(-1, rows, w)

    def over(self, ratio: Tensor, features: Tensor, moments: Tensor | None, query: Tensor, reg: Tensor) -> Float[Tensor, "b m"]:
        """The importance-weighted rule over some points, by the products of their features where these are kept and faster."""
        if moments is not None and (self.several or len(ratio) >= PACKED):
            return rules.importance_weighted_moments(ratio, features, moments, query, reg, check=False, total=self.total)
        return rules.importance_weighted_primal(ratio, features, query, reg, check=False, total=self.total)


def take(table: Float[Tensor, "n p"], rows: Int[Tensor, "b m"]) -> Float[Tensor, "*b m p"]:
    """Rows of a table for each of a batch; those of a single one without the batch, which is several times faster."""
    return table.index_select(0, rows[0]) if len(rows) == 1 else table[rows]


def count(points: Tensor, total: Total) -> Tensor:
    """How many points a memory has, over all processes that share it."""
    return total(torch.tensor(float(len(points)), dtype=torch.float64, device=points.device))

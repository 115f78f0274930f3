"""The importance-weighted kernel Bayes' rule as a layer of a network."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor, nn

from kbf.filters.kernel.update.rule import DenseUpdate, PrimalUpdate
from kbf.layers.kernel_layer import KernelLayer, check_alike
from kbf.rkhs.kernels import linear
from kbf.rkhs.rules import (
    importance_weighted,
    importance_weighted_coefficients,
    importance_weighted_primal,
)


class IWKBR(KernelLayer):
    """Importance-weighted kernel Bayes' rule: (features, ratio, query) -> posterior weights.

        w = sqrt(D) (sqrt(D) G sqrt(D) + n reg I)^-1 sqrt(D) g,    D = diag(r)

    G = k(Psi, Psi) is the Gram matrix of the n training observations' features Psi, and g = k(Psi,
    psi(x)) that of a new observation. Without a kernel, k is the inner product of features, and the
    layer solves the p x p system of the same weights if p < n,

        w = D Psi (Psi^T D Psi + n reg I_p)^-1 psi(x).

    sum_i w_i f(z_i) estimates E[f(z) | x] under the prior that the ratio r describes; weights may
    be negative, and need not sum to 1. Negative ratios count as 0. The layer is differentiable in
    features, ratio, query, bandwidth and ridge, and nothing is stored between calls.

    References: Xu et al. (2022), Algorithm 1, step 3, equation 4, and section 3.3; the functions
    are `kbf.rkhs.rules.importance_weighted` and `kbf.rkhs.rules.importance_weighted_primal`.

    >>> import torch
    >>> features, states = torch.eye(3), torch.tensor([[0.0], [1.0], [2.0]])
    >>> IWKBR(reg=1e-6)(features, None, features[1:2]) @ states
    tensor([[1.0000]])
    """

    def __init__(
        self,
        kernel: str | Callable[..., Tensor] | None = None,
        *,
        bandwidth: float | Tensor = 1.0,
        reg: float | Tensor = 1e-3,
        learn_bandwidth: bool = False,
        learn_reg: bool = False,
    ) -> None:
        """Choose the kernel of the features.

        Args:
            kernel: None for inner products of learned features; otherwise as in
                `kbf.layers.kernel_layer.KernelLayer`.
            bandwidth: of the kernel, in the units of the features.
            reg: lambda.
            learn_bandwidth: make the bandwidth a parameter.
            learn_reg: make the ridge a parameter.

        Raises:
            ValueError: as `kbf.layers.kernel_layer.KernelLayer`.
        """
        super().__init__(kernel, bandwidth, reg, learn_bandwidth, learn_reg)

    def forward(
        self,
        features: Float[Tensor, "n p"],
        ratio: Float[Tensor, "*r n"] | None,
        query: Float[Tensor, "b p"],
    ) -> Float[Tensor, "b n"]:
        """Return the weights ``b n`` of the posterior.

        Args:
            features: Psi ``n p``, of the training observations.
            ratio: r, one for all queries ``n``, or one for each ``b n``; None for 1.
            query: psi(x) ``b p``, of the new observations.

        Raises:
            ValueError: shapes, types or devices that do not match.
            NotPositiveDefiniteError: a ridge too small for the precision of the features, or NaN.
        """
        if features.ndim != 2 or query.ndim != 2 or features.shape[1] != query.shape[1]:
            raise ValueError(
                "IWKBR: features must be (n, p), one row for each training observation, and query "
                "(b, p), one row for each new observation; got "
                f"{tuple(features.shape)} and {tuple(query.shape)}"
            )
        ratio = ratio_of(ratio, query, len(features))
        check_alike("IWKBR", features=features, ratio=ratio, query=query)
        if self.in_features(features):
            return importance_weighted_primal(ratio, features, query, self.reg.to(features))
        return self.from_gram(self.gram(features, features), ratio, self.gram(query, features))

    def from_gram(
        self,
        gram: Float[Tensor, "n n"],
        ratio: Float[Tensor, "*r n"] | None,
        query_gram: Float[Tensor, "b n"],
    ) -> Float[Tensor, "b n"]:
        """Return the weights ``b n`` of the posterior, from Gram matrices.

        Args:
            gram: G ``n n``, symmetric.
            ratio: r ``n`` or ``b n``; None for 1.
            query_gram: g ``b n``, row j the kernel of query j with the training observations.

        Raises:
            ValueError, NotPositiveDefiniteError: as `forward`.
        """
        n = gram.shape[-1]
        if gram.shape != (n, n) or query_gram.ndim != 2 or query_gram.shape[1] != n:
            raise ValueError(
                "IWKBR: gram must be (n, n), of the training observations, and query_gram (b, n), "
                "of new observations with them; got "
                f"{tuple(gram.shape)} and {tuple(query_gram.shape)}"
            )
        ratio = ratio_of(ratio, query_gram, n)
        check_alike("IWKBR", gram=gram, ratio=ratio, query_gram=query_gram)
        return importance_weighted(ratio, gram, query_gram, self.reg.to(gram))

    def in_features(self, features: Float[Tensor, "n p"]) -> bool:
        """Return whether the p x p system is the smaller one: inner products, and p < n."""
        return self.kernel is linear and features.shape[1] < features.shape[0]

    def over(self, features: Float[Tensor, "n p"], *, check: bool = True) -> nn.Module:
        """Return the rule over fixed features, (ratio ``b n``, query ``b p``) -> weights ``b n``.

        It is for many steps over one memory: the Gram matrix or the products of features are
        computed once.

        Args:
            features: Psi ``n p``.
            check: raise an error for a factorisation that fails, as `forward` does. With False, the
                weights of inner products are NaN there, without a synchronisation with a GPU, and
                a filter rejects the observation.
        """
        reg = self.reg.to(features)
        if self.in_features(features):
            update = PrimalUpdate(nn.Identity(), features[:, None], reg)
            if check:
                update.coefficients = importance_weighted_coefficients
            return update
        self.gram(features[:1], features[:1])  # raises for a bandwidth of another length
        return DenseUpdate(
            importance_weighted, self.form, self.bandwidth.to(features), features, reg
        )


def ratio_of(ratio: Tensor | None, query: Float[Tensor, "b m"], n: int) -> Float[Tensor, "b n"]:
    """Return the ratio of each query ``b n``, at least 0.

    Raises:
        ValueError: a ratio of another shape.
    """
    b = len(query)
    if ratio is None:
        return query.new_ones(b, n)
    if ratio.shape not in ((n,), (b, n)):
        raise ValueError(
            f"IWKBR: ratio must have one number for each of the {n} training observations, ({n},), "
            f"or for each query, ({b}, {n}); got {tuple(ratio.shape)}"
        )
    return ratio.clamp_min(0).expand(b, n)

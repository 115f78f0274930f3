"""A density ratio as a layer of a network: samples of a prior -> its ratio at training states."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor, nn

from kbf.filters.kernel.operators import RatioOfWeights, UnitRatio, ratio_operator
from kbf.layers.kernel_layer import KernelLayer, check_alike
from kbf.rkhs.ratios import RATIOS, kulsif, relative, tikhonov

# The names in `kbf.rkhs.ratios.RATIOS` of ratios to a sample; others are known at the training
# states alone.
METHODS = ("kulsif", "tikhonov", "relative", "one")


class DensityRatio(KernelLayer):
    """Density ratio r_i ~ pi(z_i) / p(z_i) of a prior, given by samples, to training states.

    With the training states z ``n d``, weighted samples u of the prior, and g_i = sum_j a_j k(z_i,
    u_j), the method kulsif is

        r = max(0, n (G + n reg I)^-1 g),    G = k(z, z).

    tikhonov is the same without the maximum, relative the ratio to a mixture of both densities,
    which is at most 1/alpha, and one ignores the prior. Differentiable in states, samples, weights,
    bandwidth and ridge; at values that are clipped the gradient is 0.

    References: Xu et al. (2022), Algorithm 1, step 2; the functions are those of
    `kbf.rkhs.ratios`.

    >>> import torch
    >>> states = torch.tensor([[-1.0], [0.0], [1.0]])
    >>> DensityRatio(reg=0.1)(states, samples=torch.tensor([[[0.8], [1.2]]])).argmax(-1)
    tensor([2])
    """

    def __init__(
        self,
        kernel: str | Callable[..., Tensor] = "gaussian",
        *,
        method: str = "kulsif",
        bandwidth: float | Tensor = 1.0,
        reg: float | Tensor = 1e-3,
        alpha: float = 0.1,
        learn_bandwidth: bool = False,
        learn_reg: bool = False,
    ) -> None:
        """Choose the method, and the kernel of the states.

        Args:
            kernel: as in `kbf.layers.kernel_layer.KernelLayer`.
            method: kulsif, tikhonov, relative or one.
            bandwidth: of the kernel, in the units of the states.
            reg: eta.
            alpha: in [0, 1), of the method relative.
            learn_bandwidth: make the bandwidth a parameter.
            learn_reg: make the ridge a parameter.

        Raises:
            ValueError: an unknown method, alpha out of range, or as
                `kbf.layers.kernel_layer.KernelLayer`.
        """
        super().__init__(kernel, bandwidth, reg, learn_bandwidth, learn_reg)
        if method not in METHODS:
            raise ValueError(
                f"DensityRatio: method must be one of {', '.join(METHODS)}; got {method!r}"
            )
        if not 0 <= alpha < 1:
            raise ValueError(f"DensityRatio: alpha must be in [0, 1), got {alpha}")
        self.method: str = method
        self.alpha: float = alpha

    def forward(
        self,
        states: Float[Tensor, "n d"],
        samples: Float[Tensor, "b m d"],
        weights: Float[Tensor, "b m"] | None = None,
    ) -> Float[Tensor, "b n"]:
        """Return the ratios ``b n`` of the priors at the training states.

        Args:
            states: z ``n d``, of the training part.
            samples: u ``b m d``, m points of each prior.
            weights: a ``b m``, of either sign; None for 1/m.

        Raises:
            ValueError: shapes, types or devices that do not match.
            NotPositiveDefiniteError: a ridge too small for the precision of the states, or NaN.
        """
        shaped = states.ndim == 2 and samples.ndim == 3 and states.shape[1] == samples.shape[2]
        if not shaped:
            raise ValueError(
                "DensityRatio: states must be (n, d) and samples (b, m, d), m points of each prior "
                f"in the batch; got {tuple(states.shape)} and {tuple(samples.shape)}"
            )
        a = (
            samples.new_full(samples.shape[:2], 1 / samples.shape[1])
            if weights is None
            else weights
        )
        if a.shape != samples.shape[:2]:
            raise ValueError(
                f"DensityRatio: weights must be {tuple(samples.shape[:2])}, one for each sample; "
                f"got {tuple(a.shape)}"
            )
        check_alike("DensityRatio", states=states, samples=samples, weights=a)
        form, eta = RATIOS[self.method], self.reg.to(states)
        if form.constant:
            return samples.new_ones(len(samples), len(states))
        gram, cross = self.gram(states, states), self.gram(states, samples)
        if self.method == "relative":
            return relative(gram, cross, a, eta, self.alpha)
        prior = (cross @ a[..., None])[..., 0]
        return (tikhonov if form.signed else kulsif)(gram, prior, eta)

    def operator(self, states: Float[Tensor, "n d"]) -> nn.Module:
        """Return the ratio of priors that are weights over the states, weights -> ratio ``b n``.

        It is for many steps over one memory: what depends on the states alone is computed once. For
        kulsif the result is not clipped yet (`kbf.filters.kernel.filter.KernelBayesFilter` does).
        """
        form, eta = RATIOS[self.method], self.reg.to(states)
        if form.constant:
            return UnitRatio()
        gram = self.gram(states, states)
        if form.dense is None:
            return ratio_operator(gram, eta)
        return RatioOfWeights(form.dense, gram, eta, self.alpha)

    def extra_repr(self) -> str:
        """Overrides `KernelLayer`: the method, too."""
        return f"method={self.method}, {super().extra_repr()}"

"""Base class of the layers: a kernel, its bandwidth and a ridge, which are learned on request."""

import inspect
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from kbf.rkhs.kernels import KERNELS, linear


class KernelLayer(nn.Module):
    """A kernel with a bandwidth and a ridge, both positive.

    Bandwidth and ridge are stored as their logarithms, bandwidth = exp(log_bandwidth), so that they
    remain positive under every optimiser: as parameters if they are learned, as buffers otherwise.
    The logarithms are in float64 and are converted to the type of the data in each call.
    """

    kernel: Callable[..., Tensor]
    log_bandwidth: Tensor | None
    log_reg: Tensor

    def __init__(
        self,
        kernel: str | Callable[..., Tensor] | None,
        bandwidth: float | Tensor,
        reg: float | Tensor,
        learn_bandwidth: bool,
        learn_reg: bool,
    ) -> None:
        """Choose the kernel, and where its numbers start.

        Args:
            kernel: a name in `kbf.rkhs.kernels.KERNELS`; a function k(x, y, *, bandwidth) of
                `kbf.rkhs.kernels`; a kernel k(x, y) without a free bandwidth, for example
                ``partial(gaussian, bandwidth=0.5)`` or a module of one's own; or None for inner
                products.
            bandwidth: a length in the units of the points, or one for each component ``q``.
            reg: the ridge, multiplied by the number of points of the regression.
            learn_bandwidth: make the bandwidth a parameter.
            learn_reg: make the ridge a parameter.

        Raises:
            ValueError: an unknown name, a bandwidth or a ridge that is not positive, or a bandwidth
                for a kernel that has none.
        """
        super().__init__()
        if isinstance(kernel, str) and kernel not in KERNELS:
            raise ValueError(
                f"{self.name}: kernel must be one of {', '.join(KERNELS)}, or a function "
                f"k(x, y); got {kernel!r}"
            )
        self.kernel = linear if kernel is None else KERNELS.get(kernel, kernel)  # pyright: ignore[reportArgumentType, reportCallIssue]
        length, ridge = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (bandwidth, reg))
        if length.ndim > 1 or not bool(((length > 0) & length.isfinite()).all()):
            raise ValueError(
                f"{self.name}: bandwidth must be a positive number, or a vector of them, one for "
                f"each component; got {bandwidth}"
            )
        if ridge.ndim > 0 or not 0 < float(ridge) < torch.inf:
            raise ValueError(f"{self.name}: reg must be a positive number, got {reg}")
        free = has_free_bandwidth(self.kernel)
        if not free and (learn_bandwidth or length.ndim == 1 or float(length) != 1):
            raise ValueError(
                f"{self.name}: this kernel has no free bandwidth (inner products have none); "
                "choose a kernel with one, such as kernel='gaussian', or leave out bandwidth and "
                "learn_bandwidth"
            )
        self.keep("log_bandwidth", length.log() if free else None, learn_bandwidth)
        self.keep("log_reg", ridge.log(), learn_reg)

    @property
    def name(self) -> str:
        """The name of the class, for messages."""
        return type(self).__name__

    def keep(self, name: str, value: Tensor | None, learn: bool) -> None:
        """Register a value as a parameter if it is learned, as a buffer otherwise."""
        if learn and value is not None:
            self.register_parameter(name, nn.Parameter(value))
        else:
            self.register_buffer(name, value)

    @property
    def bandwidth(self) -> Tensor:
        """The bandwidth ``()`` or ``q``; 1 for a kernel without a free one."""
        log = self.log_bandwidth
        return torch.ones_like(self.log_reg) if log is None else log.exp()

    @property
    def reg(self) -> Tensor:
        """The ridge ``()``."""
        return self.log_reg.exp()

    @property
    def form(self) -> Callable[..., Tensor]:
        """The kernel as a function k(x, y, *, bandwidth)."""
        return partial(fixed, self.kernel) if self.log_bandwidth is None else self.kernel

    def gram(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the Gram matrix ``*d n m`` of points ``*b n q`` and ``*c m q``.

        Raises:
            ValueError: points of different widths, types or devices; or a bandwidth that has not
                one length for each component.
        """
        check_alike(self.name, first=x, second=y)
        if x.shape[-1] != y.shape[-1]:
            raise ValueError(
                f"{self.name}: points of {x.shape[-1]} components cannot be compared with points "
                f"of {y.shape[-1]}"
            )
        width = self.bandwidth
        if width.ndim == 1 and len(width) != x.shape[-1]:
            raise ValueError(
                f"{self.name}: bandwidth has {len(width)} lengths, the points have {x.shape[-1]} "
                "components"
            )
        return self.form(x, y, bandwidth=width.to(y))

    def extra_repr(self) -> str:
        """Overrides `nn.Module`: the kernel, and the present bandwidth and ridge."""
        name = next((name for name, k in KERNELS.items() if k is self.kernel), None)
        shown = [f"kernel={name or getattr(self.kernel, '__name__', type(self.kernel).__name__)}"]
        if self.log_bandwidth is not None:
            shown.append(f"bandwidth={self.bandwidth.tolist()}")
        return ", ".join([*shown, f"reg={float(self.reg.detach()):.4g}"])


def has_free_bandwidth(kernel: Callable[..., Tensor]) -> bool:
    """Return whether a kernel requires an argument ``bandwidth``.

    >>> from kbf.rkhs.kernels import gaussian
    >>> has_free_bandwidth(gaussian), has_free_bandwidth(partial(gaussian, bandwidth=0.5))
    (True, False)
    """
    argument = inspect.signature(kernel).parameters.get("bandwidth")
    return argument is not None and argument.default is inspect.Parameter.empty


def fixed(kernel: Callable[..., Tensor], x: Tensor, y: Tensor, *, bandwidth: Tensor) -> Tensor:
    """Return k(x, y) of a kernel without a free bandwidth."""
    return kernel(x, y)


def check_alike(name: str, **points: Tensor) -> None:
    """Raise a ValueError unless all are floating-point tensors of one type and device."""
    for argument, values in points.items():
        if not values.is_floating_point():
            raise ValueError(f"{name}: {argument} must be floating-point, got {values.dtype}")
    kinds = {(values.dtype, str(values.device)) for values in points.values()}
    if len(kinds) > 1:
        found = ", ".join(
            f"{argument} {values.dtype} on {values.device}" for argument, values in points.items()
        )
        raise ValueError(
            f"{name}: all arguments must be of one type and on one device, got {found}; "
            "convert them with .to(...)"
        )

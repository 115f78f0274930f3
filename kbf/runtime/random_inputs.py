"""Random numbers of an exported step: they are inputs of the program, uniform and Gaussian.

`RandomInputs` is a mode in which `torch.rand`, `torch.randn` and the other samplers of filters take
their numbers from two tensors, in the order of the calls. All branches of a step are computed in
it, so that a step has the same calls whatever its values are.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kbf.runtime.branches import all_branches

# Proposals for each draw of a Gamma or Poisson distribution; each is accepted with a probability of
# 0.95 or more (Gamma), or of 0.75 at a mean of 10 to 0.89 at large ones (Poisson).
PROPOSALS = 8
# Mean from which on a Poisson distribution is drawn from by rejection.
LEAST_MEAN_OF_REJECTION = 10.0
# Terms of its cumulative distribution below that; what is left out is below 1e-13.
TERMS_OF_INVERSION = 42


class NotExportedError(ValueError):
    """A filter that draws numbers of a distribution that a program has not."""


class RandomInputs(TorchFunctionMode):
    """A mode in which samplers use given numbers; without numbers it counts them.

    Attributes:
        uniform, normal: ``1 m``, numbers that are left; None draws them and counts.
        counts: numbers that were used, of each kind.
    """

    def __init__(self, uniform: Tensor | None = None, normal: Tensor | None = None) -> None:
        """Use the numbers of these tensors, in order."""
        super().__init__()
        self.given: dict[str, Tensor | None] = {"uniform": uniform, "normal": normal}
        self.counts: dict[str, int] = {"uniform": 0, "normal": 0}

    def __enter__(self) -> "RandomInputs":
        self.branches = all_branches()
        self.branches.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.branches.__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Replace a sampler; other functions are called as they are."""
        settings = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        sampler = SAMPLERS.get(name) if name in SAMPLERS and func in FUNCTIONS else None
        if sampler is None:
            return func(*args, **settings)
        settings.pop("generator", None)
        return sampler(self, *args, **settings)

    def take(self, kind: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        """Return the next numbers of a kind, in a shape."""
        count, first = math.prod(shape), self.counts[kind]
        self.counts[kind] += count
        given, wanted = self.given[kind], dtype or torch.get_default_dtype()
        if given is None:
            return torch.full(shape, 0.5 if kind == "uniform" else 0.0, dtype=wanted)
        return given[0, first : first + count].reshape(shape).to(wanted)


def size_of(size: tuple[Any, ...]) -> tuple[int, ...]:
    """Return a shape that is given as numbers or as one tuple."""
    return tuple(size[0]) if len(size) == 1 and isinstance(size[0], tuple | list) else tuple(size)


def rand(mode: RandomInputs, *size: Any, dtype: Any = None, device: Any = None) -> Tensor:
    """Uniform numbers of [0, 1)."""
    return mode.take("uniform", size_of(size), dtype)


def randn(mode: RandomInputs, *size: Any, dtype: Any = None, device: Any = None) -> Tensor:
    """Standard Gaussian numbers."""
    return mode.take("normal", size_of(size), dtype)


def randint(mode: RandomInputs, high: int, size: Any, device: Any = None) -> Tensor:
    """Whole numbers below ``high``."""
    uniform = mode.take("uniform", tuple(size), torch.float64)
    return (uniform * high).long().clamp(0, high - 1)


def multinomial(mode: RandomInputs, rows: Tensor, m: int, replacement: bool = False) -> Tensor:
    """One index in proportion to each row."""
    if m != 1:
        raise NotExportedError("a filter that draws several indices of a row is not exported")
    cumulative = rows.double().cumsum(-1)
    uniform = mode.take("uniform", (*rows.shape[:-1], 1), torch.float64)
    below = (cumulative <= uniform * cumulative[..., -1:]).sum(-1, keepdim=True)
    return below.clamp_max(rows.shape[-1] - 1)


def bernoulli(mode: RandomInputs, p: Tensor) -> Tensor:
    """1 with probability p."""
    return (mode.take("uniform", tuple(p.shape), p.dtype) < p).to(p.dtype)


def gamma(mode: RandomInputs, shape: Tensor) -> Tensor:
    """Numbers of Gamma distributions, by rejection from `PROPOSALS` proposals.

    References: Marsaglia and Tsang (2000); for shapes below 1 their section 6.
    """
    d = torch.where(shape < 1, shape + 1, shape) - 1 / 3
    c = (9 * d).rsqrt()
    found = d
    for _ in range(PROPOSALS):  # the first that is accepted is the last to be written
        x = mode.take("normal", tuple(shape.shape), shape.dtype)
        u = mode.take("uniform", tuple(shape.shape), shape.dtype)
        v = (1 + c * x) ** 3
        tiny = torch.finfo(shape.dtype).tiny
        bound = 0.5 * x.square() + d - d * v + d * v.clamp_min(tiny).log()
        found = torch.where((v > 0) & (u.clamp_min(tiny).log() < bound), d * v, found)
    u = mode.take("uniform", tuple(shape.shape), shape.dtype)
    return torch.where(shape < 1, found * u.pow(1 / shape), found)


def poisson(mode: RandomInputs, mean: Tensor, generator: Any = None) -> Tensor:
    """Numbers of Poisson distributions.

    Means below `LEAST_MEAN_OF_REJECTION` by inversion, others by rejection from `PROPOSALS`
    proposals. Both are computed for every mean. A draw of which no proposal is accepted, 1.4e-5 of
    all at a mean of 10 and fewer at larger ones, is the whole number below the mean.

    References: Hoermann (1993), The transformed rejection method for generating Poisson random
    variables: his algorithm PTRS without its squeezes.
    """
    rate, shape = mean.double(), tuple(mean.shape)
    small = rate.clamp_max(LEAST_MEAN_OF_REJECTION)
    large = rate.clamp_min(LEAST_MEAN_OF_REJECTION)
    u = mode.take("uniform", shape, torch.float64)
    p = (-small).exp()
    cumulative, inverted = p, torch.zeros_like(p)
    for k in range(1, TERMS_OF_INVERSION):
        inverted = inverted + (u >= cumulative)
        p = p * small / k
        cumulative = cumulative + p
    b = 0.931 + 2.53 * large.sqrt()
    a = 0.02483 * b - 0.059
    alpha = 1.1239 + 1.1328 / (b - 3.4)
    found = large.floor()
    for _ in range(PROPOSALS):
        u = mode.take("uniform", shape, torch.float64) - 0.5
        v = mode.take("uniform", shape, torch.float64)
        edge = (0.5 - u.abs()).clamp_min(torch.finfo(torch.float64).tiny)
        k = ((2 * a / edge + b) * u + large + 0.43).floor()
        count = k.clamp_min(0)
        log_p = count * large.log() - large - torch.lgamma(count + 1)
        accepted = (v * alpha).log() - (a / edge.square() + b).log() <= log_p
        found = torch.where((k >= 0) & accepted, count, found)
    return torch.where(rate < LEAST_MEAN_OF_REJECTION, inverted, found).to(mean.dtype)


SAMPLERS: dict[str, Callable[..., Tensor]] = {
    "rand": rand,
    "randn": randn,
    "randint": randint,
    "multinomial": multinomial,
    "bernoulli": bernoulli,
    "_standard_gamma": gamma,
    "poisson": poisson,
}
# The functions themselves: methods of tensors may have equal names.
FUNCTIONS: set[Any] = {getattr(torch, name) for name in SAMPLERS}

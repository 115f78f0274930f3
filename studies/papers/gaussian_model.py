"""A Gaussian model with a separate prior and the posterior mean in closed form.

Fukumizu et al., 5.1; Xu et al., 6.1.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.rkhs.linalg import psd_solve
from kbf.ssm import gaussian_noise


class GaussianModel(NamedTuple):
    """(Z, X) ~ N((0_d, 1_d), V), that is x = 1 + B z + N(0, R).

    The prior of z is N(0, P) with P = V_ZZ / 2.

    The paper's X is our state z, its Y our observation x.

    Attributes:
        V: ``2d 2d``, z before x.
        B: ``d d``. R: ``d d``. P: ``d d``.
    """

    V: Tensor
    B: Tensor
    R: Tensor
    P: Tensor

    def pairs(self, n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """Training pairs z ``n d`` and x ``n d`` from N((0, 1), V)."""
        z, x = gaussian_noise(torch.Size([n]), self.V, generator).chunk(2, -1)
        return z, 1 + x

    def prior(self, n: int, generator: Generator) -> Tensor:
        """States ``n d`` from the prior."""
        return gaussian_noise(torch.Size([n]), self.P, generator)

    def observe(self, z: Float[Tensor, "n d"], generator: Generator) -> Float[Tensor, "n d"]:
        """Observations of states, from the likelihood p(x | z)."""
        return 1 + z @ self.B.mT + gaussian_noise(z.shape[:-1], self.R, generator)

    def queries(self, q: int, generator: Generator) -> Tensor:
        """The observations ``q d`` at which the papers ask: from N(0, V_XX), not from the model."""
        return gaussian_noise(torch.Size([q]), self.V.chunk(2)[1].chunk(2, -1)[1], generator)

    def posterior_mean(self, x: Float[Tensor, "q d"]) -> Float[Tensor, "q d"]:
        """E[Z | X = x] = P B^T (B P B^T + R)^-1 (x - 1) under the prior."""
        return (x - 1) @ psd_solve(self.B @ self.P @ self.B.mT + self.R, self.B @ self.P)


def gaussian_model(d: int, generator: Generator, *, scale: float = 1.0) -> GaussianModel:
    """V = scale A^T A + 2 I with A ``2d 2d`` standard normal.

    The scale is 1 in Fukumizu et al., 1 / (2 d) in Xu et al.
    """
    A = partial(torch.randn, dtype=torch.float64, generator=generator)(2 * d, 2 * d)
    V = scale * A.mT @ A + 2 * torch.eye(2 * d, dtype=torch.float64)
    (V_zz, V_zx), (_, V_xx) = (block.chunk(2, -1) for block in V.chunk(2))
    B = psd_solve(V_zz, V_zx).mT
    return GaussianModel(V, B, V_xx - B @ V_zx, V_zz / 2)

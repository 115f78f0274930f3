"""Manifolds of states and observations: flat space, and circles for pairs that are angles.

A regression with noise needs three maps of a manifold: ``project`` brings a regressed mean back to
it, ``log`` returns the displacement from one point to another, and ``exp`` displaces a point. In a
flat space they are the identity, y - m and m + v; on the circle the nearest unit vector, the angle
between two, and a turn. A pose (x, y, cos, sin) has two components of the one kind and one angle.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kbf.ssm import rotate


class Manifold(NamedTuple):
    """Vectors ``q`` of which c neighbouring pairs are points of the circle.

    A displacement has k = q - c components.

    Attributes:
        circles: the first component of each of the c pairs (cos, sin), rising; none in flat space.
    """

    circles: tuple[int, ...] = ()

    def project(self, y: Float[Tensor, "*b q"]) -> Float[Tensor, "*b q"]:
        """A point near the manifold to one on it."""
        if not self.circles:
            return y
        parts = self.parts(y, 2)
        return torch.cat([project_circle(part) if circle else part for circle, part in parts], -1)

    def log(self, base: Float[Tensor, "*b q"], y: Float[Tensor, "*c q"]) -> Float[Tensor, "*e"]:
        """The displacement ``*e k`` from one point to another; they broadcast."""
        if not self.circles:
            return y - base
        pairs = zip(self.parts(base, 2), self.parts(y, 2), strict=True)
        return torch.cat(
            [circle_log(m, part) if circle else part - m for (circle, m), (_, part) in pairs], -1
        )

    def exp(self, base: Float[Tensor, "*b q"], v: Float[Tensor, "*b k"]) -> Float[Tensor, "*b q"]:
        """The point that is displaced by v."""
        if not self.circles:
            return base + v
        pairs = zip(self.parts(base, 2), self.parts(v, 1), strict=True)
        return torch.cat(
            [circle_exp(m, part) if circle else m + part for (circle, m), (_, part) in pairs], -1
        )

    def turns(self, k: int) -> Float[Tensor, "t k"]:
        """Return displacements ``k`` that lead back: none, and each angle by a turn either way."""
        once = (
            2
            * math.pi
            * torch.eye(k, dtype=torch.float64)[
                [start - before for before, start in enumerate(self.circles)]
            ]
        )
        return torch.cat([once.new_zeros(1, k), once, -once])

    def parts(
        self, y: Float[Tensor, "*b q"], width: int
    ) -> list[tuple[bool, Float[Tensor, "*b p"]]]:
        """Return pairs (is an angle, components) of y, with ``width`` components for an angle."""
        pieces, at, shift = [], 0, 0
        for start in self.circles:
            start = start - shift
            if start > at:
                pieces.append((False, y[..., at:start]))
            pieces.append((True, y[..., start : start + width]))
            at, shift = start + width, shift + 2 - width
        if at < y.shape[-1]:
            pieces.append((False, y[..., at:]))
        return pieces


def project_circle(y: Float[Tensor, "*b 2"]) -> Float[Tensor, "*b 2"]:
    """Scale to norm 1; the origin goes to (1, 0).

    >>> project_circle(torch.tensor([[0.0, 2.0], [0.0, 0.0]]))
    tensor([[0., 1.],
            [1., 0.]])
    """
    norm = y.norm(dim=-1, keepdim=True)
    start = torch.stack([torch.ones_like(y[..., 0]), torch.zeros_like(y[..., 1])], -1)
    return torch.where(norm > 0, y / torch.where(norm > 0, norm, 1), start)


def circle_log(base: Float[Tensor, "*b 2"], y: Float[Tensor, "*c 2"]) -> Float[Tensor, "*e 1"]:
    """The angle in (-pi, pi] that turns base to y, counter-clockwise."""
    return torch.atan2(base[..., 0] * y[..., 1] - base[..., 1] * y[..., 0], (base * y).sum(-1))[
        ..., None
    ]


def circle_exp(base: Float[Tensor, "*b 2"], v: Float[Tensor, "*b 1"]) -> Float[Tensor, "*b 2"]:
    """Base turned by the angle v."""
    return rotate(base, v[..., 0])


FLAT, CIRCLE = Manifold(), Manifold((0,))


def manifold_of(points: Float[Tensor, "n q"], tol: float = 1e-4) -> Manifold:
    """Return the manifold of points: neighbouring components of norm 1 that vary are angles.

    >>> manifold_of(torch.tensor([[5.0, 0.6, 0.8], [2.0, 0.0, -1.0]]))
    Manifold(circles=(1,))
    """
    squares, vary = points.square(), (points != points[:1]).any(0)
    unit = ((squares[:, :-1] + squares[:, 1:] - 1).abs() < 2 * tol).all(0) & vary[:-1]
    circles: list[int] = []
    for start in unit.nonzero()[:, 0].tolist():
        if not circles or start > circles[-1] + 1:  # a component belongs to one angle
            circles.append(start)
    return Manifold(tuple(circles))

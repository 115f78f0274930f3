"""Where states and observations live: how to subtract, add noise, and come back, on a flat space and on the circle.

A regression with noise needs three maps of a manifold: ``project`` brings a regressed mean back to it, ``log`` tells the
displacement from one point to another, and ``exp`` displaces a point. In a flat space they are the identity, y - m and m + v.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kbf.ssm import rotate


class Manifold(NamedTuple):
    """A manifold in R^q whose displacements are vectors of k components.

    Attributes:
        project: ``*b q`` -> ``*b q``, a point near the manifold to one on it.
        log: base ``*b q``, point ``*b q`` -> displacement ``*b k``.
        exp: base ``*b q``, displacement ``*b k`` -> point ``*b q``.
        period: displacements that differ by a multiple of it lead to one point; None if all lead to different points.
    """

    project: Callable[[Tensor], Tensor]
    log: Callable[[Tensor, Tensor], Tensor]
    exp: Callable[[Tensor, Tensor], Tensor]
    period: float | None


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
    return torch.atan2(base[..., 0] * y[..., 1] - base[..., 1] * y[..., 0], (base * y).sum(-1))[..., None]


def circle_exp(base: Float[Tensor, "*b 2"], v: Float[Tensor, "*b 1"]) -> Float[Tensor, "*b 2"]:
    """Base turned by the angle v."""
    return rotate(base, v[..., 0])


FLAT = Manifold(lambda y: y, lambda base, y: y - base, lambda base, v: base + v, None)
CIRCLE = Manifold(project_circle, circle_log, circle_exp, 2 * math.pi)


def manifold_of(points: Float[Tensor, "n q"], tol: float = 1e-4) -> Manifold:
    """The circle if the points are pairs of norm 1 (up to ``tol``), else flat space.

    >>> manifold_of(torch.tensor([[0.6, 0.8], [0.0, -1.0]])) is CIRCLE
    True
    """
    circle = points.shape[-1] == 2 and bool(((points.square().sum(-1) - 1).abs() < 2 * tol).all())
    return CIRCLE if circle else FLAT

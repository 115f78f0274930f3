"""Images of dSprites, rendered from the outlines of the shapes.

A factor is an index: shape 0..2 (square, ellipse, heart), scale 0..5, orientation 0..39, posX 0..31
(to the right), posY 0..31 (downwards). All lengths below are in pixels.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# The factors.
NAMES = ("shape", "scale", "orientation", "posX", "posY")

# Number of values of each factor.
SIZES = (3, 6, 40, 32, 32)

# Pixels along a side of an image.
PIXELS = 64

# Images that are rendered together: their intermediate arrays take about 50 MB.
IMAGES_AT_ONCE = 128

# Square that contains the heart. Points outside it skip the test of the polygon, which is slow.
HEART_RADIUS = 10


def render_sprites(factors: Int[Tensor, "n 5"]) -> Bool[Tensor, "n 64 64"]:
    """Renders images (y down, x to the right): a pixel is on if its centre is inside.

    The outline is scaled (linspace 0.5..1, 6), rotated counter-clockwise on the screen (linspace
    0..2 pi, 40: the orientations 0 and 39 are one image), and placed at (16 + 32 posX, 16 + 32
    posY) with positions linspace 0..1, 32. About nine in ten images equal the published ones in
    every pixel; the others differ in a few pixels on the outline.

    Raises:
        ValueError: a factor out of its range.

    References: Matthey, Higgins, Hassabis, Lerchner (2017), dSprites.

    >>> render_sprites(torch.tensor([[0, 0, 0, 16, 16]])).sum().item()  # a square with sides of 9.6
    81
    """
    check_factors(factors)
    if not len(factors):
        return torch.zeros(0, PIXELS, PIXELS, dtype=torch.bool)
    return torch.cat([render_chunk(chunk) for chunk in factors.cpu().split(IMAGES_AT_ONCE)])


def render_chunk(factors: Int[Tensor, "n 5"]) -> Bool[Tensor, "n 64 64"]:
    """`render_sprites` for images that fit into memory together."""
    shape, scale, turn, x, y = (column[:, None, None].double() for column in factors.unbind(1))
    size = 0.5 + 0.5 * scale / (SIZES[1] - 1)
    angle = 2 * math.pi * (turn % (SIZES[2] - 1)) / (SIZES[2] - 1)  # the last equals the first
    pixel = torch.arange(PIXELS, dtype=torch.float64) + 0.5
    right = (pixel[None, None, :] - (16 + 32 * x / (SIZES[3] - 1))) / size
    down = (pixel[None, :, None] - (16 + 32 * y / (SIZES[4] - 1))) / size
    # the pixels in the coordinates of the upright shape
    u, v = right * angle.cos() - down * angle.sin(), right * angle.sin() + down * angle.cos()
    images = torch.zeros(u.shape, dtype=torch.bool)
    for index, inside in enumerate((in_square, in_ellipse, in_heart)):
        rows = (shape == index).flatten()
        images[rows] = inside(u[rows], v[rows])
    return images


def in_square(u: Float[Tensor, "*p"], v: Float[Tensor, "*p"]) -> Bool[Tensor, "*p"]:
    """Whether points are inside the square of half side 9.6."""
    return torch.maximum(u.abs(), v.abs()) < 9.6


def in_ellipse(u: Float[Tensor, "*p"], v: Float[Tensor, "*p"]) -> Bool[Tensor, "*p"]:
    """Whether points are inside the ellipse of half axes 12.76 and 7.22."""
    return (u / 12.76).square() + (v / 7.22).square() < 1


def in_heart(u: Float[Tensor, "*p"], v: Float[Tensor, "*p"]) -> Bool[Tensor, "*p"]:
    """Whether points are inside the heart, a polygon of 72 corners at equally spaced t.

    x = 9.62 sin^3 t, y = -0.662 (13 cos t - 5 cos 2t - 2 cos 3t - cos 4t) - 1.45.
    """
    t = 2 * math.pi * torch.arange(72, dtype=u.dtype) / 72
    x = 9.62 * t.sin() ** 3
    y = -0.662 * (13 * t.cos() - 5 * (2 * t).cos() - 2 * (3 * t).cos() - (4 * t).cos()) - 1.45
    near = torch.maximum(u.abs(), v.abs()) < HEART_RADIUS
    inside = torch.zeros_like(near)
    inside[near] = in_polygon(u[near], v[near], x, y)
    return inside


def in_polygon(
    u: Float[Tensor, "m"], v: Float[Tensor, "m"], x: Float[Tensor, "k"], y: Float[Tensor, "k"]
) -> Bool[Tensor, "m"]:
    """Whether a ray from (u, v) to the right crosses an odd number of edges."""
    x1, y1 = x.roll(-1), y.roll(-1)
    spans = (y > v[:, None]) != (y1 > v[:, None])  # never a level edge, whose slope is infinite
    crossing = x + (x1 - x) / (y1 - y) * (v[:, None] - y)
    return (spans & (u[:, None] < crossing)).sum(1) % 2 == 1


def check_factors(factors: Tensor) -> None:
    """Raises a ValueError that names the first factor out of its range."""
    for name, size, column in zip(NAMES, SIZES, factors.unbind(1), strict=True):
        wrong = column[(column < 0) | (column >= size)]
        if len(wrong):
            raise ValueError(
                f"dSprites: {name} is an index from 0 to {size - 1}, got {int(wrong[0])}"
            )

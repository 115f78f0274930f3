"""Textures of DeepMind Lab (from the package labmaze) or generated ones, ``S S 3`` uint8.

Rows run downwards. Functions of the plane are evaluated on two grids, `ACROSS` and `DOWN`.
"""

import colorsys
import importlib
import importlib.metadata
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Generator, Tensor

# Texels along a side.
SIZE = 256

# Centres of the texels in (0, 1): the distance from the top and from the left.
DOWN, ACROSS = torch.meshgrid(
    *[(torch.arange(SIZE, dtype=torch.float64) + 0.5) / SIZE] * 2, indexing="ij"
)

# Red, green and blue added to the transparent lines of Lab's walls, which are darker than the wall.
GLOW = (0, 40, 45)


class Textures(NamedTuple):
    """Textures of one style.

    Attributes:
        walls: in different colours. floors: in different colours. sky: the east, north, west, south
            and upper face of the sky box.
    """

    walls: list[Tensor]
    floors: list[Tensor]
    sky: list[Tensor]


def labmaze_version() -> str | None:
    """Returns the version of labmaze, or None if it cannot be imported."""
    try:
        importlib.import_module("labmaze")
        return importlib.metadata.version("labmaze")
    except ImportError:
        return None


def draw(generator: Generator, *shape: int) -> Float[Tensor, "..."]:
    """Draws uniform numbers in [0, 1), float64."""
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


def pick(generator: Generator, n: int) -> int:
    """Draws a number from 0 to n - 1."""
    return int(torch.randint(n, (), generator=generator))


def shuffled(generator: Generator, items: list[str]) -> list[str]:
    """Returns the items in random order."""
    return [items[i] for i in torch.randperm(len(items), generator=generator).tolist()]


def labmaze_textures(generator: Generator) -> Textures:
    """Draws one of Lab's five styles, with all its colours, and one of its skies."""
    assets = importlib.import_module("labmaze.assets")
    style = assets.MAZE_STYLES[pick(generator, len(assets.MAZE_STYLES))]
    # the first sky is night
    sky = assets.get_sky_texture_paths(assets.SKY_STYLES[1 + pick(generator, 2)])
    walls, floors = assets.get_wall_texture_paths(style), assets.get_floor_texture_paths(style)
    sides = [load(path) for path in (sky.right, sky.back, sky.left, sky.front)]
    return Textures(
        [load(walls[name]) for name in shuffled(generator, sorted(walls))],
        [load(floors[name]) for name in shuffled(generator, sorted(floors))],
        [*sides, load(sky.up).rot90(-1)],
    )


def load(path: str | Path) -> UInt8[Tensor, "S S 3"]:
    """Reads a picture; its transparent parts are replaced by `GLOW`."""
    with Image.open(path) as file:
        transparent = file.mode == "RGBA" or "transparency" in file.info
        whole = file.convert("RGBA" if transparent else "RGB")
    if whole.mode == "RGBA":
        thumbnail = np.array(whole.reduce(8), dtype=np.float64).reshape(-1, 4)
        mean = np.average(thumbnail[:, :3], axis=0, weights=thumbnail[:, 3] + 1e-6)
        behind = [min(round(0.65 * c + glow), 255) for c, glow in zip(mean, GLOW, strict=True)]
        background = Image.new("RGBA", whole.size, (*behind, 255))
        whole = Image.alpha_composite(background, whole).convert("RGB")
    return torch.from_numpy(np.array(whole.resize((SIZE, SIZE), Image.Resampling.BOX)))


def generated_textures(generator: Generator) -> Textures:
    """Makes eight walls of four patterns in eight hues, two floors, and a sky with a skyline."""
    hue = float(draw(generator, 1))
    patterns = (bricks, panels, blocks, tiles)
    hues = [(hue + k / 8) % 1 for k in torch.randperm(8, generator=generator).tolist()]
    walls = [patterns[k % 4](generator, colour(h, 0.5, 0.62)) for k, h in enumerate(hues)]
    floors = [hexagons(generator, colour((hue + k) % 1, 0.5, 0.75)) for k in (0.4, 0.9)]
    return Textures(walls, floors, skies(generator))


def colour(hue: float, saturation: float, value: float) -> Float[Tensor, "3"]:
    """Returns red, green and blue in [0, 1]."""
    return torch.tensor(colorsys.hsv_to_rgb(hue, saturation, value), dtype=torch.float64)


def noise(generator: Generator, cells: int) -> Float[Tensor, "S S"]:
    """Returns smooth periodic noise in [-1, 1]: cubic steps on a random coarse grid."""
    values = 2 * draw(generator, cells, cells) - 1
    parts = []
    for place in (DOWN, ACROSS):
        low = (place * cells).floor()
        t = place * cells - low
        parts.append((low.long() % cells, (low.long() + 1) % cells, t * t * (3 - 2 * t)))
    (r0, r1, s), (c0, c1, t) = parts
    return (values[r0, c0] * (1 - t) + values[r0, c1] * t) * (1 - s) + (
        values[r1, c0] * (1 - t) + values[r1, c1] * t
    ) * s


def finish(brightness: Tensor, base: Float[Tensor, "3"]) -> UInt8[Tensor, "S S 3"]:
    """Returns a base colour times a brightness ``S S``, as uint8."""
    return (255 * brightness[..., None] * base).clamp(0, 255).round().to(torch.uint8)


def cells(
    generator: Generator, across: Tensor, down: Tensor, joint: float, contrast: float
) -> Tensor:
    """Returns the brightness of rectangles of random shades with dark joints, of unit side."""
    shades = 1 + contrast * (2 * draw(generator, 64, 64) - 1)
    inside_x, inside_y = across % 1, down % 1
    dark = (inside_x < joint) | (inside_y < joint)
    edge = (inside_x < 2 * joint) | (inside_y < 2 * joint)
    shade = shades[down.floor().long() % 64, across.floor().long() % 64]
    return shade * torch.where(dark, 0.45, torch.where(edge, 1.15, 1.0))


def skirting(brightness: Tensor) -> Tensor:
    """Adds a dark strip at the foot of a wall and a thin one at its top."""
    return brightness * torch.where(DOWN > 0.93, 0.35, torch.where(DOWN < 0.02, 0.6, 1.0))


def bricks(generator: Generator, base: Tensor) -> Tensor:
    """Draws courses of bricks, each shifted against the next."""
    courses = 8 * DOWN
    shift = 0.5 * (courses.floor() % 2)
    shade = cells(generator, 4 * ACROSS + shift, courses, 0.05, 0.35)
    return finish(skirting(shade + 0.1 * noise(generator, 32)), base)


def panels(generator: Generator, base: Tensor) -> Tensor:
    """Draws metal panels with a disc on each quarter."""
    shade = cells(generator, 2 * ACROSS, 2 * DOWN, 0.02, 0.1)
    discs = shades_of_discs(generator, 2 * ACROSS, 2 * DOWN)
    return finish(skirting(shade * discs + 0.04 * noise(generator, 64)), base)


def shades_of_discs(generator: Generator, across: Tensor, down: Tensor) -> Tensor:
    """Draws the brightness of discs with rims, one in each unit square."""
    radius = ((across % 1 - 0.5).square() + (down % 1 - 0.5).square()).sqrt()
    shades = (0.4 + 0.3 * draw(generator, 2, 2))[down.floor().long() % 2, across.floor().long() % 2]
    rim = ((radius > 0.33) & (radius < 0.36)) | ((radius > 0.38) & (radius < 0.395))
    return torch.where(radius < 0.3, shades, torch.where(rim, 0.5, 1.0))


def blocks(generator: Generator, base: Tensor) -> Tensor:
    """Draws large blocks with smooth stains and diagonal stripes."""
    shade = cells(generator, 3 * ACROSS, 4 * DOWN, 0.03, 0.2)
    stripes = torch.where(((ACROSS + DOWN) * 8 % 1) < 0.5, 0.94, 1.06)
    return finish(skirting(shade * stripes + 0.2 * noise(generator, 6)), base)


def tiles(generator: Generator, base: Tensor) -> Tensor:
    """Draws small square tiles of many shades."""
    return finish(skirting(cells(generator, 10 * ACROSS, 10 * DOWN, 0.06, 0.45)), base)


def hexagons(generator: Generator, base: Tensor) -> Tensor:
    """Draws a floor of hexagons of four shades with thin joints."""
    x, y = 8 * ACROSS, 8 * DOWN
    first = torch.stack([x.floor() + 0.5, 2 * (y / 2).floor() + 1.0])
    second = torch.stack([(x + 0.5).floor(), 2 * ((y + 1) / 2).floor()])
    here = torch.stack([x, y])
    far = [(here - centre).square().sum(0) for centre in (first, second)]
    nearest = torch.where(far[0] < far[1], first, second)
    joint = (far[0].sqrt() - far[1].sqrt()).abs() < 0.07
    shades = torch.tensor([0.72, 0.92, 1.0, 1.06])[
        torch.randint(4, (16, 16), generator=generator)
    ].double()
    shade = shades[nearest[1].long() % 8, (2 * nearest[0]).long() % 16]
    return finish(shade * torch.where(joint, 0.8, 1.0) + 0.06 * noise(generator, 32), base)


def skies(generator: Generator) -> list[Tensor]:
    """Draws the five faces of a sky box: pale blue at the horizon, clouds, and towers around."""
    a, b, one = 2 * ACROSS - 1, 1 - 2 * DOWN, torch.ones_like(ACROSS)
    faces = [(one, -a, b), (a, one, b), (-one, a, b), (-a, -one, b), (-a, b, one)]
    waves = 6 * (2 * draw(generator, 12, 3) - 1)
    phases = 2 * math.pi * draw(generator, 12)
    towers = torch.stack(
        [
            2 * math.pi * draw(generator, 24),
            0.02 + 0.06 * draw(generator, 24),
            0.1 + 0.4 * draw(generator, 24),
        ],
        -1,
    )
    grey = 0.25 + 0.35 * draw(generator, 24)
    pictures = []
    for face in faces:
        x, y, z = torch.stack(face) / torch.stack(face).square().sum(0).sqrt()
        height = z.clamp_min(0)
        clouds = (torch.stack([x, y, 2 * z], -1) @ waves.T + phases).sin().mean(-1)
        cover = (4 * clouds).clamp(0, 1)[..., None] * 0.7
        blue = torch.stack([0.55 - 0.3 * height, 0.8 - 0.3 * height, 1 - 0.1 * height], -1)
        picture = blue * (1 - cover) + cover
        azimuth = torch.atan2(y, x)
        for (place, width, top), shade in zip(towers.tolist(), grey.tolist(), strict=True):
            away = (azimuth - place + math.pi) % (2 * math.pi) - math.pi
            solid = (away.abs() < width) & (z < top) & (x.abs().maximum(y.abs()) > 1e-6)
            picture[solid] = torch.tensor([0.9, 1.0, 1.1], dtype=torch.float64) * shade
        pictures.append((255 * picture).clamp(0, 255).round().to(torch.uint8))
    return pictures


def picture(generator: Generator) -> UInt8[Tensor, "S S 3"]:
    """Draws a framed abstract painting of discs, boxes and stripes in strong colours."""
    hue = float(draw(generator, 1))
    painted = colour(hue, 0.35, 0.9).expand(SIZE, SIZE, 3).clone()
    for k in range(7):
        x, y, extent, turn, tint = draw(generator, 5).tolist()
        extent, angle = 0.1 + 0.22 * extent, math.pi * turn
        u = (ACROSS - x) * math.cos(angle) + (DOWN - y) * math.sin(angle)
        v = (DOWN - y) * math.cos(angle) - (ACROSS - x) * math.sin(angle)
        shapes = (
            (u.square() + v.square()) < extent**2,
            (u.abs() < extent) & (v.abs() < 0.6 * extent),
            u.abs() < 0.25 * extent,
        )
        painted[shapes[k % 3]] = colour(tint, 0.9, (0.3, 0.95, 0.75)[pick(generator, 3)])
    rim = torch.maximum((ACROSS - 0.5).abs(), (DOWN - 0.5).abs())
    painted[rim > 0.46] = colour(hue, 0.4, 0.2)
    return (255 * painted).round().to(torch.uint8)


def hang(
    wall: UInt8[Tensor, "S S 3"], painting: UInt8[Tensor, "S S 3"], extent: float = 0.5
) -> UInt8[Tensor, "S S 3"]:
    """Returns the wall with a painting in its middle, of this share of its side."""
    side = round(SIZE * extent)
    small = Image.fromarray(painting.numpy()).resize((side, side), Image.Resampling.BOX)
    start = (SIZE - side) // 2
    hung = wall.clone()
    hung[start : start + side, start : start + side] = torch.from_numpy(np.array(small))
    return hung

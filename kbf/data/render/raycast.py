"""A first-person ray caster for worlds of rectangular cells with textured faces and a sky.

World axes: x and y on the ground, z up. Camera axes: x forward, y left, z up. A rotation matrix
takes camera to world; a yaw of theta degrees is the turn by theta about z, counter-clockwise as
seen from above. Yaw 0 looks along +x.

Letters: ``N`` views, ``H W`` pixels, ``X Y`` cells, ``K`` textures of ``S S`` texels.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn.functional import avg_pool2d

# Sides of a cell: towards +x, +y, -x, -y.
EAST, NORTH, WEST, SOUTH = range(4)

# Brightness of the faces that the four sides show, of floors and of ceilings.
LIGHT = (0.88, 1.0, 0.88, 0.8, 1.0, 0.95)

# How much of the light is lost for each unit of depth: a face at depth t is 1 / (1 + FOG t) times
# as bright.
FOG = 0.02

# Rays that are cast at once. On a processor their numbers stay in the cache.
RAYS = {"cpu": 1 << 15, "cuda": 1 << 23}


class Scene(NamedTuple):
    """A world. Its cells are boxes, with one texture on each face.

    Attributes:
        walls: ``X Y 4`` int32, the texture of the wall at each side (east, north, west, south) of a
            cell, -1 where it is open.
        flats: ``X Y 2`` int32, the textures of the floor and the ceiling of a cell; a ceiling of -1
            is open to the sky.
        texels: all textures with all their mip levels, each texel one int32 of four bytes (red,
            green, blue, 255).
        size: S, a power of two. number: K.
        cell: extent of a cell along x and y. height: extent along z.
        sky: number of the first of five textures, the east, north, west, south and upper face of
            the sky box; -1 for none.
    """

    walls: Tensor
    flats: Tensor
    texels: Tensor
    size: int
    number: int
    cell: tuple[float, float] = (1.0, 1.0)
    height: float = 1.0
    sky: int = -1


class Walls(NamedTuple):
    """Where rays that run along the ground meet a wall.

    Attributes:
        depth: the ray's parameter t at the wall. facing: |component of the ray's direction across
            the wall|.
        side: which side of its last cell the ray meets. texture: of the wall. u: in [0, 1], from
            left to right.
    """

    depth: Tensor
    facing: Tensor
    side: Tensor
    texture: Tensor
    u: Tensor


class Surfaces(NamedTuple):
    """What rays meet first, all of one shape.

    Attributes:
        depth: the ray's parameter t, infinite for the sky. texture: its number. u: from left to
            right in [0, 1]. v: from top to bottom. base: where the mip level to read begins. side:
            texels of one side of this level. light: brightness.
    """

    depth: Tensor
    texture: Tensor
    u: Tensor
    v: Tensor
    base: Tensor
    side: Tensor
    light: Tensor


def make_scene(
    walls: Int[Tensor, "X Y 4"],
    flats: Int[Tensor, "X Y 2"],
    textures: UInt8[Tensor, "K S S 3"],
    *,
    cell: tuple[float, float] = (1.0, 1.0),
    height: float = 1.0,
    sky: int = -1,
) -> Scene:
    """Put a world together; see `Scene`. The rows of a texture run from top to bottom.

    Seen from inside, walls read from left to right. Floors have north (+y) at the top, seen from
    above; ceilings have it at the top too, seen from below.

    Raises:
        ValueError: S is no power of two, a texture that is not there, an open side of an outer
            cell, or a ceiling without sky.
    """
    count, size = textures.shape[:2]
    if size & (size - 1):
        raise ValueError(f"the side of a texture must be a power of two, got {size}")
    last = max(int(walls.max()), int(flats.max()), sky + 4 if sky >= 0 else -1)
    if last >= count or int(flats[..., 0].min()) < 0:
        raise ValueError(
            f"textures 0 to {count - 1} are there, but {last} is used, or a floor has none"
        )
    outer = (walls[-1, :, EAST], walls[:, -1, NORTH], walls[0, :, WEST], walls[:, 0, SOUTH])
    if any(bool((side < 0).any()) for side in outer):
        raise ValueError("an outer cell is open to the outside: rays would never end")
    if sky < 0 and bool((flats < 0).any()):
        raise ValueError("a ceiling is open, but there is no sky")
    levels = [textures.permute(0, 3, 1, 2).float()]
    while levels[-1].shape[-1] > 1:
        levels.append(avg_pool2d(levels[-1], 2))
    channels = torch.cat(
        [level.round().to(torch.uint8).permute(0, 2, 3, 1).reshape(-1, 3) for level in levels]
    )
    packed = (
        torch.cat([channels, torch.full_like(channels[:, :1], 255)], -1)
        .contiguous()
        .view(torch.int32)
        .flatten()
    )
    return Scene(
        walls.int().contiguous(), flats.int().contiguous(), packed, size, count, cell, height, sky
    )


def to(scene: Scene, device: str | torch.device) -> Scene:
    """The scene on a device."""
    return scene._replace(
        walls=scene.walls.to(device), flats=scene.flats.to(device), texels=scene.texels.to(device)
    )


def yaw_rotation(yaw_degrees: Float[Tensor, "*N"]) -> Float[Tensor, "*N 3 3"]:
    """The rotation matrices of a camera that keeps level."""
    yaw = torch.deg2rad(yaw_degrees)
    c, s, zero, one = yaw.cos(), yaw.sin(), torch.zeros_like(yaw), torch.ones_like(yaw)
    return torch.stack(
        [torch.stack(row, -1) for row in ([c, -s, zero], [s, c, zero], [zero, zero, one])], -2
    )


def render_views(
    scene: Scene,
    rotation: Float[Tensor, "N 3 3"],
    position: Float[Tensor, "N 3"],
    size: tuple[int, int] = (72, 96),
    fov: float = 90.0,
    supersample: int = 2,
    *,
    device: str | torch.device | None = None,
    progress: Callable[[int], None] | None = None,
) -> UInt8[Tensor, "N H W 3"]:
    """Render what cameras see.

    Each pixel is the mean of ``supersample`` squared rays on a regular grid inside it. Each ray
    reads the nearest texel of the finest mip level whose texels are not smaller than the part of
    the face that the ray stands for.

    Args:
        scene: the world.
        rotation: from camera (x forward, y left, z up) to world axes.
        position: of the cameras, each inside a free cell.
        size: height and width, in pixels, which are square.
        fov: horizontal field of view, degrees.
        supersample: rays along each side of a pixel.
        device: where to render and where the images are; None for the scene's.
        progress: called with the number of views that are done, after each chunk.

    Raises:
        ValueError: a position outside of the world, an fov not in (0, 180), or fewer than one ray
            or pixel.
    """
    level = bool(
        (rotation[:, :2, 2] == 0).all()
        and (rotation[:, 2, :2] == 0).all()
        and (rotation[:, 2, 2] == 1).all()
    )
    check(scene, position, size, fov, supersample)
    device = scene.texels.device if device is None else torch.device(device)
    scene, rotation = to(scene, device), rotation.to(device)
    origin = position.to(device, torch.float32)[:, None, None]
    across, up = pixel_grid(size, fov, supersample, device)
    chunk = max(RAYS.get(device.type, 1 << 20) // (size[0] * size[1]), 1)
    images = torch.empty(len(rotation), *size, 3, dtype=torch.uint8, device=device)
    step = 2 * math.tan(math.radians(fov) / 2) / (size[1] * supersample)
    for start in range(0, len(rotation), chunk):
        part = slice(start, start + chunk)
        light = [torch.zeros(images[part].shape[:3], device=device) for _ in range(3)]
        for a in range(supersample):
            rays = directions(rotation[part], across[a::supersample], level)
            walls = meet_walls(scene, origin[part], *rays(up[:1])[:2]) if level else None
            for b in range(supersample):
                direction = rays(up[b::supersample])
                add_colours(light, scene, meet(scene, origin[part], direction, step, walls))
        images[part] = torch.stack([(c / supersample**2).round_() for c in light], -1).to(
            torch.uint8
        )
        if progress is not None:
            progress(min(start + chunk, len(rotation)))
    return images


def check(
    scene: Scene, position: Tensor, size: tuple[int, int], fov: float, supersample: int
) -> None:
    """Raise the errors of `render_views`."""
    if not 0 < fov < 180 or supersample < 1 or min(size) < 1:
        raise ValueError(
            f"fov {fov} must be in (0, 180); supersample {supersample} and size {size} at least 1"
        )
    extent = [
        scene.walls.shape[0] * scene.cell[0],
        scene.walls.shape[1] * scene.cell[1],
        scene.height,
    ]
    inside = (position > 0) & (position < position.new_tensor(extent))
    if not bool(inside.all()):
        outside = position[~inside.all(-1)][0].tolist()
        raise ValueError(
            f"the camera at {outside} is outside of the world, which reaches from 0 to {extent}"
        )


def pixel_grid(
    size: tuple[int, int], fov: float, supersample: int, device: torch.device
) -> tuple[Float[Tensor, " columns"], Float[Tensor, " rows"]]:
    """Returns the rays' directions in the plane at distance 1: left by column, up by row."""
    height, width = size[0] * supersample, size[1] * supersample
    half = math.tan(math.radians(fov) / 2)
    across = half * (1 - (2 * torch.arange(width, dtype=torch.float64, device=device) + 1) / width)
    up = half * (height - 2 * torch.arange(height, dtype=torch.float64, device=device) - 1) / width
    return across, up


def directions(
    rotation: Float[Tensor, "n 3 3"], across: Float[Tensor, " W"], level: bool
) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Returns the function from ``up`` (one number a row) to the rays' directions x, y, z, float32.

    They have length 1 along the camera's axis, so that the ray's parameter is the depth. For level
    cameras x and y are ``n 1 W`` and z is ``1 H 1``, else all are ``n H W``.
    """
    forward, left, top = (rotation.double()[:, :, k, None, None] for k in range(3))
    flat = forward + left * across

    def rays(up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        d = (flat if level else flat + top * up[:, None]).float()
        return d[:, 0], d[:, 1], up.float()[None, :, None] if level else d[:, 2]

    return rays


def meet_walls(scene: Scene, origin: Float[Tensor, "n 1 1 3"], dx: Tensor, dy: Tensor) -> Walls:
    """Follows each ray from cell to cell to the first wall (a digital differential analyser)."""
    columns, rows = scene.walls.shape[:2]
    table = scene.walls.flatten()
    dx, dy = dx / scene.cell[0], dy / scene.cell[1]
    x = (origin[..., 0] / scene.cell[0]).expand_as(dx)
    y = (origin[..., 1] / scene.cell[1]).expand_as(dy)
    east, north = dx >= 0, dy >= 0
    per_x, per_y = 1 / dx.abs(), 1 / dy.abs()
    i, j = x.floor().int(), y.floor().int()
    step_x, step_y = torch.where(east, 1, -1).int(), torch.where(north, 1, -1).int()
    side_x, side_y = torch.where(east, EAST, WEST).int(), torch.where(north, NORTH, SOUTH).int()

    def ahead(i: Tensor, j: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        to_x, to_y = (i + east - x).abs() * per_x, (j + north - y).abs() * per_y
        crosses_x = to_x <= to_y
        side = torch.where(crosses_x, side_x, side_y)
        return (
            crosses_x,
            side,
            table.index_select(0, ((i * rows + j) * 4 + side).flatten()).view_as(i),
            torch.minimum(to_x, to_y),
        )

    crosses_x, side, texture, depth = ahead(i, j)
    for _ in range(columns + rows):
        going = texture < 0
        if not bool(going.any()):
            break
        i, j = i + step_x * (going & crosses_x), j + step_y * (going & ~crosses_x)
        crosses_x, side, texture, depth = ahead(i, j)
    along = torch.where(crosses_x, y + depth * dy - j, x + depth * dx - i)
    facing = torch.where(crosses_x, dx.abs() * scene.cell[0], dy.abs() * scene.cell[1])
    return Walls(depth, facing, side, texture, torch.where(mirrored(side), 1 - along, along))


def mirrored(side: Tensor) -> Tensor:
    """Whether the wall at this side reads from left to right where x, or y, falls."""
    return torch.isin(side, torch.tensor([EAST, SOUTH], dtype=side.dtype, device=side.device))


def mip(scene: Scene, extent: Tensor) -> tuple[Tensor, Tensor]:
    """Returns start and side of the first mip level whose texels cover ``extent`` of a side."""
    level = (extent * scene.size).log2().ceil().clamp(0, math.log2(scene.size))
    side = torch.exp2(-level).mul(scene.size).round().int()
    return (scene.size**2 - side * side) // 3 * (4 * scene.number), side


def meet(
    scene: Scene,
    origin: Float[Tensor, "n 1 1 3"],
    direction: tuple[Tensor, Tensor, Tensor],
    step: float,
    walls: Walls | None = None,
) -> Surfaces:
    """What each ray meets first.

    A ray d of length 1 along the camera's axis that stands for step x step of the plane at distance
    1 covers a part of a face with normal n that is about depth step wide and depth step / |n . d|
    long; the longer side chooses the mip level.

    Args:
        scene: the world.
        origin: where the rays begin.
        direction: along x, y and z, shapes that broadcast.
        step: distance of neighbouring rays at depth 1.
        walls: what `meet_walls` gives for them, where this is known.
    """
    dx, dy, dz = direction
    wall = meet_walls(scene, origin, dx, dy) if walls is None else walls
    columns, rows = scene.walls.shape[:2]
    cell_x, cell_y = scene.cell
    x, y, z = origin[..., 0], origin[..., 1], origin[..., 2]
    below = dz < 0
    steep = dz.abs()
    flat_depth = torch.where(below, z, scene.height - z) / steep
    flat = flat_depth < wall.depth
    depth = torch.minimum(flat_depth, wall.depth)
    # floors and ceilings
    px, py = (x + depth * dx) / cell_x, (y + depth * dy) / cell_y
    i, j = px.floor(), py.floor()
    index = ((i * rows + j) * 2 + ~below).int().clamp_(0, 2 * columns * rows - 1)
    flat_texture = scene.flats.flatten().index_select(0, index.flatten()).view_as(index)
    px, py = px - i, py - j
    light = [torch.tensor(LIGHT, device=dx.device)[k] for k in (wall.side, 5 - below.long())]
    fogged = [
        brightness / (1 + FOG * far)
        for brightness, far in zip(light, (wall.depth, flat_depth), strict=True)
    ]
    width = torch.where(wall.side % 2 == 0, cell_y, cell_x)
    wall_mip = mip(scene, wall.depth * step / (wall.facing * width))
    flat_mip = mip(scene, flat_depth * step / (steep * min(scene.cell)))
    texture = torch.where(flat, flat_texture, wall.texture)
    u = torch.where(flat, torch.where(below, px, 1 - px), wall.u)
    v = torch.where(flat, 1 - py, 1 - (z + depth * dz) / scene.height)
    base = torch.where(flat, flat_mip[0], wall_mip[0])
    side = torch.where(flat, flat_mip[1], wall_mip[1])
    brightness = torch.where(flat, fogged[1], fogged[0])
    if scene.sky < 0:
        return Surfaces(depth, texture, u, v, base, side, brightness)
    open_air = texture < 0
    box = meet_sky(scene, dx, dy, dz)
    sky_base, sky_side = mip(scene, torch.tensor(step / 2, device=dx.device))
    return Surfaces(
        torch.where(open_air, torch.inf, depth),
        torch.where(open_air, box[0], texture),
        torch.where(open_air, box[1], u),
        torch.where(open_air, box[2], v),
        torch.where(open_air, sky_base, base),
        torch.where(open_air, sky_side, side),
        brightness.masked_fill(open_air, 1.0),
    )


def meet_sky(scene: Scene, dx: Tensor, dy: Tensor, dz: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Texture, u and v of the sky box, a cube around the camera that is infinitely far away."""
    ax, ay = dx.abs(), dy.abs()
    along_x = ax >= ay
    reach = 1 / torch.maximum(ax, ay)
    side = torch.where(
        along_x, torch.where(dx >= 0, EAST, WEST), torch.where(dy >= 0, NORTH, SOUTH)
    ).int()
    across = torch.where(along_x, dy, dx) * reach
    u = torch.where(mirrored(side), 1 - across, 1 + across) / 2
    rise = dz * reach
    top = rise > 1
    above = 1 / dz
    return (
        scene.sky + torch.where(top, 4, side),
        torch.where(top, (1 - dx * above) / 2, u),
        torch.where(top, 1 - dy * above, 1 - rise) / 2,
    )


def add_colours(light: list[Tensor], scene: Scene, seen: Surfaces) -> None:
    """Add red, green and blue of what is seen to ``light``, three tensors ``n H W``."""
    below_one = 1 - 1e-6
    column = (seen.u.clamp(0, below_one) * seen.side).int()
    row = (seen.v.clamp(0, below_one) * seen.side).int()
    index = ((seen.texture * seen.side + row) * seen.side + column).add_(seen.base)
    packed = scene.texels.index_select(0, index.flatten()).view_as(index)
    for k, channel in enumerate(light):
        channel.addcmul_(((packed >> (8 * k)) & 255).float(), seen.light)

"""Worlds for the ray caster: mazes with rooms, and a single room."""

import importlib
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from kbf.data.render.raycast import Scene, make_scene, meet_walls
from kbf.data.render.textures import (
    Textures,
    blocks,
    bricks,
    colour,
    draw,
    generated_textures,
    hang,
    hexagons,
    labmaze_textures,
    panels,
    pick,
    picture,
    tiles,
)

# Share of the wall faces of a maze with a painting.
HUNG = 0.25

# Different paintings in one maze.
PAINTINGS = 6


class Size(NamedTuple):
    """Extent of a maze in cells, both odd, and the largest number of its rooms."""

    columns: int
    rows: int
    rooms: int


# Random mazes; the other level is "room".
LEVELS = {"small_maze": Size(11, 11, 3), "maze": Size(17, 11, 4), "large_maze": Size(23, 23, 6)}

DEFAULT_LEVEL = "maze"


class Layout(NamedTuple):
    """Free cells and rooms of a maze.

    Attributes:
        free: ``X Y`` bool. zone: ``X Y`` int64, 0 in corridors and walls, 1, 2, ... in rooms.
    """

    free: Tensor
    zone: Tensor


class World(NamedTuple):
    """A scene, the camera position (``3`` float64), and a description of the source."""

    scene: Scene
    position: Tensor
    source: str


@lru_cache(maxsize=8)
def load_world(level: str, seed: int, labmaze: str | None) -> World:
    """Makes the world of a level, with a camera position that has a wide view.

    Args:
        level: one of `LEVELS`, or "room".
        seed: from 0 to 2**31 - 1, of all random draws.
        labmaze: the version of labmaze, which is used then; None for generated mazes and textures.

    Raises:
        ValueError: unknown level, or a seed out of range.
    """
    if level not in (*LEVELS, "room"):
        raise ValueError(f"there is no level {level!r}; levels: {', '.join(LEVELS)}, room")
    if not 0 <= seed < 2**31:
        raise ValueError(f"the seed of a level must be from 0 to 2**31 - 1, got {seed}")
    if level == "room":
        return room(seed)
    generator = Generator().manual_seed(seed)
    layout = (
        carve(LEVELS[level], generator) if labmaze is None else labmaze_layout(LEVELS[level], seed)
    )
    textures = generated_textures(generator) if labmaze is None else labmaze_textures(generator)
    scene = maze_scene(layout, textures, generator)
    return World(scene, best_view(scene, layout.free), source(labmaze))


def source(labmaze: str | None) -> str:
    """Returns a description of the source of mazes and textures."""
    if labmaze is None:
        return "a generated maze, generated textures"
    return f"a labmaze maze, labmaze {labmaze} textures"


def labmaze_layout(size: Size, seed: int) -> Layout:
    """Makes a maze with DeepMind Lab's generator."""
    maze = importlib.import_module("labmaze").RandomMaze(
        height=size.rows,
        width=size.columns,
        max_rooms=size.rooms,
        extra_connection_probability=0.05,
        random_seed=seed,
    )
    return read_layout(str(maze.entity_layer), str(maze.variations_layer))


def read_layout(entities: str, variations: str) -> Layout:
    """Returns the layout of a text maze with north at the top.

    ``*`` is a wall in the first text; a letter in the second text is the name of a room.
    """
    walls, rooms = (
        [line for line in lines if line]
        for lines in (entities.splitlines(), variations.splitlines())
    )
    free = torch.tensor([[mark != "*" for mark in line] for line in walls])
    zone = torch.tensor(
        [[0 if mark == "." else 1 + ord(mark) - ord("A") for mark in line] for line in rooms]
    )
    return Layout(*(table.flip(0).T.contiguous() for table in (free, zone * free)))


def carve(size: Size, generator: Generator) -> Layout:
    """Makes a maze by recursive backtracking over the odd cells, with rooms of side 3 or 5."""
    columns, rows, rooms = size
    free = torch.zeros(columns, rows, dtype=torch.bool)
    zone = torch.zeros(columns, rows, dtype=torch.long)
    path = [(1, 1)]
    free[1, 1] = True
    while path:
        x, y = path[-1]
        ways = [
            (dx, dy)
            for dx, dy in ((2, 0), (0, 2), (-2, 0), (0, -2))
            if 0 < x + dx < columns and 0 < y + dy < rows
        ]
        if not (ways := [(dx, dy) for dx, dy in ways if not free[x + dx, y + dy]]):
            path.pop()
            continue
        dx, dy = ways[pick(generator, len(ways))]
        free[x + dx // 2, y + dy // 2] = free[x + dx, y + dy] = True
        path.append((x + dx, y + dy))
    made = 0
    for _ in range(20 * rooms):
        wide, deep = 3 + 2 * pick(generator, 2), 3 + 2 * pick(generator, 2)
        if made == rooms or wide > columns - 2 or deep > rows - 2:
            continue
        x = 1 + 2 * pick(generator, (columns - wide) // 2)
        y = 1 + 2 * pick(generator, (rows - deep) // 2)
        if (zone[x - 1 : x + wide + 1, y - 1 : y + deep + 1] > 0).any():
            continue
        made += 1
        free[x : x + wide, y : y + deep] = True
        zone[x : x + wide, y : y + deep] = made
    return Layout(free, zone)


def maze_scene(layout: Layout, textures: Textures, generator: Generator) -> Scene:
    """Makes the scene of a layout: colours by room, paintings on random wall faces."""
    free, zone = layout
    around = torch.nn.functional.pad(free, (1, 1, 1, 1))
    # the cells to the east, north, west and south
    beyond = around[2:, 1:-1], around[1:-1, 2:], around[:-2, 1:-1], around[1:-1, :-2]
    closed = ~torch.stack(beyond, -1)
    paintings = [picture(generator) for _ in range(PAINTINGS)]
    colours, floors = len(textures.walls), len(textures.floors)
    hung = torch.where(
        draw(generator, *closed.shape) < HUNG,
        torch.randint(PAINTINGS, closed.shape, generator=generator),
        -1,
    )
    kind = (zone[..., None] % colours) * (PAINTINGS + 1) + 1 + hung
    used = kind[closed & free[..., None]].unique()
    made = []
    for number in used.tolist():
        which, painted = divmod(number, PAINTINGS + 1)
        wall = textures.walls[which]
        made.append(hang(wall, paintings[painted - 1]) if painted else wall)
    walls = torch.where(closed, torch.searchsorted(used, kind).clamp(max=len(used) - 1), -1)
    flats = torch.stack([len(used) + zone.clamp(max=1) % floors, torch.full_like(zone, -1)], -1)
    return make_scene(
        walls, flats, torch.stack([*made, *textures.floors, *textures.sky]), sky=len(used) + floors
    )


def best_view(scene: Scene, free: Bool[Tensor, "X Y"]) -> Float[Tensor, "3"]:
    """Returns the centre of the free cell with the widest view, at half the height of the walls.

    It maximises the geometric mean of the distances to the walls around.
    """
    centres = (free.nonzero() + 0.5) * torch.tensor(scene.cell)
    angles = torch.arange(360) * (torch.pi / 180) + 0.01
    eyes = torch.full((len(centres), 1), scene.height / 2)
    origin = torch.cat([centres, eyes], -1)[:, None, None]
    rays = torch.ones(len(centres), 1, 1) * torch.stack([angles.cos(), angles.sin()])[:, None, None]
    clearance = meet_walls(scene, origin, rays[0], rays[1]).depth.log().mean((1, 2))
    return origin[int(clearance.argmax()), 0, 0].double()


def room(seed: int = 0) -> World:
    """Makes a closed room of 5 x 4 x 3 with the camera in its middle.

    Each of its six faces has another hue and pattern and a large painting. It does not depend on
    labmaze.
    """
    generator = Generator().manual_seed(seed)
    hue = float(draw(generator, 1))
    faces = [
        pattern(generator, colour((hue + k / 6) % 1, 0.6, 0.75))
        for k, pattern in enumerate((bricks, panels, blocks, tiles, hexagons, panels))
    ]
    faces = torch.stack([hang(face, picture(generator), 0.6) for face in faces])
    walls, flats = torch.arange(4).reshape(1, 1, 4), torch.tensor([[[4, 5]]])
    return World(
        make_scene(walls, flats, faces, cell=(5.0, 4.0), height=3.0),
        torch.tensor([2.5, 2.0, 1.5], dtype=torch.float64),
        "a room, generated textures",
    )

"""The renderers against geometry that is worked out by hand, and what the pictures must have to
tell a heading.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import sys

import numpy as np
import pytest
import torch

import kbf.data.render
from kbf.data.render import maze, raycast, textures
from kbf.data.render.raycast import (
    EAST,
    NORTH,
    SOUTH,
    WEST,
    make_scene,
    meet,
    meet_walls,
    render_views,
    yaw_rotation,
)

LABMAZE = textures.labmaze_version()
needs_labmaze = pytest.mark.skipif(LABMAZE is None, reason="labmaze is not installed")
SOURCES = [
    pytest.param(LABMAZE, marks=needs_labmaze, id="labmaze"),
    pytest.param(None, id="generated"),
]


def plain(*colours: tuple[int, int, int], size: int = 8) -> torch.Tensor:
    """Textures of one colour each."""
    return torch.tensor(colours, dtype=torch.uint8)[:, None, None].expand(-1, size, size, 3)


def box(
    faces: torch.Tensor,
    *,
    numbers: list[int] | None = None,
    extent: float = 4.0,
    height: float = 2.0,
    **rest,
):
    """A room of one cell; ``numbers``: textures of the east, north, west, south wall, the floor and
    the ceiling.
    """
    numbers = numbers or [0, 0, 0, 0, 1, 2]
    walls, flats = (
        torch.tensor(numbers[:4]).reshape(1, 1, 4),
        torch.tensor(numbers[4:]).reshape(1, 1, 2),
    )
    return make_scene(walls, flats, faces, cell=(extent, extent), height=height, **rest)


def at(*position: float, n: int = 1) -> torch.Tensor:
    return torch.tensor(position, dtype=torch.float64).expand(n, 3)


def degrees(*yaw: float) -> torch.Tensor:
    return torch.tensor(yaw, dtype=torch.float64)


def turn(axis: int, angle: float) -> torch.Tensor:
    """The rotation about a camera axis: 0 rolls, 1 looks down, 2 turns left."""
    c, s = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    a, b = [(1, 2), (2, 0), (0, 1)][axis]
    matrix = torch.eye(3, dtype=torch.float64)
    matrix[a, a], matrix[b, b], matrix[a, b], matrix[b, a] = c, c, -s, s
    return matrix


def turning() -> torch.Tensor:
    """Rotation matrices of a camera that looks along each axis, with every roll of 90 degrees: 24
    views.
    """
    looks = [turn(2, 90.0 * k) for k in range(4)] + [turn(1, 90.0), turn(1, -90.0)]
    return torch.stack([look @ turn(0, 90.0 * k) for look in looks for k in range(4)])


def differ(a: torch.Tensor, b: torch.Tensor, by: int = 1) -> float:
    """Share of numbers that differ by more than ``by`` grey levels."""
    return float(((a.int() - b.int()).abs() > by).double().mean())


@pytest.fixture
def flat_light(monkeypatch):
    monkeypatch.setattr(raycast, "LIGHT", (1.0,) * 6)
    monkeypatch.setattr(raycast, "FOG", 0.0)


# --------------------------------------------------------------------------------------------------
# ---------------- geometry


def depth_map(scene, rotation, position, size=(5, 7), fov=90.0):
    """Depth of each pixel, through the parts of the renderer."""
    across, up = raycast.pixel_grid(size, fov, 1, torch.device("cpu"))
    direction = raycast.directions(rotation, across, False)(up)
    return meet(scene, position.float()[:, None, None], direction, 0.1).depth


def test_depth_of_a_wall_straight_ahead_and_of_a_corner():
    scene = box(plain((9, 9, 9), (9, 9, 9), (9, 9, 9)), height=50.0)
    ahead = depth_map(scene, yaw_rotation(degrees(0.0, 45.0, 60.0)), at(2, 2, 25, n=3))[:, 2]
    assert torch.allclose(ahead[0], torch.full((7,), 2.0))
    u = torch.tensor([(1 - (2 * k + 1) / 7) for k in range(7)])
    angle = torch.arctan(u) + math.radians(45)
    distance = 2 / torch.maximum(
        angle.cos(), angle.sin()
    )  # to the nearer of the two walls that meet at 45 degrees
    assert torch.allclose(ahead[1], distance * torch.cos(torch.arctan(u)), atol=1e-5)
    assert torch.allclose(ahead[1, 3], torch.tensor(2 * math.sqrt(2)), atol=1e-5)
    assert torch.allclose(ahead[2, 3], torch.tensor(2 / math.sin(math.radians(60))), atol=1e-5)


def test_depth_is_the_nearest_of_six_planes(rng):
    scene = make_scene(
        torch.arange(4).reshape(1, 1, 4),
        torch.tensor([[[4, 5]]]),
        plain(*[(9, 9, 9)] * 6),
        cell=(5.0, 4.0),
        height=3.0,
    )
    rotation = torch.from_numpy(np.linalg.qr(rng.standard_normal((20, 3, 3)))[0])
    rotation = rotation * torch.linalg.det(rotation)[:, None, None]
    position = torch.from_numpy(rng.uniform(0.2, 0.8, (20, 3))) * torch.tensor([5.0, 4.0, 3.0])
    found = depth_map(scene, rotation, position)
    for n in range(20):
        for row in range(5):
            for column in range(7):
                camera = torch.tensor(
                    [1.0, 1 - (2 * column + 1) / 7, (5 - 2 * row - 1) / 7], dtype=torch.float64
                )
                d = (rotation[n] @ camera).tolist()
                planes = [
                    ((5, 4, 3)[k] - position[n, k] if d[k] > 0 else -position[n, k]) / d[k]
                    for k in range(3)
                ]
                assert float(found[n, row, column]) == pytest.approx(float(min(planes)), rel=1e-4)


def test_walls_of_a_maze_are_the_nearest_of_all_segments(rng):
    layout = maze.carve(maze.Size(11, 9, 2), torch.Generator().manual_seed(3))
    free = layout.free.tolist()
    walls = torch.full((11, 9, 4), -1)
    segments = []  # ends from left to right as seen from inside
    for i in range(11):
        for j in range(9):
            sides = [
                ((i + 1, j + 1), (i + 1, j)),
                ((i, j + 1), (i + 1, j + 1)),
                ((i, j), (i, j + 1)),
                ((i + 1, j), (i, j)),
            ]
            for side, (di, dj) in enumerate([(1, 0), (0, 1), (-1, 0), (0, -1)]):
                inside = 0 <= i + di < 11 and 0 <= j + dj < 9
                if not inside or (free[i][j] and not free[i + di][j + dj]):
                    walls[i, j, side] = len(segments)
                    segments.append((*sides[side], free[i][j]))
    scene = make_scene(
        walls, torch.zeros(11, 9, 2, dtype=torch.long), plain(*[(0, 0, 0)] * len(segments), size=1)
    )
    cells = layout.free.nonzero()
    places = cells[torch.from_numpy(rng.integers(len(cells), size=40))] + torch.from_numpy(
        rng.uniform(0.1, 0.9, (40, 2))
    )
    angles = torch.from_numpy(rng.uniform(0, 2 * np.pi, 40))
    dx, dy = angles.cos().float()[:, None, None], angles.sin().float()[:, None, None]
    met = meet_walls(
        scene, torch.cat([places, torch.full((40, 1), 0.5)], 1).float()[:, None, None], dx, dy
    )
    for n in range(40):
        o, d = places[n].numpy(), np.array([math.cos(angles[n]), math.sin(angles[n])])
        best = (math.inf, -1, 0.0)
        for number, (a, b, seen) in enumerate(segments):
            a, b = np.array(a, dtype=float), np.array(b, dtype=float)
            matrix = np.stack([d, a - b], 1)
            if seen and abs(np.linalg.det(matrix)) > 1e-12:
                t, u = np.linalg.solve(matrix, a - o)
                if t > 0 and -1e-9 <= u <= 1 + 1e-9 and t < best[0]:
                    best = (t, number, u)
        assert float(met.depth[n]) == pytest.approx(best[0], rel=1e-4)
        assert int(met.texture[n]) == best[1]
        assert float(met.u[n]) == pytest.approx(best[2], abs=1e-4)


@pytest.mark.parametrize("side", [EAST, NORTH, WEST, SOUTH])
@pytest.mark.parametrize("away", [0.0, 20.0, -17.0])
def test_stripes_project_to_the_columns_that_the_pinhole_says(side, away, flat_light):
    colours = torch.tensor(
        [[255, 0, 0], *[[255 * (k % 2)] * 3 for k in range(1, 8)]], dtype=torch.uint8
    )  # the first one is red
    stripes = colours[None, None].repeat_interleave(8, 2).expand(1, 64, 64, 3)
    scene = box(
        torch.cat([stripes, torch.full((1, 64, 64, 3), 77, dtype=torch.uint8)]),
        numbers=[0, 0, 0, 0, 1, 1],
    )
    view = render_views(
        scene, yaw_rotation(degrees(90.0 * side + away)), at(2, 2, 1), (3, 192), supersample=1
    )[0, 1].int()
    # edge k of the wall is 2 - k / 2 to the left of the middle, at distance 2
    to_left = torch.tensor([2 - 0.5 * k for k in range(1, 8)], dtype=torch.float64)
    bearing = torch.arctan(to_left / 2) - math.radians(away)
    expected = 96 * (1 - torch.tan(bearing))
    expected = expected[(bearing.abs() < math.radians(43))]
    edges = (view.diff(dim=0).abs().sum(-1) > 100).nonzero()[:, 0] + 1
    for column in expected.tolist():
        assert (edges - column).abs().min() <= 1, f"an edge is missing at column {column}"
    red = (view[:, 0] > 200) & (view[:, 1] < 50)
    assert red.any()
    first = 96 * (
        1 - math.tan(math.atan(0.875) - math.radians(away))
    )  # the middle of the red stripe of this wall
    if 0 <= first < 192:
        assert red[int(first)]


def test_rows_of_a_wall_run_from_top_to_bottom(flat_light):
    halves = torch.zeros(1, 8, 8, 3, dtype=torch.uint8)
    halves[0, :4] = 200
    scene = box(torch.cat([halves, plain((9, 9, 9))]), numbers=[0, 0, 0, 0, 1, 1], height=8.0)
    view = render_views(scene, yaw_rotation(degrees(0.0)), at(2, 2, 4.5), (48, 48), supersample=1)[
        0, :, 24, 0
    ]
    assert (view[: 24 + 5] == 200).all() and (
        view[24 + 7 :] == 0
    ).all()  # 0.5 below the eye at distance 2: a quarter of 24 rows


@pytest.mark.parametrize("below", [True, False])
def test_floor_and_ceiling_lie_as_documented(below, flat_light):
    quarters = torch.zeros(1, 8, 8, 3, dtype=torch.uint8)
    quarters[0, :4, 4:], quarters[0, 4:, 4:], quarters[0, 4:, :4] = 60, 120, 180
    scene = box(torch.cat([plain((9, 9, 9)), quarters]), numbers=[0, 0, 0, 0, 1, 1])
    pitch = 90.0 if below else -90.0
    north_up = turn(2, 90.0) @ turn(
        1, pitch
    )  # look north, then down: north is at the top; or up: then it is at the bottom
    view = render_views(scene, north_up[None], at(2, 2, 1), (8, 8), fov=40.0)[0, :, :, 0]
    expected = torch.tensor([[0, 60], [180, 120]]) if below else torch.tensor([[120, 180], [60, 0]])
    assert torch.equal(view[1::5, 1::5].int(), expected.int())


def test_a_quarter_turn_in_a_symmetric_room_changes_nothing(flat_light, rng):
    wall = torch.from_numpy(rng.integers(0, 255, (1, 16, 16, 3), dtype=np.uint8))
    faces = torch.cat([wall, plain((50, 60, 70), (150, 160, 170), size=16)])
    views = render_views(
        box(faces), yaw_rotation(degrees(10.0, 100.0, 190.0, 280.0)), at(2, 2, 1, n=4)
    )
    assert views.float().std() > 20
    for view in views[1:]:
        assert differ(view, views[0]) < 1e-3


def test_rolling_the_camera_rolls_the_picture(rng):
    faces = torch.from_numpy(rng.integers(0, 255, (6, 16, 16, 3), dtype=np.uint8))
    scene = box(faces, numbers=[0, 1, 2, 3, 4, 5])
    views = render_views(scene, turning(), at(1.7, 2.1, 0.8, n=24), (20, 20)).reshape(
        6, 4, 20, 20, 3
    )
    for look in views:
        for k in range(1, 4):
            assert (
                differ(look[k], look[0].rot90(k)) < 0.01
            )  # its left is up now: the picture turns counter-clockwise


def test_each_axis_shows_its_face():
    colours = [(200, 0, 0), (0, 200, 0), (0, 0, 200), (200, 200, 0), (200, 0, 200), (0, 200, 200)]
    scene = box(plain(*colours), numbers=[0, 1, 2, 3, 4, 5])
    middle = render_views(scene, turning()[::4], at(2, 2, 1, n=6), (5, 5))[:, 2, 2]
    seen = [tuple((200 * (pixel > 50)).tolist()) for pixel in middle]
    assert seen == colours  # east, north, west, south, then down and up


def test_light_and_fog_scale_the_colour(monkeypatch):
    monkeypatch.setattr(raycast, "LIGHT", (0.5, 1.0, 0.25, 0.75, 0.9, 0.6))
    monkeypatch.setattr(raycast, "FOG", 0.25)
    scene = box(plain((200, 100, 40)), numbers=[0] * 6)
    views = render_views(scene, turning()[::4], at(2, 2, 1, n=6), (3, 3), supersample=1)[:, 1, 1]
    for seen, light, depth in zip(
        views, (0.5, 1.0, 0.25, 0.75, 0.9, 0.6), (2, 2, 2, 2, 1, 1), strict=True
    ):
        assert seen.tolist() == [round(c * light / (1 + depth / 4)) for c in (200, 100, 40)]


def test_far_faces_show_the_mean_of_their_texture(flat_light):
    chequered = torch.zeros(1, 64, 64, 3, dtype=torch.uint8)
    chequered[0, ::2, ::2] = chequered[0, 1::2, 1::2] = 200
    scene = box(torch.cat([chequered, chequered, chequered]), extent=64.0, height=64.0)
    view = render_views(scene, yaw_rotation(degrees(0.0)), at(32, 32, 32), (24, 32), supersample=1)
    assert (view.int() - 100).abs().max() <= 1
    near = render_views(
        scene, yaw_rotation(degrees(0.0)), at(63.5, 32.1, 32.1), (24, 32), supersample=1
    )
    assert set(near.unique().tolist()) == {0, 200}


# --------------------------------------------------------------------------------------------------
# ------------ the renderer


def test_level_cameras_take_the_short_way_to_the_same_picture():
    world = maze.load_world("maze", 0, None)
    rotation = yaw_rotation(degrees(*range(0, 360, 24)))
    tilted = rotation.clone()
    tilted[:, 0, 2] = 1e-13  # not level any more: every ray is rollout_sequential by itself
    position = world.position.expand(len(rotation), 3)
    assert (
        differ(
            render_views(world.scene, rotation, position),
            render_views(world.scene, tilted, position),
        )
        < 2e-3
    )


def test_a_batch_is_its_views_one_by_one(monkeypatch):
    world = maze.load_world("maze", 1, None)
    rotation = torch.stack(
        [
            yaw_rotation(degrees(33.0))[0],
            turn(1, 40.0),
            turn(0, 25.0) @ turn(2, -70.0),
            turn(2, 77.0),
        ]
    )
    position = world.position + torch.tensor(
        [[0.0, 0, 0], [0.2, 0.1, 0.1], [-0.3, 0, -0.2], [0.1, -0.1, 0]]
    )
    told = []
    together = render_views(world.scene, rotation, position, (12, 16), progress=told.append)
    assert told == [4]
    for k in range(4):
        assert (
            differ(
                render_views(world.scene, rotation[k : k + 1], position[k : k + 1], (12, 16))[0],
                together[k],
            )
            < 5e-3
        )
    monkeypatch.setattr(raycast, "RAYS", {"cpu": 3 * 12 * 16})
    assert torch.equal(
        render_views(world.scene, rotation, position, (12, 16), progress=told.append), together
    )
    assert told == [4, 3, 4]


@pytest.mark.parametrize("supersample", [2, 3])
@pytest.mark.parametrize("level", [True, False])
def test_supersampling_is_the_mean_of_a_larger_picture(supersample, level):
    world = maze.load_world("maze", 0, None)
    rotation = (
        yaw_rotation(degrees(5.0, 222.0))
        if level
        else (turn(2, 50.0) @ turn(1, -20.0) @ turn(0, 10.0)).expand(2, 3, 3)
    )
    position, s = world.position.expand(2, 3), supersample
    large = render_views(world.scene, rotation, position, (18 * s, 24 * s), supersample=1).double()
    mean = large.reshape(2, 18, s, 24, s, 3).mean((2, 4))
    assert (
        render_views(world.scene, rotation, position, (18, 24), supersample=s) - mean
    ).abs().max() <= 1


def test_odd_sizes_and_axes_give_no_holes():
    world = maze.load_world("maze", 0, None)
    views = render_views(
        world.scene, turning(), world.position.expand(24, 3), (7, 7), supersample=1
    )
    assert views.dtype == torch.uint8 and views.shape == (24, 7, 7, 3)
    assert (views.float().mean((1, 2, 3)) > 20).all()
    assert render_views(world.scene, turning()[:0], world.position.expand(0, 3), (7, 7)).shape == (
        0,
        7,
        7,
        3,
    )


def test_the_sky_is_infinitely_far_away():
    sky = torch.stack(textures.skies(torch.Generator().manual_seed(0)))
    faces = torch.cat([plain((0, 0, 0), (0, 0, 0), size=textures.SIZE), sky])
    scene = box(faces, numbers=[0, 0, 0, 0, 1, -1], sky=2)
    rotation = (turn(2, 30.0) @ turn(1, -50.0)).expand(2, 3, 3)
    one, other = render_views(
        scene, rotation, torch.tensor([[2.0, 2.0, 1.5], [1.0, 3.0, 1.9]]), supersample=1
    )
    sky = (one.sum(-1) > 0) & (other.sum(-1) > 0)
    assert sky.double().mean() > 0.5
    assert torch.equal(one[sky], other[sky])
    level = render_views(scene, yaw_rotation(degrees(40.0)), at(2, 2, 1.9))
    depth = depth_map(scene, turn(1, -90.0)[None], at(2, 2, 1))
    assert depth[0, 2, 3] == math.inf and (level.sum(-1) > 0).any()


def test_the_sky_is_a_box(rng):
    scene = box(plain(*[(k, k, k) for k in range(7)]), numbers=[0, 0, 0, 0, 1, -1], sky=2)
    d = torch.from_numpy(rng.standard_normal((3, 200))).float()
    d[2] = d[2].abs()
    texture, u, v = raycast.meet_sky(scene, *d)
    x, y, z = d / d.abs().max(0).values  # where the box is met
    for k in range(200):
        a, b, c = float(x[k]), float(y[k]), float(z[k])
        faces = {
            2: (a, -b, -c),
            3: (b, a, -c),
            4: (-a, b, -c),
            5: (-b, -a, -c),
            6: (c, -a, -b),
        }  # outwards, right, down
        face = max(faces, key=lambda name: faces[name][0])
        assert int(texture[k]) == face
        assert float(u[k]) == pytest.approx((1 + faces[face][1]) / 2, abs=1e-5)
        assert float(v[k]) == pytest.approx((1 + faces[face][2]) / 2, abs=1e-5)


def test_the_sky_is_seen_where_it_is():
    colours = [
        (0, 0, 0),
        (0, 0, 0),
        (200, 0, 0),
        (0, 200, 0),
        (0, 0, 200),
        (200, 200, 0),
        (0, 200, 200),
    ]
    scene = box(plain(*colours), numbers=[0, 0, 0, 0, 1, -1], sky=2)
    looks = torch.stack([turn(2, 90.0 * k) @ turn(1, -35.0) for k in range(4)] + [turn(1, -90.0)])
    middle = render_views(scene, looks, at(2, 2, 1.9, n=5), (5, 5))[:, 2, 2]
    assert [tuple(pixel.tolist()) for pixel in middle] == colours[2:]


@pytest.mark.parametrize("labmaze", SOURCES)
def test_the_faces_of_the_sky_meet(labmaze):
    generator = torch.Generator().manual_seed(1)
    made = (
        textures.generated_textures(generator)
        if labmaze is None
        else textures.labmaze_textures(generator)
    )
    east, north, west, south, up = (face.double() for face in made.sky)
    border = 2  # Lab's textures have a rim
    seams = [
        (a[:, border], b[:, -1 - border])
        for a, b in ((east, north), (north, west), (west, south), (south, east))
    ]
    seams += [(north[border], up[border].flip(0)), (south[border], up[-1 - border])]
    seams += [(east[border], up[:, border]), (west[border], up[:, -1 - border].flip(0))]
    for a, b in seams:
        assert (a - b).abs().mean() < 12


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_renders_the_same():
    world = maze.load_world("maze", 0, None)
    rotation = torch.cat([yaw_rotation(degrees(*range(0, 360, 40))), turning()])
    for part in (rotation[:9], rotation[9:]):
        position = world.position.expand(len(part), 3)
        there = render_views(world.scene, part, position, device="cuda")
        assert there.is_cuda
        assert differ(there.cpu(), render_views(world.scene, part, position)) < 0.01


def test_errors_of_scenes_and_views():
    faces = plain((1, 1, 1), (2, 2, 2), (3, 3, 3))
    with pytest.raises(ValueError, match="power of two"):
        box(plain((1, 1, 1), (1, 1, 1), (1, 1, 1), size=6))
    with pytest.raises(ValueError, match="open to the outside"):
        box(faces, numbers=[0, 0, -1, 0, 1, 2])
    with pytest.raises(ValueError, match="0 to 2 are there, but 3"):
        box(faces, numbers=[0, 0, 0, 0, 1, 3])
    with pytest.raises(ValueError, match="no sky"):
        box(faces, numbers=[0, 0, 0, 0, 1, -1])
    with pytest.raises(ValueError, match=r"camera at \[5.0, 2.0, 1.0\] is outside"):
        render_views(box(faces), yaw_rotation(degrees(0.0)), at(5, 2, 1))
    with pytest.raises(ValueError, match="fov"):
        render_views(box(faces), yaw_rotation(degrees(0.0)), at(2, 2, 1), fov=180.0)


# --------------------------------------------------------------------------------------------------
# -------------- the worlds


def test_a_layout_is_read_with_north_at_the_top():
    layout = maze.read_layout("*****\n* P *\n*** *\n*****\n", ".....\n.AA..\n.....\n.....\n")
    assert layout.free.shape == (5, 4)
    assert layout.free.nonzero().tolist() == [[1, 2], [2, 2], [3, 1], [3, 2]]
    assert layout.zone.nonzero().tolist() == [[1, 2], [2, 2]]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("level", maze.LEVELS)
def test_every_place_of_a_carved_maze_can_be_reached(level, seed):
    size = maze.LEVELS[level]
    free, zone = maze.carve(size, torch.Generator().manual_seed(seed))
    assert free.shape == (size.columns, size.rows)
    assert not (free[0] | free[-1]).any() and not (free[:, 0] | free[:, -1]).any()
    reached, edge = set(), [tuple(free.nonzero()[0].tolist())]
    while edge:
        x, y = edge.pop()
        if free[x, y] and (x, y) not in reached:
            reached.add((x, y))
            edge += [(x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)]
    assert len(reached) == int(free.sum())
    assert 1 <= int(zone.max()) <= size.rooms
    for number in range(1, int(zone.max()) + 1):
        places = (zone == number).nonzero()
        low, high = places.min(0).values, places.max(0).values + 1
        assert len(places) == int((high - low).prod()), "a room is no rectangle"
        around = zone[low[0] - 1 : high[0] + 1, low[1] - 1 : high[1] + 1]
        assert set(around.unique().tolist()) <= {0, number}, "two rooms touch"
        assert free[low[0] : high[0], low[1] : high[1]].all()


def test_walls_stand_between_free_cells_and_the_rest(monkeypatch):
    layout = maze.carve(maze.LEVELS["small_maze"], torch.Generator().manual_seed(1))
    made = textures.generated_textures(torch.Generator().manual_seed(0))
    scene = maze.maze_scene(layout, made, torch.Generator().manual_seed(0))
    for i, j in layout.free.nonzero().tolist():
        open_to = [
            bool(layout.free[i + di, j + dj]) for di, dj in ((1, 0), (0, 1), (-1, 0), (0, -1))
        ]
        assert [number < 0 for number in scene.walls[i, j].tolist()] == open_to
    monkeypatch.setattr(maze, "HUNG", 0.0)
    bare = maze.maze_scene(layout, made, torch.Generator().manual_seed(0))
    zones = len(layout.zone[layout.free].unique())
    assert bare.number == zones + len(made.floors) + 5 < scene.number


def test_the_viewpoint_is_the_middle_of_the_open_space():
    free = torch.zeros(12, 9, dtype=torch.bool)
    free[1:11, 1], free[3:8, 2:7] = True, True
    layout = maze.Layout(free, torch.zeros_like(free, dtype=torch.long))
    generator = torch.Generator().manual_seed(0)
    scene = maze.maze_scene(layout, textures.generated_textures(generator), generator)
    x, y, z = maze.best_view(scene, free).tolist()
    assert (x, z) == (5.5, 0.5) and 2.5 <= y <= 4.5


@pytest.mark.parametrize("labmaze", SOURCES)
def test_a_world_is_its_seed(labmaze):
    make = maze.load_world.__wrapped__
    first, again, other = (
        make("small_maze", 2, labmaze),
        make("small_maze", 2, labmaze),
        make("small_maze", 3, labmaze),
    )
    for a, b in zip(first.scene, again.scene, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert torch.equal(first.position, again.position)
    assert not torch.equal(first.scene.walls, other.scene.walls)


def distances(views: torch.Tensor) -> torch.Tensor:
    """Root mean square differences of all pairs, in grey levels."""
    flat = views.flatten(1).float()
    flat = flat - flat.mean(0)
    return torch.cdist(flat, flat) / flat.shape[1] ** 0.5


@pytest.mark.parametrize("labmaze", SOURCES)
@pytest.mark.parametrize(
    "level, seed", [("small_maze", 0), ("maze", 0), ("maze", 1), ("large_maze", 0), ("room", 0)]
)
def test_views_tell_the_heading(level, seed, labmaze):
    world = maze.load_world(level, seed, labmaze)
    yaw = torch.arange(0.0, 360.0, dtype=torch.float64)
    views = render_views(world.scene, yaw_rotation(yaw), world.position.expand(360, 3), (36, 48))
    apart = ((yaw[:, None] - yaw + 180) % 360 - 180).abs()
    gap = distances(views)
    assert gap[apart > 10].min() > 9, "two headings look alike"  # real frames of DeepMind Lab: 8.2
    assert gap[apart == 1].median() < gap[apart > 30].median() / 2.5, "neighbours are not alike"
    fine = render_views(
        world.scene, yaw_rotation(5 * yaw[:60] + 0.1), world.position.expand(60, 3), (36, 48)
    )
    step = (fine.float() - views[:300:5].float()).square().mean((1, 2, 3)).sqrt()
    assert step.median() < 0.5 * gap.diagonal(1).median()


@pytest.mark.parametrize("labmaze", SOURCES)
def test_mazes_are_lit_like_lab(labmaze):
    world = maze.load_world("maze", 0, labmaze)
    views = render_views(
        world.scene, yaw_rotation(degrees(*range(0, 360, 30))), world.position.expand(12, 3)
    ).float()
    assert 70 < views.mean() < 170 and views.std() > 30  # real frames: 113


def test_the_room_has_six_different_faces():
    world = maze.room(0)
    views = render_views(world.scene, turning()[::4], world.position.expand(6, 3), (20, 20))
    gap = distances(views)
    assert gap[~torch.eye(6, dtype=torch.bool)].min() > 40


# --------------------------------------------------------------------------------------------------
# ----------- the interface


def test_render_by_name():
    yaw = degrees(-180.0, 0.1, 90.0, 450.0)
    told = []
    shown = kbf.data.render.render("maze", yaw, seed=1, size=(9, 12), progress=told.append)
    assert shown.images.shape == (4, 9, 12, 3) and shown.images.dtype == torch.uint8
    assert shown.yaw_degrees.dtype == torch.float32 and torch.equal(shown.yaw_degrees, yaw.float())
    renderer = f"kbf ray caster over {maze.source(LABMAZE)}"
    assert shown.about == {"renderer": renderer, "level": "maze", "seed": 1}
    assert differ(shown.images[2], shown.images[3]) < 0.01
    assert told == [4]
    assert torch.equal(
        kbf.data.render.render("maze", yaw, seed=1, size=(9, 12)).images, shown.images
    )
    assert (
        differ(kbf.data.render.render("maze", yaw, seed=2, size=(9, 12)).images, shown.images) > 0.5
    )
    assert kbf.data.render.render("maze", yaw, level="room", size=(9, 12)).about["level"] == "room"


def test_without_labmaze_mazes_are_generated(monkeypatch):
    monkeypatch.setitem(sys.modules, "labmaze", None)
    shown = kbf.data.render.render("maze", degrees(0.0), size=(9, 12))
    assert shown.about["renderer"] == "kbf ray caster over a generated maze, generated textures"


@needs_labmaze
def test_with_labmaze_its_version_is_told():
    assert (
        kbf.data.render.render("maze", degrees(0.0), size=(9, 12)).about["renderer"]
        == f"kbf ray caster over a labmaze maze, labmaze {LABMAZE} textures"
    )


def test_errors_of_the_interface(monkeypatch):
    with pytest.raises(ValueError, match="no renderer 'dmlab'; renderers: maze, vizdoom"):
        kbf.data.render.render("dmlab", degrees(0.0))
    with pytest.raises(ValueError, match="'nowhere'; levels: small_maze, maze, large_maze, room"):
        kbf.data.render.render("maze", degrees(0.0), level="nowhere")
    with pytest.raises(ValueError, match="seed"):
        kbf.data.render.render("maze", degrees(0.0), seed=-1)
    with pytest.raises(ValueError, match="NaN"):
        kbf.data.render.render("maze", degrees(math.nan))
    with pytest.raises(ValueError, match="MAP01 to MAP32"):
        kbf.data.render.render("vizdoom", degrees(0.0), level="MAP33")
    monkeypatch.setitem(sys.modules, "vizdoom", None)
    with pytest.raises(ValueError, match=r'pip install "kbf\[render\]"'):
        kbf.data.render.render("vizdoom", degrees(0.0))


# --------------------------------------------------------------------------------------------------
# ----------------- ViZDoom

needs_vizdoom = pytest.mark.skipif(
    importlib.util.find_spec("vizdoom") is None, reason="ViZDoom is not installed"
)


@needs_vizdoom
def test_vizdoom_shows_what_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yaw = degrees(*range(-180, 180, 15), 0.0, 3.0)
    told = []
    shown = kbf.data.render.render("vizdoom", yaw, size=(36, 48), progress=told.append)
    assert os.listdir(tmp_path) == [] and os.getcwd() == str(tmp_path)
    assert shown.images.shape == (26, 36, 48, 3)
    assert shown.about["renderer"] == f"ViZDoom {importlib.metadata.version('vizdoom')}"
    assert (shown.yaw_degrees - yaw).abs().max() < 360 / 65536
    steps = shown.yaw_degrees.double() * (65536 / 360)
    assert (steps - steps.round()).abs().max() < 0.01, "these are not the engine's angles"
    assert told == [26]
    gap = distances(shown.images)
    assert gap[12, 24] < 3  # the same heading twice
    assert gap[:24, :24][~torch.eye(24, dtype=torch.bool)].min() > 9
    # turning left moves what is ahead to the right: by 24 tan(3 degrees) = 1.26 pixels in the
    # middle
    a, b = (shown.images[k].double()[6:30, 18:30] for k in (24, 25))
    shifted = [
        float((shown.images[25].double()[6:30, 18 + s : 30 + s] - a).square().mean())
        for s in (-2, -1, 0, 1, 2)
    ]
    assert int(np.argmin(shifted)) == 3 and b.std() > 5


@needs_vizdoom
def test_vizdoom_pictures_are_cut_to_shape():
    from kbf.data.render.vizdoom import fit

    ramp = (
        torch.arange(320)
        .expand(240, 320)[..., None]
        .expand(-1, -1, 3)
        .clamp(max=255)
        .to(torch.uint8)
    )
    assert torch.equal(fit(ramp, (240, 320)), ramp)
    assert fit(ramp, (24, 24))[0, 0, 0] in range(
        40, 48
    )  # 240 of 320 columns: the first 40 are cut off
    assert fit(ramp, (12, 32))[0, 0, 0] in range(0, 8)

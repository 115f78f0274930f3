"""A camera that turns in SO(3): its path, what it sees of a room, and rotations as quaternions."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from scipy.spatial.transform import Rotation
from torch import Generator, Tensor

from kbf.data.frames import as_observations
from kbf.data.render.maze import room
from kbf.data.render.raycast import render_views

Rotations = Float[Tensor, "n 3 3"]


def walk(n: int, reach: float, step: float, generator: Generator) -> Rotations:
    """A piecewise smooth walk in SO(3) along geodesics between random rotations.

    The speed is constant.

    The rotations to go to are Exp(v), v uniform in the ball of radius ``reach``. The balls of SO(3)
    of radius below pi / 2 are convex, so that the path never turns further than ``reach`` from the
    identity, about any axis.

    Args:
        n: frames.
        reach: radians, below pi / 2.
        step: radians between frames, at most.
        generator: of the goals.

    Raises:
        ValueError: ``reach`` is not in (0, pi / 2).
    """
    if not 0 < reach < math.pi / 2:
        raise ValueError(
            f"a walk must reach less than a right angle from the identity, got {reach}"
        )

    def goal() -> Rotation:
        direction = torch.randn(3, dtype=torch.float64, generator=generator)
        radius = reach * torch.rand((), dtype=torch.float64, generator=generator) ** (1 / 3)
        return Rotation.from_rotvec((radius * direction / direction.norm()).numpy())

    path, here = [], goal()
    while len(path) < n:
        there = goal()
        turn = (here.inv() * there).as_rotvec()  # in the camera's axes
        steps = math.ceil(math.hypot(*turn) / step)
        path += [here * Rotation.from_rotvec(turn * k / steps) for k in range(1, steps + 1)]
        here = there
    return torch.from_numpy(Rotation.concatenate(path[:n]).as_matrix())


def film(rotations: Rotations, noise: float, generator: Generator) -> Float[Tensor, "n 3 20 20"]:
    """Views from the middle of the room: 20 x 20 RGB pixels in [0, 1], plus noise.

    The noise N(0, ``noise``^2) is not clipped.
    """
    world = room()
    views = render_views(world.scene, rotations, world.position.expand(len(rotations), 3), (20, 20))
    seen = as_observations(views, (20, 20)).double()
    return seen + noise * torch.randn(seen.shape, dtype=torch.float64, generator=generator)


def quaternions(rotations: Rotations) -> Float[Tensor, "n 4"]:
    """Unit quaternions (x, y, z, w) of a path with continuous signs.

    q and -q are one rotation: each has the sign that is closer to its predecessor.
    """
    q = torch.from_numpy(Rotation.from_matrix(rotations.numpy()).as_quat())
    turned = torch.where((q[1:] * q[:-1]).sum(-1) < 0, -1.0, 1.0).double()
    return (
        q * torch.cat([torch.where(q[:1, 3] < 0, -1.0, 1.0).double(), turned]).cumprod(0)[:, None]
    )


def rotations_of(q: Float[Tensor, "n 4"]) -> Rotations:
    """The rotations of quaternions of any length and sign."""
    return torch.from_numpy(Rotation.from_quat(q.numpy()).as_matrix())

"""First-person renderers: the views that a camera has of a place as it turns."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from kbf.data.render.rendered import Rendered

NAMES = ("maze", "vizdoom")
"""What `render` knows by name."""
RAY_CASTER = "kbf ray caster"


def render(
    name: str,
    yaw_degrees: Float[Tensor, " N"],
    *,
    level: str | None = None,
    seed: int = 0,
    size: tuple[int, int] = (72, 96),
    progress: Callable[[int], None] | None = None,
) -> Rendered:
    """Render what a camera sees that stands at one place, keeps level, and looks in these directions.

    Args:
        name: the renderer. "maze": this package's ray caster over a maze of labmaze with DeepMind
            Lab's textures, or over a generated one where labmaze is missing. "vizdoom": the Doom
            engine, over Freedoom maps.
        yaw_degrees: ``N``, counter-clockwise as seen from above: turning left is positive. Float64,
            so that no turn is lost.
        level: the world, one of the renderer's; None for its own choice.
        seed: of the world.
        size: height and width, in pixels; the horizontal field of view is 90 degrees.
        progress: called with the number of views that are done, now and then.

    Raises:
        ValueError: unknown renderer or level, directions that are not finite, or a package that is
            not installed.
    """
    check_name(name)
    if not bool(yaw_degrees.isfinite().all()):
        raise ValueError("the directions to render hold NaN or infinite entries")
    if name == "vizdoom":
        from kbf.data.render import vizdoom

        return vizdoom.render(yaw_degrees, level=level, seed=seed, size=size, progress=progress)
    from kbf.data.render import maze, raycast, textures

    level = level or maze.DEFAULT_LEVEL
    world = maze.load_world(level, seed, textures.labmaze_version())
    rotation = raycast.yaw_rotation(yaw_degrees.double())
    images = raycast.render_views(
        world.scene, rotation, world.position.expand(len(yaw_degrees), 3), size, progress=progress
    )
    return Rendered(
        images,
        yaw_degrees.float(),
        {"renderer": f"{RAY_CASTER} over {world.source}", "level": level, "seed": seed},
    )


def describe(name: str) -> str:
    """What `render` would render with here, and its version, in words: together with its arguments, the views depend on this.

    Raises:
        ValueError: unknown renderer, or one that needs a package that is not installed.
    """
    check_name(name)
    if name == "vizdoom":
        from kbf.data.render import vizdoom

        return vizdoom.describe()
    from kbf.data.render import maze, textures

    return f"{RAY_CASTER} over {maze.source(textures.labmaze_version())}"


def check_name(name: str) -> None:
    """Raise the error of an unknown renderer."""
    if name not in NAMES:
        raise ValueError(f"there is no renderer {name!r}; renderers: {', '.join(NAMES)}")

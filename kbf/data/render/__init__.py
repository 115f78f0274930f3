"""First-person renderers: the views of a camera that turns at one place."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from kbf.data.frames import Frames

# Renderers that `render` selects by name.
NAMES = ("maze", "vizdoom")

RAY_CASTER = "kbf ray caster"


def render(
    name: str,
    yaw_degrees: Float[Tensor, " N"],
    *,
    level: str | None = None,
    seed: int = 0,
    size: tuple[int, int] = (72, 96),
    progress: Callable[[int], None] | None = None,
) -> Frames:
    """Renders the views of a level camera at one place in the given directions.

    Args:
        name: the renderer. "maze": this package's ray caster over a maze of labmaze with DeepMind
            Lab's textures, or over a generated one if labmaze is not installed. "vizdoom": the Doom
            engine, over Freedoom maps.
        yaw_degrees: ``N``, counter-clockwise as seen from above: turning left is positive. Float64
            keeps the fraction of a degree after many turns.
        level: the world, one of the renderer's; None for its default.
        seed: of the world.
        size: height and width, in pixels; the horizontal field of view is 90 degrees.
        progress: called from time to time with the number of finished views.

    Raises:
        ValueError: unknown renderer or level, directions that are not finite, or a package that is
            not installed.
    """
    if name not in NAMES:
        raise ValueError(f"there is no renderer {name!r}; renderers: {', '.join(NAMES)}")
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
    about = {"renderer": f"{RAY_CASTER} over {world.source}", "level": level, "seed": seed}
    return Frames(images, yaw_degrees.float(), about)

"""Views of the Doom engine: ViZDoom over the Freedoom maps that it contains."""

import contextlib
import importlib.metadata
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn.functional import interpolate

from kbf.data.frames import Frames
from kbf.runtime.optional_dependencies import need

# A bright yard with open sky.
DEFAULT_LEVEL = "E1M3"

# Ticks after the start before which the engine ignores actions.
SETTLE_TICKS = 20

# Parts of the picture that are not rendered.
HIDDEN = (
    "hud",
    "minimal_hud",
    "weapon",
    "crosshair",
    "decals",
    "particles",
    "effects_sprites",
    "corpses",
    "messages",
    "screen_flashes",
)


def render(
    yaw_degrees: Float[Tensor, " N"],
    *,
    level: str | None = None,
    seed: int = 0,
    size: tuple[int, int] = (72, 96),
    progress: Callable[[int], None] | None = None,
) -> Frames:
    """Renders views at the start of a level, one tick each; see `kbf.data.render.render`.

    The engine rounds an angle to 360 / 65536 degrees; the angles of the result are read back from
    it. There are no monsters, but lamps flicker: two views in one direction may differ in a few
    pixels.

    Args:
        yaw_degrees: ``N``, counter-clockwise; 0 looks to the east of the map.
        level: "E1M1" to "E4M9" or "MAP01" to "MAP32".
        seed: of the engine's randomness.
        size: height and width; the picture, 4:3 and 90 degrees wide, is cropped to this shape
            around its middle.
        progress: called with the number of finished views, every 100 views and at the end.

    Raises:
        ValueError: no such level, or ViZDoom is not installed.
    """
    level = level or DEFAULT_LEVEL
    game_file = find_game(level)
    doom = need("vizdoom", "render", 'the renderer "vizdoom"')
    images = torch.empty(len(yaw_degrees), *size, 3, dtype=torch.uint8)
    angles = torch.empty(len(yaw_degrees), dtype=torch.float64)
    with (
        tempfile.TemporaryDirectory(prefix="kbf-vizdoom-") as folder,
        started(doom, game_file, level, seed, size, folder) as game,
    ):
        for k, yaw in enumerate(yaw_degrees.tolist()):
            now = float(game.get_state().game_variables[0])
            game.make_action([(now - yaw + 180) % 360 - 180])  # positive turns right
            state = game.get_state()
            angles[k] = float(state.game_variables[0])
            images[k] = fit(torch.from_numpy(state.screen_buffer.copy()), size)
            if progress is not None and ((k + 1) % 100 == 0 or k + 1 == len(yaw_degrees)):
                progress(k + 1)
    turns = ((yaw_degrees.double() - angles) / 360).round()  # the engine returns 0 to 360
    about = {
        "renderer": f"ViZDoom {importlib.metadata.version('vizdoom')}",
        "level": level,
        "seed": seed,
    }
    return Frames(images, (angles + 360 * turns).float(), about)


def find_game(level: str) -> str:
    """Returns the file of ViZDoom that contains a level."""
    if re.fullmatch(r"E[1-4]M[1-9]", level):
        return "freedoom1.wad"
    if re.fullmatch(r"MAP(0[1-9]|[12]\d|3[0-2])", level):
        return "freedoom2.wad"
    raise ValueError(
        f"there is no level {level!r}; levels: E1M1 to E4M9 and MAP01 to MAP32 of Freedoom"
    )


@contextlib.contextmanager
def started(
    doom: Any, game_file: str, level: str, seed: int, size: tuple[int, int], folder: str
) -> Iterator[Any]:
    """Runs the engine with ``folder`` as the working directory while it starts.

    The engine writes its files into the working directory.
    """
    game = doom.DoomGame()
    resolution = (
        doom.ScreenResolution.RES_640X480
        if size[0] > 240 or size[1] > 320
        else doom.ScreenResolution.RES_320X240
    )
    settings = {
        "doom_game_path": str(Path(doom.__file__).parent / game_file),
        "doom_config_path": str(Path(folder) / "_vizdoom.ini"),
        "doom_map": level,
        "seed": seed,
        "screen_resolution": resolution,
        "screen_format": doom.ScreenFormat.RGB24,
        **{f"render_{part}": False for part in HIDDEN},
        "window_visible": False,
        "sound_enabled": False,
        "mode": doom.Mode.PLAYER,
        "episode_timeout": 0,
        "episode_start_time": SETTLE_TICKS,
        "available_buttons": [doom.Button.TURN_LEFT_RIGHT_DELTA],
        "available_game_variables": [doom.GameVariable.ANGLE],
    }
    for name, value in settings.items():
        getattr(game, f"set_{name}")(value)
    game.add_game_args("-nomonsters +fov 90 +movebob 0 +stillbob 0")
    with contextlib.chdir(folder):
        game.init()
    try:
        yield game
    finally:
        game.close()


def fit(picture: UInt8[Tensor, "h w 3"], size: tuple[int, int]) -> UInt8[Tensor, "H W 3"]:
    """Crops the middle in the shape of ``size`` and resizes it with anti-aliasing."""
    height, width = picture.shape[:2]
    part = min(height / size[0], width / size[1])
    high, wide = round(part * size[0]), round(part * size[1])
    top, left = (height - high) // 2, (width - wide) // 2
    cut = picture[top : top + high, left : left + wide].permute(2, 0, 1)[None].float()
    scaled = interpolate(cut, size, mode="bilinear", antialias=True, align_corners=False)
    return scaled[0].permute(1, 2, 0).clamp(0, 255).round().to(torch.uint8)

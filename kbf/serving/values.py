"""Values of requests and responses of ``kbf serve``: numbers and images in JSON, and refusals."""

import base64
import binascii
import io
import math
from typing import Any

import numpy as np

# Largest edge of the images on the page, in pixels: larger ones are drawn smaller.
MAX_SHOWN_PIXELS = 256


class Refused(ValueError):
    """A request that is refused, with its HTTP status and the reason."""

    def __init__(self, status: int, reason: str) -> None:
        """Keep the status."""
        super().__init__(reason)
        self.status: int = status


def check_numbers(value: Any, name: str, *, nested: bool = False) -> None:
    """Raise `Refused` for a value of JSON that is no number, null, or list or mapping of these.

    Args:
        value: of JSON.
        name: for the message.
        nested: whether lists may have lists inside, as images do.
    """
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            if isinstance(each, dict | list) and not nested:
                raise Refused(422, f"{name} must be numbers, without lists or mappings inside")
            check_numbers(each, name, nested=nested)
    elif value is not None and (
        type(value) not in (int, float) or not -math.inf < value < math.inf
    ):
        raise Refused(422, f"{name} must be finite numbers, or null where missing, got {value!r}")


def image_of(obs: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return an image ``c h w``: from ``{"png": base64 text}``, or from nested lists of numbers.

    Raises:
        Refused: it is neither, or has another shape.
    """
    if isinstance(obs, dict) and obs.keys() == {"png"} and isinstance(obs["png"], str):
        from PIL import Image

        channels, height, width = shape
        try:
            picture = Image.open(
                io.BytesIO(base64.b64decode(obs["png"], validate=True)), formats=["PNG"]
            )
            if picture.size != (width, height):  # before it is decoded
                raise Refused(
                    422, f"obs: the image must be {width} x {height} pixels, got {picture.size}"
                )
            pixels = np.asarray(picture.convert("L" if channels == 1 else "RGB"))
        except (OSError, SyntaxError, binascii.Error) as error:
            raise Refused(422, f"obs: this is no PNG image in base64: {one_line(error)}") from error
        return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)
    if not isinstance(obs, list):
        raise Refused(422, 'obs must be {"png": an image in base64}, or nested lists c h w')
    check_numbers(obs, "obs", nested=True)
    try:
        pixels = np.array(obs, dtype="float64")
    except ValueError:
        pixels = np.empty(0)
    if pixels.shape != tuple(shape) or np.isnan(pixels).any():
        raise Refused(422, f"obs must be numbers in the shape {list(shape)}")
    return pixels


def finite(value: float | None) -> float | None:
    """Return a number for JSON, which has neither NaN nor infinity: null."""
    return value if value is not None and math.isfinite(value) else None


def one_line(error: Exception) -> str:
    """Return the text of an error in one line; a KeyError has its text in quotes."""
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    return " ".join(text.split()) or type(error).__name__


def png_of(image: np.ndarray) -> bytes:
    """Return an image ``c h w`` as PNG, at most `MAX_SHOWN_PIXELS` wide and high."""
    from PIL import Image

    pixels = image if image.dtype == np.uint8 else (255 * image.clip(0, 1)).astype("uint8")
    picture = Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))
    picture.thumbnail((MAX_SHOWN_PIXELS, MAX_SHOWN_PIXELS))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()

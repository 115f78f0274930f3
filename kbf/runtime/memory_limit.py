"""The memory that an object of an untrusted file would need, estimated before it is built.

Three upper bounds, by what multiplies in an object:

- An argument that is annotated as a whole number (steps, particles, units of a layer) needs
  `BYTES_OF_A_ROW` for each; of a shape (`SHAPES`) the product counts, and seeds do not.
- A class with a static method ``memory_needed(**arguments)`` (data sets of images) returns its own
  estimate in bytes, in place of the first bound.
- The parameters and buffers of a network are counted on PyTorch's meta device, which builds a
  module without its memory.
"""

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# Bytes that an object of an untrusted file may need. Shipped configurations need 0.45e9.
LARGEST_MEMORY = 4 * 2**30

# Bytes for each unit of a count: 32 numbers in float64, and three copies during computations.
BYTES_OF_A_ROW = 1024

# Bytes for each number of an image: float64, and three copies while noise is added.
BYTES_OF_A_PIXEL = 32

# Arguments whose numbers multiply: the shape of an observation.
SHAPES = ("q", "size")


def check_arguments(target: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Raise a ValueError if the arguments of a class ask for more than `LARGEST_MEMORY`."""
    if (needed := getattr(target, "memory_needed", None)) is not None:
        check_bytes(target, needed(**arguments))
        return
    for name, parameter in inspect.signature(target).parameters.items():
        value = arguments.get(name)
        if "seed" in name or not re.search(r"\bint\b", str(parameter.annotation)):
            continue
        several = value if isinstance(value, list | tuple) else [value]
        numbers = [number for number in several if isinstance(number, int | float)]
        for number in [math.prod(numbers)] if name in SHAPES else numbers:
            if number * BYTES_OF_A_ROW > LARGEST_MEMORY:
                most = LARGEST_MEMORY // BYTES_OF_A_ROW
                raise too_large(f"{name} is {number!r:.50}, which may be {most:,} at most")


def check_module(make: Callable[[], Any], copies: int = 1) -> None:
    """Raise a ValueError if copies of the module of ``make`` need more than `LARGEST_MEMORY`."""
    with torch.device("meta"):
        module = make()
    if isinstance(module, nn.Module):
        size = sum(leaf.nbytes for leaf in [*module.parameters(), *module.buffers()])
        check_bytes(type(module), copies * size)


def check_bytes(target: Callable[..., Any], needed: int) -> None:
    """Raise a ValueError if an object of this class needs more than `LARGEST_MEMORY`."""
    if needed > LARGEST_MEMORY:
        gib = f"{needed / 2**30:.3g} GiB, of at most {LARGEST_MEMORY // 2**30} GiB"
        raise too_large(f"{getattr(target, '__name__', target)} needs {gib}")


def too_large(reason: str) -> ValueError:
    """Returns the error about an object that is too large, with the remedy."""
    return ValueError(
        f"{reason} for an object that a file describes. For a file that you trust: trust=true"
    )

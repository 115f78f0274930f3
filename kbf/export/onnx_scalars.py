"""Python numbers in ONNX programs of float64.

``torch.onnx`` writes Python numbers as float32 constants, and converts these to the type of the
other operand: 0.1 in a program of float64 is wrong by 1e-9. `SCALARS` replaces operations with such
numbers by those with tensors of no dimension, and `scalar_tensor` writes these in their own type.
"""

from typing import Any, no_type_check

import torch
from torch import Tensor

Number = int | float

aten = torch.ops.aten


def like(value: Number, x: Tensor) -> Tensor:
    """Return a number as a tensor of the type of x."""
    return torch.scalar_tensor(value, dtype=x.dtype)


def clamp(x: Tensor, min: Number | None = None, max: Number | None = None) -> Tensor:
    """Return x between two numbers; NaN where x is NaN."""
    if not x.is_floating_point():
        return NotImplemented
    x = x if min is None else torch.maximum(x, like(min, x))
    return x if max is None else torch.minimum(x, like(max, x))


def clamp_max(x: Tensor, max: Number) -> Tensor:
    """Return x, at most ``max``."""
    return clamp(x, max=max)


def masked_fill(x: Tensor, mask: Tensor, value: Number) -> Tensor:
    """Return x with a number where the mask is True."""
    return torch.where(mask, like(value, x), x)


def where_first(condition: Tensor, value: Number, x: Tensor) -> Tensor:
    """Return a number where the condition holds, else x."""
    return torch.where(condition, like(value, x), x)


def where_second(condition: Tensor, x: Tensor, value: Number) -> Tensor:
    """Return x where the condition holds, else a number."""
    return torch.where(condition, x, like(value, x))


def full(size: list[int], value: Number, *, dtype: Any = None, **settings: Any) -> Tensor:
    """Return a tensor of one number."""
    if dtype is None or not dtype.is_floating_point:
        return NotImplemented
    return torch.scalar_tensor(value, dtype=dtype).expand(size).clone()


def full_like(x: Tensor, value: Number, *, dtype: Any = None, **settings: Any) -> Tensor:
    """Return a tensor of one number with the shape of x."""
    return full(list(x.shape), value, dtype=dtype or x.dtype)


def new_full(x: Tensor, size: list[int], value: Number, *, dtype: Any = None, **_: Any) -> Tensor:
    """Return a tensor of one number with the type of x."""
    return full(size, value, dtype=dtype or x.dtype)


# Operations with Python numbers, as those with tensors.
SCALARS: dict[Any, Any] = {
    aten.clamp.default: clamp,
    aten.clamp_min.default: clamp,
    aten.clamp_max.default: clamp_max,
    aten.masked_fill.Scalar: masked_fill,
    aten.where.ScalarSelf: where_first,
    aten.where.ScalarOther: where_second,
    aten.full.default: full,
    aten.full_like.default: full_like,
    aten.new_full.default: new_full,
}


def translations() -> dict[Any, Any]:
    """Return the translation of a tensor of no dimension, for ``torch.onnx.export``."""
    import onnx_ir
    from onnxscript import opset20

    @no_type_check  # the exporter reads the annotations, and passes whole numbers as well
    def scalar_tensor(
        s: float, dtype: int = 1, layout: str = "", device: str = "", pin_memory: bool = False
    ) -> Any:
        value: Any = onnx_ir.tensor(s, dtype=onnx_ir.DataType(dtype))
        return opset20.Constant(value=value)

    return {aten.scalar_tensor.default: scalar_tensor}

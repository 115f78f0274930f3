"""Compilation of the step of a filter: machine code on a CPU, a CUDA graph on a GPU."""

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from kbf.filters.gating import GatedFilter
from kbf.filters.protocols import Filter, allows_missing_sensors, control_components

# (leaves of the state, observation) -> (leaves of the next state, estimate, rejected ``b``).
CompiledStep = Callable[..., tuple[Tensor, ...]]

# Loggers with messages of the compiler about itself.
COMPILER_LOGGERS = ("torch._inductor.ir", "torch.utils.cpp_extension")


class Step(nn.Module):
    """The module that is compiled.

    (leaves of the state, observation) -> (leaves of the next state, estimate, rejected ``b``).
    """

    def __init__(self, filter: Filter[Any]) -> None:
        super().__init__()
        self.filter: Filter[Any] = filter
        self.kind: type[Any] = type(filter.init(1))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """One step."""
        *leaves, obs = inputs
        state, rejected = GatedFilter(self.filter).attempt(self.kind(*leaves), obs)
        if rejected is None:
            rejected = torch.zeros(len(obs), dtype=torch.bool, device=obs.device)
        return (*state, self.filter.estimate(state), rejected)


def compile_step(filter: Filter[Any], obs: Shaped[Tensor, "b *x"]) -> CompiledStep:
    """The step of a deterministic filter, compiled for observations of one shape and type.

    On a CPU it becomes machine code without Python (PyTorch's AOTInductor; it needs a C++ compiler,
    and takes some seconds), on a GPU it is captured as a CUDA graph.

    Args:
        filter: a module whose steps need no random numbers.
        obs: an example, ``b *x``.

    Returns:
        (leaves of the state, observation) -> (leaves of the next state, estimate, rejected ``b``).
        Lost tracks are re-initialised by the caller.

    Raises:
        ValueError: a filter with controls or missing sensors, one that is no module or whose step
            depends on values; or no C++ compiler. The result raises it for leaves of another shape.
    """
    if control_components(filter) or allows_missing_sensors(filter):
        raise ValueError(
            "the step of a filter with controls or with missing sensors is not compiled: "
            "run it as it is"
        )
    if not isinstance(filter, nn.Module):
        raise ValueError(
            f"only filters that are modules can be compiled, {type(filter).__name__} is none"
        )
    module = Step(filter).eval()
    leaves = [leaf.contiguous() for leaf in filter.init(len(obs))]
    inputs = (
        *leaves,
        obs.to(leaves[0].device).contiguous(),
    )  # as `fitting` passes them on: compiled code reads by these strides
    if leaves[0].is_cuda:
        return fitting(inputs, recorded(module, inputs))
    with torch.no_grad(), quietly(*COMPILER_LOGGERS), tempfile.TemporaryDirectory() as directory:
        try:
            exported = torch.export.export(module, inputs)
        except Exception as error:
            raise not_compiled(error) from error
        try:
            package = torch._inductor.aoti_compile_and_package(
                exported, package_path=str(Path(directory) / "step.pt2")
            )
        except Exception as error:
            if "compiler" not in str(error).lower():
                raise
            raise ValueError(
                f"compiling a filter's step needs a C++ compiler (g++ or clang++): {error}"
            ) from error
        loaded = torch._inductor.aoti_load_package(package)
    return fitting(inputs, lambda *given: tuple(loaded(*given)))


def recorded(step: Step, inputs: tuple[Tensor, ...]) -> CompiledStep:
    """The compiled step, on a GPU as a CUDA graph, recorded before the first observation arrives.

    Raises:
        ValueError: a step that depends on values.
    """
    graph = torch.compile(step, mode="reduce-overhead", fullgraph=True)

    @torch.inference_mode()
    def run(*given: Tensor) -> tuple[Tensor, ...]:
        own = (
            leaf if leaf.is_inference() else leaf.clone() for leaf in given
        )  # another kind of tensor would compile again
        return tuple(leaf.clone() for leaf in graph(*own))  # the next replay overwrites them

    try:
        for _ in range(3):  # as it is, recorded, replayed
            run(*inputs)
    except Exception as error:
        raise not_compiled(error) from error
    return run


def not_compiled(error: Exception) -> ValueError:
    """The error for a step that cannot be compiled."""
    first = str(error).strip().split("\n")[0]
    return ValueError(f"the step of this filter cannot be compiled, run it as it is: {first}")


def fitting(inputs: tuple[Tensor, ...], run: CompiledStep) -> CompiledStep:
    """``run`` with a check of shapes and a conversion of types.

    Compiled code checks neither, and would read beyond the ends of its inputs.
    """
    kinds = [(leaf.shape, leaf.dtype, leaf.device) for leaf in inputs]

    def checked(*given: Tensor) -> tuple[Tensor, ...]:
        for leaf, (shape, _, _) in zip(given, kinds, strict=True):
            if leaf.shape != shape:
                raise ValueError(
                    f"this step is compiled for {tuple(shape)}, got {tuple(leaf.shape)}"
                )
        return run(
            *(
                leaf.to(device, dtype).contiguous()
                for leaf, (_, dtype, device) in zip(given, kinds, strict=True)
            )
        )

    return checked


@contextmanager
def quietly(*loggers: str) -> Iterator[None]:
    """Suppresses Python warnings, and messages of loggers below the level of errors."""
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in loggers}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)

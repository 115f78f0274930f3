"""A filter at work: one observation in, one estimate out, for as long as it takes."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Generator, Tensor, nn

from kbf.filters.protocols import Filter, allows_missing_sensors, control_components, move
from kbf.filters.rollout import (
    FreshStart,
    advance,
    check_controlled,
    reinitialize_lost,
    update_rejection_count,
    where,
)
from kbf.filters.state_io import load_state, read_leaves, save_state
from kbf.recording import Array, tensor_of
from kbf.runtime.html_repr import Shown


class OnlineFilter(Shown):
    """A running filter. Its state has a fixed size, so that nothing grows, however long it runs.

    >>> from kbf.filters.gaussian.kalman import KalmanFilter, LinearModel
    >>> one, zero = torch.eye(1), torch.zeros(1)
    >>> model = LinearModel(A=one, a=zero, Q=0 * one, C=one, c=zero, R=one, m0=zero, P0=one)
    >>> online = OnlineFilter(KalmanFilter(model))
    >>> online.step(torch.tensor([[3.0]])), online.step(torch.tensor([[3.0]])), online.step(None)
    (tensor([[1.5000]]), tensor([[2.]]), tensor([[2.]]))
    """

    controlled: int
    allow_missing_sensors: bool

    def __init__(
        self,
        filter: Filter[Any],
        batch: int = 1,
        *,
        compiled: Shaped[Tensor, "b *x"] | None = None,
        generator: Generator | None = None,
    ) -> None:
        """Start from the prior.

        Args:
            filter: any filter; its module, if it is one, is set to eval mode.
            batch: sequences that are filtered at once.
            compiled: an observation ``b *x``, as an example of shape and type, to compile the step
                for (`compile_step`); None runs it as it is written.
            generator: randomness of the filters that need any.

        Raises:
            ValueError: an example of another batch, or as `compile_step`.
        """
        if compiled is not None and len(compiled) != batch:
            raise ValueError(
                f"the step is to be compiled for {len(compiled)} sequences, and to run {batch}"
            )
        self.filter: Filter[Any] = filter.eval() if isinstance(filter, nn.Module) else filter
        self.generator = generator
        self.controlled, self.allow_missing_sensors = (
            control_components(filter),
            allows_missing_sensors(filter),
        )
        self.state: Any = filter.init(batch, generator=generator)
        self.rejected: int = 0
        self.misses: Tensor | None = None  # observations passed over in a row
        self.fresh = FreshStart(filter, generator)
        self.fast: Callable[..., tuple[Tensor, ...]] | None = (
            None if compiled is None else compile_step(filter, compiled)
        )

    @torch.inference_mode()
    def step(
        self, obs: Shaped[Array, "b *x"] | None, control: Float[Array, "b k"] | None = None
    ) -> Tensor:
        """Move, and observe ``b *x``: the estimates ``b d``.

        A sequence whose observation has NaN entries, or all with None, has observed nothing: its
        state moves only. Where the filter knows its sensors, only those with such entries are
        silent. Of an observation that is impossible given the prediction (`kbf.filters.rollout`)
        the state moves only, too; ``rejected`` counts them, and after several in a row it begins
        anew.

        Args:
            obs: what was observed, a tensor or a NumPy array, or None.
            control: ``b k``, of the move to this step, for a filter made from recordings with
                controls.

        Raises:
            ValueError: observations or controls of another batch or width, or controls for a filter
                that takes none.
        """
        obs, control = tensor_of(obs, "obs"), tensor_of(control, "control")
        if self.controlled or control is not None:
            check_controlled(self.filter, control, (len(self.state[0]),))
        if obs is None:
            self.state = move(self.filter, self.state, control=control, generator=self.generator)
            return self.filter.estimate(self.state)
        if obs.ndim < 2 or len(obs) != len(self.state[0]):
            raise ValueError(
                f"observations must be {(len(self.state[0]), '...')}, the batch in front; got {tuple(obs.shape)}"
            )
        if self.fast is None:
            self.state, passed = advance(
                self.filter, self.state, obs, control=control, generator=self.generator
            )
            self.select_updated(passed, obs, control)
            return self.filter.estimate(self.state)
        *leaves, estimate, passed = self.fast(*self.state, obs)
        self.state = type(self.state)(*leaves)
        return self.filter.estimate(self.state) if self.select_updated(passed, obs) else estimate

    def select_updated(
        self,
        passed: Bool[Tensor, " b"] | None,
        obs: Shaped[Tensor, "b *x"],
        control: Tensor | None = None,
    ) -> bool:
        """Begin anew where the track is lost, and add up observations that were passed over; whether any track began anew.

        One with NaN entries was no observation, where the filter does not know its sensors.
        """
        before, self.misses = self.misses, None
        if passed is None or (before is None and not bool(passed.any())):
            self.misses = (
                None if before is None else update_rejection_count(self.filter, before, passed, obs)
            )
            return False
        x, missed = obs.to(passed.device), passed
        if before is not None:
            self.state, passed = reinitialize_lost(
                self.filter, self.state, passed, x, before, self.fresh, control=control
            )
        found = update_rejection_count(self.filter, before, passed, x)
        assert found is not None
        self.rejected += int((found > (0 if before is None else before)).sum())
        self.misses = found if bool(found.any()) else None
        return bool((missed & ~passed).any())

    def restart(self, which: Shaped[Tensor, " b"] | None = None) -> None:
        """Back to the prior: all sequences, or those where ``which`` is True.

        Raises:
            ValueError: ``which`` of another batch.
        """
        if which is not None and len(which) != len(self.state[0]):
            raise ValueError(
                f"which is for {len(which)} sequences, this filter runs {len(self.state[0])}"
            )
        fresh = self.filter.init(len(self.state[0]), generator=self.generator)
        self.state = fresh if which is None else where(which, fresh, self.state)
        self.misses = (
            None if which is None or self.misses is None else self.misses.masked_fill(which, 0)
        )

    def save(self, path: str | os.PathLike[str], **others: Tensor) -> None:
        """Write the state, that of the generator, and ``others`` beside them, whole or not at all."""
        drawn = {} if self.generator is None else {"generator": self.generator.get_state()}
        misses = {} if self.misses is None else {"misses": self.misses}
        save_state(self.state, path, **drawn, **misses, **others)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from a written state; a filter that draws, with the random numbers that would have come.

        Raises:
            ValueError: as `kbf.filters.state_io.load_state`, or a state of another batch, or of a
                generator on another device.
        """
        state: Any = load_state(self.filter, path)
        if len(state[0]) != len(self.state[0]):
            raise ValueError(
                f"{path} holds {len(state[0])} sequences, this filter runs {len(self.state[0])}"
            )
        stored = read_leaves(path)
        drawn, misses = stored.get("generator"), stored.get("misses")
        if drawn is not None and self.generator is not None:
            try:
                self.generator.set_state(drawn)
            except RuntimeError as error:
                raise ValueError(
                    f"{path}: its random numbers come from another device, {str(error).splitlines()[0]}"
                ) from error
        self.state, self.misses = state, None if misses is None else misses.to(state[0].device)


class Step(nn.Module):
    """(leaves of the state, observation) -> (leaves of the next state, estimate, passed over ``b``): what is compiled."""

    filter: Filter[Any]
    kind: type[Any]

    def __init__(self, filter: Filter[Any]) -> None:
        super().__init__()
        self.filter, self.kind = filter, type(filter.init(1))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """One step."""
        state, passed = advance(self.filter, self.kind(*inputs[:-1]), inputs[-1])
        if passed is None:
            passed = torch.zeros(len(inputs[-1]), dtype=torch.bool, device=inputs[-1].device)
        return (*state, self.filter.estimate(state), passed)


def compile_step(
    filter: Filter[Any], obs: Shaped[Tensor, "b *x"]
) -> Callable[..., tuple[Tensor, ...]]:
    """The step of a deterministic filter, compiled for observations of one shape and type.

    On a CPU it becomes machine code without Python (PyTorch's AOTInductor; it needs a C++ compiler,
    and takes some seconds), on a GPU it is captured as a CUDA graph.

    Args:
        filter: a module whose steps need no random numbers.
        obs: an example, ``b *x``.

    Returns:
        (leaves of the state, observation) -> (leaves of the next state, estimate, passed over
        ``b``).

    Raises:
        ValueError: a filter that takes controls or silent sensors, or is no module, or whose step
            looks at values; or no C++ compiler. The result raises it for leaves of another shape.
    """
    if control_components(filter) or allows_missing_sensors(filter):
        raise ValueError(
            "the step of a filter with controls, or with sensors that may be silent, is not compiled: run it as it is"
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
    )  # as `fitting` hands them on: compiled code reads by these strides
    if leaves[0].is_cuda:
        return fitting(inputs, recorded(module, inputs))
    with torch.no_grad(), quietly(), tempfile.TemporaryDirectory() as directory:
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


def recorded(step: Step, inputs: tuple[Tensor, ...]) -> Callable[..., tuple[Tensor, ...]]:
    """The compiled step, on a GPU as a CUDA graph: recorded here, and not while the first observations of a running filter wait.

    Raises:
        ValueError: a step that looks at values.
    """
    graph = torch.compile(step, mode="reduce-overhead", fullgraph=True)

    @torch.inference_mode()
    def run(*given: Tensor) -> tuple[Tensor, ...]:
        own = (
            leaf if leaf.is_inference() else leaf.clone() for leaf in given
        )  # of tensors of another kind it is compiled anew
        return tuple(leaf.clone() for leaf in graph(*own))  # the next replay overwrites them

    try:
        for _ in range(3):  # as it is, recorded, replayed
            run(*inputs)
    except Exception as error:
        raise not_compiled(error) from error
    return run


def not_compiled(error: Exception) -> ValueError:
    """What is said of a step that cannot be compiled."""
    first = str(error).strip().split("\n")[0]
    return ValueError(f"the step of this filter cannot be compiled, run it as it is: {first}")


def fitting(
    inputs: tuple[Tensor, ...], run: Callable[..., tuple[Tensor, ...]]
) -> Callable[..., tuple[Tensor, ...]]:
    """``run`` for inputs like these: compiled code looks neither at shapes nor at types, and would read beyond their ends."""
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
def quietly() -> Iterator[None]:
    """Without the compiler's remarks on itself."""
    loggers = [
        logging.getLogger(name) for name in ("torch._inductor.ir", "torch.utils.cpp_extension")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)

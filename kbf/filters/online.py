"""Online filtering: one observation in, one estimate out; saves and restores the running state."""

import os
from typing import Any, cast

import torch
from jaxtyping import Float, Shaped
from torch import Generator, Tensor, nn

from kbf.filters.compile import CompiledStep, compile_step
from kbf.filters.gating import GatedFilter, GatedState, is_observed
from kbf.filters.protocols import (
    Filter,
    S,
    UpdateHook,
    allows_missing_sensors,
    check_controlled,
    control_components,
    move,
    where,
)
from kbf.recording import Array, observation_of, tensor_of
from kbf.runtime.atomic_files import check_archive
from kbf.runtime.html_repr import Shown
from kbf.runtime.tensor_files import check_tensors, write_tensors


class RunningFilter(Shown):
    """A filter that keeps its state between observations. The state has a fixed size.

    Attributes:
        state: of the filter, after the last step.
        rejected: number of observations that were rejected (`kbf.filters.gating`).
        rejections: ``b``, consecutive rejections; None if they are all 0.

    >>> from kbf.filters.gaussian.kalman import KalmanFilter, LinearModel
    >>> one, zero = torch.eye(1), torch.zeros(1)
    >>> model = LinearModel(A=one, a=zero, Q=0 * one, C=one, c=zero, R=one, m0=zero, P0=one)
    >>> online = RunningFilter(KalmanFilter(model))
    >>> online.step(torch.tensor([[3.0]])), online.step(torch.tensor([[3.0]])), online.step(None)
    (tensor([[1.5000]]), tensor([[2.]]), tensor([[2.]]))
    """

    def __init__(
        self,
        filter: Filter[Any],
        batch: int = 1,
        *,
        compiled: Shaped[Tensor, "b *x"] | CompiledStep | None = None,
        generator: Generator | None = None,
    ) -> None:
        """Start from the prior.

        Args:
            filter: any filter; a module is set to eval mode.
            batch: number of tracks that are filtered at once.
            compiled: an observation ``b *x`` as an example of shape and type, for which the step is
                compiled (`kbf.filters.compile.compile_step`); or the result of `compile_step`,
                which several running filters can share; None does not compile.
            generator: source of random numbers, for filters that draw.

        Raises:
            ValueError: an example of another batch, or as `compile_step`.
        """
        if isinstance(compiled, Tensor) and len(compiled) != batch:
            raise ValueError(
                f"the step is to be compiled for {len(compiled)} sequences, and to run {batch}"
            )
        self.filter: Filter[Any] = filter.eval() if isinstance(filter, nn.Module) else filter
        self.generator, self.gate = generator, GatedFilter(filter, generator)
        self.controlled: int = control_components(filter)
        self.allow_missing_sensors: bool = allows_missing_sensors(filter)
        self.state: Any = filter.init(batch, generator=generator)
        self.rejected: int = 0
        self.rejections: Tensor | None = None
        self.compiled: CompiledStep | None = (
            compile_step(filter, compiled) if isinstance(compiled, Tensor) else compiled
        )

    @torch.inference_mode()
    def step(
        self,
        obs: Shaped[Array, "*x"] | dict[str, Any] | None,
        control: Float[Array, "b k"] | None = None,
        *,
        before: UpdateHook | None = None,
    ) -> Tensor:
        """Predict, update with ``b *x``, and return the estimates ``b d``.

        A track without an observation keeps its predicted state: all tracks if ``obs`` is None, and
        those whose row holds NaN. In a filter that allows missing sensors NaN marks a missing
        sensor, and the others are used. An implausible observation is rejected, and after several
        in a row the track is re-initialised (`kbf.filters.gating`).

        Args:
            obs: a tensor, a NumPy array, or None; of a single track also ``q``.
            control: ``b k``, of the move to this step, for a filter with controls.
            before: called with the predicted state before the update; with None in place of the
                observation where there is none.

        Raises:
            ValueError: observations or controls of another batch or width, or controls for a filter
                without controls.
        """
        x: Any = observation_of(obs, len(self.state[0]))
        control = tensor_of(control, "control")
        if self.controlled or control is not None:
            check_controlled(self.filter, control, (len(self.state[0]),))
        if x is None:
            self.state = self.predicted(control)
            if before is not None:
                before(self.state, None, None)
            return self.filter.estimate(self.state)
        if x.ndim < 2 or len(x) != len(self.state[0]):
            raise ValueError(
                f"observations must be {(len(self.state[0]), '...')}, the batch in front; "
                f"got {tuple(x.shape)}"
            )
        current, estimate = GatedState(self.state, self.rejections), None
        if self.compiled is None:
            after = self.gate.step(current, x, control=control, before=before)
        else:
            if before is not None:
                before(self.predicted(control), x, None)
            *leaves, estimate, rejected = self.compiled(*self.state, x)
            updated = type(self.state)(*leaves)
            after = self.gate.resolve(current, updated, rejected, x)
            if after.inner is not updated:  # a track was re-initialised
                estimate = None
        self.state, self.rejections = after.inner, after.rejections
        if after.rejected is not None:
            observed = is_observed(self.filter, x).to(after.rejected.device)
            self.rejected += int((after.rejected & observed).sum())
        return self.filter.estimate(self.state) if estimate is None else estimate

    def predicted(self, control: Float[Tensor, "b k"] | None) -> Any:
        """The state predicted for the next step."""
        return move(self.filter, self.state, control=control, generator=self.generator)

    def restart(self, which: Shaped[Tensor, " b"] | None = None) -> None:
        """Re-initialise all tracks, or those where ``which`` is True.

        Raises:
            ValueError: ``which`` of another batch.
        """
        if which is not None and len(which) != len(self.state[0]):
            raise ValueError(
                f"which is for {len(which)} sequences, this filter runs {len(self.state[0])}"
            )
        fresh = self.filter.init(len(self.state[0]), generator=self.generator)
        self.state = fresh if which is None else where(which, fresh, self.state)
        if self.rejections is not None:
            self.rejections = None if which is None else self.rejections.masked_fill(which, 0)

    def save(self, path: str | os.PathLike[str], **others: Tensor) -> None:
        """Write the state, that of the generator, and ``others``, atomically."""
        drawn = {} if self.generator is None else {"generator": self.generator.get_state()}
        counts = {} if self.rejections is None else {"rejections": self.rejections}
        save_state(self.state, path, **drawn, **counts, **others)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Continue from a saved state; a filter that draws continues its random numbers.

        Raises:
            ValueError: as `load_state`, or a state of another batch, or of a
                generator on another device.
        """
        state: Any = load_state(self.filter, path)
        if len(state[0]) != len(self.state[0]):
            raise ValueError(
                f"{path} holds {len(state[0])} sequences, this filter runs {len(self.state[0])}"
            )
        stored = read_leaves(path)
        drawn, counts = stored.get("generator"), stored.get("rejections")
        if drawn is not None and self.generator is not None:
            try:
                self.generator.set_state(drawn)
            except RuntimeError as error:
                raise ValueError(
                    f"{path}: its random numbers come from another device, "
                    f"{str(error).splitlines()[0]}"
                ) from error
        self.state = state
        self.rejections = None if counts is None else counts.to(state[0].device)


def save_state(state: Any, path: str | os.PathLike[str], **others: Tensor) -> None:
    """Write the state of a running filter and ``others`` atomically."""
    write_tensors({**state._asdict(), **others}, path)


def read_leaves(
    path: str | os.PathLike[str], device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """What `save_state` wrote, by name.

    Raises:
        ValueError: the file is damaged (the checksums in it say so, if a bit has changed), or holds
            something else.
    """
    try:
        check_archive(path)
        leaves = torch.load(path, weights_only=True, map_location=device)
        check_tensors(leaves, os.stat(path).st_size)
    except OSError:
        raise
    except Exception as error:  # whatever a file that is none of ours makes of the reader
        raise ValueError(
            f"{path} is damaged, or not the state of a filter: {type(error).__name__}"
        ) from error
    named = isinstance(leaves, dict) and all(
        isinstance(n, str) and isinstance(leaf, Tensor) for n, leaf in leaves.items()
    )
    if not named:
        raise ValueError(f"{path} is not the state of a filter: it holds {type(leaves).__name__}")
    return leaves


def load_state(filter: Filter[S], path: str | os.PathLike[str]) -> S:
    """Read a state written by `save_state` back for ``filter``.

    Raises:
        ValueError: the file is damaged, or holds the state of another kind of filter, or NaN.
    """
    like: Any = filter.init(1)
    leaves = read_leaves(path, like[0].device)
    if not set(like._fields) <= set(leaves):
        raise ValueError(
            f"{path} holds a state of {sorted(map(str, leaves))}, "
            f"this filter's has {sorted(like._fields)}"
        )
    for name, leaf in zip(like._fields, like, strict=True):
        if leaves[name].shape[1:] != leaf.shape[1:]:
            raise ValueError(
                f"{path}: {name} is {tuple(leaves[name].shape[1:])} wide, "
                f"this filter needs {tuple(leaf.shape[1:])}"
            )
        if leaves[name].dtype != leaf.dtype:
            raise ValueError(
                f"{path}: {name} is {leaves[name].dtype}, this filter works in {leaf.dtype}"
            )
        if bool((leaves[name].isnan() | leaves[name].isposinf()).any()):
            raise ValueError(f"{path}: {name} holds NaN or infinity: start without this file")
    return cast(S, type(like)(*(leaves[name] for name in like._fields)))

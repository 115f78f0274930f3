"""The filtering loop: predict, update, record.

All filters run through the same loop. Implausible observations are rejected and lost tracks are
re-initialised by `kbf.filters.gating`; filters that support it are evaluated in parallel in time
(`kbf.filters.parallel_rollout`), with the results of the loop.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Generator, Tensor

from kbf.filters.gating import GatedFilter, GatedState, is_observed
from kbf.filters.parallel_rollout import Inputs, Steps, joined, outputs_of, rollout_parallel
from kbf.filters.protocols import (
    Filter,
    UpdateHook,
    allows_missing_sensors,
    check_controlled,
    log_likelihood_of,
)
from kbf.recording import (
    Array,
    Recording,
    as_float,
    check_finite,
    mask_of,
    observation_of,
    pad,
    tensor_of,
)
from kbf.runtime import html_repr
from kbf.runtime.deadline import check_deadline

# Messages of PyTorch and of kernels about tensors whose sizes do not fit.
MISMATCH: re.Pattern[str] = re.compile(
    "size of tensor|shapes cannot be multiplied|have no distance"
)


class Rollout(NamedTuple):
    """What `rollout` returns.

    Attributes:
        estimates: ``b T d``.
        covariances: ``b T d d``; None unless requested, or if the filter has none.
        log_likelihood: log p(x_t | x_1, ..., x_{t-1}), ``b T``; NaN where nothing was observed or
            the observation was rejected. None unless requested, or if the filter has no density of
            its observations. At a step that re-initialises a lost track it refers to the
            prediction of that track.
        state: after the last step.
        diagnostics: ``b T``, by name. ``rejected`` is 1 where the observation was rejected.
    """

    estimates: Tensor
    covariances: Tensor | None
    log_likelihood: Tensor | None
    state: Any
    diagnostics: dict[str, Tensor]

    def __repr__(self) -> str:
        return html_repr.described("Rollout", self._asdict())

    def _repr_html_(self) -> str:
        return html_repr.page(
            "Rollout", self._asdict(), self.estimates[0], "estimates of the first recording"
        )


def rollout(
    filter: Filter[Any],
    obs: Shaped[Array, "b T *x"],
    *,
    mask: Shaped[Array, "b T"] | None = None,
    controls: Float[Array, "b T k"] | None = None,
    state: Any = None,
    covariances: bool = False,
    log_likelihood: bool = False,
    generator: Generator | None = None,
    progress: Callable[[int], None] | None = None,
    states: list[Any] | None = None,
    before: UpdateHook | None = None,
    gradients: bool = False,
) -> Rollout:
    """Run a filter over a batch of recordings: T times predict, update, estimate.

    Where ``mask`` is False or the observation is implausible, the predicted state is kept;
    predicting h steps ahead is h masked steps. The diagnostic ``rejected`` is 1 where an
    observation was rejected (`kbf.filters.gating`).

    Args:
        filter: anything with ``init, predict, update, estimate``; its `diagnostics_of` each step
            are collected.
        obs: ``b T *x``, tensors or NumPy arrays.
        mask: ``b T`` or None for all observed.
        controls: ``b T k``, that of the move to each step; None for a filter without controls.
        state: state to continue from; None starts from ``filter.init``.
        covariances: return the covariance of each estimate.
        log_likelihood: return the log density of each observation given those before it.
        generator: source of random numbers, for filters that draw.
        progress: called with t after each step.
        states: a list to which the state after each step is appended.
        before: called before each update.
        gradients: keep the graph of all steps for ``backward()``, which takes memory proportional
            to T; without it nothing that is returned has gradients.

    Raises:
        ValueError: a wrong shape, NaN or infinite values among the observations that are not
            masked, controls for a filter without controls, or none for one that requires them.
    """
    with torch.set_grad_enabled(gradients and torch.is_grad_enabled()):
        inputs = checked_inputs(filter, obs, mask, controls)
        batch, steps = inputs.obs.shape[:2]
        if state is None:
            state = filter.init(batch, generator=generator)
        inputs = inputs.each(lambda x: x.to(state[0].device))
        walk = partial(
            rollout_sequential,
            GatedFilter(filter, generator),
            covariances=covariances,
            log_likelihood=log_likelihood,
            before=before,
            states=states,
        )
        with shape_errors(inputs.obs.shape[2:]):
            parts: list[Steps] = []
            sequential = before is not None or states is not None or log_likelihood
            if steps > 1 and not sequential and not torch.compiler.is_compiling():
                first = walk(GatedState(state), inputs.during(0, 1))
                fast = None
                # It keeps no gradients.
                if not any(leaf.requires_grad for leaf in first.state.inner):
                    with torch.no_grad():
                        fast = rollout_parallel(filter, walk, state, inputs, covariances)
                parts = [first if fast is None else fast]
            done = sum(part.length for part in parts)
            if progress is not None:
                for t in range(done):
                    progress(t)
            if done < steps:
                start = parts[-1].state if parts else GatedState(state)
                parts.append(walk(start, inputs.during(done), progress=progress, first=done))
    found, last = joined(parts)
    return Rollout(
        found.pop("estimates"),
        found.pop("covariances", None),
        found.pop("log_likelihood", None),
        last.inner,
        found,
    )


def rollout_recordings(
    filter: Filter[Any],
    recordings: list[Recording],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> list[Rollout]:
    """Run a filter over recordings of any lengths as one padded batch.

    Args:
        filter: as in `rollout`.
        recordings: what is observed, with masks and controls.
        dtype: type of observations and controls; None leaves them as they are.
        device: device of the filter; None for that of the recordings.
        options: further arguments of `rollout`.

    Returns:
        One `Rollout` per recording, without the dimension of the batch and without the padding:
        estimates ``T d``. ``state`` is None, since that of a shorter recording is not kept.

    Raises:
        ValueError: as `rollout`.
    """
    run = rollout(
        filter, **batch_inputs(recordings, dtype=dtype, device=device), **options
    )._replace(state=None)
    return [
        Rollout(*(first_steps_of(leaf, k, len(s.states)) for leaf in run))
        for k, s in enumerate(recordings)
    ]


def first_steps_of(leaf: Any, k: int, steps: int) -> Any:
    """The first steps of recording k in a tensor ``b T ...``, or in each tensor of a dict."""
    if isinstance(leaf, dict):
        return {name: value[k, :steps] for name, value in leaf.items()}
    return None if leaf is None else leaf[k, :steps]


def batch_inputs(
    recordings: list[Recording],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> dict[str, Any]:
    """Return ``obs``, ``mask`` and ``controls`` of recordings, padded, as arguments of `rollout`.

    The mask is None if every step of every recording is observed: filters are faster without one.
    """
    batch = pad(recordings)
    complete = all(s.mask is None and len(s.states) == batch.states.shape[1] for s in recordings)
    obs = batch.obs.to(device)
    return {
        "obs": obs if dtype is None else as_float(obs, dtype),
        "mask": None if complete or batch.mask is None else batch.mask.to(device),
        "controls": None if batch.controls is None else batch.controls.to(device, dtype),
    }


def rollout_sequential(
    gate: GatedFilter,
    state: GatedState,
    inputs: Inputs,
    *,
    covariances: bool = False,
    log_likelihood: bool = False,
    before: UpdateHook | None = None,
    states: list[Any] | None = None,
    progress: Callable[[int], None] | None = None,
    first: int = 0,
) -> Steps:
    """Run the loop one step after the other; ``first`` is the number of the first step."""
    rows: list[dict[str, Tensor]] = []
    densities: list[Tensor | None] = []

    def with_density(predicted: Any, x: Tensor, now: Tensor | None) -> None:
        densities.append(log_likelihood_of(gate.filter, predicted, x))
        if before is not None:
            before(predicted, x, now)

    hook = with_density if log_likelihood else before
    for t in range(inputs.obs.shape[1]):
        check_deadline()
        now, control = (
            None if each is None else each[:, t] for each in (inputs.mask, inputs.controls)
        )
        x = inputs.obs[:, t]
        state = gate.step(state, x, mask=now, control=control, before=hook)
        row = outputs_of(gate.filter, state.inner, covariances)
        estimate = row["estimates"]
        row["rejected"] = (
            estimate.new_zeros(len(estimate))
            if state.rejected is None
            else state.rejected.to(estimate)
        )
        if log_likelihood and (density := densities.pop()) is not None:
            accepted = is_observed(gate.filter, x) & (row["rejected"] == 0)
            accepted = accepted if now is None else accepted & now
            row["log_likelihood"] = torch.where(accepted, density, torch.nan)
        rows.append(row)
        if states is not None:
            states.append(state.inner)
        if progress is not None:
            progress(first + t)
    return Steps({name: torch.stack([row[name] for row in rows], 1) for name in rows[0]}, state)


def checked_inputs(
    filter: Filter[Any],
    obs: Shaped[Array, "b T *x"],
    mask: Shaped[Array, "b T"] | None,
    controls: Float[Array, "b T k"] | None,
) -> Inputs:
    """The arguments of `rollout` as tensors, with zeros in place of masked observations.

    Raises:
        ValueError: as `rollout`.
    """
    obs, mask = tensor_of(obs, "obs"), mask_of(mask)
    controls = tensor_of(controls, "controls")
    if obs.ndim < 3:
        raise ValueError(
            f"observations must be (batch, time, ...), got {tuple(obs.shape)}; "
            "a single recording is obs[None]"
        )
    lead = tuple(obs.shape[:2])
    if lead[1] == 0:
        raise ValueError("there are no observations to filter: time has length 0")
    check_controlled(filter, controls, lead)
    if mask is not None and mask.shape != lead:
        raise ValueError(f"mask must be {lead}, got {tuple(mask.shape)}")
    if not allows_missing_sensors(filter):
        check_finite(obs.flatten(0, 1) if mask is None else obs[mask], "observations")
    if mask is not None:
        obs = torch.where(mask.reshape(*lead, *[1] * (obs.ndim - 2)), obs, torch.zeros_like(obs))
    return Inputs(obs, mask, controls)


def step(
    filter: Filter[Any],
    state: Any,
    obs: Shaped[Array, "*x"] | dict[str, Any],
    *,
    mask: Shaped[Array, " b"] | None = None,
    control: Float[Array, "b k"] | None = None,
    generator: Generator | None = None,
    before: UpdateHook | None = None,
) -> Any:
    """One step of a filter: predict, then update where ``mask`` is True.

    Where the observation is implausible, or NaN, the predicted state is kept.

    Args:
        filter: any filter.
        state: its state after the step before.
        obs: ``b *x``, of a single track also ``q``. mask: ``b``.
        control: ``b k``, of the move to this step.
        generator: source of random numbers, for filters that draw.
        before: called before the update.

    Raises:
        ValueError: observations by name; `kbf.FittedFilter.online` takes them.
    """
    x: Any = observation_of(obs, len(state[0]))
    mask = mask_of(mask)
    gate, acted = GatedFilter(filter, generator), tensor_of(control, "control")
    with shape_errors(x.shape[1:]):
        return gate.attempt(state, x, mask=mask, control=acted, before=before)[0]


@contextmanager
def shape_errors(shape: torch.Size) -> Iterator[None]:
    """Context that raises errors about the sizes of tensors as a ValueError about observations.

    Args:
        shape: of an observation.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if not MISMATCH.search(str(error)):
            raise
        given = f"{shape[0]} components" if len(shape) == 1 else f"the shape {tuple(shape)}"
        raise ValueError(
            f"observations have {given}, and the filter was fitted to others: {error}"
        ) from error

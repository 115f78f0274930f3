"""Smoothing and forecasting: states given later observations, paths of them, and h steps ahead.

A smoother runs its filter forwards, keeps every state, and steps back
(`kbf.filters.kernel.smoother`); that needs the whole recording, or for a fixed lag the next L
observations. Any filter can forecast: it predicts without updates.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Generator, Tensor

from kbf.filters.gating import observe
from kbf.filters.protocols import Backward, Filter, FilterStep, covariance_of, move, smoother_of
from kbf.filters.rollout import rollout
from kbf.recording import Array, mask_of, tensor_of
from kbf.runtime import html_repr

# Paths that are drawn in one batch: some filters step back in O(P^2) numbers for each.
PATHS_AT_A_TIME = 200


class Smoothed(NamedTuple):
    """Estimates ``b T d`` of z_t given all observations, or x_1 ... x_{t+L}.

    Covariances ``b T d d`` are None for a filter without them.
    """

    estimates: Tensor
    covariances: Tensor | None

    def __repr__(self) -> str:
        return html_repr.described("Smoothed", self._asdict())

    def _repr_html_(self) -> str:
        return html_repr.page(
            "Smoothed",
            self._asdict(),
            self.estimates[0],
            "smoothed estimates of the first recording",
        )


def check_smoother(filter: Filter[Any], lag: int | None) -> Backward:
    """The filter's way back; raise a ValueError where it has none, or for a negative lag."""
    if lag is not None and lag < 0:
        raise ValueError(
            "a smoother's lag is the number of later observations that it waits for, "
            f"at least 0; got {lag}"
        )
    return smoother_of(filter)


@torch.no_grad()
def smooth(
    filter: Filter[Any],
    obs: Shaped[Array, "b T *x"],
    *,
    mask: Shaped[Array, "b T"] | None = None,
    controls: Float[Array, "b T k"] | None = None,
    lag: int | None = None,
    generator: Generator | None = None,
    progress: Callable[[int], None] | None = None,
) -> Smoothed:
    """Estimate z_t given all observations (fixed interval) or x_1 ... x_{t+L} (fixed lag).

    It keeps two states of the filter of every step, ``2 b T n`` numbers for a kernel filter. With a
    lag the backward pass is repeated from each t + L, which costs O(L) a step, as in an online
    filter.

    Args:
        filter: one with a ``smoother()``.
        obs: ``b T *x``. mask: ``b T``, False = not observed. controls: ``b T k``. As for
            `kbf.filters.rollout.rollout`.
        lag: L; 0 is filtering. None takes all observations.
        generator: randomness of the filters that need any.
        progress: called after each step back with how many are done, T - 1 of them or, with a lag,
            T.

    Raises:
        ValueError: a filter without a smoother, a negative lag, or as
            `kbf.filters.rollout.rollout`.

    >>> from kbf.filters.gaussian.kalman import KalmanFilter, LinearModel
    >>> one, zero = torch.eye(1), torch.zeros(1)
    >>> model = LinearModel(A=one, a=zero, Q=0 * one, C=one, c=zero, R=one, m0=zero, P0=one)
    >>> kf = KalmanFilter(model)
    >>> smooth(kf, torch.tensor([[[3.0], [3.0]]])).estimates.flatten()
    tensor([2., 2.])
    """
    x, seen, acted = tensor_of(obs, "obs"), mask_of(mask), tensor_of(controls, "controls")
    back = check_smoother(filter, lag)
    states, predicted, x = forward(filter, x, seen, acted, generator)

    def observed(state: Any, t: int) -> Any:
        """Take x_t in, where there was one."""
        return observe(filter, state, x[:, t], None if seen is None else seen[:, t])[0]

    def walk(state: Any, times: range) -> Any:
        """From the smoothed state after the last of the times back to the first."""
        for t in reversed(times):
            now = FilterStep(states[t], predicted[t], partial(observed, t=t))
            state = back(
                now, state, control=None if acted is None else acted[:, t + 1], generator=generator
            )
        return state

    T = len(states)
    smoothed: list[Any] = [None] * T
    for done, t in enumerate(reversed(range(T))):
        if lag is None:
            smoothed[t] = walk(smoothed[t + 1], range(t, t + 1)) if t + 1 < T else states[t]
        else:
            last = min(t + lag, T - 1)
            smoothed[t] = walk(states[last], range(t, last))
        if progress is not None:
            progress(done)
    spreads = [spread for state in smoothed if (spread := covariance_of(filter, state)) is not None]
    return Smoothed(
        torch.stack([filter.estimate(state) for state in smoothed], 1),
        torch.stack(spreads, 1) if spreads else None,
    )


def forward(
    filter: Filter[Any],
    x: Shaped[Tensor, "b T *x"],
    mask: Tensor | None,
    controls: Tensor | None,
    generator: Generator | None,
) -> tuple[list[Any], list[Any], Shaped[Tensor, "b T *x"]]:
    """Return the states after each step, those predicted before it, and x, 0 where masked."""
    states: list[Any] = []
    predicted: list[Any] = []

    def keep(state: Any, obs: Tensor, mask: Tensor | None) -> None:
        predicted.append(state)

    rollout(
        filter,
        x,
        mask=mask,
        controls=controls,
        generator=generator,
        states=states,
        before=keep,
    )
    if mask is not None:  # whatever stands where nothing was observed
        x = torch.where(mask.reshape(*mask.shape, *[1] * (x.ndim - 2)), x, torch.zeros_like(x))
    return states, predicted, x


@torch.no_grad()
def sample_paths(
    filter: Filter[Any],
    obs: Shaped[Array, "1 T *x"],
    n: int,
    *,
    mask: Shaped[Array, "1 T"] | None = None,
    controls: Float[Array, "1 T k"] | None = None,
    generator: Generator | None = None,
) -> Float[Tensor, "n T d"]:
    """Draw whole paths z_1, ..., z_T given all observations of a recording.

    Forward filtering, backward sampling: z_T is drawn from the belief at T, and z_t for t = T - 1,
    ..., 1 from p(z_t | z_{t+1}, x_1 ... x_t), the filter's step back from a belief that is certain
    of the drawn z_{t+1}. It costs as much as smoothing a batch of n recordings.

    Args:
        filter: one with a ``smoother()``, and no average of several.
        obs: ``1 T *x``. mask: ``1 T``. controls: ``1 T k``. As for `smooth`.
        n: number of paths.
        generator: of the draws.

    Raises:
        ValueError: a filter without a smoother, an average, or as `kbf.filters.rollout.rollout`.

    References: Carter and Kohn (1994); Godsill, Doucet and West (2004) for particles.
    """
    x, seen, acted = tensor_of(obs, "obs"), mask_of(mask), tensor_of(controls, "controls")
    back = check_smoother(filter, None)
    states, predicted, x = forward(filter, x, seen, acted, generator)

    def path(count: int) -> Tensor:
        """Draw so many paths, ``count T d``."""

        def copies(value: Any) -> Any:
            """A tensor, or the leaves of a state, for each path."""
            if isinstance(value, Tensor):
                return value.expand(count, *value.shape[1:])
            return type(value)(*map(copies, value))

        def observed(state: Any, t: int) -> Any:
            known = None if seen is None else copies(seen[:, t])
            return observe(filter, state, copies(x[:, t]), known)[0]

        certain = drawn(copies(states[-1]), generator)
        found = [filter.estimate(certain)]
        for t in reversed(range(len(states) - 1)):
            now = FilterStep(copies(states[t]), copies(predicted[t]), partial(observed, t=t))
            control = None if acted is None else copies(acted[:, t + 1])
            certain = drawn(back(now, certain, control=control, generator=generator), generator)
            found.append(filter.estimate(certain))
        return torch.stack(found[::-1], 1)

    counts = [min(PATHS_AT_A_TIME, n - first) for first in range(0, n, PATHS_AT_A_TIME)]
    return torch.cat([path(count) for count in counts])


def drawn(state: Any, generator: Generator | None = None) -> Any:
    """Draw one state of each belief of a batch, and return the beliefs that are certain of them.

    Beliefs are normal, with ``mean`` and ``cov``, or samples with ``weights`` or ``log_weights``,
    which may be negative: the positive part is a distribution.

    Raises:
        ValueError: another kind of belief.
    """
    if hasattr(state, "cov"):
        values, vectors = torch.linalg.eigh(state.cov)
        root = vectors * values.clamp_min(0).sqrt()[..., None, :]
        noise = torch.randn(state.mean.shape, generator=generator).to(state.mean)
        mean = state.mean + (root @ noise[..., None])[..., 0]
        return state._replace(mean=mean, cov=torch.zeros_like(state.cov))
    name = "log_weights" if hasattr(state, "log_weights") else "weights"
    if (weights := getattr(state, name, None)) is None:
        raise ValueError(
            "an average of several models has no paths: select a single one by "
            "require=['smooth'], or name it, as in model='kalman'"
        )
    positive = weights.exp() if name == "log_weights" else weights.clamp_min(0)
    pick = torch.multinomial(positive.cpu(), 1, generator=generator).to(positive.device)
    if hasattr(state, "particles"):  # the others are not required
        at = pick[..., None].expand(-1, -1, state.particles.shape[-1])
        sure = torch.zeros_like if name == "log_weights" else torch.ones_like
        return state._replace(
            **{"particles": state.particles.gather(1, at), name: sure(positive[:, :1])}
        )
    return state._replace(weights=torch.zeros_like(weights).scatter(1, pick, 1))


@torch.no_grad()
def predict_ahead(
    filter: Filter[Any],
    obs: Shaped[Array, "b T *x"],
    horizon: int,
    *,
    mask: Shaped[Array, "b T"] | None = None,
    controls: Float[Array, "b T k"] | None = None,
    generator: Generator | None = None,
) -> Float[Tensor, "b h T d"]:
    """Return forecasts of z_{t+1}, ..., z_{t+h} given x_1 ... x_t, from every t.

    Entry k, t is that of z_{t+k+1}.

    Equals the output of `rollout` on masked steps after t. Filters with controls require the future
    controls; beyond the end of the recording, estimates are NaN.

    Args:
        filter: any filter.
        obs: ``b T *x``. mask: ``b T``. controls: ``b T k``. As for `kbf.filters.rollout.rollout`.
        horizon: h, at least 1.
        generator: randomness of the filters that need any.

    Raises:
        ValueError: a horizon less than 1, or as `kbf.filters.rollout.rollout`.
    """
    if horizon < 1:
        raise ValueError(f"the horizon of a prediction must be at least 1, got {horizon}")
    obs, mask, controls = (
        tensor_of(obs, "obs"),
        mask_of(mask),
        tensor_of(controls, "controls"),
    )
    states: list[Any] = []
    rollout(filter, obs, mask=mask, controls=controls, generator=generator, states=states)
    ahead = []
    for t, state in enumerate(states):
        estimates = []
        for k in range(t + 1, t + 1 + horizon):
            if controls is not None and k >= len(states):
                estimates.append(torch.full_like(filter.estimate(state), torch.nan))
                continue
            state = move(
                filter,
                state,
                control=None if controls is None else controls[:, k],
                generator=generator,
            )
            estimates.append(filter.estimate(state))
        ahead.append(torch.stack(estimates, 1))
    return torch.stack(ahead, 2)

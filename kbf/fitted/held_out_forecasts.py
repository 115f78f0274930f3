"""Forecasts of held-out states, by which the intervals of forecasts are calibrated.

While a filter runs through recordings that it has not been fitted to, some of its predicted states
are kept. Each is moved on without observations, and compared with the states of those steps.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.evaluation.score import Watch
from kbf.filters.particle.bootstrap import ParticleState, thinned
from kbf.filters.protocols import Filter, covariance_of, move
from kbf.recording import Recording, pad

# Numbers of steps ahead that are calibrated; those between them are interpolated.
HORIZONS = (1, 2, 5, 10, 20)
# Most origins of forecasts for each filter.
MOST_ORIGINS = 100
# Steps between origins at least: forecasts from adjacent steps have nearly the same errors.
MIN_STRIDE = 4
# Origins whose forecasts are computed in one batch.
ORIGINS_PER_BATCH = 64


class HeldOutForecasts(NamedTuple):
    """Forecasts of `HORIZONS` (h of them) from m origins, and the states that they are of.

    Attributes:
        states: ``h m d``, NaN beyond the end of a recording.
        means: ``h m d``.
        covariances: ``h m d d``; None for a filter without them.
    """

    states: Float[Tensor, "h m d"]
    means: Float[Tensor, "h m d"]
    covariances: Float[Tensor, "h m d d"] | None


class Origins:
    """Keeps some of the predicted states of a filter while `kbf.evaluation.score.score` runs it.

    Attributes:
        groups: of each batch of recordings the steps that are kept, with the predicted states.
    """

    def __init__(self, watch: Watch, recordings: list[Recording]) -> None:
        """Keep at most about `MOST_ORIGINS` predicted states; ``watch`` is called as well."""
        self.watch: Watch = watch
        steps = sum(len(each.states) for each in recordings)
        self.stride: int = max(MIN_STRIDE, -(-steps // MOST_ORIGINS))
        self.groups: list[list[tuple[int, Any]]] = []
        self.step: int = 0

    def __call__(
        self,
        filter: Filter[Any],
        predicted: Any,
        obs: Tensor,
        *,
        last: Any = None,
        mask: Tensor | None = None,
    ) -> Any:
        """Keep the predicted state of every ``stride``-th step; a `kbf.evaluation.score.Watch`.

        The first step is left out: its prediction is that of the prior. Particles are thinned: some
        hundreds determine mean and covariance of a forecast.
        """
        if last is None:
            self.groups.append([])
            self.step = 0
        elif self.step % self.stride == 0:
            self.groups[-1].append((self.step, with_few_particles(predicted, self.step)))
        self.step += 1
        return self.watch(filter, predicted, obs, last=last, mask=mask)


def with_few_particles(state: Any, seed: int) -> Any:
    """Return a state whose particles are `kbf.filters.particle.bootstrap.thinned`.

    They are those of a particle filter, alone, behind a wrapper or as a member of an average.
    """
    members = [name for name in state._fields if name.endswith("particles")]
    for prefix in (name.removesuffix("particles") for name in members):
        names = [prefix + leaf for leaf in ParticleState._fields]
        if all(name in state._fields for name in names):  # others have weights of another kind
            particles, log_weights = (getattr(state, name) for name in names)
            generator = Generator(particles.device).manual_seed(seed)
            few = thinned(particles, log_weights, generator)
            state = state._replace(**dict(zip(names, few, strict=True)))
    return state


@torch.no_grad()
def forecasts(
    filter: Filter[Any],
    recordings: list[Recording],
    origins: Origins,
    *,
    most: float = math.inf,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> HeldOutForecasts | None:
    """Return the forecasts from the predicted states that a run has kept; None if there are none.

    Args:
        filter, recordings: of the run.
        origins: what it has kept.
        most: number of origins; of more, evenly spaced ones.
        seed, dtype, device: as of `kbf.evaluation.score.score`.
    """
    generator = torch.Generator(device).manual_seed(seed)
    parts, first = [], 0
    for kept in origins.groups:
        size = len(kept[0][1][0]) if kept else 1
        kept = kept[:: max(1, math.ceil(len(kept) * len(recordings) / most))]
        group, first = pad(recordings[first : first + size]), first + size
        for steps, state in batches(kept, size):
            parts.append(moved_on(filter, state, steps, group, generator, dtype, device))
    if not parts:
        return None
    states, means, covariances = zip(*parts, strict=True)
    spread = None if covariances[0] is None else torch.cat(covariances, 1)
    return HeldOutForecasts(torch.cat(states, 1), torch.cat(means, 1), spread)


def batches(kept: list[tuple[int, Any]], size: int) -> Iterator[tuple[list[int], Any]]:
    """Yield steps, and the states ``b`` of a number of them as one batch ``m = len(steps) b``."""
    count = max(1, ORIGINS_PER_BATCH // size)
    for at in range(0, len(kept), count):
        steps, states = zip(*kept[at : at + count], strict=True)
        yield list(steps), type(states[0])(*map(torch.cat, zip(*states, strict=True)))


def moved_on(
    filter: Filter[Any],
    state: Any,
    steps: list[int],
    group: Recording,
    generator: Generator,
    dtype: torch.dtype,
    device: torch.device | str,
) -> HeldOutForecasts:
    """Return forecasts from states predicted for ``steps``, of the padded recordings ``b T``."""
    truths, means, covariances = [], [], []
    beyond = torch.full_like(group.states[:, 0], torch.nan)
    for ahead in range(1, HORIZONS[-1] + 1):
        at = [step + ahead - 1 for step in steps]
        if ahead > 1:
            control = None
            if group.controls is not None:
                last = group.controls.shape[1] - 1  # beyond the end nothing is compared
                control = torch.cat([group.controls[:, min(t, last)] for t in at])
                control = control.to(device, dtype)
            state = move(filter, state, control=control, generator=generator)
        if ahead in HORIZONS:
            length = group.states.shape[1]
            truths.append(torch.cat([group.states[:, t] if t < length else beyond for t in at]))
            means.append(filter.estimate(state).double().cpu())
            C = covariance_of(filter, state)
            covariances += [] if C is None else [C.double().cpu()]
    return HeldOutForecasts(
        torch.stack(truths).double().cpu(),
        torch.stack(means),
        torch.stack(covariances) if covariances else None,
    )

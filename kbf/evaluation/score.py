"""Runs filters through recordings and scores estimates, smoothed estimates and forecasts."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from kbf.evaluation.metrics import mse
from kbf.evaluation.scoring_rules import sample_energies
from kbf.filters.protocols import Filter
from kbf.filters.rollout import batch_inputs, rollout_recordings
from kbf.filters.smoothing import predict_ahead, smooth
from kbf.filters.wrapper import FilterWrapper
from kbf.recording import Recording
from kbf.runtime import html_repr

# (filter, predicted state, x_t, *, last, mask) -> a NamedTuple of tensors ``b ...``, a result for
# each observation before the update. ``last`` is the result of the previous step, ``mask`` is ``b``
# or None. An example is `kbf.evaluation.alarms.Monitor.check`.
Watch = Callable[..., Any]


class Score(NamedTuple):
    """Results of a filter on some recordings.

    Attributes:
        mse: one number a recording, the mean over time of ||z_hat - z||^2, summed over the
            components of the state.
        estimates: ``T d`` for each recording.
        diagnostics: means over recordings and time, by name.
        covariances: ``T d d`` for each recording, if requested and if the filter has them.
        energies: ``T`` for each recording, the energy score of the filter's weighted sample at each
            step (`kbf.evaluation.scoring_rules.sample_energies`), if covariances are requested and
            the filter has a weighted sample.
        watched: for each recording the results of ``watch``, fields ``T ...``; empty without
            ``watch``.
    """

    mse: Tensor
    estimates: list[Tensor]
    diagnostics: dict[str, float]
    covariances: list[Tensor] | None = None
    energies: list[Tensor] | None = None
    watched: Sequence[Any] = ()

    def __repr__(self) -> str:
        return html_repr.described("Score", self._asdict())

    def _repr_html_(self) -> str:
        return html_repr.page(
            "Score",
            self._asdict(),
            self.estimates[0] if self.estimates else None,
            "estimates of the first recording",
        )


@torch.no_grad()
def score(
    filter: Filter[Any],
    recordings: list[Recording],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    batch_size: int = 32,
    covariances: bool = False,
    watch: Watch | None = None,
    progress: Callable[[int], None] | None = None,
) -> Score:
    """Run a filter over recordings, from its initial state, and compare estimates with the states.

    Args:
        filter: any filter.
        recordings: of any lengths. Masked steps are scored as well.
        seed: of filters that draw random numbers.
        dtype: type that the filter takes. The errors are computed in float64.
        device: device of the filter.
        batch_size: recordings that are filtered as one batch.
        covariances: collect the covariances of filters that have them, and the energy scores of
            their weighted samples.
        watch: called at each step before the update.
        progress: called after each step with its number.

    Raises:
        ValueError: NaN or infinite observations that are not masked, or an estimate that is not
            finite.
    """
    if isinstance(filter, nn.Module):
        filter.eval()
    generator = torch.Generator(device).manual_seed(seed)
    errors: list[Tensor] = []
    estimates: list[Tensor] = []
    spreads: list[Tensor] = []
    collected: dict[str, list[Tensor]] = {}
    watched: list[Any] = []
    energies: list[Tensor] = []
    for first in range(0, len(recordings), batch_size):
        group = recordings[first : first + batch_size]
        notes: list[Any] = []
        runs = rollout_recordings(
            ScoredBelief(filter, pad_sequence([s.states for s in group], True).to(device), seed)
            if covariances
            else filter,
            group,
            dtype=dtype,
            device=device,
            covariances=covariances,
            generator=generator,
            progress=progress,
            before=None if watch is None else partial(note, notes, watch, filter),
        )
        leaves = [torch.stack(each, 1).cpu() for each in zip(*notes, strict=True)]
        for k, (recording, run) in enumerate(zip(group, runs, strict=True)):
            estimates.append(run.estimates.to("cpu", torch.float64))
            errors.append(error_of(estimates[-1], recording.states))
            if notes:
                steps = len(recording.states)
                watched.append(type(notes[0])._make(leaf[k, :steps] for leaf in leaves))
            if run.covariances is not None:
                spreads.append(run.covariances.to("cpu", torch.float64))
            if ScoredBelief.ENERGY in run.diagnostics:
                energies.append(run.diagnostics.pop(ScoredBelief.ENERGY).to("cpu", torch.float64))
            for name, values in run.diagnostics.items():
                collected.setdefault(name, []).append(values.double().mean())
    diagnostics = {name: torch.stack(values).mean().item() for name, values in collected.items()}
    return Score(
        torch.stack(errors), estimates, diagnostics, spreads or None, energies or None, watched
    )


class ScoredBelief(FilterWrapper):
    """A filter whose diagnostics include the energy score of its weighted sample."""

    ENERGY = "energy_score"

    def __init__(self, inner: Filter[Any], states: Float[Tensor, "b T d"], seed: int) -> None:
        """Wrap a filter, given the true ``states``; ``seed`` is of the draws from the sample."""
        super().__init__(inner)
        self.states, self.step_number = states, 0
        self.draws: torch.Generator = torch.Generator(states.device).manual_seed(seed)

    def diagnostics(self, state: Any) -> dict[str, Tensor]:
        """Those of the filter and the energy score ``b``; called once a step."""
        sample = self.weighted_sample(state)
        # filters of moments have no sample; they may be evaluated in parallel in time
        if sample is None:
            return super().diagnostics(state)
        z = self.states[:, self.step_number].double()
        self.step_number += 1
        return super().diagnostics(state) | {self.ENERGY: sample_energies(z, *sample, self.draws)}


def note(
    notes: list[Any],
    watch: Watch,
    filter: Filter[Any],
    predicted: Any,
    x: Tensor,
    mask: Tensor | None,
) -> None:
    """Append the result of ``watch`` for a step."""
    notes.append(watch(filter, predicted, x, last=notes[-1] if notes else None, mask=mask))


def error_of(estimate: Tensor, states: Tensor) -> Tensor:
    """Mean over time of ||z_hat - z||^2 of estimates ``T d`` in float64.

    Steps with an unknown state (NaN) are not scored.

    Raises:
        ValueError: an estimate that is not finite.
    """
    if not torch.isfinite(estimate).all():
        bad = (~torch.isfinite(estimate)).any(-1).nonzero().flatten()
        raise ValueError(
            f"the filter's estimate is not finite at {len(bad)} of {len(estimate)} steps, "
            f"first at step {int(bad[0])}"
        )
    known = states.isfinite().all(-1)
    return mse(estimate, states.to(estimate), None if bool(known.all()) else known)


@torch.no_grad()
def score_smoothed(
    filter: Filter[Any],
    recordings: list[Recording],
    *,
    lag: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> Score:
    """Score smoothed estimates (`kbf.filters.smoothing.smooth`) over the same steps as `score`.

    Args:
        filter: one with a smoother.
        recordings: one after the other; padding would be taken for steps at which nothing was
            observed.
        lag: as of `kbf.filters.smoothing.smooth`. The others as for `score`.

    Raises:
        ValueError: as `score`, or a filter without a smoother.
    """
    if isinstance(filter, nn.Module):
        filter.eval()
    generator = torch.Generator(device).manual_seed(seed)
    runs = [
        smooth(
            filter,
            **batch_inputs([s], dtype=dtype, device=device),
            lag=lag,
            generator=generator,
            progress=progress,
        )
        for s in recordings
    ]
    estimates = [run.estimates[0].to("cpu", torch.float64) for run in runs]
    spreads = [
        run.covariances[0].to("cpu", torch.float64) for run in runs if run.covariances is not None
    ]
    errors = [error_of(found, s.states) for found, s in zip(estimates, recordings, strict=True)]
    return Score(torch.stack(errors), estimates, {}, spreads or None)


class Ahead(NamedTuple):
    """Forecasts 1 to h steps ahead.

    Attributes:
        mse: ``s h``, the error of each recording and horizon.
        estimates: ``h T d`` for each recording; entry k, t is that of z_{t+k+1}.
    """

    mse: Tensor
    estimates: list[Tensor]


@torch.no_grad()
def score_ahead(
    filter: Filter[Any],
    recordings: list[Recording],
    horizon: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Ahead:
    """Compare forecasts of z_t, made 1 to h steps before, with the states.

    All horizons are scored on the same steps t = h + 1, h + 2, ...

    Args:
        filter: any.
        recordings: longer than ``horizon``.
        horizon: h. The others as for `score`.

    Raises:
        ValueError: a recording that is too short, or as `score`.
    """
    if isinstance(filter, nn.Module):
        filter.eval()
    check_horizon(recordings, horizon)
    generator = torch.Generator(device).manual_seed(seed)
    errors, estimates = [], []
    for s in recordings:
        found = predict_ahead(
            filter,
            horizon=horizon,
            **batch_inputs([s], dtype=dtype, device=device),
            generator=generator,
        )[0].to("cpu", torch.float64)
        made = [found[k - 1, horizon - k : len(s.states) - k] for k in range(1, horizon + 1)]
        errors.append(torch.stack([error_of(each, s.states[horizon:]) for each in made]))
        estimates.append(found)
    return Ahead(torch.stack(errors), estimates)


def check_horizon(recordings: list[Recording], horizon: int) -> None:
    """Raise a ValueError unless every recording is longer than the horizon."""
    if horizon >= (shortest := min(len(s.states) for s in recordings)):
        raise ValueError(
            f"predictions {horizon} steps ahead need longer test recordings; "
            f"the shortest has {shortest} steps"
        )

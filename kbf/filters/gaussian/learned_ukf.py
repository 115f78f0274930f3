"""Unscented Kalman filter of maps that are learned from recordings.

z' = z + g(z, u) + N(0, Q), x = h(z) + N(0, R), with g and h of `kbf.filters.gaussian.learned_maps`.
The regression is of the change z' - z: without evidence a state stays where it is. Kernels and
ranks minimise the leave-one-out loss of a map. The kinds of the maps (linear, kernel, both) and the
factors of Q and R maximise the log score of the filter on held-out blocks: one-step residuals do
not show whether errors of a map accumulate.

Sensors may be late, fail, or have errors that persist: their laws are fitted to the residuals of h
(`kbf.filters.gaussian.sensor_laws`) and filtered in an augmented state
(`kbf.filters.gaussian.augmented`). Counts are filtered as their square roots
(`kbf.filters.gaussian.count_maps`).

The first observation meets the recorded states themselves, not a Gaussian of them
(`kbf.filters.gaussian.start`).

A Gaussian has one mode: forks, and starts that several places explain, require particles
(`kbf.filters.kernel_monte_carlo`).

References: Wan and van der Merwe (2000); Ko and Fox (2009), GP-BayesFilters, for the UKF on learned
maps.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor, nn

from kbf.data.windows import held_out_blocks, take, whole_folds, without
from kbf.filters.gaussian.augmented import Sensor, augmented
from kbf.filters.gaussian.count_maps import with_stable_counts
from kbf.filters.gaussian.learned_maps import (
    KINDS,
    LearnedMap,
    fit_map,
    kernel_of,
    row_of,
    select_kernel,
)
from kbf.filters.gaussian.map_pairs import Pairs, pairs_of, residuals_of
from kbf.filters.gaussian.moments import innovation_log_density
from kbf.filters.gaussian.sensor_laws import (
    MAX_DELAY,
    fit_persistence,
    no_faults,
    observed,
    select_delays,
    working,
)
from kbf.filters.gaussian.start import StartingFilter
from kbf.filters.gaussian.ukf import UnscentedKalmanFilter
from kbf.filters.rollout import rollout_recordings
from kbf.filters.scaling import are_counts
from kbf.manifolds import manifold_of
from kbf.recording import (
    Recording,
    as_recordings,
    check_vectors,
    control_width,
)
from kbf.runtime.errors import FitError
from kbf.runtime.html_repr import ShownModule

# Parts that the recordings are cut into.
FOLDS = 5
# Steps from which on the last part alone is held out; of fewer, `FOLDS_OF_FEW` parts are in turn.
MANY_STEPS = 1000
FOLDS_OF_FEW = (0, 2, 4)
# First steps of a held-out block that do not count: the filter has not converged yet.
BURN_IN = 5
# Share of the mean variance that is added to each component in a log score: states may lie on a
# circle, where a covariance is nearly singular.
MIN_VARIANCE = 1e-6
# Factors of Q and R with which the kinds of maps are compared.
COARSE_FACTORS = ((1.0, 1.0), (16.0, 1.0))

# Recordings without a fold, to fit; and held-out blocks of the fold.
Part = tuple[list[Recording], list[Recording]]


class LearnedUKF(ShownModule):
    """The unscented Kalman filter of a change map g and an observation map h, both learned.

    `prepare` selects kernels, kinds and factors; `fit` learns the maps. With
    ``allow_missing_sensors`` each sensor has a map of its own, and the update leaves out the rows
    of missing ones.

    Attributes:
        kernels: ``m 2 3``, the kernels of each map (the change map, then those of sensors), for g
            alone and for both; empty before `prepare`.
        kinds: ``2``, positions in `KINDS` of the kinds of the change map and of observation maps.
        factors: ``2``, factors of the covariances Q and R.
        delays: ``q``, steps by which sensors are late; empty before `prepare`.
        counts: ``q``, which observations are counts; empty before `prepare`.
        faulty: whether sensors may fail.
    """

    def __init__(
        self,
        ranks: Sequence[int] = (96, 200, 400),
        factors: Sequence[float] = (1.0, 4.0, 16.0, 64.0, 256.0),
        kinds: Sequence[str] = KINDS,
    ) -> None:
        """Set the candidates.

        Args:
            ranks: most features of a map.
            factors: of the covariances Q and R.
            kinds: of maps, names among `KINDS`.

        Raises:
            ValueError: no candidates, ranks or factors that are not positive, or unknown kinds.
        """
        super().__init__()
        if not ranks or not factors or min(ranks) < 1 or not min(factors) > 0:
            raise ValueError(
                f"ranks and factors must be positive and not empty, got {ranks} and {factors}"
            )
        if not kinds or not set(kinds) <= set(KINDS):
            raise ValueError(f"kinds must be some of {', '.join(KINDS)}, got {list(kinds)}")
        self.ranks, self.given_factors, self.given_kinds = (
            tuple(ranks),
            tuple(factors),
            tuple(kinds),
        )
        self.allow_missing_sensors: bool = False
        self.kernels: Tensor = nn.Buffer(torch.zeros(0, 2, 3, dtype=torch.float64))
        self.kinds: Tensor = nn.Buffer(torch.full((2,), KINDS.index(kinds[-1])))
        self.factors: Tensor = nn.Buffer(torch.ones(2, dtype=torch.float64))
        self.delays: Tensor = nn.Buffer(torch.zeros(0, dtype=torch.long))
        self.counts: Tensor = nn.Buffer(torch.zeros(0, dtype=torch.bool))
        self.faulty: Tensor = nn.Buffer(torch.tensor(False))

    @torch.no_grad()
    def prepare(self, memory: list[Recording], generator: Generator | None = None) -> None:
        """Select delays, faults, kernels, kinds of maps and factors.

        1. Delays of sensors by leave-one-out (`select_delays`), faults by the residuals of a map,
           kernels by leave-one-out.
        2. The kind of the observation maps, then that of the change map, by the log score on
           held-out blocks at the better one of `COARSE_FACTORS`.
        3. The factor of Q, of R, and of Q again, at these kinds.

        Recordings that are too short for a held-out block of ten steps leave the last kinds and
        factors of 1.
        """
        recordings = as_recordings(memory, allow_missing_sensors=self.allow_missing_sensors)
        check_vectors(recordings, "a learned observation map")
        self.kinds.fill_(KINDS.index(self.given_kinds[-1]))
        self.factors.fill_(1)
        self.counts = counts_in(recordings)
        stable = [with_stable_counts(each, self.counts) for each in recordings]
        self.delays = select_delays(stable)
        faults, kept = working(stable, self.delays)
        self.faulty.fill_(faults.any)
        self.kernels = self.selected_kernels(self.pairs(kept))
        parts = held_out_parts(recordings)
        if parts:
            filters = self.select_kinds(parts)
            if filters:
                self.select_factors(filters, parts)

    def select_kinds(self, parts: list[Part]) -> list[StartingFilter]:
        """Set `kinds`; return the filters without each part, none if no kind could be fitted."""
        best, filters = -torch.inf, []
        last = self.given_kinds[-1]
        for place, others in ((1, self.given_kinds), (0, self.given_kinds[:-1])):
            for kind in others:
                kinds = [last, last] if place else [last, KINDS[int(self.kinds[1])]]
                kinds[place] = kind
                try:
                    found = [self.filter_of(rest, *kinds) for rest, _ in parts]
                except FitError:  # too few steps without a fold
                    continue
                score = float(log_scores(found, parts, COARSE_FACTORS).max())
                if score > best:
                    best, filters = score, found
                    self.kinds.copy_(torch.tensor([KINDS.index(each) for each in kinds]))
        return filters

    def select_factors(self, filters: list[StartingFilter], parts: list[Part]) -> None:
        """Set `factors`, one after the other."""
        for place in (0, 1, 0):
            grid = []
            for factor in self.given_factors:
                pair = self.factors.tolist()
                pair[place] = factor
                grid.append((pair[0], pair[1]))
            k = int(log_scores(filters, parts, grid).argmax())
            self.factors.copy_(torch.tensor(grid[k], dtype=torch.float64))

    @torch.no_grad()
    def fit(self, memory: Recording | list[Recording] | None) -> StartingFilter:
        """Return the filter of maps that are fitted to ``memory``, in its dtype and device.

        Raises:
            ValueError: no memory, observations that are not vectors, or too few points.
        """
        recordings = as_recordings(memory, allow_missing_sensors=self.allow_missing_sensors)
        check_vectors(recordings, "a learned observation map")
        move, reading = (KINDS[k] for k in self.kinds.tolist())
        return with_factors(self.filter_of(recordings, move, reading), self.factors)

    def pairs(self, recordings: list[Recording]) -> Pairs:
        """Return `pairs_of` recordings with stable counts."""
        none = none_of(recordings)
        counts = self.counts if len(self.counts) else none
        delays = self.delays if len(self.delays) else none.long()
        return pairs_of(recordings, delays, counts)

    def sensors(self, pairs: Pairs, kind: str) -> list[Sensor]:
        """Return the observation maps of a kind."""
        found = []
        for k, each in enumerate(pairs.sensors, 1):
            map = self.map_of(k, kind, each.states, each.readings, counts=each.counts)
            found.append(Sensor(each.columns, each.delay, map, map.noise))
        return found

    def selected_kernels(self, pairs: Pairs) -> Float[Tensor, "m 2 3"]:
        """Return `kernels` for these pairs; zeros where a kind is no candidate."""
        both = [
            (pairs.inputs, pairs.change),
            *((each.states, each.readings) for each in pairs.sensors),
        ]
        found = torch.zeros(len(both), 2, 3, dtype=torch.float64)
        for place, (row, (u, y)) in enumerate(zip(found, both, strict=True)):
            for k, kind in enumerate(KINDS[1:]):
                if kind in self.given_kinds:
                    left = y.double()
                    if kind == "both":
                        left = left - fit_map("linear", u, y)(u.double())
                    u = u.double()
                    row[k] = row_of(select_kernel(u, left, self.ranks[0], precise=place == 0))
        return found

    def map_of(
        self, place: int, kind: str, u: Tensor, y: Tensor, *, counts: bool = False
    ) -> LearnedMap:
        """Return the map of a kind; its kernels are row ``place`` of `kernels`, if there is one."""
        kernel = None
        if place < len(self.kernels) and kind != "linear":
            kernel = kernel_of(self.kernels[place, KINDS.index(kind) - 1])
        return fit_map(
            kind, u, y, kernel=kernel, ranks=self.ranks, counts=counts, precise=place == 0
        )

    def filter_of(self, recordings: list[Recording], move: str, reading: str) -> StartingFilter:
        """Return the filter of maps of such kinds, without factors."""
        counts = self.counts if len(self.counts) else none_of(recordings)
        recordings = [with_stable_counts(each, counts) for each in recordings]
        faults, kept = no_faults(recordings[0].obs.shape[1]), recordings
        if bool(self.faulty):
            faults, kept = working(recordings, self.delays)
        pairs = self.pairs(kept)
        change, join = self.map_of(0, move, pairs.inputs, pairs.change), pairs.join
        sensors = self.sensors(pairs, reading)
        manifold = manifold_of(torch.cat([s.states for s in recordings]))

        def moved(z: Tensor, u: Tensor | None = None) -> Tensor:
            return manifold.project(z + change(z if u is None or join is None else join(z, u)))

        persistence = fit_persistence([residuals_of(each, sensors) for each in kept])
        model, states, d = augmented(recordings, moved, change.noise, sensors, persistence)
        inner = UnscentedKalmanFilter(
            model,
            allow_missing_sensors=self.allow_missing_sensors or faults.any,
            controlled=control_width(recordings),
        )
        return StartingFilter(
            inner, states, d=d, faults=faults, counts=counts, missing=self.allow_missing_sensors
        )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **named: Any
    ) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Overrides `nn.Module._load_from_state_dict`: buffers get the stored numbers of maps.

        Buffers that are missing keep their values.

        Raises:
            ValueError: kinds, factors or delays that no model has.
        """
        names = ("kernels", "kinds", "factors", "delays", "counts", "faulty")
        kernels, kinds, factors, delays, counts, _ = (
            state_dict.setdefault(prefix + name, getattr(self, name).clone()) for name in names
        )
        self.kernels = torch.zeros_like(kernels, device=self.kernels.device)
        self.delays = torch.zeros_like(delays, device=self.delays.device)
        self.counts = torch.zeros_like(counts, device=self.counts.device)
        if not bool(((delays >= 0) & (delays <= MAX_DELAY)).all()):
            raise ValueError(
                f"this model was stored with delays {delays.tolist()}; they are 0 to {MAX_DELAY}"
            )
        if not bool(((kinds >= 0) & (kinds < len(KINDS))).all()):
            raise ValueError(
                f"this model was stored with kinds of maps {kinds.tolist()}; "
                f"there are 0 to {len(KINDS) - 1}"
            )
        if not bool((factors > 0).all()):
            raise ValueError(
                f"this model was stored with factors {factors.tolist()}; they must be positive"
            )
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)

    def hyperparameters(self) -> dict[str, float]:
        """Return positions of the kinds in `KINDS`, and factors, for logs."""
        names = ("transition", "observation")
        kinds = {f"{n}_kind": float(k) for n, k in zip(names, self.kinds, strict=True)}
        return kinds | {f"{n}_factor": float(k) for n, k in zip(names, self.factors, strict=True)}


def none_of(recordings: list[Recording]) -> Bool[Tensor, " q"]:
    """Return that no column of observations is a count."""
    return torch.zeros_like(recordings[0].obs[0], dtype=torch.bool)


def counts_in(recordings: list[Recording]) -> Bool[Tensor, " q"]:
    """Return which columns of observations are counts."""
    return are_counts(torch.cat([observed(each) for each in recordings]))


def held_out_parts(recordings: list[Recording]) -> list[Part]:
    """Return the rest and the held-out blocks of each fold; folds without blocks are left out."""
    lengths = [len(s.states) for s in recordings]
    try:
        spans = whole_folds(lengths, FOLDS)
    except FitError:
        return []
    few = [k for k in FOLDS_OF_FEW if k < len(spans)] if sum(lengths) < MANY_STEPS else [-1]
    parts = [(without(recordings, spans[k]), take(recordings, spans[k])) for k in few]
    blocks = [(rest, held_out_blocks(held)) for rest, held in parts]
    return [(rest, held) for rest, held in blocks if rest and held]


def with_factors(filter: StartingFilter, factors: Float[Tensor, "*b 2"]) -> StartingFilter:
    """Return the filter with the covariances q Q of z and r R for each pair (q, r) of factors.

    Of several pairs, each is that of one recording of a batch.
    """
    inner, d = filter.inner, filter.d
    q, r = (each[..., None, None].to(inner.model.Q) for each in factors.unbind(-1))
    Q = inner.model.Q.expand(*factors.shape[:-1], -1, -1).clone()
    Q[..., :d, :d] *= q
    changed = UnscentedKalmanFilter(
        inner.model._replace(Q=Q, R=r * inner.model.R),
        allow_missing_sensors=inner.allow_missing_sensors,
        controlled=inner.controlled,
    )
    return filter.with_inner(changed)


def log_scores(
    filters: list[StartingFilter], parts: list[Part], factors: Sequence[tuple[float, float]]
) -> Float[Tensor, " m"]:
    """Return the mean of log N(z; m, C) over held-out steps for m pairs of factors of Q and R.

    All pairs are run as one batch. -inf where a score is not finite.
    """
    found: list[Tensor] = []
    for filter, (_, blocks) in zip(filters, parts, strict=True):
        rows = torch.tensor(factors, dtype=torch.float64).repeat_interleave(len(blocks), 0)
        runs = rollout_recordings(
            with_factors(filter, rows),
            blocks * len(factors),
            dtype=filter.states.dtype,
            covariances=True,
        )
        scores = []
        for block, run in zip(blocks * len(factors), runs, strict=True):
            assert run.covariances is not None
            left = (block.states - run.estimates)[BURN_IN:].double()
            C = run.covariances[BURN_IN:].double()
            least = MIN_VARIANCE * C.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
            scores.append(innovation_log_density(left, C + least * torch.eye(C.shape[-1]).to(C)))
        found.append(torch.cat(scores).unflatten(0, (len(factors), -1)))
    means = torch.cat(found, 1).mean(1)
    return torch.where(means.isfinite(), means, -torch.inf)

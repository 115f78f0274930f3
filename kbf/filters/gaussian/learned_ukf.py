"""Unscented Kalman filter of maps that are learned from recordings.

z' = z + g(z, u) + N(0, Q), x = h(z) + N(0, R), with g and h of `kbf.filters.gaussian.learned_maps`.
The regression is of the change z' - z: without evidence a state stays where it is. Kernels and
ranks minimise the leave-one-out loss of a map. The kinds of the maps (linear, kernel, both, or of
few inputs: `kbf.filters.gaussian.sparse_maps`) minimise the error of the filter on held-out blocks:
one-step residuals do not show whether errors of a map accumulate.

Moves may have several regimes, and jumps (`kbf.filters.gaussian.regimes`); the filter is then the
interacting multiple model filter (`kbf.filters.gaussian.switching`).

Sensors may be late, fail, have errors that persist, or gains that wander: their laws are fitted to
the residuals of h (`kbf.filters.gaussian.sensor_laws`) and filtered in an augmented state
(`kbf.filters.gaussian.augmented`). Counts are filtered as their square roots
(`kbf.filters.gaussian.count_maps`).

The first update uses the recorded states themselves, not a Gaussian approximation of them
(`kbf.filters.gaussian.start`).

A Gaussian has one mode: forks, and starts that several places explain, require particles
(`kbf.filters.kernel_monte_carlo`).

References: Wan and van der Merwe (2000); Ko and Fox (2009) for the UKF on learned maps.
"""

import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Generator, Tensor, nn

from kbf.data.windows import some_of_each
from kbf.filters.gaussian.augmented import Sensor, augmented
from kbf.filters.gaussian.block_scores import (
    COARSE_FACTORS,
    MAX_SHARE_FOR_FACTORS,
    MAX_SHARE_FOR_KINDS,
    MAX_SHARE_OF_LARGE_DATA,
    Fitted,
    Part,
    held_out_parts,
    held_out_scores,
    raced,
    variance_of,
    with_factors,
)
from kbf.filters.gaussian.count_maps import with_stable_counts
from kbf.filters.gaussian.learned_maps import (
    KINDS as KINDS_OF_MAPS,
    LearnedMap,
    fit_map,
    kernel_of,
    kernels_of_maps,
    least_noise,
)
from kbf.filters.gaussian.map_pairs import persistence_of
from kbf.filters.gaussian.map_sources import Source, counts_in, jump_covariance, source_of
from kbf.filters.gaussian.regimes import STRUCTURES, select_regimes
from kbf.filters.gaussian.sensor_laws import MAX_DELAY, Persistence, select_delays
from kbf.filters.gaussian.sparse_maps import AnyMap, fit_sparse, inputs_of_maps, read_by
from kbf.filters.gaussian.start import StartingFilter
from kbf.filters.gaussian.switching import SwitchingFilter
from kbf.filters.gaussian.ukf import UnscentedKalmanFilter
from kbf.manifolds import manifold_of
from kbf.recording import Recording, as_recordings, check_vectors, control_width
from kbf.runtime.deadline import time_within_share
from kbf.runtime.errors import FitError
from kbf.runtime.html_repr import ShownModule

# Kinds of maps: of few inputs for each output, and those of all inputs.
KINDS = ("sparse", *KINDS_OF_MAPS)
# Kinds that are compared by default. On six development systems (seeds 0 to 3, 7 and 8, 1,000 rows)
# the selected filter had no larger error than with kernel maps without a linear part among them.
COMPARED_KINDS = ("sparse", "linear", "both")
# Steps by which all is selected, at most and at least, and for each second until a deadline; the
# maps are fitted to all recordings.
MAX_STEPS_OF_SELECTION = 5000
MIN_STEPS_OF_SELECTION = 1000
STEPS_PER_SECOND = 50
# Factors with errors of at most this multiple of the least are compared by their log scores.
MAX_ERROR_RATIO = 1.05


class LearnedUKF(ShownModule):
    """The unscented Kalman filter of a change map g and an observation map h, both learned.

    `prepare` selects kernels, kinds and factors; `fit` learns the maps. With
    ``allow_missing_sensors`` each sensor has a map of its own, and the update leaves out the rows
    of missing ones.

    Attributes:
        kernels: ``1+q 2 3``, for g alone and for both: those of the change map, then those of the
            sensor whose first column it is; empty before `prepare`.
        inputs: ``d+q e+3``, of sparse maps: those of the changes, then those of the sensors
            (`kbf.filters.gaussian.sparse_maps.select_inputs`); empty before `prepare`.
        kinds: ``2``, positions in `KINDS` of the kinds of the change map and of observation maps.
        factors: ``2``, factors of the covariances Q and R.
        delays: ``q``, steps by which sensors are late; empty before `prepare`.
        counts: ``q``, which observations are counts; empty before `prepare`.
        faulty: whether sensors may fail.
        regimes: the map of each regime, one of `kbf.filters.gaussian.regimes.STRUCTURES`.
        zero_reading: ``q``, the reading 0 of each sensor in the units of recordings; None for 0.
    """

    def __init__(
        self,
        ranks: Sequence[int] = (96, 200, 400),
        factors: Sequence[float] = (1.0, 4.0, 16.0, 64.0, 256.0),
        kinds: Sequence[str] = COMPARED_KINDS,
        switches: bool = True,
    ) -> None:
        """Set the candidates.

        Args:
            ranks: most features of a map.
            factors: of the covariances Q and R.
            kinds: of maps, names among `KINDS`.
            switches: whether several regimes are tried.

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
        self.ranks, self.given_factors = tuple(ranks), tuple(factors)
        self.given_kinds = tuple(kinds)
        self.switches: bool = switches
        self.zero_reading: Tensor | None = None
        self.allow_missing_sensors: bool = False
        self.kernels: Tensor = nn.Buffer(torch.zeros(0, 2, 3, dtype=torch.float64))
        self.inputs: Tensor = nn.Buffer(torch.zeros(0, 3, dtype=torch.float64))
        self.kinds: Tensor = nn.Buffer(torch.full((2,), KINDS.index(kinds[-1])))
        self.factors: Tensor = nn.Buffer(torch.ones(2, dtype=torch.float64))
        self.delays: Tensor = nn.Buffer(torch.zeros(0, dtype=torch.long))
        self.counts: Tensor = nn.Buffer(torch.zeros(0, dtype=torch.bool))
        self.faulty: Tensor = nn.Buffer(torch.tensor(False))
        self.regimes: Tensor = nn.Buffer(torch.tensor(STRUCTURES[0]))

    @torch.no_grad()
    def prepare(self, memory: list[Recording], generator: Generator | None = None) -> None:
        """Select delays, faults, kernels, kinds of maps and factors by `MAX_STEPS_OF_SELECTION`.

        1. Delays of sensors by leave-one-out (`select_delays`), faults by the residuals of a map,
           kernels by leave-one-out, regimes by `select_regimes`.
        2. The kinds of maps and one regime or several (`select_kinds`), by the error on held-out
           blocks at the best of `COARSE_FACTORS`.
        3. The factor of Q, of R, and of Q again, by the log score on these blocks, among those
           whose error is at most `MAX_ERROR_RATIO` times the least.

        Recordings that are too short for a held-out block of ten steps leave the last kinds and
        factors of 1. Within a `kbf.runtime.deadline.deadline` fewer parts, or fewer kinds, are
        compared after `MAX_SHARE_FOR_KINDS` of the time (`MAX_SHARE_OF_LARGE_DATA` of more steps
        than are selected by), and fewer factors after `MAX_SHARE_FOR_FACTORS`.
        """
        recordings = as_recordings(memory, allow_missing_sensors=self.allow_missing_sensors)
        check_vectors(recordings, "a learned observation map")
        seconds = time_within_share(1.0) - time.perf_counter()
        most = min(MAX_STEPS_OF_SELECTION, STEPS_PER_SECOND * seconds)
        given = sum(len(each.states) for each in recordings)
        recordings = some_of_each(recordings, max(MIN_STEPS_OF_SELECTION, int(most)))
        whole = sum(len(each.states) for each in recordings) == given
        until = time_within_share(MAX_SHARE_FOR_KINDS if whole else MAX_SHARE_OF_LARGE_DATA)
        end = time_within_share(MAX_SHARE_FOR_FACTORS)
        self.kinds.fill_(KINDS.index(self.given_kinds[-1]))
        self.factors.fill_(1)
        self.counts = counts_in(recordings)
        self.delays = select_delays([with_stable_counts(each, self.counts) for each in recordings])
        self.faulty.fill_(True)
        source = self.source(recordings)
        self.faulty.fill_(source.faults.any)
        self.kernels = kernels_of_maps(
            source.pairs, len(self.delays), self.given_kinds, self.ranks[0]
        )
        if "sparse" in self.given_kinds:
            self.inputs = inputs_of_maps(source.pairs, len(self.delays))
        structure = select_regimes(source.moves) if self.switches else STRUCTURES[0]
        self.regimes = torch.tensor(STRUCTURES[0])
        parts = held_out_parts(recordings)
        if not parts:
            self.regimes = torch.tensor(structure)
        elif filters := self.select_kinds(parts, structure, until):
            count = len(filters) if whole else 1
            self.select_factors(filters[:count], parts[:count], end)

    def select_kinds(
        self, parts: list[Part], structure: tuple[int, ...], until: float
    ) -> list[Fitted]:
        """Set `kinds` and `regimes`; return the filters without each part, none if none fits.

        Errors select among pairs of equal kinds; then, with several regimes, the kind of the change
        map; then that of observation maps, and of the change map; all this without sparse maps,
        which are the slowest, and again with them. The kinds of the best filter come first. The
        comparison ends at ``until`` (a `time.perf_counter`).
        """
        source_without = cache(lambda k: self.source(parts[k][0]))
        source = cache(lambda regimes, k: source_without(k).with_regimes(regimes))
        readings = cache(lambda k, kind: self.readings(source_without(k), KINDS[kind]))
        runs = cache(lambda regimes: self.runs(partial(source, regimes), readings, parts))
        given = [KINDS.index(kind) for kind in self.given_kinds]
        quick = [i for i in given if KINDS[i] != "sparse"]
        best, tried = None, set[tuple[tuple[int, ...], tuple[int, ...]]]()
        steps: list[Any] = [(STRUCTURES[0], (0, 1)), (None, (1,)), (None, (0,))]
        if structure != STRUCTURES[0]:
            steps.insert(1, (structure, (0,)))
        for kinds, (regimes, places) in product((quick, given), steps):
            if best is not None and time.perf_counter() > until:
                break
            regimes, now = regimes or tuple(self.regimes.tolist()), tuple(self.kinds.tolist())
            pairs = [tuple(i if k in places else now[k] for k in (0, 1)) for i in kinds]
            pairs = [pair for pair in pairs if (regimes, pair) not in tried]
            if best is not None:
                pairs.sort(key=now.__ne__)
            tried.update((regimes, pair) for pair in pairs)
            for pair, found in raced(pairs, runs(regimes), len(parts), best, until).items():
                if best is None or found.better_than(best):
                    best = found
                    self.kinds.copy_(torch.tensor(pair))
                    self.regimes = torch.tensor(regimes)
        return [] if best is None else best.filters

    def runs(
        self, source: Callable[[int], Source], readings: Callable[..., Any], parts: list[Part]
    ) -> Callable[[tuple[int, ...], int], tuple[Fitted, Tensor] | None]:
        """Return the filter and its errors as a function of kinds, and of the part held out.

        Both are None for too few steps. Maps of a kind are fitted once.
        """
        moves = cache(lambda k, kind: self.changes(source(k), KINDS[kind]))
        scale = variance_of(parts)

        def run(pair: tuple[int, ...], k: int) -> tuple[Fitted, Tensor] | None:
            move, reading = pair
            try:
                filter = self.filter_with(source(k), moves(k, move), *readings(k, reading))
            except FitError:
                return None
            return filter, held_out_scores(filter, parts[k], COARSE_FACTORS, scale)[1]

        return run

    def select_factors(self, filters: list[Fitted], parts: list[Part], until: float) -> None:
        """Set `factors`, one after the other, until a `time.perf_counter`."""
        scale = variance_of(parts)
        for k, place in enumerate((0, 1, 0)):
            if k == 2 and float(self.factors[1]) == 1:
                break  # the grid would be that of k = 0
            if time.perf_counter() > until:
                break
            grid = []
            for factor in self.given_factors:
                pair = self.factors.tolist()
                pair[place] = factor
                grid.append((pair[0], pair[1]))
            pairs = zip(filters, parts, strict=True)
            found = [torch.stack(held_out_scores(*pair, grid, scale)) for pair in pairs]
            logs, errors = torch.stack(found).mean(0)
            near = errors <= MAX_ERROR_RATIO * errors.min()
            best = int(torch.where(near, logs, -torch.inf).argmax())
            self.factors.copy_(torch.tensor(grid[best], dtype=torch.float64))

    @torch.no_grad()
    def fit(self, memory: Recording | list[Recording] | None) -> Fitted:
        """Return the filter of maps that are fitted to ``memory``, in its dtype and device.

        Raises:
            ValueError: no memory, observations that are not vectors, or too few points.
        """
        recordings = as_recordings(memory, allow_missing_sensors=self.allow_missing_sensors)
        check_vectors(recordings, "a learned observation map")
        move, reading = (KINDS[k] for k in self.kinds.tolist())
        source = self.source(recordings).with_regimes(tuple(self.regimes.tolist()))
        laws = self.changes(source, move), *self.readings(source, reading)
        return with_factors(self.filter_with(source, *laws), self.factors)

    def source(self, recordings: list[Recording]) -> Source:
        """Return what maps are fitted to, of one regime."""
        none = torch.zeros_like(recordings[0].obs[0], dtype=torch.bool)
        counts = self.counts if len(self.counts) else none
        delays = self.delays if len(self.delays) else none.long()
        return source_of(recordings, delays, counts, faulty=bool(self.faulty))

    def readings(self, source: Source, kind: str) -> tuple[list[Sensor], Persistence]:
        """Return the observation maps of a kind, and how long their errors persist."""
        found = []
        for each in source.pairs.sensors:
            u, y = each.states, each.readings
            if kind == "sparse" and not each.counts:
                rows = self.inputs[len(each.states[0]) + each.columns.to(self.inputs.device)]
                map = fit_sparse(rows, u, y, ranks=self.ranks)
            else:
                whole = "both" if kind == "sparse" else kind
                map = self.map_of(1 + int(each.columns[0]), whole, u, y, counts=each.counts)
            found.append(Sensor(each.columns, each.delay, map, map.noise + least_noise(y)))
        return found, persistence_of(source.kept, found, self.zero_reading)

    def map_of(
        self, place: int, kind: str, u: Tensor, y: Tensor, *, counts: bool = False
    ) -> LearnedMap:
        """Return the map of a kind, with the kernel in row ``place`` of `kernels`, if any."""
        kernel = None
        if place < len(self.kernels) and kind != "linear":
            row = self.kernels[place, KINDS_OF_MAPS.index(kind) - 1]
            kernel = kernel_of(row) if bool(row.any()) else None
        return fit_map(
            kind, u, y, kernel=kernel, ranks=self.ranks, counts=counts, precise=place == 0
        )

    def change_of(self, kind: str, u: Tensor, y: Tensor) -> AnyMap:
        """Return the map of the change."""
        if kind == "sparse":
            return fit_sparse(self.inputs[: y.shape[1]], u, y, ranks=self.ranks, precise=True)
        return self.map_of(0, kind, u, y)

    def changes(self, source: Source, kind: str) -> list[tuple[AnyMap, Tensor]]:
        """Return the change map of each regime, and its covariance Q."""
        inputs, change, regimes = source.pairs.inputs, source.pairs.change, source.regimes
        if regimes is None:
            found = self.change_of(kind, inputs, change)
            return [(found, found.noise)]
        maps: dict[int, AnyMap] = {}
        laws = []
        for k, place in enumerate(regimes.maps):
            if place not in maps:
                here = regimes.moves_of(place)
                moves = source.moves
                maps[place] = self.change_of(kind, moves.inputs[here], moves.change[here])
                laws.append((maps[place], maps[place].noise))
            else:
                laws.append((maps[place], jump_covariance(source, maps[place], k)))
        return laws

    def filter_with(
        self,
        source: Source,
        changes: list[tuple[AnyMap, Tensor]],
        sensors: list[Sensor],
        persistence: Persistence,
    ) -> Fitted:
        """Return the filter of such maps, without factors."""
        recordings, join = source.recordings, source.pairs.join
        manifold = manifold_of(torch.cat([s.states for s in recordings]))
        read = read_by(sensors, recordings[0].states.shape[1], recordings[0].obs.shape[1])
        firsts = torch.tensor([0, *(len(each.states) for each in recordings[:-1])]).cumsum(0)

        def of_regime(change: AnyMap, Q: Tensor) -> StartingFilter:
            def moved(z: Tensor, u: Tensor | None = None) -> Tensor:
                return manifold.project(z + change(z if u is None or join is None else join(z, u)))

            model, states, d = augmented(recordings, moved, Q, sensors, persistence, read)
            inner = UnscentedKalmanFilter(
                model,
                allow_missing_sensors=self.allow_missing_sensors or source.faults.any,
                controlled=control_width(recordings),
            )
            return StartingFilter(
                inner,
                states,
                d=d,
                faults=source.faults,
                counts=source.counts,
                missing=self.allow_missing_sensors,
                first=states[firsts],
            )

        filters = [of_regime(*law) for law in changes]
        if source.regimes is None:
            return filters[0]
        return SwitchingFilter(filters, source.regimes.P, source.regimes.start)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **named: Any
    ) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Overrides `nn.Module._load_from_state_dict`: buffers get the stored numbers of maps.

        Buffers that are missing keep their values.

        Raises:
            ValueError: kinds, factors or delays that no model has.
        """
        for name, own in list(self.named_buffers(recurse=False)):
            stored = state_dict.setdefault(prefix + name, own.clone())
            if name not in ("kinds", "factors", "faulty"):  # their sizes are those of the data
                setattr(self, name, torch.zeros_like(stored, device=own.device))
        kinds, factors, delays, regimes = (
            state_dict[prefix + name] for name in ("kinds", "factors", "delays", "regimes")
        )
        if tuple(regimes.tolist()) not in STRUCTURES:
            raise ValueError(
                f"this model was stored with regimes {regimes.tolist()}, which are none of "
                f"{', '.join(map(str, map(list, STRUCTURES)))}"
            )
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

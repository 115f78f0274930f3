"""What the maps of a state-space model are fitted to: working readings, moves, and their laws."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kbf.filters.gaussian.count_maps import with_stable_counts
from kbf.filters.gaussian.map_pairs import Pairs, pairs_of
from kbf.filters.gaussian.regimes import STRUCTURES, Moves, Regimes, fit_regimes
from kbf.filters.gaussian.sensor_laws import Faults, no_faults, working
from kbf.filters.gaussian.sparse_maps import AnyMap
from kbf.filters.scaling import are_counts
from kbf.recording import Recording, moves, observed

# Mean of counts from which on failures of a sensor are looked for, see `rare_counts`.
MIN_MEAN_OF_COUNTS = 4.0
# Moves that a map of a regime requires.
MIN_MOVES_OF_MAP = 30


class Source(NamedTuple):
    """Recordings, and the laws that are fitted to them before the maps.

    Attributes:
        recordings: with stable counts. kept: with NaN in place of failed readings.
        counts: ``q``, which observations are counts. faults: of the sensors.
        pairs: that maps are fitted to.
        moves: that regimes are fitted to. regimes: None for one regime.
    """

    recordings: list[Recording]
    kept: list[Recording]
    counts: Tensor
    faults: Faults
    pairs: Pairs
    moves: Moves
    regimes: Regimes | None

    def with_regimes(self, structure: tuple[int, ...]) -> "Source":
        """Return the source with regimes of a structure; one if a map would have too few moves."""
        if structure == STRUCTURES[0]:
            return self._replace(regimes=None)
        found = fit_regimes(self.moves, structure)
        enough = all(int(found.moves_of(k).sum()) >= MIN_MOVES_OF_MAP for k in set(structure))
        return self._replace(regimes=found if enough else None)


def source_of(
    recordings: list[Recording],
    delays: Int[Tensor, " q"],
    counts: Bool[Tensor, " q"],
    *,
    faulty: bool,
) -> Source:
    """Return the source of maps, of one regime.

    Args:
        recordings: as recorded.
        delays: of the columns of observations. counts: which columns are counts.
        faulty: whether sensors may fail.

    Raises:
        FitError: as `pairs_of`.
    """
    stable = [with_stable_counts(each, counts) for each in recordings]
    faults, kept = no_faults(stable[0].obs.shape[1]), stable
    if faulty:
        faults, kept = working(stable, delays, ~rare_counts(recordings, counts))
    pairs = pairs_of(kept, delays, counts)
    z, after, u = moves(kept)
    inputs = z if u is None or pairs.join is None else pairs.join(z, u)
    lengths = [len(each.states) - 1 for each in kept if len(each.states) > 1]
    found = Moves(inputs, after - z, lengths).newest()
    return Source(stable, kept, counts, faults, pairs, found, None)


def jump_covariance(source: Source, change: AnyMap, component: int) -> Tensor:
    """Return the covariance ``d d`` of the errors of a map in the moves of a component."""
    assert source.regimes is not None
    weights = source.regimes.marginals[:, component]
    error = (source.moves.change - change(source.moves.inputs)).double()
    prior = change.noise.diagonal().diag()
    S = (weights[:, None] * error).mT @ error + prior
    return S / (weights.sum() + 1)


def counts_in(recordings: list[Recording]) -> Bool[Tensor, " q"]:
    """Return which columns of observations are counts."""
    return are_counts(torch.cat([observed(each) for each in recordings]))


def rare_counts(recordings: list[Recording], counts: Bool[Tensor, " q"]) -> Bool[Tensor, " q"]:
    """Return which columns are counts with a mean below `MIN_MEAN_OF_COUNTS`.

    Their square roots are far from Gaussian: most are that of 0, and the others would be taken for
    failures.
    """
    mean = torch.cat([observed(each) for each in recordings]).nanmean(0)
    return counts.to(mean.device) & (mean < MIN_MEAN_OF_COUNTS)

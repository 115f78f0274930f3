"""Adds recordings to the memory of a fitted filter, and prunes the memory to a budget.

Keeps the bandwidths, ridges, scaling and encoders of the checkpoint and recomputes the operators
over the enlarged memory.
"""

import heapq
import itertools
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kbf.data.files.splits import where_known
from kbf.data.windows import Span, take
from kbf.fitted.buffers import RecordingBuffers
from kbf.fitted.checkpoint import Trained, check_like
from kbf.fitted.held_out_calibration import learn
from kbf.fitted.model import inner_filter
from kbf.recording import Recording, as_recordings
from kbf.rkhs.features import nystrom_whitening, pivots
from kbf.rkhs.kernels import gaussian, median_distance
from kbf.runtime.errors import DataError

# Steps that are kept or removed together: a transition needs both of its ends.
STEPS_PER_CHUNK = 20
# Number of features in which chunks are compared.
COVERAGE_RANK = 256
# Noise variance of a point of unit variance: the smaller, the less a repeated point is worth.
POINT_NOISE = 0.1


class Appended(NamedTuple):
    """The filter over the new memory, and numbers of points.

    Attributes:
        trained: the filter.
        before: points of the old memory.
        added: points of the new recordings.
        kept: points of the new memory.
    """

    trained: Trained
    before: int
    added: int
    kept: int


def append(
    trained: Trained,
    recordings: list[Recording],
    *,
    budget: int | None = None,
    refit: bool = False,
    seed: int = 0,
) -> Appended:
    """Add recordings to the memory of a trained filter; its module is changed.

    Where the filter has a calibration and a monitor, both are learned from the new memory.

    Args:
        trained: the filter.
        recordings: in the units of the data. No transition leads from one to the next.
        budget: upper bound on the points of the new memory (`prune`); None keeps all.
        refit: select bandwidths, ridges, densities and, with model selection, the model again.
        seed: of filters that draw.

    Raises:
        ValueError: a model without a memory, recordings of other shapes, or ``refit`` of a model
            that is trained by gradient.
    """
    module = trained.module
    if refit and module.learns:
        raise ValueError(
            f"{module.config['model']['name']} is trained by gradient, which refit=True does not: "
            "fit it again with kbf.fit"
        )
    if inner_filter(trained.filter) is module.net:
        name = module.config["model"]["name"]
        raise ValueError(f"this is a model without a memory ({name}): train it again instead")
    missing = bool(getattr(module.net, "allow_missing_sensors", False))
    first, *_ = as_recordings(recordings, allow_missing_sensors=missing)
    check_like(module, first, "the filter")
    memory = module.memory.recordings()
    before = points(memory)
    memory += module.taken_in(recordings)
    memory = memory if budget is None else prune(memory, budget)
    module.memory = RecordingBuffers(memory).to(module.device)
    if refit:
        module.prepare(module.memory.recordings())
    learned = trained.calibration is not None or trained.monitor is not None
    trained = Trained(module, module.filter(), trained.epochs)
    if learned:
        trained = learn(trained, seed=seed)
    return Appended(trained, before, points(recordings), points(memory))


def known_parts(recordings: list[Recording], *, cut_missing: bool = False) -> list[Recording]:
    """Return the parts of recordings in which the state is known.

    With ``cut_missing`` the observation must be known as well, as in training.

    Raises:
        DataError: no step has a known state.
    """
    parts = []
    for each in recordings:
        known = each.states.isfinite().all(-1)
        known = known & each.mask if cut_missing and each.mask is not None else known
        parts += take([each], where_known([Span(0, 0, len(known))], lambda _, known=known: known))
    if not parts:
        raise DataError("no step has a known state: nothing can be appended")
    return parts


def points(memory: list[Recording]) -> int:
    """Return the number of steps of all recordings."""
    return sum(len(r.states) for r in memory)


def prune(memory: list[Recording], budget: int) -> list[Recording]:
    """Return at most ``budget`` points of a memory, in chunks that cover the whole memory.

    Greedy: the next chunk c is the one with the largest log det(I + Phi_c M Phi_c^T) / |c|, M =
    (sigma^2 I + Phi_k^T Phi_k)^-1 over the points k that are kept already, sigma^2 = `POINT_NOISE`.
    That is the information gain of a point about a function with the Gaussian kernel over (state,
    observation, control); of equal chunks the oldest is taken. The algorithm is a pivoted Cholesky
    decomposition with noise, by chunks instead of points. The features Phi are those of
    `kbf.rkhs.features.nystrom`.

    Raises:
        ValueError: a budget of fewer points than one chunk.

    References: Krause, Singh and Guestrin (2008), greedy selection by information gain; Minoux
    (1978), lazy evaluation.
    """
    if points(memory) <= budget:
        return memory
    spans = chunks([len(s.states) for s in memory])
    if budget < min(span.stop - span.start for span in spans):
        raise ValueError(
            f"a budget of {budget} points is less than the {STEPS_PER_CHUNK} steps that are kept "
            "together"
        )
    features = coverage_features(memory)
    starts = [sum(len(s.states) for s in memory[:k]) for k in range(len(memory))]
    parts = [features[starts[k] + a : starts[k] + b] for k, a, b in spans]
    kept, left = [], budget
    M = torch.eye(features.shape[1], dtype=features.dtype, device=features.device) / POINT_NOISE
    heap = [(-gain(part, M), k) for k, part in enumerate(parts)]
    heapq.heapify(heap)
    while heap:
        _, k = heapq.heappop(heap)
        part = parts[k]
        if len(part) > left:
            continue
        now = (-gain(part, M), k)
        # Gains only decrease: the first by an old gain need not be the first by its present one.
        if heap and now > heap[0]:
            heapq.heappush(heap, now)
            continue
        kept.append(spans[k])
        left -= len(part)
        known = part @ M
        M = M - known.mT @ torch.linalg.solve(
            torch.eye(len(part)).to(part) + known @ part.mT, known
        )
    return take(memory, joined(sorted(kept)))


def gain(part: Float[Tensor, "c p"], M: Float[Tensor, "p p"]) -> float:
    """Return log det(I + Phi_c M Phi_c^T) / c."""
    total = torch.linalg.slogdet(torch.eye(len(part)).to(part) + part @ M @ part.mT).logabsdet
    information = total / len(part)
    return round(information.item(), 9)  # rounding errors must not order equal chunks


def coverage_features(memory: list[Recording]) -> Float[Tensor, "n p"]:
    """Return Nystrom features of the Gaussian kernel over states, observations and controls.

    Each of the three is scaled by its median distance.
    """
    sides = [torch.cat([s.states for s in memory]), torch.cat([s.obs.flatten(1) for s in memory])]
    sides += (
        [torch.cat([s.controls for s in memory if s.controls is not None])]
        if memory[0].controls is not None
        else []
    )
    scaled = []
    for side in sides:
        values = side.double()
        values = torch.where(values.isfinite(), values, values.nanmean(0))  # of a missing sensor
        scaled.append(values / (median_distance(values) if values.std(0).sum() > 0 else 1))
    x = torch.cat(scaled, -1)
    kernel = partial(gaussian, bandwidth=len(sides) ** 0.5)
    marks = x[pivots(kernel, x, rank=COVERAGE_RANK, tol=1e-6)]
    return kernel(x, marks) @ nystrom_whitening(kernel(marks, marks))


def chunks(lengths: list[int]) -> list[Span]:
    """Return spans of about `STEPS_PER_CHUNK` steps, of equal length (to one) in a recording."""
    spans = []
    for k, length in enumerate(lengths):
        count = max(1, round(length / STEPS_PER_CHUNK))
        edges = [round(length * i / count) for i in range(count + 1)]
        spans += [Span(k, a, b) for a, b in itertools.pairwise(edges)]
    return spans


def joined(spans: list[Span]) -> list[Span]:
    """Merge neighbouring spans of a recording, to keep the transition between them."""
    whole: list[Span] = []
    for span in spans:
        if whole and whole[-1].recording == span.recording and whole[-1].stop == span.start:
            whole[-1] = whole[-1]._replace(stop=span.stop)
        else:
            whole.append(span)
    return whole

"""A filter that goes on learning: recordings are added to its memory, and the memory is kept to a budget.

Bandwidths, ridges, units and encoders stay those of the checkpoint; the operators over the memory
are made anew.
"""

from __future__ import annotations

import heapq
import itertools
import os
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kbf.data.windows import Span, take
from kbf.recording import Recording, as_recordings
from kbf.rkhs.features import nystrom_whitening, pivots
from kbf.rkhs.kernels import gaussian, median_distance
from kbf.training.buffers import RecordingBuffers
from kbf.training.checkpoint import Trained, check_like, load_filter, rewrite_checkpoint
from kbf.training.fitted_model import inner_filter
from kbf.training.held_out_calibration import learn

STEPS_PER_CHUNK = 20
"""Steps that are kept or left out together: a transition needs both of its ends."""
COVERAGE_RANK = 256
"""Features in which chunks are compared."""
POINT_NOISE = 0.1
"""Variance of a point's noise, where a point alone has variance 1: the smaller, the less a second look at the same is worth."""


class Appended(NamedTuple):
    """The filter over the new memory, and how many points there were, came, and are in it now."""

    trained: Trained
    before: int
    added: int
    kept: int


def append(
    checkpoint: str | os.PathLike[str],
    recordings: list[Recording],
    out: str | os.PathLike[str],
    *,
    budget: int | None = None,
    device: str | torch.device = "cpu",
    trust: bool = False,
    seed: int = 0,
) -> Appended:
    """Add recordings to the memory of a trained filter and write it as a new checkpoint, whole or not at all.

    Where the checkpoint has a calibration and a monitor, both are learned anew from the new memory.

    Args:
        checkpoint: of the filter.
        recordings: in the units of the data. Each is a recording of its own: no transition leads to
            it from those before.
        out: the new checkpoint; it may be the old one.
        budget: most points of the new memory (`prune`); None keeps all.
        device: where to work. trust: as of `kbf.training.checkpoint.load_filter`. seed: of filters
            that draw.

    Raises:
        CheckpointError: a checkpoint that cannot be loaded. ValueError: a model without a memory,
            or recordings of other shapes.
    """
    trained = load_filter(checkpoint, device=device, trust=trust)
    module = trained.module
    if inner_filter(trained.filter) is module.net:
        raise ValueError(
            f"{checkpoint} is of a model without a memory ({module.config['model']['name']}): train it again instead"
        )
    check_like(
        module,
        as_recordings(
            recordings,
            allow_missing_sensors=bool(getattr(module.net, "allow_missing_sensors", False)),
        )[0],
        checkpoint,
    )
    memory = module.memory.sequences()
    before = points(memory)
    memory += module.taken_in(recordings)
    memory = memory if budget is None else prune(memory, budget)
    module.memory = RecordingBuffers(memory).to(module.device)
    learned = trained.calibration is not None or trained.monitor is not None
    trained = Trained(module, module.filter(), trained.epochs)
    if learned:
        trained = learn(trained, seed=seed)
    rewrite_checkpoint(trained, checkpoint, out)
    return Appended(trained, before, points(recordings), points(memory))


def points(memory: list[Recording]) -> int:
    """Steps in all recordings together."""
    return sum(len(s.states) for s in memory)


def prune(memory: list[Recording], budget: int) -> list[Recording]:
    """At most ``budget`` points of a memory, in contiguous chunks, chosen to cover what the whole memory knows.

    Greedy: the next chunk c is the one with the largest log det(I + Phi_c M Phi_c^T) / |c|, M =
    (sigma^2 I + Phi_k^T Phi_k)^-1 over the points k that are kept already, sigma^2 = `POINT_NOISE`:
    what a point of it tells of a function with the Gaussian kernel over (state, observation,
    control) that those do not; of equal ones the oldest. It is pivoted Cholesky with noise, by
    chunks in place of points. The features Phi are those of `kbf.rkhs.features.nystrom`.

    Raises:
        ValueError: a budget of fewer points than one chunk.

    References: Krause, Singh and Guestrin (2008) for greedy choice by information gain, Minoux
    (1978) for not evaluating all.
    """
    if points(memory) <= budget:
        return memory
    spans = chunks([len(s.states) for s in memory])
    if budget < min(span.stop - span.start for span in spans):
        raise ValueError(
            f"a budget of {budget} points is less than the {STEPS_PER_CHUNK} steps that are kept together"
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
        if heap and now > heap[0]:  # a gain only falls: who is first with an old one need not be
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
    """log det(I + Phi_c M Phi_c^T) / c."""
    information = torch.linalg.slogdet(
        torch.eye(len(part)).to(part) + part @ M @ part.mT
    ).logabsdet / len(part)
    return round(information.item(), 9)  # equal ones are equal, whatever was chosen before


def coverage_features(memory: list[Recording]) -> Float[Tensor, "n p"]:
    """Nystrom features of the Gaussian kernel over states, observations and controls, each in units of its median distance."""
    sides = [torch.cat([s.states for s in memory]), torch.cat([s.obs.flatten(1) for s in memory])]
    sides += (
        [torch.cat([s.controls for s in memory if s.controls is not None])]
        if memory[0].controls is not None
        else []
    )
    scaled = []
    for side in sides:
        values = side.double()
        values = torch.where(values.isfinite(), values, values.nanmean(0))  # of a silent sensor
        scaled.append(values / (median_distance(values) if values.std(0).sum() > 0 else 1))
    x = torch.cat(scaled, -1)
    kernel = partial(gaussian, bandwidth=len(sides) ** 0.5)
    marks = x[pivots(kernel, x, rank=COVERAGE_RANK, tol=1e-6)]
    return kernel(x, marks) @ nystrom_whitening(kernel(marks, marks))


def chunks(lengths: list[int]) -> list[Span]:
    """Recordings in pieces of about `STEPS_PER_CHUNK` steps; of one recording all are of equal length, to one step."""
    spans = []
    for k, length in enumerate(lengths):
        count = max(1, round(length / STEPS_PER_CHUNK))
        edges = [round(length * i / count) for i in range(count + 1)]
        spans += [Span(k, a, b) for a, b in itertools.pairwise(edges)]
    return spans


def joined(spans: list[Span]) -> list[Span]:
    """Neighbours of one recording as one span: the transition between them is kept as well."""
    whole: list[Span] = []
    for span in spans:
        if whole and whole[-1].recording == span.recording and whole[-1].stop == span.start:
            whole[-1] = whole[-1]._replace(stop=span.stop)
        else:
            whole.append(span)
    return whole

"""Outliers through every filter, many steps, flat memory."""

from __future__ import annotations

import copy
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

from kbf.commands.support.stream_reader import InputColumns, RowReader
from kbf.data.files.column_schema import ColumnSchema, Part
from kbf.filters.gaussian.ekf import EKF
from kbf.filters.gaussian.kalman import LearnedKalman
from kbf.filters.gaussian.ukf import UKF
from kbf.filters.kernel.kbf import KBF
from kbf.filters.neural.lstm import LSTMFilter
from kbf.filters.online import RunningFilter
from kbf.filters.particle.bootstrap import ParticleFilter
from kbf.filters.particle.learned import LearnedParticleFilter
from kbf.filters.regression.kernel_ridge import FrameRegression
from kbf.filters.rollout import rollout
from kbf.fitted.checkpoint import load_filter
from kbf.recording import Recording
from kbf.ssm import rotation, simulate
from studies.stress.cases import Outcome

SIZES = [20.0, 100.0, 1e6, 1e19, 1e30, 1e39, 1e150, 1e300, float("inf"), float("nan")]
MODELS = {
    "kalman": LearnedKalman,
    "ekf": lambda: EKF(rotation()),
    "ukf": lambda: UKF(rotation()),
    "particle": lambda: ParticleFilter(rotation(), particles=500),
    "particle_learned": lambda: LearnedParticleFilter(particles=500),
    "frame": FrameRegression,
    "kbf": lambda: KBF(rank=24),
    "kbf_paper": lambda: KBF(rank=None, tol=0.0, learn=False),
    "kbr_original": lambda: KBF(rule="original", ratio="tikhonov", rank=None),
    "lstm": lambda: LSTMFilter(
        2, 2, hidden=8, sizes=(8,), generator=torch.Generator().manual_seed(0)
    ),
}
BEFORE, AFTER, SCORED = 10, 20, 100


def outliers(share: float) -> Iterator[Outcome]:
    """One bad observation.

    20 good ones later the error is within 5 % of what it would have been, over the 100 after them.
    """
    whole = simulate(
        rotation(),
        torch.tensor([1.0, 0.0], dtype=torch.float64),
        330,
        torch.Generator().manual_seed(0),
    )
    memory = Recording(whole.states[:150], whole.obs[:150])
    obs, states = whole.obs[150:], whole.states[150:]
    filters = {}
    for name, build in MODELS.items():
        model = build().double()
        model.prepare([memory], torch.Generator().manual_seed(0))
        with torch.no_grad():
            filters[name] = model.eval().fit([memory])
    first = BEFORE + 1 + AFTER
    for name, filter in filters.items():

        def error(seen: torch.Tensor, filter=filter) -> float:
            with torch.no_grad():
                mask = seen.isfinite().all(-1)[None]  # as the commands say it of NaN
                found = rollout(
                    filter,
                    seen[None].nan_to_num(0, 0, 0),
                    mask=mask,
                    generator=torch.Generator().manual_seed(1),
                ).estimates[0]
            return float((found - states)[first : first + SCORED].square().sum(1).mean())

        usual = error(obs)
        for size in SIZES[: max(2, round(share * len(SIZES)))]:
            spoiled = copy.copy(obs).clone()
            spoiled[BEFORE] = torch.tensor([size, -size])
            try:
                after = error(spoiled)
                why = (
                    ""
                    if after <= 1.05 * usual + 1e-9
                    else f"error {after:.4g} after it, {usual:.4g} without"
                )
            except (ValueError, RuntimeError) as raised:
                why = f"{type(raised).__name__}: {str(raised)[:100]}"
            yield Outcome("outliers", f"{name}, {size:g}", why)


def used() -> int:
    """The largest memory of this process so far, in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def long(share: float) -> Iterator[Outcome]:
    """A million steps, and the memory after them."""
    filter = load_filter("example:rotation").filter
    steps, batch = max(100, round(1000 * share)), 1000
    obs = torch.randn(batch, 64, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    state, early = filter.init(batch), 0
    with torch.inference_mode():
        dtype = filter.estimate(state).dtype
        for k in range(steps):
            state = filter.update(filter.predict(state), obs[:, k % 64].to(dtype))
            early = used() if k == steps // 10 else early
    finite = all(bool(leaf.isfinite().all()) for leaf in state)
    yield Outcome(
        "endurance", f"{batch * steps:,} steps of {batch} filters: finite", "" if finite else "NaN"
    )
    grown = used() - early
    yield Outcome(
        "endurance",
        f"{batch * steps:,} steps: flat memory",
        "" if grown < 8 * 1024 else f"{grown} KiB more",
    )
    live, early, count = RunningFilter(filter), 0, round(20_000 * share)
    for k in range(count):
        live.step(None if k % 7 == 0 else obs[:1, k % 64].to(dtype))
        early = used() if k == count // 10 else early
    yield Outcome(
        "endurance",
        f"{count:,} live steps: flat memory",
        "" if used() - early < 4 * 1024 else f"{used() - early} KiB more",
    )
    columns = InputColumns(
        ColumnSchema((Part("number", ("z",)),), (Part("number", ("a",)), Part("number", ("b",))))
    )
    lines = round(10_000 * share)
    reader = RowReader(
        (b"1,2\n,\nx,y\n" * 100 for _ in range(lines)),
        columns,
        torch.float64,
        on_unreadable=lambda text: None,
    )
    early, count = 0, 0
    for count, _ in enumerate(reader, 1):
        early = used() if count == 30 * lines else early
    why = (
        ""
        if count == 300 * lines and used() - early < 4 * 1024
        else f"{count} lines, {used() - early} KiB more"
    )
    yield Outcome("endurance", f"{300 * lines:,} lines of a stream: flat memory", why)


def run(folder: Path, share: float = 1.0) -> Iterator[Outcome]:
    """All of these."""
    yield from outliers(share)
    yield from long(share)

"""Benchmarks of filters by rank, batch, locality and precision: that they run, that their sides
agree, and what they claim.
"""

from __future__ import annotations

import csv
import json

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from kbf.cli import main
from kbf.filters.compile import Step
from kbf.filters.kernel.update.rule import PrimalUpdate
from kbf.filters.online import RunningFilter
from kbf.filters.rollout import rollout, step
from kbf.rkhs.features import NystromFeatures
from studies.benchmarks import batch, checks, local, precision, rank
from studies.benchmarks.problem import REGS, problem

NAMES = ("rank", "batch", "local", "precision", "checks")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_smoke(name, tmp_path):
    assert main(["bench", name, "size=smoke", f"run_dir={tmp_path}"]) == 0
    with (tmp_path / "results.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 3 and all(len(row) == len(rows[0]) and None not in row for row in rows)
    assert (tmp_path / "figure.png").stat().st_size > 5000
    assert "to be reached" in (tmp_path / "claims.md").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "about.json").read_text(encoding="utf-8"))["benchmark"] == name


# What is compared


@torch.no_grad()
def test_with_enough_rank_features_are_the_full_matrices():
    p = problem(60, steps=20, scale=0.5)
    obs = p.test.obs[None]
    exact = rollout(p.filter().fit(p.memory), obs.double()).estimates
    low = rollout(p.filter(60, 1e-13).fit(p.memory), obs.double()).estimates
    assert (low - exact).abs().max() < 1e-5
    single = rollout(p.filter(60, 1e-13, dtype="float32").fit(p.memory), obs.float()).estimates
    assert (single - exact).abs().max() < 1e-4


@torch.no_grad()
def test_checked_and_bare_steps_do_the_same():
    p = problem(60, steps=15)
    for filter in (p.filter(16).fit(p.memory), p.filter(16, normalise=True).fit(p.memory)):
        live, step = RunningFilter(filter), checks.bare(filter, p.test.obs)
        for x in p.test.obs[1:]:
            torch.testing.assert_close(live.step(x[None]), step())


@torch.no_grad()
def test_batch_sides_do_the_same():
    p = problem(60, steps=15)
    low = p.filter(16, dtype="float32").fit(p.memory)
    obs = torch.stack([p.test.obs[i : i + 5] for i in range(9)]).float()
    truth = rollout(low, obs).estimates[:, -1]
    assert (batch.written(low, obs) - truth).abs().max() < 1e-5
    assert (batch.compiled(low, Step(low), obs) - truth).abs().max() < 1e-5
    assert (torch.cat([batch.written(low, one) for one in obs.split(1)]) - truth).abs().max() < 1e-4


@torch.no_grad()
def test_points_of_ratio_0_change_nothing_but_time():
    p = problem(300, steps=20)
    obs = p.test.obs[None].double()
    found = rollout(p.filter(128).fit(p.memory), obs)
    whole = p.filter(128).fit(p.memory)
    whole.rule = local.AllPoints(whole.rule)
    assert (rollout(whole, obs).estimates - found.estimates).abs().max() < 1e-8
    assert found.diagnostics["zero_weight_share"].mean() > 0.2


@torch.no_grad()
def test_parts_in_float64_are_the_filter_of_the_library():
    p = problem(80, steps=10)
    obs = p.test.obs[None].double()
    exact = p.filter(80, 1e-6).fit(p.memory)
    states, observations = p.memory.states.double(), p.memory.obs.double()
    maps = [
        NystromFeatures("gaussian", p.bandwidths[i], part, 80, 1e-6)
        for i, part in ((1, states), (2, observations))
    ]
    rebuilt = precision.fitted(
        p, maps[0](states), PrimalUpdate(maps[1], observations[:, None], REGS[2])
    )
    assert (rollout(rebuilt, obs).estimates - rollout(exact, obs).estimates).abs().max() < 1e-9


def test_variants_have_the_same_features_and_fail_where_float32_does():
    p = problem(80, steps=10)
    made = precision.variants(p, 1e-3)
    assert None not in made.values()
    assert len({p.ranks(each) for each in made.values()}) == 1
    assert [name for name, each in precision.variants(p, 1e-9).items() if each is None] == [
        precision.FEATURES
    ]
    types = {
        name: (each.states.dtype, each.rule.features.dtype, each.rule.psi.whiten.dtype)
        for name, each in made.items()
    }
    double, single = torch.float64, torch.float32
    assert types[precision.EXACT] == (double, double, double)
    assert types[precision.STEPS] == types[precision.COARSE] == (single, single, double)
    assert all(
        types[name] == (single, single, single)
        for name in (
            precision.QUERY,
            precision.SOLVES,
            precision.FEATURES,
            precision.JITTER,
            precision.LANDMARKS,
        )
    )


def test_products_of_small_whole_numbers_are_exact_in_bfloat16(rng):
    points = torch.from_numpy(rng.integers(-2, 3, (40, 1, 6))).float()
    query, ratio = torch.from_numpy(rng.integers(-2, 3, (1, 6))).float(), torch.ones(1, 40)
    exact, coarse = (
        kind(nn.Identity(), points, 0.1) for kind in (PrimalUpdate, precision.CoarseUpdate)
    )
    assert torch.allclose(coarse(ratio, query), exact(ratio, query), atol=1e-6)
    finer = 1 + 0.001 * torch.arange(40)[None]
    assert (coarse(finer, query) - exact(finer, query)).abs().max() > 1e-5


class Waits(TorchDispatchMode):
    """Counts what makes Python wait for the values of a tensor."""

    KINDS = (
        "aten::_local_scalar_dense",
        "aten::nonzero",
        "aten::is_nonzero",
        "aten::equal",
        "aten::_linalg_check_errors",
    )

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().split(".")[0] in self.KINDS:
            self.found.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("width", [16, 128])
@pytest.mark.parametrize("local", [None, 50])
@pytest.mark.parametrize("normalise", [True, False])
def test_steps_never_wait_for_the_device(normalise, local, width):
    p = problem(200, steps=5, scale=0.25)
    low = p.filter(width, dtype="float32", normalise=normalise, local=local).fit(p.memory)
    obs, mask = (
        torch.stack([p.test.obs, p.test.obs]).float(),
        torch.tensor([[True, False], [True, True], [False, True]]),
    )
    state, last = low.init(2), low.init(2)
    with torch.no_grad(), Waits() as waits:
        for t, seen in enumerate([None, *mask]):
            state = step(low, state, obs[:, t], mask=seen)
            last = low.estimate(state)
            low.diagnostics(state)
    assert waits.found == []
    assert last.isfinite().all()


def test_waiting_is_seen():
    p = problem(200, steps=5, scale=0.25)
    low = p.filter(128, dtype="float32").fit(p.memory)
    with Waits() as waits:
        step(
            low, low.init(1), p.test.obs[:1].float()
        )  # one sequence on a CPU looks for the positive ratios
        bool(torch.ones(1).sum() > 0)
    assert len(waits.found) == 2


# Claims


def test_rank_claims():
    row = {
        "scale": 1.0,
        "rank of states": 9,
        "rank of observations": 8,
        "error above dense": 1e-4,
        "times faster than dense": 30.0,
    }
    rows = [row | {"tolerance": tol, "largest difference": tol**0.5} for tol in (1e-2, 1e-6)]
    told = rank.claims(rows)
    assert [claim.reached for claim in told] == [True, True, None]
    assert told[2].measured == "scale 1: 9 and 8 (30 times faster than dense)"
    rows[1] |= {"largest difference": 3e-3, "error above dense": -0.01}
    told = rank.claims(rows)
    assert [claim.reached for claim in told] == [False, False, None]
    assert (
        "3 sqrt" in told[0].measured
        and "tolerance 1e-06" in told[0].measured
        and told[2].measured == "none"
    )
    assert rank.claims(rows[:1])[1].reached is None


def test_batch_claims():
    def rows(times: float) -> list[dict]:
        row = {
            "rank": 64,
            "microseconds": 10.0,
            "microseconds a sequence": 5.0,
            "times the floor": times,
            "times one by one": 2.0,
        }
        row["largest difference"] = 1e-6
        sides = (batch.ROLLOUT, batch.WRITTEN, batch.SINGLE, batch.COMPILED)
        return [row | {"batch": b, "side": side} for b in (1, 64) for side in sides]

    told = batch.claims(rows(2.9))
    assert [claim.reached for claim in told] == [True, True, True, None, None]
    assert (
        told[3].measured == "1: 2 times; 64: 2 times"
        and told[4].measured == "1: 1 times; 64: 1 times"
    )
    slow = rows(3.1)
    slow[-1]["largest difference"] = 1.7
    told = batch.claims(slow)
    assert [claim.reached for claim in told][:3] == [False, False, False] and told[
        2
    ].measured == "1.7e+00 apart at the most"
    few = batch.claims(
        [row for row in rows(1.0) if row["batch"] == 1 and row["side"] != batch.COMPILED]
    )
    assert [claim.reached for claim in few] == [None, None, True, None] and few[
        0
    ].measured == "not measured"


def test_local_claims():
    row = {"points that take part": 3.0, "times faster than all": 4.0, "largest difference": 1e-6}
    above = {local.ALL: 0.0, local.POSITIVE: 0.0, "500": -0.02, "250": 0.009, "100": 0.02}
    rows = [row | {"points": name, "error above all": value} for name, value in above.items()]
    told = local.claims(rows)
    assert told[0].measured.startswith("250 (+0.9 %), 4 times") and told[0].reached is None
    assert told[1].reached is True
    rows[1]["largest difference"] = 1.0
    told = local.claims([*rows[:2], rows[-1]])
    assert told[0].measured == "none of those tried" and told[1].reached is False
    assert len(local.claims([rows[0], *rows[2:]])) == 1


def test_precision_claims():
    rows = [
        {"in float32": name, "tolerance": tol, "finite": True, "largest difference": 1e-5}
        for name in (precision.EXACT, precision.STEPS, precision.FEATURES)
        for tol in (1e-4, 1e-8)
    ]
    rows[-1] |= {"finite": False, "largest difference": float("nan")}
    told = precision.claims(rows)
    assert [claim.reached for claim in told] == [True, None]
    assert told[1].measured == "differs by 1e-05, fails at 1e-08"
    assert (
        precision.claims([*rows[:2], rows[2] | {"largest difference": 1e-3}, *rows[3:]])[0].reached
        is False
    )
    rows[2] |= {"finite": False, "largest difference": float("nan")}
    assert precision.claims(rows)[0].reached is False

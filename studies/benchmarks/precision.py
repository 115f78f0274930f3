"""float32 against float64, part by part.

n points; tolerances that increase the rank.

All in float64 is compared with the same filter where more and more is done in float32: the steps
(what ``KBF(dtype="float32")`` does); the features of the query; what is done once with features
(Psi^T Psi and the ridge solves: the square of a condition, but the ridge holds it); and the
features. Their whitening L^-T divides by the root of the smallest pivot, about the tolerance, which
float32 cannot tell from 0 below 1e-7: the factorisation fails, unless a larger jitter hides the
small pivots, or the choice of landmarks stops before them (and then there are fewer features).
Last, steps in float32 with Psi^T D Psi in bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kbf.filters.kernel.filter import KernelBayesFilter
from kbf.filters.kernel.operators import Operator, ratio_operator_primal, transition_operator_primal
from kbf.filters.kernel.update.rule import PrimalUpdate
from kbf.filters.online import RunningFilter
from kbf.filters.rollout import rollout
from kbf.plots.charts import Figure, curves
from kbf.recording import transitions
from kbf.rkhs import rules
from kbf.rkhs.features import NystromFeatures, nystrom_whitening
from kbf.rkhs.kernels import gaussian
from kbf.rkhs.linalg import NotPositiveDefiniteError
from studies.benchmarks.base import Claim, Row, Settings, Tell, alternate, largest
from studies.benchmarks.problem import REGS, Problem, problem
from studies.benchmarks.step import stepper

SIZES: dict[str, dict[str, Any]] = {
    "full": {
        "n": 900,
        "steps": 200,
        "tolerances": [1e-4, 1e-6, 1e-8, 1e-10, 1e-12],
        "rounds": 5,
        "seconds": 0.1,
    },
    "smoke": {"n": 80, "steps": 20, "tolerances": [1e-3, 1e-9], "rounds": 1, "seconds": 0.01},
}
EXACT, STEPS, QUERY, SOLVES = "nothing", "steps", "steps, query", "steps, query, solves"
FEATURES, JITTER, LANDMARKS = "all but landmarks", "all but landmarks, jitter 1e-6", "all"
COARSE = "steps, products in bfloat16"


class CoarseUpdate(PrimalUpdate):
    """The importance-weighted rule with its one large product, Psi^T D Psi, in bfloat16."""

    def over(
        self, ratio: Tensor, features: Tensor, moments: Tensor | None, query: Tensor
    ) -> Tensor:
        """Apply the rule to some of the points, with Psi^T D Psi in bfloat16."""
        products = (features * ratio[..., None]).bfloat16().mT @ features.bfloat16()
        c = self.coefficients(products.to(features.dtype), query, self.scale * self.reg)
        return rules.from_coefficients(ratio, features, c)


def variants(p: Problem, tol: float) -> dict[str, KernelBayesFilter | None]:
    """The filters by name; None where a factorisation fails."""
    n = len(p.memory.states)
    exact, single = p.filter(n, tol).fit(p.memory), p.filter(n, tol, dtype="float32")
    query, coarse = single.fit(p.memory).float(), single.fit(p.memory)
    assert isinstance(exact.transition, Operator) and exact.transition.right is not None
    assert isinstance(coarse.rule, PrimalUpdate)
    solves = fitted(p, exact.transition.right.float(), query.rule)
    coarse.rule = CoarseUpdate(coarse.rule.psi, p.memory.obs[:, None], REGS[2], dtype=torch.float32)
    made: dict[str, KernelBayesFilter | None] = {
        EXACT: exact,
        STEPS: single.fit(p.memory),
        QUERY: query,
        SOLVES: solves,
    }
    for name, jitter in ((FEATURES, 1e-10), (JITTER, 1e-6), (LANDMARKS, None)):
        try:
            states, observations = single_maps(p, tol, jitter)
            rule = PrimalUpdate(observations, p.memory.obs[:, None], REGS[2])
            made[name] = fitted(p, states(p.memory.states), rule)
        except NotPositiveDefiniteError:
            made[name] = None
    return made | {COARSE: coarse}


def fitted(p: Problem, features: Tensor, rule: nn.Module) -> KernelBayesFilter:
    """The filter of given features of the memory's states ``n r``; operators of the same dtype."""
    eta, reg_transition, _ = REGS
    transition = transition_operator_primal(features, transitions([len(features)]), reg_transition)
    return KernelBayesFilter(
        p.memory.states.to(features), transition, ratio_operator_primal(features, eta), rule
    )


def single_maps(p: Problem, tol: float, jitter: float | None) -> list[NystromFeatures]:
    """Features of states and observations in float32.

    At the landmarks of float64 with a jitter, or, for None, at landmarks of their own.
    """
    made = []
    for points, width in ((p.memory.states, p.bandwidths[1]), (p.memory.obs, p.bandwidths[2])):
        dtype = torch.float32 if jitter is None else torch.float64
        features = NystromFeatures(
            "gaussian", width.to(dtype), points.to(dtype), len(points), tol
        ).float()
        if jitter is not None:
            gram = gaussian(features.landmarks, features.landmarks, bandwidth=features.bandwidth)
            features.whiten = nystrom_whitening(gram, jitter=jitter)
        made.append(features)
    return made


@torch.no_grad()
def run(settings: Settings, tell: Tell) -> list[Row]:
    """Time of a step, difference and error of each variant at each tolerance."""
    p, device, rows = problem(settings["n"], steps=settings["steps"]), settings["device"], []
    truth = p.test.states.double()
    for tol in settings["tolerances"]:
        tell(f"tolerance {tol:g}")
        filters = {
            name: None if made is None else made.to(device)
            for name, made in variants(p, tol).items()
        }
        exact, estimates_of, sides = filters[EXACT], {}, {}
        assert exact is not None
        for name, each in filters.items():
            if each is not None:
                obs = p.test.obs[None].to(device, torch.float64 if name == EXACT else torch.float32)
                estimates_of[name] = rollout(each, obs).estimates[0].cpu().double()
                sides[name] = stepper(RunningFilter(each), obs[0])
        tell(f"tolerance {tol:g}: time of a step")
        seconds = alternate(sides, rounds=settings["rounds"], seconds=settings["seconds"])
        least = (estimates_of[EXACT] - truth).square().sum(-1).mean()
        for name, each in filters.items():
            estimates = estimates_of.get(name, torch.full_like(truth, torch.nan))
            states, observations = p.ranks(exact if each is None else each)
            row: Row = {
                "in float32": name,
                "tolerance": tol,
                "ranks": f"{states} and {observations}",
            }
            row |= {
                "microseconds": 1e6 * seconds.get(name, float("nan")),
                "finite": bool(estimates.isfinite().all()),
            }
            row["largest difference"] = largest(estimates, estimates_of[EXACT])
            rows.append(
                row
                | {
                    "error above float64": (
                        (estimates - truth).square().sum(-1).mean() / least - 1
                    ).item()
                }
            )
    return rows


def claims(rows: list[Row]) -> list[Claim]:
    """Whether float32 steps are accurate enough, and the error of each low-precision part."""
    verdicts = []
    for name in dict.fromkeys(row["in float32"] for row in rows if row["in float32"] != EXACT):
        mine = [row for row in rows if row["in float32"] == name]
        good = [row["largest difference"] for row in mine if row["finite"]]
        failed = [f"{row['tolerance']:g}" for row in mine if not row["finite"]]
        words = [f"differs by {max(good):.2g}"] if good else []
        words += [f"fails at {', '.join(failed)}"] if failed else []
        reached = not failed and max(good) <= 1e-4 if name == STEPS else None
        target = f"float32 in {name}" + (
            ": estimates equal to 1e-4 at every tolerance" if name == STEPS else ""
        )
        verdicts.append(Claim(target, ", ".join(words), reached))
    return verdicts


def draw(rows: list[Row]) -> Figure:
    """Difference to all in float64 against the tolerance.

    a variant that fails has no point there.
    """
    return curves(
        [row for row in rows if row["in float32"] != EXACT],
        x="tolerance",
        y="largest difference",
        by="in float32",
        log="xy",
        xlabel="tolerance of the features",
        ylabel="largest difference of the estimates",
        title="float32 against float64, part by part",
    )

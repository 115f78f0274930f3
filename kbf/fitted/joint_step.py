"""`step_together`: one step of several running filters of a checkpoint, as one batch.

The step of one filter consists of many operations on small tensors, which take nearly as long for
one filter as for ten. Estimates of a batch equal those of single steps up to rounding.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kbf.evaluation.alarms import WINDOW, Check, Monitor
from kbf.filters.gating import GatedState, is_observed
from kbf.fitted.online_estimator import OnlineEstimator, StepInputs, concatenated
from kbf.fitted.results import Result


@torch.inference_mode()
def step_together(estimators: Sequence[OnlineEstimator], inputs: Sequence[StepInputs]) -> Result:
    """Predict and update each filter; return estimates, covariances and alarms, one row for each.

    A track that has diverged starts again from the prior, as in `OnlineEstimator.advance`. No
    filter is changed if an error is raised.

    Args:
        estimators: of one checkpoint, not compiled; more than one only of a filter without random
            numbers (`draws`).
        inputs: of each, with observations ``1 *x`` and the controls ``1 k`` of the move.
    """
    first, lives = estimators[0], [each.live for each in estimators]
    obs = torch.cat([each.obs for each in inputs if each.obs is not None])
    controls = [each.control for each in inputs if each.control is not None]
    predicted: list[Any] = []
    after = first.live.gate.step(
        GatedState(concatenated([live.state for live in lives]), counts_of(estimators)),
        obs,
        control=torch.cat(controls) if controls else None,
        before=None if first.monitor is None else lambda state, *_: predicted.append(state),
    )
    alarms, recent = [""] * len(obs), None
    if first.monitor is not None:
        alarms, recent = alarms_of(first.monitor, estimators, predicted[0], obs)
    counts: list[Tensor | None] = [None] * len(obs)
    if after.rejections is not None:
        counts = [each.clone() if bool(each) else None for each in after.rejections.split(1)]
    rejected = [False] * len(obs)
    if after.rejected is not None:
        observed = is_observed(first.filter, obs).to(after.rejected.device)
        rejected = (after.rejected & observed).tolist()
    states = rows_of(after.inner)
    lost = [k for k, alarm in enumerate(alarms) if alarm == "diverged"]
    kept = [(live.state, live.rejections, live.rejected) for live in lives]
    recents = [each.recent for each in estimators]
    try:  # these first: only they can raise an error
        for k in lost:
            estimators[k].restart()
            lives[k].step(inputs[k].obs, inputs[k].control)
            states[k] = lives[k].state
    except Exception:
        for k in lost:
            lives[k].state, lives[k].rejections, lives[k].rejected = kept[k]
            estimators[k].recent = recents[k]
        raise
    for k, each in enumerate(estimators):
        each.alarms += alarms[k] != ""
        if alarms[k] != "diverged":
            each.live.state = states[k]
            each.live.rejections = counts[k]
            each.live.rejected += int(rejected[k])
            each.recent = None if recent is None else recent[k].clone()
    state = concatenated(states) if "diverged" in alarms else after.inner
    C = first.covariances(state)
    return Result(
        first.filter.estimate(state).double().cpu(),
        None if C is None else C.double().cpu(),
        None if first.monitor is None else alarms,
        {},
    )


def alarms_of(
    monitor: Monitor, estimators: Sequence[OnlineEstimator], predicted: Any, obs: Tensor
) -> tuple[list[str], Tensor]:
    """Return the alarm of each filter, and the last scores ``b WINDOW`` of the monitor."""
    unknown = monitor.obs.new_full((WINDOW,), torch.nan)
    recent = torch.stack([unknown if e.recent is None else e.recent for e in estimators])
    seen = ~obs.isnan().flatten(1).any(1)
    if not bool(seen.all()):
        obs = torch.where(seen.view(-1, *[1] * (obs.ndim - 1)), obs, 0)
    last = Check(*[recent[:, 0]] * 4, recent=recent)  # only the scores are used
    checks = monitor.check(estimators[0].filter, predicted, obs, last=last, mask=seen)
    return checks.names(monitor.rate), checks.recent


def counts_of(estimators: Sequence[OnlineEstimator]) -> Tensor | None:
    """Return the consecutive rejections of each filter; None if they are all 0."""
    counts = [each.live.rejections for each in estimators]
    known = [each for each in counts if each is not None]
    if not known:
        return None
    return torch.cat([torch.zeros_like(known[0]) if each is None else each for each in counts])


def rows_of(state: Any) -> list[Any]:
    """Return the states of single recordings, each in memory of its own."""
    leaves = [leaf.split(1) for leaf in state]
    if len(leaves[0]) == 1:
        return [state]
    return [type(state)(*(row.clone() for row in rows)) for rows in zip(*leaves, strict=True)]

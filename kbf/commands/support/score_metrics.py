"""Metrics of a trained filter on the test part, as the flat keys of ``metrics.json``."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from kbf.data.dataset import Data
from kbf.evaluation.calibration import Calibration, no_covariances
from kbf.evaluation.metrics import nmse, summary
from kbf.evaluation.score import Score, score
from kbf.evaluation.scoring_rules import Reliability, reliability
from kbf.filters.selection.auto import ModelSelection
from kbf.fitted.checkpoint import Trained
from kbf.recording import Recording

# First steps of each recording that ``test.mse_settled`` leaves out.
SETTLING_STEPS = 10


class ScoredRun(NamedTuple):
    """Scores of a filter on the test part.

    Attributes:
        result: estimates, errors and recalibrated covariances.
        reliabilities: of the raw and of the recalibrated covariances (`reliability_of`).
        metrics: flat keys.
    """

    result: Score
    reliabilities: dict[str, Reliability]
    metrics: dict[str, float | None]


def score_test_part(trained: Trained, data: Data, floor: Score | None, seed: int) -> ScoredRun:
    """Score a trained filter on the test part, with its calibration and its monitor.

    The monitor changes no estimate, but it requires the sequential loop, whose rounding in float32
    differs from that of the parallel one. It is used in training and evaluation alike, so that both
    have equal scores.

    Args:
        trained: filter and calibration.
        data: its test part is scored.
        floor: scores of the Bayes-optimal filter; None where it is not known.
        seed: of filters that draw.
    """
    module, monitor = trained.module, trained.monitor
    result = score(
        trained.filter,
        data.test,
        covariances=True,
        seed=seed,
        dtype=module.input_dtype,
        device=module.device,
        watch=None if monitor is None else monitor.check,
    )
    reliabilities = reliability_of(result, data.test, trained.calibration)
    metrics = score_metrics(result, floor, data.test) | reliability_metrics(reliabilities)
    return ScoredRun(recalibrated(result, trained.calibration), reliabilities, metrics)


def selected_filter(trained: Trained) -> str:
    """Return the name of the filter that is used: the model's, or what model selection chose.

    An average is the names of its members, joined by " + ".
    """
    net = trained.module.net
    if isinstance(net, ModelSelection) and net.used() != [net.main_name]:
        return " + ".join(net.used())
    return trained.module.config["model"]["name"]


def score_metrics(
    result: Score, floor: Score | None, recordings: list[Recording]
) -> dict[str, float | None]:
    """Return error, floor, excess error, NMSE and diagnostics of a scored run.

    ``test.nmse`` is the mean over components of `kbf.evaluation.metrics.nmse` over all test steps,
    ``test.nmse.0`` that of the first component. Values that are not known are None: the floor
    without a true model, the standard error of a single recording.
    """
    floors = [None] * len(result.mse) if floor is None else floor.mse.tolist()
    figures = summary(result.mse.tolist(), floors)
    values = {
        "test.mse": figures["mse"],
        "test.mse_se": figures["se"],
        "test.floor": None if floor is None else floor.mse.mean().item(),
        "test.excess": figures["excess"],
    }
    values["test.mse_settled"] = settled_error(result, recordings)
    states = torch.cat([r.states.double() for r in recordings])
    by_component = nmse(torch.cat(result.estimates), states)
    values["test.nmse"] = by_component.nanmean().item()
    values |= {f"test.nmse.{k}": value for k, value in enumerate(by_component.tolist())}
    values |= {f"test.{name}": value for name, value in result.diagnostics.items()}
    return {name: None if value != value else value for name, value in values.items()}


def settled_error(result: Score, recordings: list[Recording]) -> float:
    """Return the error without the first `SETTLING_STEPS` of each recording; NaN of shorter ones.

    It is the mean over the remaining steps with a known state, each counted once.
    """
    pairs = zip(recordings, result.estimates, strict=True)
    left = [(r.states.double() - z)[SETTLING_STEPS:] for r, z in pairs]
    return torch.cat(left).square().sum(-1).nanmean().item()


def reliability_of(
    result: Score, recordings: list[Recording], calibration: Calibration | None
) -> dict[str, Reliability]:
    """Return the reliability of the covariances: raw (key "raw") and recalibrated (key "").

    Without a calibration only "raw"; for a filter without covariances only "", with those of its
    held-out errors.
    """
    if result.covariances is None and calibration is None:
        return {}
    states = [r.states.double() for r in recordings]
    spreads = result.covariances or list(map(no_covariances, result.estimates))
    z, m, C = (torch.cat(parts) for parts in (states, result.estimates, spreads))
    known = z.isfinite().all(-1)
    if not known.any():
        return {}
    energies = None if result.energies is None else torch.cat(result.energies)[known]
    found = {}
    if result.covariances is not None:
        found["raw"] = reliability(z[known], m[known], C[known], energies=energies)
    if calibration is not None:
        found[""] = reliability(z[known], m[known], C[known], calibration)
    return found


def recalibrated(result: Score, calibration: Calibration | None) -> Score:
    """Return the scores with recalibrated covariances, where there is a calibration."""
    if calibration is None:
        return result
    spreads = result.covariances or list(map(no_covariances, result.estimates))
    return result._replace(covariances=[calibration.covariance(C) for C in spreads])


def reliability_metrics(reliabilities: Mapping[str, Reliability]) -> dict[str, float]:
    """Return reliabilities as flat keys, as ``test.coverage_95``; raw ones end with ``_raw``."""
    return {
        f"test.{key}{name and f'_{name}'}": value
        for name, each in reliabilities.items()
        for key, value in each.numbers.items()
    }

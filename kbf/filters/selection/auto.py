"""Model selection by blocked cross-validation: a main model, others, or an average of them.

`ModelSelection` fits a main model and its candidates to the recordings without a fold and runs them
through the blocks of that fold; the best ones are compared on the other folds as well. Candidates
are compared in the order of their cost, so that a budget leaves out the slowest ones:

1. `BASELINES`: the mean, Kalman filters of linear models, ridge regression on a window. They take
   seconds and are compared whatever the budget.
2. `PUBLISHED`, the published filter over the recording itself, up to `MIN_STEPS_OF_LARGE_DATA`
   steps; it assumes no form of the conditional densities.
3. `LEARNED`, filters of a learned state-space model, from `MIN_STEPS_FOR_MORE` steps on.
4. The main model.
5. `SLOW`: boosted trees on a window and networks, each from `MIN_STEPS_FOR_SLOW` steps on.

The candidate with the least error is selected, or the average of the best ones
(`kbf.filters.selection.averaging`) if its error is below (1 - `MIN_GAIN_OF_AVERAGE`) times that.

With density ratios as observations (`kbf.densities.ratio`) the kernel Monte Carlo filter is
selected unless it cannot be fitted. Only this filter uses ratios, the others use their means, and
the ratios of the recordings, each from a single encoder, are less informative than those of new
images.

Before the comparison, drift detection (`kbf.filters.selection.drift`) may restrict the training
data to the most recent steps.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn

from kbf.data.windows import take, whole_folds, without
from kbf.densities.selected import DensityModel
from kbf.filters.ensemble import EnsembleFilter
from kbf.filters.gaussian.kalman import LearnedKalman
from kbf.filters.gaussian.learned_ukf import LearnedUKF
from kbf.filters.held import HeldReadings, check_held, held_by
from kbf.filters.kernel.kbf import KBF
from kbf.filters.kernel_monte_carlo.model import KernelMonteCarlo
from kbf.filters.neural.gru_ensemble import FittedGRU, FittedMamba
from kbf.filters.particle.learned import LearnedParticleFilter
from kbf.filters.protocols import Filter, RatioModel
from kbf.filters.regression.boosting import WindowBoosting
from kbf.filters.regression.window import MeanModel, WindowRidge
from kbf.filters.selection.averaging import averaged
from kbf.filters.selection.cross_validation import Part, Row, Search, deviation
from kbf.filters.selection.drift import last_steps, newest
from kbf.filters.selection.ratio_mean import RatioMean
from kbf.filters.selection.requirements import REQUIREMENTS, fit_meeting
from kbf.recording import Recording, as_recordings
from kbf.runtime.errors import FitError

# Baselines, as functions of a seed.
BASELINES: dict[str, Callable[[int], nn.Module]] = {
    "mean": lambda seed: MeanModel(),
    "kalman": lambda seed: LearnedKalman(),
    "kalman_velocity": lambda seed: LearnedKalman(order=2),
    "window_ridge": lambda seed: WindowRidge(None),
}
# Filters of a learned state-space model.
LEARNED: dict[str, Callable[[int], nn.Module]] = {
    "ukf_learned": lambda seed: LearnedUKF(),
    "particle_learned": lambda seed: LearnedParticleFilter(),
    "kernel_monte_carlo": lambda seed: KernelMonteCarlo(seed=seed),
}
# The last of them that is compared. (Checkpoints number the models in the order above.)
COSTLIEST = "particle_learned"
# The filter with a learned model and moving particles among them.
MOVING = "kernel_monte_carlo"
# Models that are slow to fit.
SLOW: dict[str, Callable[[int], nn.Module]] = {
    "window_boosting": lambda seed: WindowBoosting(None, seed=seed),
    "gru": lambda seed: FittedGRU(seed=seed),
    "mamba": lambda seed: FittedMamba(seed=seed),
}
# The filter of Xu et al. (2022), Algorithm 2, over the recording, with bandwidths from median
# distances: their grid takes long.
PUBLISHED: dict[str, Callable[[int], nn.Module]] = {
    "kbf_median": lambda seed: KBF(normalise=False, rank=128, learn=False),
}
# Parts of the recordings that are held out in turn; of several recordings these are whole, and may
# be fewer.
FOLDS = 5
# Steps below which the main model is used without a comparison.
MIN_STEPS_TO_COMPARE = 50
# Steps below which `LEARNED` is not compared: the scores of few blocks are too uncertain.
MIN_STEPS_FOR_MORE = 200
# Steps below which models of `SLOW` are not compared.
MIN_STEPS_FOR_SLOW = {"window_boosting": 500, "gru": 2001, "mamba": 5000}
# Steps above which only the second and the fifth fold are held out: fits are slow.
MIN_STEPS_OF_LARGE_DATA = 2000
# Share of the error of the best candidate by which that of the average must be smaller: a step of
# an average takes as long as those of all its members.
MIN_GAIN_OF_AVERAGE = 0.03
# Share of the time that is left which a candidate may take, the last two all of it.
SHARE_OF_TIME = 0.75

# Models that are compared on all folds; the others are left out after the first one. Baselines are
# compared in addition.
MAX_FINALISTS = 4


class ModelSelection(nn.Module):
    """Selects a main model, one of its competitors, or an average of the best ones.

    Before `prepare`, and with too little data, it is the main model.

    Attributes:
        weights: ``m d``, the weight of each model for each component of the state; empty before
            `prepare`.
        spreads: ``m d d``, covariances of the held-out errors of each model.
        scores: ``m``, NMSE on held-out blocks, -1 for models that were not compared.
        newest: the number of most recent steps that are trained on, 0 for all.
        held: ``q``, how sensors are held (`kbf.filters.held.held_by`); empty if none is looked
            for.
        candidates: the results of `prepare`, the best first; not stored in checkpoints.
        held_out_filters: the selected filter without each fold, and the fold; not stored in
            checkpoints.
        until: the end of the budget (a `time.perf_counter`), infinite without one.
    """

    def __init__(
        self,
        main: nn.Module,
        *,
        name: str = "main",
        seed: int = 0,
        budget: float | None = None,
        require: Sequence[str] = (),
        held: str | bool = "auto",
    ) -> None:
        """Select between ``main`` and the models of this module.

        Args:
            main: the main model.
            name: its name in tables.
            seed: of the models that draw random numbers.
            budget: seconds for `prepare`, the fit after it and the calibration, or None. Models
                other than `BASELINES` are stopped when the search ends, and one that would take
                longer, by its first fold, is stopped early. The main model is no exception.
            require: what candidates must meet
                (`kbf.filters.selection.requirements.REQUIREMENTS`). An average cannot
                sample paths (`kbf.filters.smoothing.sample_paths`): smooth selects a single model.
            held: whether exact repeats of readings are missing readings: True for those of all
                sensors, False for none, auto for those that `kbf.filters.held.held_sensors` finds.

        Raises:
            ValueError: an unknown requirement, or another value of ``held``.
        """
        super().__init__()
        self.finds_held: str | bool = check_held(held)
        self.budget, self.require = budget, tuple(require)
        if unknown := [name for name in require if name not in REQUIREMENTS]:
            raise ValueError(f"require: {unknown[0]!r} is none of {', '.join(REQUIREMENTS)}")
        self.main_name: str = name.replace(".", "_")  # a module's name has no dots
        makers = BASELINES | LEARNED | PUBLISHED | SLOW
        others = {key: make(seed) for key, make in makers.items() if key != self.main_name}
        if isinstance(main, DensityModel):
            for each in others.values():
                if isinstance(each, DensityModel):
                    each.share_densities(main)
                if isinstance(each, KernelMonteCarlo):
                    each.fitted = main.densities.fitted
                    each.sensors.fitted = main.densities.sensors.fitted
        self.models: nn.ModuleDict = nn.ModuleDict({self.main_name: main, **others})
        self.weights: Tensor = nn.Buffer(torch.zeros(0, dtype=torch.float64))
        self.spreads: Tensor = nn.Buffer(torch.zeros(0, dtype=torch.float64))
        self.scores: Tensor = nn.Buffer(torch.zeros(0, dtype=torch.float64))
        self.newest: Tensor = nn.Buffer(torch.tensor(0))
        self.held: Tensor = nn.Buffer(torch.zeros(0, dtype=torch.long))
        self.ratio_dim = 0
        self.candidates: list[Row] = []
        self.until: float = torch.inf
        self.held_out_filters: list[tuple[Filter[Any], list[Recording]]] = []

    @property
    def main(self) -> Any:
        """The main model."""
        return self.models[self.main_name]

    @property
    def allow_missing_sensors(self) -> bool:
        """Whether sensors may be missing; models that require all sensors are not compared then."""
        return getattr(self.main, "allow_missing_sensors", False)

    @allow_missing_sensors.setter
    def allow_missing_sensors(self, value: bool) -> None:
        for each in self.models.values():
            if hasattr(each, "allow_missing_sensors"):
                setattr(each, "allow_missing_sensors", value)  # noqa: B010 - a module's attribute

    def adapted(self, model: Any) -> Any:
        """Return the model for observations that are density ratios or have repeats, if they do."""
        if bool(self.held.any()) and hasattr(model, "allow_missing_sensors"):
            return HeldReadings(model, self.held)
        if isinstance(model, RatioModel):
            model.ratio_dim = self.ratio_dim
            return model
        return RatioMean(model, self.ratio_dim) if self.ratio_dim else model

    @torch.no_grad()
    def prepare(self, memory: list[Recording], generator: Generator | None = None) -> None:
        """Prepare the main model, compare the candidates, and select.

        The ``prepare`` of each model selects its settings (densities, orders, lags) on all
        recordings; all models are fitted without the fold that they are scored on.
        """
        started = time.perf_counter()
        self.until = torch.inf if self.budget is None else started + self.budget
        vectors = len(memory) > 0 and memory[0].obs.ndim == 2 and not self.ratio_dim
        self.held = held_by(self.finds_held, memory) if vectors else self.held[:0]
        memory = self.select_newest(memory)
        recordings, parts = self.held_out(memory)
        main = self.adapted(self.main)
        if not parts:
            main.prepare(memory, generator)
            return
        scale = torch.cat([s.states for s in recordings]).double().var(0, correction=0)
        search = Search(parts, scale, self.budget, started)
        suitable = [
            name
            for name, each in self.models.items()
            if not self.allow_missing_sensors or getattr(each, "allow_missing_sensors", False)
        ]

        def attempt(names: Iterable[str]) -> None:
            names = [name for name in names if name in suitable]
            for k, name in enumerate(names):
                model = self.adapted(self.models[name])
                search.attempt(
                    name,
                    partial(fit_meeting, model, self.require),
                    prepare=partial(model.prepare, recordings, generator),
                    timed=name not in BASELINES,
                    share=1.0 if len(names) - k <= 2 else SHARE_OF_TIME,
                )
            search.finish(MAX_FINALISTS)

        if self.ratio_dim:
            attempt([MOVING])
        if not search.found:
            attempt(self.in_order(sum(len(s.states) for s in recordings)))
        if not search.found:
            main.prepare(memory, generator)
            return
        self.select(search)
        selected = self.filters_of({name: each.filters for name, each in search.found.items()})
        pairs = zip(selected, search.parts, strict=True)
        self.held_out_filters = [(filter, fold) for filter, (_, fold) in pairs]
        self.candidates = search.table()

    def in_order(self, total: int) -> list[str]:
        """Return the candidates for ``total`` steps in the order of their cost."""
        large = total > MIN_STEPS_OF_LARGE_DATA
        published = not large and self.main_name not in PUBLISHED and not self.allow_missing_sensors
        return [
            *BASELINES,
            *(PUBLISHED if published else ()),
            *(sorted(LEARNED, key=COSTLIEST.__eq__) if total >= MIN_STEPS_FOR_MORE else ()),
            self.main_name,
            *(name for name in SLOW if total >= MIN_STEPS_FOR_SLOW[name]),
        ]

    def held_out(self, memory: list[Recording]) -> tuple[list[Recording], list[Part]]:
        """Return the recordings and their folds, each with the rest.

        There is no fold if the models cannot be compared on these recordings.
        """
        if not self.compares(memory):
            return [], []
        recordings = as_recordings(memory, allow_missing_sensors=self.allow_missing_sensors)
        lengths = [len(s.states) for s in recordings]
        total = sum(lengths)
        if total < MIN_STEPS_TO_COMPARE:
            return recordings, []
        try:
            spans = whole_folds(lengths, FOLDS)
        except FitError:
            return recordings, []
        few = spans[1::3] if total > MIN_STEPS_OF_LARGE_DATA and len(spans) == FOLDS else spans
        return recordings, [(without(recordings, each), take(recordings, each)) for each in few]

    def compares(self, memory: list[Recording]) -> bool:
        """Whether all models accept such data: neither images nor missing observations."""
        vectors = len(memory) > 0 and memory[0].obs.ndim == 2
        return vectors and (
            self.allow_missing_sensors or all(bool(s.obs.isfinite().all()) for s in memory)
        )

    def select_newest(self, memory: list[Recording]) -> list[Recording]:
        """Set `newest` by drift detection; return the steps that are trained on.

        The ridge regression on a window proposes the number of steps, the main model confirms it.
        """
        self.newest.zero_()
        ridge = WindowRidge()
        ridge.allow_missing_sensors = self.allow_missing_sensors
        if self.compares(memory):
            recordings = as_recordings(memory, allow_missing_sensors=self.allow_missing_sensors)
            self.newest.fill_(newest(recordings, [self.adapted(ridge), self.adapted(self.main)]))
        return self.kept(memory)

    def kept(self, memory: list[Recording]) -> list[Recording]:
        """The steps of ``memory`` that are trained on."""
        return last_steps(memory, int(self.newest))

    def select(self, search: Search) -> None:
        """Set weights, scores and covariances of errors from the results of a search."""
        names, found, scale = list(self.models), search.found, search.scale
        # Of equal ones the main model.
        best = min(found, key=lambda k: (float(found[k].scores.mean()), k != self.main_name))
        weights = {best: torch.ones_like(scale)}
        if len(found) > 1 and "smooth" not in self.require:
            shares, scores = averaged(found, scale)
            search.rows.append(Row("average", float(scores.mean()), deviation(scores), 0.0, ""))
            enough = (1 - MIN_GAIN_OF_AVERAGE) * float(found[best].scores.mean())
            if float(scores.mean()) < enough:
                weights = shares
        self.weights = torch.stack([weights.get(name, torch.zeros_like(scale)) for name in names])
        left = {name: torch.cat(each.residuals) for name, each in found.items()}
        none = torch.zeros_like(scale.diag())
        self.spreads = torch.stack(
            [left[k].mT @ left[k] / len(left[k]) if k in left else none for k in names]
        )
        self.scores = torch.stack(
            [found[k].scores.mean() if k in found else torch.full_like(scale[0], -1) for k in names]
        )

    def used(self) -> list[str]:
        """Names of the models that the filter consists of."""
        selected = (self.weights > 0).any(-1).tolist() if len(self.weights) else []
        names = [name for name, here in zip(self.models, selected, strict=False) if here]
        return names or [self.main_name]

    def filters_of(self, filters: dict[str, list[Filter[Any]]]) -> list[Filter[Any]]:
        """Combine the filters of the models in use, one for each memory."""
        names = self.used()
        if len(names) == 1:
            return filters[names[0]]
        rows = [list(self.models).index(name) for name in names]
        return [
            EnsembleFilter(
                dict(zip(names, each, strict=True)), self.weights[rows], self.spreads[rows]
            )
            for each in zip(*(filters[name] for name in names), strict=True)
        ]

    def fit(self, memory: Recording | list[Recording] | None) -> Filter[Any]:
        """Return the selected filter over ``memory``.

        Raises:
            ValueError: as the models'.
        """
        if memory is not None:
            memory = self.kept([memory] if isinstance(memory, Recording) else memory)
        models = {name: self.adapted(self.models[name]) for name in self.used()}
        return self.filters_of({name: [model.fit(memory)] for name, model in models.items()})[0]

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **named: Any
    ) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Overrides `nn.Module._load_from_state_dict`: later candidates than stored are not used.

        `weights` has a row for each candidate of the version that wrote it.
        """
        compared = len(state_dict.get(prefix + "weights", ()))
        for name in list(self.models)[max(1, compared) :]:
            inside = f"{prefix}models.{name}."
            if not any(key.startswith(inside) for key in state_dict):
                own = self.models[name].state_dict(prefix=inside)
                state_dict.update({key: value.clone() for key, value in own.items()})
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)

    def hyperparameters(self) -> dict[str, float]:
        """Return those of the selected models, the weights, and the NMSE of all candidates."""
        numbers: dict[str, float] = {"newest": float(self.newest)} if int(self.newest) else {}
        if held := int((self.held > 0).sum()):
            numbers["held_sensors"] = float(held)
        for name in self.used():
            own: Any = getattr(self.models[name], "hyperparameters", dict)
            prefix = "" if name == self.main_name else f"{name}/"
            numbers |= {prefix + key: value for key, value in own().items()}
        for name, score, weight in zip(self.models, self.scores, self.weights, strict=False):
            if float(score) >= 0:
                numbers[f"held_out/{name}"] = float(score)
                numbers[f"weight/{name}"] = float(weight.mean())
        return numbers

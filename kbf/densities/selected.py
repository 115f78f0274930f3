"""The selected densities of a model, as a module that its checkpoint stores."""

import logging
from typing import Any

import torch
from torch import Generator, Tensor, nn

from kbf.densities.learned_ssm import LearnedModel, learn_model
from kbf.densities.per_sensor import SelectedSensors
from kbf.densities.ridge import RidgeMap, join_of
from kbf.densities.selection import COUNTS, DENSITIES, MAX_POINTS, Known, select_density
from kbf.recording import Recording, as_recordings, check_vectors, moves, observed_pairs
from kbf.runtime.html_repr import ShownModule

log: logging.Logger = logging.getLogger(__name__)
# p(z' | z) and p(x | z), rows of the buffers below.
SIDES = ("transition", "observation")


class SelectedDensities(nn.Module):
    """Densities of transitions and observations, given by name or selected (`choose`).

    Attributes:
        chosen: ``2``, positions in `kbf.densities.selection.DENSITIES` of the densities of
            transitions and observations; the Gaussian without a selection.
        scores: ``2 l``, the held-out log score of each density, nats per point.
        tried: ``2 l``, whether the density was a candidate.
        maps: ``2 3``, `kbf.densities.ridge.RidgeMap.selection` of the last densities that are
            Gaussian, -1 of others: a checkpoint is loaded without selecting their kernels again.
        fitted: the selected densities with the pairs that they are fitted to, so that they need not
            be fitted again.
        allow_missing_sensors: whether components of observations may be NaN. Each sensor then has
            its own density.
        sensors: these densities.
    """

    def __init__(self, transition: str | None = None, observation: str | None = None) -> None:
        """Take the names of densities, or None to select them by held-out log scores.

        Densities of counts are for observations only.

        Raises:
            ValueError: an unknown name, or a density of counts for transitions.
        """
        super().__init__()
        for side, name in zip(SIDES, (transition, observation), strict=True):
            if name is not None and name not in DENSITIES:
                raise ValueError(
                    f"{side} must be null (selected by held-out log score) or one of "
                    f"{', '.join(DENSITIES)}; got {name!r}"
                )
        if transition in COUNTS:
            raise ValueError(
                f"transition={transition}: counts are observations; "
                "a memory has states between whole numbers"
            )
        self.given: tuple[str | None, str | None] = (transition, observation)
        self.fitted: list[Known] = []
        # recordings of the last `choose`, and whether sensors were missing
        self.selected_for: tuple[Recording | list[Recording] | None, bool] = (None, False)
        # selected by `select_if_missing`, for the recordings at hand
        self.provisional: bool = False
        self.allow_missing_sensors: bool = False
        self.sensors: SelectedSensors = SelectedSensors()
        kept = None in self.given  # where both are given there is nothing to restore
        chosen = torch.tensor([DENSITIES.index(name or "gaussian") for name in self.given])
        none = torch.zeros(2, len(DENSITIES), dtype=torch.float64)
        self.chosen: Tensor = nn.Buffer(chosen, persistent=kept)
        self.scores: Tensor = nn.Buffer(none, persistent=kept)
        self.tried: Tensor = nn.Buffer(none.bool(), persistent=kept)
        self.maps: Tensor = nn.Buffer(torch.full((2, 3), -1))

    @property
    def names(self) -> tuple[str, str]:
        """Names of the densities of transitions and of observations."""
        transition_density, observation_density = (DENSITIES[k] for k in self.chosen.tolist())
        return transition_density, observation_density

    @property
    def kinds(self) -> tuple[str, str | SelectedSensors]:
        """The arguments of `kbf.densities.learned_ssm.learn_model`: names, or the sensors."""
        return self.names[0], self.sensors if self.sensors.known else self.names[1]

    def select_if_missing(self, memory: Recording | list[Recording]) -> None:
        """Call `choose` unless ``prepare`` or a checkpoint has selected the densities.

        Raises:
            ValueError: observations that are not vectors, or as `choose`.
        """
        check_vectors(
            as_recordings(memory, allow_missing_sensors=self.allow_missing_sensors),
            "a learned observation map",
        )
        open_still = None in self.given or self.allow_missing_sensors
        if open_still and (self.provisional or not (bool(self.tried.any()) or self.sensors.known)):
            self.choose(memory)
            self.provisional = True

    @torch.no_grad()
    def choose(self, memory: Recording | list[Recording]) -> None:
        """Select the densities that are not given. With controls, transitions are Gaussian.

        Models that share this module select once for the same list of recordings.

        Raises:
            ValueError: as `kbf.densities.selection.select_density`.
        """
        before, missing = self.selected_for
        if memory is before and missing == self.allow_missing_sensors:
            return
        self.selected_for = None, False  # also if a deadline ends the selection
        self.provisional = False
        recordings = as_recordings(memory, allow_missing_sensors=self.allow_missing_sensors)
        if self.allow_missing_sensors:
            self.sensors.choose(*observed_pairs(recordings), self.given[1])
        # other models may share the list
        self.fitted[:] = self.select_open(recordings) if None in self.given else []
        self.selected_for = memory, self.allow_missing_sensors

    def select_open(self, recordings: list[Recording]) -> list[Known]:
        """Select the densities that are not given; return those that are fitted to all points.

        A density in `fitted` of the same points is not selected again.
        """
        found: list[Known] = []
        source, target, u = moves(recordings)
        pairs = (
            (source if u is None else join_of(source, u)(source, u), target),
            observed_pairs(recordings),
        )
        for k, (side, (inputs, outputs)) in enumerate(zip(SIDES, pairs, strict=True)):
            if self.given[k] is not None:
                continue
            self.chosen[k], self.tried[k] = DENSITIES.index("gaussian"), False
            if (
                outputs.ndim != 2
                or (k == 0 and u is not None)
                or (k == 1 and self.allow_missing_sensors)
            ):
                continue
            own = next((each for each in self.fitted if each.fits(inputs, outputs)), None)
            choice = select_density(inputs, outputs, counts=k == 1) if own is None else own.choice
            log.info("density of %s: %s", side, choice)
            if len(inputs) <= MAX_POINTS:  # all points were used
                found.append(Known(choice, inputs.double(), outputs.double()))
                self.fitted.append(found[-1])
            self.chosen[k] = DENSITIES.index(choice.name)
            self.scores[k] = torch.tensor([choice.scores.get(name, 0.0) for name in DENSITIES])
            self.tried[k] = torch.tensor([name in choice.scores for name in DENSITIES])
        return found

    def hyperparameters(self) -> dict[str, float]:
        """Held-out log scores of the candidates, and the position of the selected one.

        Empty if both densities are given.
        """
        if None not in self.given:
            return {}
        numbers = {}
        for side, chosen, scores, tried in zip(
            SIDES, self.chosen.tolist(), self.scores.tolist(), self.tried.tolist(), strict=True
        ):
            numbers[f"density/{side}"] = float(chosen)
            numbers |= {
                f"density/{side}/{name}": scores[k] for k, name in enumerate(DENSITIES) if tried[k]
            }
        return numbers | self.sensors.hyperparameters()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **named: Any
    ) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Overrides `nn.Module._load_from_state_dict`: buffers that are missing keep their values.

        Raises:
            ValueError: unknown densities.
        """
        selected = ("chosen", "scores", "tried") if None in self.given else ()
        for name in ("maps", *selected):
            state_dict.setdefault(prefix + name, getattr(self, name).clone())
        stored = state_dict.get(prefix + "chosen", self.chosen)
        if not bool(((stored >= 0) & (stored < len(DENSITIES))).all()):
            raise ValueError(
                f"this model was stored with densities {stored.tolist()}; "
                f"there are 0 to {len(DENSITIES) - 1}"
            )
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)


class DensityModel(ShownModule):
    """Base class of models over a learned state-space model, whose densities are selected."""

    def __init__(self, transition: str | None = None, observation: str | None = None) -> None:
        """Take the names of densities, as in `SelectedDensities`."""
        super().__init__()
        self.densities: SelectedDensities = SelectedDensities(transition, observation)

    @property
    def allow_missing_sensors(self) -> bool:
        """Whether each sensor may be missing at any step."""
        return self.densities.allow_missing_sensors

    @allow_missing_sensors.setter
    def allow_missing_sensors(self, value: bool) -> None:
        self.densities.allow_missing_sensors = value

    def share_densities(self, other: "DensityModel") -> None:
        """Use the densities of another model with the same settings: they are selected once."""
        if self.densities.given == other.densities.given:
            self.densities = other.densities

    def prepare(self, memory: list[Recording], generator: Generator | None = None) -> None:
        """Select transition and observation density."""
        self.densities.choose(memory)

    def hyperparameters(self) -> dict[str, float]:
        """Return the selected densities and their scores, for loggers."""
        return self.densities.hyperparameters()

    def learned(self, recordings: list[Recording]) -> LearnedModel:
        """Fit the state-space model, with the selected densities, to recordings."""
        self.densities.select_if_missing(recordings)
        own = self.densities
        selections = [tuple(row) for row in own.maps.tolist()]
        model = learn_model(recordings, own.kinds, own.fitted, selections)
        for row, density in zip(own.maps, (model.transition, model.observation), strict=True):
            selected = density.selection if isinstance(density, RidgeMap) else ()
            row.copy_(torch.tensor(selected or (-1, -1, -1)))
        return model

"""The laws that a model has chosen for its recordings, as a part of it that its checkpoint keeps."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from kbf.filters.base import check_vectors
from kbf.filters.laws.choice import COUNTS, LAWS, MOST, Known, choose_law
from kbf.filters.laws.gaussian import GaussianLaw
from kbf.filters.laws.sensors import ChosenSensors
from kbf.filters.ridge_map import join_of
from kbf.sequence import Sequence, as_sequences, moves, observed_pairs

log: logging.Logger = logging.getLogger(__name__)
SIDES = ("transition", "observation")
"""p(z' | z) and p(x | z), rows of the buffers below."""


class ChosenLaws(nn.Module):
    """Which law moves and observations follow: the best on what is held out (`choose`), or as it is told.

    Attributes:
        chosen: ``2``, positions in `kbf.filters.laws.choice.LAWS`, of moves and observations; Gaussian where there was no choice.
        scores: ``2 l``, the held-out log score of each law, nats a point. tried: ``2 l``, whether there is one.
        fitted: the chosen laws of the recordings they were chosen for, to be used without another fit.
        partial: whether sensors may be silent one by one, NaN in columns of an observation. sensors: then each has a law of its
            own, in place of the one of observations.
    """

    chosen: Tensor
    scores: Tensor
    tried: Tensor
    partial: bool

    def __init__(self, transition: str | None = None, observation: str | None = None) -> None:
        """Names of laws, or None for the best on what is held out; laws of counts are of observations.

        Raises:
            ValueError: an unknown name, or a law of counts for moves.
        """
        super().__init__()
        for side, name in zip(SIDES, (transition, observation), strict=True):
            if name is not None and name not in LAWS:
                raise ValueError(f"{side} must be null (the best law is chosen) or one of {', '.join(LAWS)}; got {name!r}")
        if transition in COUNTS:
            raise ValueError(f"transition={transition}: counts are observations; a memory has states between whole numbers")
        self.told: tuple[str | None, str | None] = (transition, observation)
        self.fitted: list[Known] = []
        self.provisional = False  # chosen by `settle`, for the recordings at hand
        self.partial, self.sensors = False, ChosenSensors()
        kept = None in self.told  # where both are given there is nothing to restore
        self.register_buffer("chosen", torch.tensor([LAWS.index(name or "gaussian") for name in self.told]), persistent=kept)
        self.register_buffer("scores", torch.zeros(2, len(LAWS), dtype=torch.float64), persistent=kept)
        self.register_buffer("tried", torch.zeros(2, len(LAWS), dtype=torch.bool), persistent=kept)

    @property
    def names(self) -> tuple[str, str]:
        """Of the laws of moves and of observations."""
        moves_law, observation_law = (LAWS[k] for k in self.chosen.tolist())
        return moves_law, observation_law

    @property
    def kinds(self) -> tuple[str, str | ChosenSensors]:
        """What `kbf.filters.learned_model.learn_model` is to fit: the names, or the sensors with theirs."""
        return self.names[0], self.sensors if self.sensors.known else self.names[1]

    def settle(self, memory: Sequence | list[Sequence]) -> None:
        """`choose`, unless ``prepare`` or a checkpoint did: a filter made without has laws that suit its recordings, too.

        Raises:
            ValueError: observations that are no vectors, or as `choose`.
        """
        check_vectors(as_sequences(memory, partial=self.partial), "a learned observation map")
        open_still = None in self.told or self.partial
        if open_still and (self.provisional or not (bool(self.tried.any()) or self.sensors.known)):
            self.choose(memory)
            self.provisional = True

    @torch.no_grad()
    def choose(self, memory: Sequence | list[Sequence]) -> None:
        """Choose those that were left open. Where there are controls, moves stay Gaussian.

        Raises:
            ValueError: as `kbf.filters.laws.choice.choose_law`.
        """
        self.fitted, self.provisional = [], False
        sequences = as_sequences(memory, partial=self.partial)
        if self.partial:
            self.sensors.choose(*observed_pairs(sequences), self.told[1])
        if None not in self.told:
            return
        source, target, u = moves(sequences)
        pairs = (source if u is None else join_of(source, u)(source, u), target), observed_pairs(sequences)
        for k, (side, (inputs, outputs)) in enumerate(zip(SIDES, pairs, strict=True)):
            if self.told[k] is not None:
                continue
            self.chosen[k], self.tried[k] = LAWS.index("gaussian"), False
            if outputs.ndim != 2 or (k == 0 and u is not None) or (k == 1 and self.partial):
                continue
            choice = choose_law(inputs, outputs, counts=k == 1)
            log.info("law of %s: %s", side, choice)
            if len(inputs) <= MOST:  # all points were looked at
                law = choice.law.map if isinstance(choice.law, GaussianLaw) else choice.law
                self.fitted.append(Known(choice.name, inputs.double(), outputs.double(), law))
            self.chosen[k] = LAWS.index(choice.name)
            self.scores[k] = torch.tensor([choice.scores.get(name, 0.0) for name in LAWS])
            self.tried[k] = torch.tensor([name in choice.scores for name in LAWS])

    def hyperparameters(self) -> dict[str, float]:
        """Held-out log scores of the laws that were tried and the place of the chosen one among all; empty if both were given."""
        if None not in self.told:
            return {}
        numbers = {}
        for side, chosen, scores, tried in zip(SIDES, self.chosen.tolist(), self.scores.tolist(), self.tried.tolist(), strict=True):
            numbers[f"law/{side}"] = float(chosen)
            numbers |= {f"law/{side}/{name}": scores[k] for k, name in enumerate(LAWS) if tried[k]}
        return numbers | self.sensors.hyperparameters()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any, **named: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As always; what was stored before there was a choice is Gaussian.

        Raises:
            ValueError: laws that there are not.
        """
        for name in ("chosen", "scores", "tried") if None in self.told else ():
            state_dict.setdefault(prefix + name, getattr(self, name).clone())
        stored = state_dict.get(prefix + "chosen", self.chosen)
        if not bool(((stored >= 0) & (stored < len(LAWS))).all()):
            raise ValueError(f"this model was stored with laws {stored.tolist()}; there are 0 to {len(LAWS) - 1}")
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)

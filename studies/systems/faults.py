"""Sensors that fail or stick for a while: a Markov chain of each sensor, filtered exactly.

A sensor works, has failed or is stuck. Working, it reads x_j ~ p(x_j | z); failed, it reads a
number that is uniform on its range; stuck, it repeats its last reading. Chains of different sensors
are independent, so that their conditional distributions given the states up to t follow from the
forward recursion, sensor by sensor.

References: Rabiner (1989), A tutorial on hidden Markov models, equations 18 to 20.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

# The conditions of a sensor, as positions in the last dimension of its probabilities.
WORKS, FAILED, STUCK = 0, 1, 2


class Faults(NamedTuple):
    """The chain of each sensor.

    Attributes:
        transition: ``3 3``, rows sum to 1.
        low, high: ``q``, the range of the readings of a failed sensor.
        step: ``q``, the distance of two readings of discrete sensors; 0 for continuous ones.
    """

    transition: Tensor
    low: Tensor
    high: Tensor
    step: Tensor

    def start(self, batch: int) -> Float[Tensor, "b q 3"]:
        """Return the probabilities at the start: all sensors work."""
        working = torch.zeros(batch, len(self.low), 3, dtype=torch.float64)
        working[..., WORKS] = 1
        return working

    def drawn(
        self, probabilities: Float[Tensor, "b q 3"], generator: Generator | None = None
    ) -> Float[Tensor, "b q 3"]:
        """Return conditions that are drawn: one probability is 1, the others are 0."""
        rows = probabilities.flatten(0, 1)
        drawn = torch.multinomial(rows, 1, generator=generator)
        return torch.zeros_like(rows).scatter_(1, drawn, 1.0).view_as(probabilities)

    def reading(
        self,
        condition: Float[Tensor, "b q 3"],
        working: Float[Tensor, "b q"],
        before: Float[Tensor, "b q"],
        generator: Generator | None = None,
    ) -> Float[Tensor, "b q"]:
        """Return the readings of sensors in known conditions.

        Args:
            condition: as `drawn` returns it. working: readings if all sensors work.
            before: readings of the step before, NaN where there are none.
        """
        u = torch.rand(working.shape, dtype=torch.float64, generator=generator)
        values = ((self.high - self.low) / self.step).round() + 1
        discrete = self.low + self.step * (u * values).floor()
        noise = torch.where(self.step > 0, discrete, self.low + (self.high - self.low) * u)
        found = torch.where(condition[..., FAILED] == 1, noise, working)
        return torch.where((condition[..., STUCK] == 1) & before.isfinite(), before, found)

    def update(
        self,
        prior: Float[Tensor, "p q 3"],
        log_working: Float[Tensor, "p q"],
        x: Float[Tensor, " q"],
        before: Float[Tensor, " q"],
    ) -> tuple[Float[Tensor, "p q"], Float[Tensor, "p q 3"]]:
        """Return log p(x_j | z) and the probabilities of the conditions given x_j, of p states.

        A continuous reading equals the one before if, and only if, the sensor is stuck. A stuck
        sensor without a reading before it reads as one that works.

        Args:
            prior: probabilities before x. log_working: log p(x_j | z) of a working sensor.
            x: the readings. before: those of the step before.
        """
        repeats = x == before
        logs = prior.log()
        width = torch.where(self.step > 0, self.high - self.low + self.step, self.high - self.low)
        inside = (x >= self.low - 1e-9) & (x <= self.high + 1e-9)
        size = torch.where(self.step > 0, self.step, 1.0)
        log_failed = torch.where(inside, (size / width).log(), -torch.inf)
        log_stuck = torch.where(repeats, 0.0, -torch.inf).expand_as(log_working)
        log_stuck = torch.where(before.isnan(), log_working, log_stuck)
        sure = self.certain(repeats)
        terms = torch.stack(
            [
                torch.where(sure, -torch.inf, log_working),
                torch.where(sure, -torch.inf, log_failed).expand_as(log_working),
                log_stuck,
            ],
            -1,
        )
        joint = logs + terms
        total = joint.logsumexp(-1)
        possible = total > -torch.inf
        posterior = (joint - torch.where(possible, total, 0.0)[..., None]).exp()
        return total, torch.where(possible[..., None], posterior, prior)

    def certain(self, repeats: Bool[Tensor, " q"]) -> Bool[Tensor, " q"]:
        """Return which repeated readings are those of stuck sensors, without doubt."""
        return repeats & (self.step == 0) & (self.transition[WORKS, STUCK] > 0)

"""`System`: a state-space model of the grammar, its simulation, and the weights of a particle.

The latent state contains all that is random and persists: the states, the states of steps before
(late sensors), the regime, the gains and biases of sensors, and their conditions. Given the latent
state and the last readings, p(x_t | latent, x_{t-1}) is known, so that a particle filter of the
latent state is the Bayes-optimal filter. Conditions of sensors are summed out
(`studies.systems.faults`).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from kbf.recording import Recording
from studies.systems.faults import Faults
from studies.systems.motions import Motion
from studies.systems.noise import Noise
from studies.systems.sensors import Reading, Sensor

# Steps of a system before a recording begins, so that states have their stationary distribution.
BURN_IN = 200
# Correlation of gains and biases from step to step.
PERSISTENCE = 0.98
# Correlation of controls from step to step.
CONTROL_PERSISTENCE = 0.9


class Latent(NamedTuple):
    """The latent state of p particles, or of p recordings that are simulated.

    Attributes:
        z: ``p d``. past: ``p L d``, the states of the L steps before, the newest first.
        regime: ``p``, a number of each state's motion.
        log_gain: ``p q``. bias: ``p q``. Without such features they have no columns.
        faults: ``p q 3``, probabilities of the conditions of sensors; no columns without faults.
    """

    z: Tensor
    past: Tensor
    regime: Tensor
    log_gain: Tensor
    bias: Tensor
    faults: Tensor


@dataclass(frozen=True)
class System:
    """z' = f_k(z) + B u + noise + jump; x_j = gain_j h_j(z or an earlier z) + bias_j + noise.

    Attributes:
        d: components of the state.
        motions: f_k. stay: probability that the regime k stays.
        noise: of the move.
        jump_rate: probability of a jump; its size is log-uniform on (0.3, 3).
        B: ``d k``; k = 0 without controls.
        sensor: h. reading: the law of readings.
        late: ``q``, sensors that see the state of ``delay`` steps before.
        gain_spread: stationary standard deviation of log gains, 0 without.
        bias_spread: ``q``, of biases; empty without.
        faults: chains of the sensors' conditions, or None.
        held: ``q``, sensors that are read in every ``period``-th step, and repeat their reading.
        length: steps of a recording; None for a single recording.
        features: names of the features.
    """

    d: int
    motions: tuple[Motion, ...]
    stay: float
    noise: Noise
    jump_rate: float
    B: Tensor
    sensor: Sensor
    reading: Reading
    late: Tensor
    delay: int
    gain_spread: float
    bias_spread: Tensor
    faults: Faults | None
    held: Tensor
    period: int
    length: int | None
    features: tuple[str, ...]

    @property
    def q(self) -> int:
        """Number of readings."""
        return self.sensor.q

    @property
    def controlled(self) -> int:
        """Components of the control."""
        return self.B.shape[1]

    def start(self, p: int, generator: Generator | None = None) -> Latent:
        """Return p latent states from the distribution before the first step of a recording."""

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator)

        regime = torch.randint(len(self.motions), (p,), generator=generator)
        log_gain = self.gain_spread * normal(p, self.q if self.gain_spread else 0)
        bias = self.bias_spread * normal(p, len(self.bias_spread))
        z, past = normal(p, self.d), torch.zeros(p, self.delay, self.d, dtype=torch.float64)
        nothing = torch.zeros(p, 0, 3, dtype=torch.float64)
        s = Latent(z, past, regime, log_gain, bias, nothing)
        u = self.control_start(p, generator)
        for _ in range(BURN_IN):
            u = self.next_control(u, generator)
            s = self.move(s, u, generator)
        return s if self.faults is None else s._replace(faults=self.faults.start(p))

    def move(
        self, s: Latent, control: Float[Tensor, "p k"], generator: Generator | None = None
    ) -> Latent:
        """Draw the next latent state; of the conditions of sensors, the probabilities."""
        p = len(s.z)

        def normal(like: Tensor) -> Tensor:
            return torch.randn(like.shape, dtype=torch.float64, generator=generator)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, dtype=torch.float64, generator=generator)

        regime = s.regime
        if len(self.motions) > 1:
            regime = torch.where(uniform(p) < self.stay, regime, 1 - regime)
        z = self.moved(s.z, regime) + control @ self.B.mT + self.noise.draw((p,), generator)
        if self.jump_rate:
            size = (uniform(p, 1) * math.log(10)).exp() * 0.3
            z = z + torch.where(uniform(p, 1) < self.jump_rate, size * normal(z), 0)
        past = torch.cat([s.z[:, None], s.past], 1)[:, : self.delay]
        fresh = math.sqrt(1 - PERSISTENCE**2)
        log_gain, bias = s.log_gain, s.bias
        if self.gain_spread:
            log_gain = PERSISTENCE * log_gain + fresh * self.gain_spread * normal(log_gain)
        if len(self.bias_spread):
            bias = PERSISTENCE * bias + fresh * self.bias_spread * normal(bias)
        faults = s.faults if self.faults is None else s.faults @ self.faults.transition
        return Latent(z, past, regime, log_gain, bias, faults)

    def moved(self, z: Float[Tensor, "p d"], regime: Int[Tensor, " p"]) -> Float[Tensor, "p d"]:
        """Return f_k(z) of the regime k of each state."""
        found = self.motions[0].f(z)
        for k, motion in enumerate(self.motions[1:], 1):
            found = torch.where((regime == k)[:, None], motion.f(z), found)
        return found

    def expected(self, s: Latent) -> Float[Tensor, "p q"]:
        """Return the expectation of the readings of sensors that work."""
        mean = self.sensor.h(s.z)
        if self.delay:
            mean = torch.where(self.late, self.sensor.h(s.past[:, -1]), mean)
        if self.gain_spread:
            mean = mean * s.log_gain.exp()
        return mean + s.bias if len(self.bias_spread) else mean

    def is_read(self, t: int) -> Bool[Tensor, " q"]:
        """Return which sensors are read in step t of a recording, and do not hold a reading."""
        return ~self.held if t % self.period else torch.ones_like(self.held)

    def weigh(
        self, s: Latent, x: Float[Tensor, " q"], before: Float[Tensor, " q"], t: int
    ) -> tuple[Float[Tensor, " p"], Latent]:
        """Return log p(x_t | latent, x_{t-1}) and the latent state given x_t.

        Args:
            s: latent states before x. x: the readings of step t.
            before: those of step t - 1; NaN in the first step.
            t: step of the recording, from 0 on.
        """
        terms, read = self.reading.log_density(x, self.expected(s)), self.is_read(t)
        if self.faults is None:
            return torch.where(read, terms, 0).sum(-1), s
        total, faults = self.faults.update(s.faults, terms, x, before)
        faults = torch.where(read[:, None], faults, s.faults)
        return torch.where(read, total, 0).sum(-1), s._replace(faults=faults)

    def control_start(self, p: int, generator: Generator | None = None) -> Float[Tensor, "p k"]:
        """Return controls of unit variance."""
        return torch.randn(p, self.controlled, dtype=torch.float64, generator=generator)

    def next_control(
        self, u: Float[Tensor, "p k"], generator: Generator | None = None
    ) -> Float[Tensor, "p k"]:
        """Return u' = 0.9 u + sqrt(1 - 0.81) e."""
        fresh = math.sqrt(1 - CONTROL_PERSISTENCE**2)
        drawn = torch.randn(u.shape, dtype=torch.float64, generator=generator)
        return CONTROL_PERSISTENCE * u + fresh * drawn

    def simulate(self, recordings: int, steps: int, generator: Generator) -> list[Recording]:
        """Draw recordings of ``steps`` steps."""
        s, u = self.start(recordings, generator), self.control_start(recordings, generator)
        x = torch.full((recordings, self.q), torch.nan, dtype=torch.float64)
        rows: list[tuple[Tensor, Tensor, Tensor]] = []
        for t in range(steps):
            u = self.next_control(u, generator)
            s = self.move(s, u, generator)
            reading = self.reading.draw(self.expected(s), generator)
            if self.faults is not None:
                s = s._replace(faults=self.faults.drawn(s.faults, generator))
                reading = self.faults.reading(s.faults, reading, x, generator)
            x = torch.where(self.is_read(t), reading, x)
            rows.append((s.z, x, u))
        z, x, u = (torch.stack(each, 1) for each in zip(*rows, strict=True))
        controls = u if self.controlled else [None] * recordings
        return [Recording(z[k], x[k], None, controls[k]) for k in range(recordings)]

    def recordings(self, rows: int, generator: Generator) -> list[Recording]:
        """Draw recordings with about ``rows`` rows together: one, or several of `length`."""
        if self.length is None:
            return self.simulate(1, rows, generator)
        return self.simulate(max(2, round(rows / self.length)), self.length, generator)

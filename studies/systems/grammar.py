"""`draw_system`: a state-space system from a seed.

The dimension is uniform over `DIMENSIONS`; motion, sensor and laws of noise are drawn from their
tables; each of `FEATURES` is there with probability `SHARE`. A feature is drawn only where it
changes the data.
"""

from collections.abc import Collection, Sequence

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from studies.systems.draws import Draws
from studies.systems.faults import FAILED, STUCK, WORKS, Faults
from studies.systems.motions import MOTIONS, Motion
from studies.systems.noise import LAWS, Noise
from studies.systems.sensors import SENSORS, Reading, Sensor
from studies.systems.system import System

DIMENSIONS = (1, 2, 3, 5, 10, 20)
# Probability of each feature.
SHARE = 0.25
# Probability that a law of noise is Gaussian; otherwise one of the four others.
GAUSSIAN_SHARE = 0.5
FEATURES: dict[str, str] = {
    "jumps": "the state jumps in 1 to 5 % of the steps",
    "regimes": "two motions, each for about 50 steps",
    "controls": "known controls push the state",
    "joint_noise": "components of the noises are correlated",
    "late": "some sensors see the state of 1 to 4 steps before",
    "gains": "gains of sensors wander",
    "biases": "biases of sensors drift",
    "failing": "sensors fail one by one, each for about 10 steps",
    "sticking": "sensors stick one by one, each for about 10 steps",
    "held": "slow sensors: readings are repeated until the next one",
    "recordings": "several recordings in place of one",
}
# Steps of the simulation that determines the scale of readings.
STEPS_OF_SCALE = 500


def draw_system(
    seed: int,
    *,
    dimensions: Sequence[int] = DIMENSIONS,
    wanted: Collection[str] | None = None,
) -> System:
    """Return the system of a seed.

    Args:
        seed: of all draws.
        dimensions: that the dimension is drawn from.
        wanted: the features, in place of those that are drawn; features that do not act on the
            system are left out.

    >>> draw_system(3).d == draw_system(3).d
    True
    """
    draws = Draws(seed)
    d = draws.choice(dimensions)
    kinds = {"motion": draws.choice(motions_for(d)), "sensor": draws.choice(sensors_for(d))}
    sensor = SENSORS[kinds["sensor"]](d, draws)
    drawn = {name for name in FEATURES if draws.chance(SHARE)}
    drawn = drawn if wanted is None else set(wanted)
    features = tuple(name for name in FEATURES if name in drawn & possible(d, sensor, drawn))
    make = MOTIONS[kinds["motion"]]
    motions = tuple(make(d, draws) for _ in range(2 if "regimes" in features else 1))
    joint = "joint_noise" in features
    level = draws.log_uniform(*motions[0].levels)
    noise = Noise(law_for(draws), level * mixing(d, joint, draws))
    control_width = draws.choice((1, 2)) if "controls" in features else 0
    B = draws.uniform(1.0, 2.0) * level * draws.normal(d, control_width)
    delay = draws.choice((1, 2, 3, 4)) if "late" in features else 0
    late, held = some_of(sensor.q, draws), some_of(sensor.q, draws)
    jump_rate = draws.uniform(0.01, 0.05) if "jumps" in features else 0.0
    scale, low, high = spread_of(motions, noise, sensor, seed)
    relative = draws.log_uniform(0.05, 0.5)
    additive = sensor.reading != "counts"
    root = relative * scale[:, None] * mixing(sensor.q, joint and additive, draws)
    step = scale * draws.uniform(0.5, 1.5) if sensor.reading == "rounded" else 0 * scale
    step = torch.ones_like(scale) if sensor.reading == "counts" else step
    law = law_for(draws)
    bias = draws.uniform(0.5, 1.5) * relative * scale
    rates = {
        "failing": draws.uniform(0.01, 0.04),
        "sticking": draws.uniform(0.01, 0.04),
    }
    return System(
        d=d,
        motions=motions,
        stay=0.98,
        noise=noise,
        jump_rate=jump_rate,
        B=B,
        sensor=sensor,
        reading=Reading(sensor.reading, Noise(law, root), step),
        late=late & ("late" in features),
        delay=delay,
        gain_spread=draws.uniform(0.2, 0.5) if "gains" in features else 0.0,
        bias_spread=bias if "biases" in features else bias[:0],
        faults=faults_of(features, rates, (low, high), step),
        held=held & ("held" in features),
        period=draws.choice((2, 3, 5)) if "held" in features else 1,
        length=draws.choice((40, 60, 100)) if "recordings" in features else None,
        features=(*kinds.values(), *features),
    )


def motions_for(d: int) -> list[str]:
    """Return the motions of d components; a turn needs two."""
    return [name for name in MOTIONS if d > 1 or name not in ("rotating", "oscillating")]


def sensors_for(d: int) -> list[str]:
    """Return the sensors of d components; of one, half and mixtures are the whole."""
    return [name for name in SENSORS if d > 1 or name not in ("partly", "mixed", "bearings")]


def possible(d: int, sensor: Sensor, drawn: set[str]) -> set[str]:
    """Return the features that act on such a system."""
    without: set[str] = set()
    if d == 1 and sensor.q == 1:
        without |= {"joint_noise"}
    if sensor.reading == "counts":
        without |= {"biases"}
    if drawn & {"failing", "sticking", "held"} or sensor.reading != "continuous":
        without |= {"joint_noise"}  # densities of single sensors are required
    return set(FEATURES) - without


def law_for(draws: Draws) -> str:
    """Return the name of a law of noise."""
    others = [name for name in LAWS if name != "gaussian"]
    return "gaussian" if draws.chance(GAUSSIAN_SHARE) else draws.choice(others)


def mixing(q: int, joint: bool, draws: Draws) -> Float[Tensor, "q q"]:
    """Return the root of a covariance with unit variances: the identity, or of a correlation."""
    mixed = torch.eye(q, dtype=torch.float64) + 0.5 * draws.normal(q, q)
    if not joint:
        return torch.eye(q, dtype=torch.float64)
    root = torch.linalg.cholesky(mixed @ mixed.mT)
    return root / root.norm(dim=1, keepdim=True)


def some_of(q: int, draws: Draws) -> Tensor:
    """Return a mask of at least one of q sensors, on average of more than half."""
    chosen = torch.zeros(q, dtype=torch.bool)
    chosen[draws.subset(q, draws.choice(range(1, q + 1)))] = True
    return chosen


def spread_of(
    motions: tuple[Motion, ...], noise: Noise, sensor: Sensor, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return standard deviation, least and largest value ``q`` of h(z) in a simulation.

    Of counts least and largest are whole numbers.
    """
    generator = Generator().manual_seed(seed)
    z = torch.randn(20, len(noise.root), dtype=torch.float64, generator=generator)
    found: list[Tensor] = []
    for t in range(STEPS_OF_SCALE):
        z = motions[0].f(z) + noise.draw((20,), generator)
        if t >= STEPS_OF_SCALE // 2:
            found.append(sensor.h(z))
    values = torch.cat(found)
    low, high = values.amin(0), values.amax(0)
    if sensor.reading == "counts":
        low, high = torch.zeros_like(low), high.ceil()
    return values.std(0).clamp_min(1e-3), low, high


def faults_of(
    features: tuple[str, ...],
    rates: dict[str, float],
    bounds: tuple[Tensor, Tensor],
    step: Tensor,
) -> Faults | None:
    """Return the chain of conditions: a fault ends with probability 0.1."""
    if not {"failing", "sticking"} & set(features):
        return None
    transition = torch.eye(3, dtype=torch.float64)
    for name, condition in (("failing", FAILED), ("sticking", STUCK)):
        if name in features:
            transition[WORKS, condition] = rates[name]
            transition[WORKS, WORKS] -= rates[name]
            transition[condition, condition] = 0.9
            transition[condition, WORKS] = 0.1
    low, high = bounds
    if bool((step > 0).any()):  # multiples of the step
        low, high = step * (low / step).floor(), step * (high / step).ceil()
    return Faults(transition, low, high, step)

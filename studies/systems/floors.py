"""Floors: the least error of any filter of a `studies.systems.system.System`.

Three filters know the system. The Kalman filter is exact where everything is linear and Gaussian
(`kalman_floor`). The particle filter of the whole latent state is exact in the limit of many
particles (`particle_floor`). The UKF matches moments (`ukf_floor`); in many dimensions its error
may be below that of any affordable number of particles, and the floor is then only the best known.

All three reject readings that repeat the one before, where these show that a sensor is stuck or
held.
"""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.filters.gaussian.kalman import KalmanFilter, LinearModel
from kbf.filters.particle.resampling import effective_sample_size, systematic
from kbf.filters.rollout import rollout_recordings
from kbf.recording import Recording
from studies.systems.moments import moment_filter
from studies.systems.system import PERSISTENCE, Latent, System

# Particles of a floor.
PARTICLES = 10_000
# Components of the state from which on no affordable number of particles is enough. Measured on 8
# systems with 10 and 20 components: the UKF has 0.08 to 0.8 of the error of 10,000 particles.
MANY_DIMENSIONS = 10
# Share of the particles below which their effective number triggers resampling.
THRESHOLD = 0.5


class Floor(NamedTuple):
    """Estimates of a filter that knows the system.

    Attributes:
        kind: "kalman", "particle" or "ukf".
        estimates: ``T d`` of each recording. variances: ``T d``, of each component.
    """

    kind: str
    estimates: list[Tensor]
    variances: list[Tensor]


def floor_of(
    system: System, recordings: list[Recording], *, particles: int = PARTICLES, seed: int = 0
) -> Floor:
    """Return the exact filter; otherwise the better one of particle filter and UKF.

    From `MANY_DIMENSIONS` on it is the UKF, where there is one: particles starve.
    """
    if is_linear_gaussian(system):
        return kalman_floor(system, recordings)
    found = [ukf_floor(system, recordings, seed=seed)] if has_moments(system) else []
    if not found or system.d < MANY_DIMENSIONS:
        found.append(particle_floor(system, recordings, particles=particles, seed=seed))
    return min(found, key=lambda each: error_of(torch.cat(each.estimates), recordings))


def error_of(estimates: Float[Tensor, "n d"], recordings: list[Recording]) -> float:
    """Return the NMSE: squared errors over the variance of each component, averaged.

    Args:
        estimates: of the rows of all recordings; not finite ones give an infinite error.
        recordings: with the states, whose variances are those over all recordings.
    """
    truth = torch.cat([each.states for each in recordings])
    left = estimates.double() - truth
    error = float((left.square().mean(0) / truth.var(0, correction=0)).mean())
    return error if math.isfinite(error) else math.inf


@torch.no_grad()
def particle_floor(
    system: System, recordings: list[Recording], *, particles: int = PARTICLES, seed: int = 0
) -> Floor:
    """Run the bootstrap filter of the whole latent state.

    An observation without probability under every particle is rejected.

    References: Gordon, Salmond and Smith (1993).
    """
    generator = Generator().manual_seed(seed)
    start = system.start(particles, generator)
    runs = [particle_run(system, start, each, generator) for each in recordings]
    return Floor("particle", [run[0] for run in runs], [run[1] for run in runs])


def particle_run(
    system: System, start: Latent, recording: Recording, generator: Generator
) -> tuple[Float[Tensor, "T d"], Float[Tensor, "T d"]]:
    """Return means and variances of one recording."""
    p = len(start.z)
    s, log_weights = start, torch.full((1, p), -math.log(p), dtype=torch.float64)
    before = torch.full_like(recording.obs[0], torch.nan)
    means, variances = [], []
    for t, x in enumerate(recording.obs):
        if float(effective_sample_size(log_weights)) < THRESHOLD * p:
            chosen = systematic(log_weights, generator)[0]
            s = Latent(*(leaf[chosen] for leaf in s))
            log_weights = torch.full_like(log_weights, -math.log(p))
        u = control_at(system, recording, t)
        s = system.move(s, u.expand(p, -1), generator)
        log_likelihood, updated = system.weigh(s, x, before, t)
        weighted = log_weights + log_likelihood
        if bool(weighted.max() > -math.inf):
            s, log_weights = updated, weighted.log_softmax(-1)
        w = log_weights[0].exp()
        means.append(w @ s.z)
        variances.append(w @ (s.z - means[-1]).square())
        before = x
    return torch.stack(means), torch.stack(variances)


def control_at(system: System, recording: Recording, t: int) -> Float[Tensor, "1 k"]:
    """Return the control of a step; without controls it has no components."""
    if recording.controls is None:
        return torch.zeros(1, system.controlled, dtype=torch.float64)
    return recording.controls[t : t + 1]


def fresh_readings(system: System, recording: Recording) -> Recording:
    """Return the recording with NaN in place of readings that are held or stuck.

    Only for continuous readings, where repeats show it.
    """
    x = recording.obs.clone()
    x[1:][recording.obs[1:] == recording.obs[:-1]] = torch.nan
    return recording._replace(obs=x)


def is_linear_gaussian(system: System) -> bool:
    """Return whether the Kalman filter of the augmented state is the Bayes-optimal filter."""
    plain = system.jump_rate == 0 and not system.gain_spread and len(system.motions) == 1
    gaussian = system.noise.law == "gaussian" and system.reading.noise.law == "gaussian"
    maps = system.motions[0].matrix is not None and system.sensor.matrix is not None
    return plain and gaussian and maps and not system.reading.discrete and not can_fail(system)


def can_fail(system: System) -> bool:
    """Return whether sensors fail, which a reading does not show."""
    return "failing" in system.features


def has_moments(system: System) -> bool:
    """Return whether `ukf_floor` applies: one motion, and repeats that show what is not read."""
    repeats_by_chance = system.reading.discrete and (system.faults is not None)
    return len(system.motions) == 1 and not can_fail(system) and not repeats_by_chance


def kalman_floor(system: System, recordings: list[Recording]) -> Floor:
    """Run the Kalman filter of (z, earlier states, biases).

    Raises:
        ValueError: the system is not linear and Gaussian.
    """
    if not is_linear_gaussian(system):
        raise ValueError(f"there is no exact filter of {', '.join(system.features)}")
    A, C = system.motions[0].matrix, system.sensor.matrix
    assert A is not None and C is not None
    d, L, biases = system.d, system.delay, len(system.bias_spread)
    size = d * (L + 1) + biases
    F, Q, H = (torch.zeros(n, size, dtype=torch.float64) for n in (size, size, system.q))
    F[:d, :d], F[d : d * (L + 1), : d * L] = A, torch.eye(d * L, dtype=torch.float64)
    Q[:d, :d] = system.noise.covariance
    b = slice(d * (L + 1), size)
    F[b, b] = PERSISTENCE * torch.eye(biases, dtype=torch.float64)
    Q[b, b] = (1 - PERSISTENCE**2) * system.bias_spread.square().diag()
    H[~system.late, :d], H[:, b] = C[~system.late], torch.eye(system.q, biases).to(C)
    H[system.late, d * L : d * (L + 1)] = C[system.late]
    none, B = torch.zeros(size, dtype=torch.float64), F.new_zeros(size, system.controlled)
    B[:d] = system.B
    start = system.start(PARTICLES, Generator().manual_seed(0))
    P0 = torch.cov(torch.cat([start.z, start.past.flatten(1), start.bias], 1).mT)
    model = LinearModel(
        *(F, none, Q, H, 0 * C[:, 0], system.reading.noise.covariance, none, P0.view(size, size)),
        B=B if system.controlled else None,
    )
    filter = KalmanFilter(model, allow_missing_sensors=True)
    return gaussian_floor("kalman", filter, system, recordings)


def gaussian_floor(kind: str, filter: Any, system: System, recordings: list[Recording]) -> Floor:
    """Run a filter of moments whose first d components are the state."""
    repeats = system.faults is not None or bool(system.held.any())
    given = [fresh_readings(system, each) if repeats else each for each in recordings]
    runs = rollout_recordings(filter, given, covariances=True)
    means, variances = [], []
    for run in runs:
        assert run.covariances is not None
        means.append(run.estimates[:, : system.d])
        variances.append(run.covariances.diagonal(dim1=-2, dim2=-1)[:, : system.d])
    return Floor(kind, means, variances)


def ukf_floor(system: System, recordings: list[Recording], *, seed: int = 0) -> Floor:
    """Run the UKF of (z, earlier states, log gains, biases), noises matched by their moments.

    Raises:
        ValueError: the system has several motions, failing sensors, or repeats by chance.
    """
    if not has_moments(system):
        raise ValueError(f"there is no filter of moments of {', '.join(system.features)}")
    return gaussian_floor("ukf", moment_filter(system, seed), system, recordings)

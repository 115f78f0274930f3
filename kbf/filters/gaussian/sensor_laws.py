"""How sensors depart from x_t = h(z_t) + white noise: delays, faults, and errors that persist.

Recorded states are known, so that each law is estimated from the residuals of a sensor's map:

- a delay L, x_t = h(z_{t-L}) + noise (`select_delays`);
- faults: a two-state Markov chain; a failed sensor reads a number that is uniform on its range
  (`working`, `Faults`);
- persistent errors: noise w_t + e_t + g_t h(z_t), e_t = phi e_{t-1} + innovation and g_t likewise
  (`fit_persistence`). Biases that drift, and errors of a map that vary slowly, are of the first
  kind, gains that wander of the second.

References: Rabiner (1989), equations 18 to 20, for chains; Sarkka (2013), section 3.6, for the
state with persistent errors.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kbf.densities.base import LOG_2PI
from kbf.filters.gaussian.hidden_chain import smoothed_chain
from kbf.filters.gaussian.leave_one_out import MIN_ROWS, features_of, left_out
from kbf.recording import Recording, observed

# Longest delay that is tried, in steps.
MAX_DELAY = 4
# Rows that delays are selected by; of more, the last ones.
MAX_ROWS_OF_DELAYS = 2000
# Share by which a delay must lower the leave-one-out error, and standard errors of this decrease.
MIN_GAIN_OF_DELAY = 0.05
MIN_STD_ERRORS_OF_DELAY = 3.0
# Log likelihood by which faults must explain residuals better than a Gaussian: 3 parameters are
# added, and laws with tails a little heavier than a Gaussian's need no faults.
MIN_GAIN_OF_FAULTS = 10.0
MAX_SHARE_OF_FAULTS = 0.45
ITERATIONS_OF_FAULTS = 30
# Rows that chains are fitted to, step by step; of more, the last ones.
MAX_ROWS_OF_CHAINS = 10_000
# Iterations of the fit of chains, and where it starts: failures of five steps.
ITERATIONS_OF_CHAINS = 5
START_OF_LEAVE = 0.2
# Times that a regression and faults are fitted in turn.
ROUNDS_OF_FAULTS = 10
# Residuals that the laws of a sensor require.
MIN_RESIDUALS = 50
# Lags and candidates of the persistence, and the least autocorrelations that count as persistence.
LAGS = (1, 2, 4, 8)
PERSISTENCES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995)
MIN_AUTOCORRELATION = 0.1
MIN_STD_ERRORS_OF_PERSISTENCE = 3.0
# Largest share of the error's variance that may persist.
MAX_PERSISTENT_SHARE = 0.95
# Least share of the error's variance that is that of a gain, and blocks of steps for its error.
MIN_SHARE_OF_GAIN = 0.1
BLOCKS_OF_GAINS = 20


class Faults(NamedTuple):
    """The two-state chain of each sensor.

    Attributes:
        enter, leave: ``q``, probabilities that a working sensor fails and that a failed one
            recovers; enter is 0 for sensors without faults.
        low, high: ``q``, the range of failed readings.
    """

    enter: Tensor
    leave: Tensor
    low: Tensor
    high: Tensor

    @property
    def any(self) -> bool:
        """Whether a sensor may fail."""
        return bool((self.enter > 0).any())

    def predict(self, works: Float[Tensor, "b q"]) -> Float[Tensor, "b q"]:
        """Return the probability that each sensor works one step later."""
        return works * (1 - self.enter.to(works)) + (1 - works) * self.leave.to(works)

    def odds(self, works: Float[Tensor, "b q"], x: Float[Tensor, "b q"]) -> Float[Tensor, "b q"]:
        """Return log (1 - p) U(x) / p of sensors that work with probability p, ``works``."""
        low, high = self.low.to(x), self.high.to(x)
        log_failed = torch.where((x >= low) & (x <= high), -(high - low).log(), -torch.inf)
        return (1 - works).log() + log_failed - works.log()

    def update(
        self,
        works: Float[Tensor, "b q"],
        x: Float[Tensor, "b q"],
        mean: Float[Tensor, "b q"],
        variance: Float[Tensor, "b q"],
        odds: Float[Tensor, "b q"] | None = None,
    ) -> Float[Tensor, "b q"]:
        """Return the probability that each sensor works given its reading x.

        A working sensor reads N(mean, variance). Missing readings leave the probability as it is.
        `odds` may be given.
        """
        odds = self.odds(works, x) if odds is None else odds
        log_works = -0.5 * ((x - mean).square() / variance + variance.log() + LOG_2PI)
        known = (self.enter.to(x) > 0) & x.isfinite()
        return torch.where(known, torch.sigmoid(log_works - odds), works)


class Persistence(NamedTuple):
    """Errors w_t + e_t + g_t h(z_t) of each sensor, e_t = phi e_{t-1} + innovation, g_t likewise.

    Attributes:
        share: ``q``, the share of the error's variance that is that of e. phi: ``q``.
        gain_share: ``q``, the share that is that of g h(z). gain_phi: ``q``, of g.
        gain: ``q``, the variance of g; 0 for a constant gain.
        zero: ``q``, the reading that a gain does not change.
    """

    share: Tensor
    phi: Tensor
    gain_share: Tensor
    gain_phi: Tensor
    gain: Tensor
    zero: Tensor


def no_faults(q: int) -> Faults:
    """Return the chain of q sensors that always work."""
    none = torch.zeros(q, dtype=torch.float64)
    return Faults(none, none + 1, none.clone(), none + 1)


class Mixture(NamedTuple):
    """Densities of the readings of sensors that may fail.

    Attributes:
        faulty: ``q``, whether a sensor may fail. share: ``q``, of failed readings.
        log_works, log_failed: ``n q``, log densities of residuals; 0 where missing.
        low, high: ``q``, the range of the readings.
    """

    faulty: Tensor
    share: Tensor
    log_works: Tensor
    log_failed: Tensor
    low: Tensor
    high: Tensor

    @property
    def failed(self) -> Bool[Tensor, "n q"]:
        """Whether a reading is more probably failed, by itself."""
        share = self.share.clamp(1e-12, 0.5)
        return self.faulty & (share.log() + self.log_failed > torch.log1p(-share) + self.log_works)


def fit_mixture(r: Float[Tensor, "n q"], x: Float[Tensor, "n q"]) -> Mixture:
    """Fit the densities to residuals r of readings x, NaN where missing.

    Residuals of working sensors are N(0, s^2), those of failed ones uniform on the range of x.
    """
    seen = r.isfinite()
    low = torch.where(seen, x, torch.inf).amin(0)
    high = torch.where(seen, x, -torch.inf).amax(0)
    usable = (seen.sum(0) >= MIN_RESIDUALS) & (high > low)
    low, high = torch.where(usable, low, 0), torch.where(usable, high, 1)
    width, seen = high - low, seen & usable
    share, s = fault_mixture(torch.where(usable, r, torch.nan), width)
    works = -0.5 * ((torch.where(seen, r, 0) / s).square() + 2 * s.log() + LOG_2PI)
    return Mixture(
        share > 0, share, torch.where(seen, works, 0), torch.where(seen, -width.log(), 0), low, high
    )


def fit_faults(mixture: Mixture, lengths: list[int]) -> tuple[Faults, Bool[Tensor, "n q"]]:
    """Fit the chains by expectation maximisation (Baum and Welch), densities as they are.

    Args:
        mixture: the densities. lengths: of the recordings.

    Returns:
        The chains, and ``n q``, whether a reading is more probably failed given all of them.
    """
    share = mixture.share.clamp(1e-12, 0.5)
    leave = torch.full_like(share, START_OF_LEAVE)
    enter = leave * share / (1 - share)
    works = torch.ones_like(mixture.log_works)
    logs = torch.stack([mixture.log_works.mT, mixture.log_failed.mT], -1)
    for _ in range(ITERATIONS_OF_CHAINS):
        P = torch.stack([1 - enter, enter, leave, 1 - leave], -1).unflatten(-1, (2, 2))
        chain = smoothed_chain(logs, P, torch.stack([1 - share, share], -1), lengths)
        works = chain.marginals[..., 0].mT
        total, total_failed = works.sum(0), (1 - works).sum(0)
        enter = (chain.transitions[:, 0, 1] + 0.5 * enter) / (total + 0.5)
        leave = (chain.transitions[:, 1, 0] + 0.5 * leave) / (total_failed + 0.5)
        share = (total_failed / (total + total_failed)).clamp(1e-12, 0.5)
    enter = torch.where(mixture.faulty, enter, 0)
    return Faults(enter, leave, mixture.low, mixture.high), mixture.faulty & (works < 0.5)


def fault_mixture(
    r: Float[Tensor, "n q"], width: Float[Tensor, " q"]
) -> tuple[Float[Tensor, " q"], Float[Tensor, " q"]]:
    """Return the share of faults, 0 for none, and the standard deviation s of working sensors.

    (1 - share) N(r; 0, s^2) + share / width, of each sensor; r is NaN where missing.
    """
    seen = r.isfinite()
    n, values = seen.sum(0).clamp_min(1), torch.where(seen, r, 0)
    share, s = torch.full_like(width, 0.05), 1.4826 * r.abs().nanmedian(0).values
    s = torch.where(s.isfinite(), s, width)
    total = torch.ones_like(values)
    for _ in range(ITERATIONS_OF_FAULTS):
        s = s.maximum(1e-6 * width)
        density = (
            (1 - share) * torch.exp(-0.5 * (values / s).square()) / (s * math.sqrt(2 * math.pi))
        )
        total = density + share / width
        works = torch.where(seen, density / total, 0)
        share = 1 - works.sum(0) / n
        s = ((works * values.square()).sum(0) / works.sum(0).clamp_min(1)).sqrt()
    variance = values.square().sum(0) / n
    plain = -0.5 * n * (1 + variance.log() + LOG_2PI)
    gain = torch.where(seen, total.log(), 0).sum(0) - plain
    found = (gain >= MIN_GAIN_OF_FAULTS) & (share < MAX_SHARE_OF_FAULTS)
    alone = variance.sqrt().maximum(1e-6 * width)
    return torch.where(found, share, 0), torch.where(found, s, alone)


def fit_persistence(residuals: list[Tensor], readings: list[Tensor] | None = None) -> Persistence:
    """Fit the autocovariances V_g phi_g^l h_t h_{t-l} + V_e phi^l of errors at lags l of `LAGS`.

    Gains come first (`fit_gains`), then c phi^l is fitted to what they leave of the
    autocorrelations. A sensor whose autocorrelation at the first two lags is below
    `MIN_AUTOCORRELATION`, or within `MIN_STD_ERRORS_OF_PERSISTENCE` of 0, has share 0.

    Args:
        residuals: ``T q`` of each recording, NaN where missing.
        readings: h(z) ``T q``; None for constant gains.
    """
    q, residuals = residuals[0].shape[1], [each.cpu() for each in residuals]
    found = Persistence(*(torch.zeros(q, dtype=torch.float64) for _ in Persistence._fields))
    rho, counts = autocorrelations(residuals)
    if readings is not None:
        gains, rho = fit_gains(residuals, [each.cpu() for each in readings], rho)
        found = found._replace(gain_share=gains[0], gain_phi=gains[1], gain=gains[2])
    for j in range(q):
        least = (MIN_STD_ERRORS_OF_PERSISTENCE / counts[j].sqrt()).clamp_min(MIN_AUTOCORRELATION)
        if int(counts[j, 0]) < MIN_RESIDUALS or not bool((rho[j] > least)[:2].all()):
            continue
        most = float(MAX_PERSISTENT_SHARE - found.gain_share[j])
        found.share[j], found.phi[j] = powers_fit(rho[j], counts[j], most)
    return found


def powers_fit(
    values: Float[Tensor, " l"], counts: Float[Tensor, " l"], most: float
) -> tuple[float, float]:
    """Return c <= ``most`` and phi of `PERSISTENCES` with the least weighted error of c phi^l."""
    phi = torch.tensor(PERSISTENCES, dtype=torch.float64)
    powers = phi[:, None] ** torch.tensor(LAGS, dtype=torch.float64)
    weights = counts / counts.sum()
    share = ((powers @ (weights * values)) / (powers.square() @ weights)).clamp(0, most)
    left = ((values - share[:, None] * powers).square() @ weights).argmin()
    return float(share[left]), float(phi[left])


def fit_gains(
    residuals: list[Tensor], readings: list[Tensor], rho: Float[Tensor, "q l"]
) -> tuple[Float[Tensor, "3 q"], Float[Tensor, "q l"]]:
    """Fit gains to products of errors: E r_t r_{t-l} = V phi^l h_t h_{t-l} + const.

    The slope of this regression must be positive at the first two lags, by
    `MIN_STD_ERRORS_OF_PERSISTENCE` over blocks of steps.

    Args:
        residuals: r, readings: h, ``T q`` of each recording.
        rho: autocorrelations of r.

    Returns:
        Shares of the errors' variance, phi and V; and the autocorrelations without gains.
    """
    q, rest = rho.shape[0], rho.clone()
    found = torch.zeros(3, q, dtype=torch.float64)
    for j in range(q):
        pairs = [lagged_products(residuals, readings, j, lag) for lag in LAGS]
        if min(len(p) for p, _ in pairs) < MIN_RESIDUALS:
            continue
        slopes, counts, certain = [], [], []
        for p, m in pairs:
            m0 = m - m.mean()
            slopes.append((m0 @ p) / m0.square().sum().clamp_min(1e-300))
            counts.append(float(len(p)))
            rows = len(p) // BLOCKS_OF_GAINS
            each = (m0 * (p - p.mean()))[: rows * BLOCKS_OF_GAINS]
            means = each.reshape(BLOCKS_OF_GAINS, rows).mean(1)
            error = means.std() / math.sqrt(BLOCKS_OF_GAINS)
            certain.append(bool(means.mean() > MIN_STD_ERRORS_OF_PERSISTENCE * error))
        if not all(certain[:2]):
            continue
        V, phi = powers_fit(torch.stack(slopes), torch.tensor(counts).double(), math.inf)
        r, h = (torch.cat(each)[:, j] for each in (residuals, readings))
        seen = r.isfinite() & h.isfinite()
        scale = float(h[seen].square().mean() / r[seen].square().mean())
        if V * scale < MIN_SHARE_OF_GAIN:
            continue
        V = min(V, MAX_PERSISTENT_SHARE / scale)
        found[:, j] = torch.tensor([V * scale, phi, V])
        means = torch.stack([m.mean() for _, m in pairs]) / r[seen].square().mean()
        rest[j] -= V * phi ** torch.tensor(LAGS, dtype=torch.float64) * means
    return found, rest


def lagged_products(
    residuals: list[Tensor], readings: list[Tensor], j: int, lag: int
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Return r_t r_{t-l} and h_t h_{t-l} of sensor j where they are known, within recordings."""
    both = [
        torch.stack([x[lag:, j] * x[:-lag, j] for x in (r, h)]).double()
        for r, h in zip(residuals, readings, strict=True)
        if len(r) > lag
    ]
    products = torch.cat(both, 1) if both else torch.zeros(2, 0, dtype=torch.float64)
    p, m = products[:, products.isfinite().all(0)]
    return p, m


def autocorrelations(residuals: list[Tensor]) -> tuple[Float[Tensor, "q l"], Float[Tensor, "q l"]]:
    """Return the autocorrelations at `LAGS`, of pairs within a recording, and numbers of pairs."""
    zero = [torch.where(each.isfinite(), each, 0) for each in residuals]
    seen = [each.isfinite().double() for each in residuals]
    variance = sum(each.square().sum(0) for each in zero) / sum(each.sum(0) for each in seen)
    rho, counts = [], []
    for lag in LAGS:
        products = [(r[lag:] * r[:-lag]).sum(0) for r in zero if len(r) > lag]
        pairs = [(s[lag:] * s[:-lag]).sum(0) for s in seen if len(s) > lag]
        count = torch.stack(pairs).sum(0) if pairs else torch.zeros_like(seen[0][0])
        total = torch.stack(products).sum(0) if products else torch.zeros_like(count)
        counts.append(count.clamp_min(1))
        rho.append(total / counts[-1] / variance)
    return torch.nan_to_num(torch.stack(rho, 1)), torch.stack(counts, 1)


def select_delays(recordings: list[Recording]) -> Int[Tensor, " q"]:
    """Return the delay of each sensor, 0 to `MAX_DELAY` steps.

    For each delay x_t is regressed on z_{t-L}, linearly and by Nystrom features of a Gaussian
    kernel; the delay has the least squared leave-one-out error. It is 0 unless another is better by
    `MIN_GAIN_OF_DELAY` and `MIN_STD_ERRORS_OF_DELAY`.
    """
    long = [each for each in recordings if len(each.states) > MAX_DELAY]
    q = recordings[0].obs.shape[1]
    none = torch.zeros(q, dtype=torch.long)
    if sum(len(each.states) - MAX_DELAY for each in long) < MIN_ROWS:
        return none
    x = torch.cat([observed(each)[MAX_DELAY:] for each in long])[-MAX_ROWS_OF_DELAYS:].double()
    errors = []
    for delay in range(MAX_DELAY + 1):
        z = torch.cat([s.states[MAX_DELAY - delay : len(s.states) - delay] for s in long])
        errors.append(left_out(features_of(z[-MAX_ROWS_OF_DELAYS:].double()), x))
    squares = torch.stack(errors).square()
    for j in range(q):
        seen = x[:, j].isfinite()
        if int(seen.sum()) < MIN_ROWS:
            continue
        each = squares[:, seen, j]
        best = int(each.mean(1).argmin())
        gain = each[0] - each[best]
        error = gain.std() / math.sqrt(len(gain))
        enough = gain.mean() > MIN_GAIN_OF_DELAY * each[0].mean()
        if bool(enough) and bool(gain.mean() > MIN_STD_ERRORS_OF_DELAY * error):
            none[j] = best
    return none


def working(
    recordings: list[Recording], delays: Int[Tensor, " q"], may_fail: Bool[Tensor, " q"]
) -> tuple[Faults, list[Recording]]:
    """Return the faults of sensors, and the recordings with NaN in place of failed readings.

    Readings that work are regressed on the states as in `select_delays`, and faults of those that
    may fail are fitted to the residuals, in turn.
    """
    x = torch.cat([observed(each) for each in recordings])
    lengths = [len(each.states) for each in recordings]
    errors, used = torch.full_like(x, torch.nan), x.isfinite()
    faults, mixture = no_faults(x.shape[1]), fit_mixture(errors, x)
    features, may_fail = {}, may_fail.to(delays.device)
    for delay in delays[may_fail].unique().tolist():
        past = [former(each.states, delay) for each in recordings]
        features[delay] = features_of(torch.cat(past).double()).to(x)
    for _ in range(ROUNDS_OF_FAULTS):
        for delay, phi in features.items():
            columns = ((delays == delay) & may_fail).nonzero()[:, 0]
            errors[:, columns] = left_out(phi, x[:, columns], used[:, columns])
        mixture = fit_mixture(errors, x)
        before, used = used, x.isfinite() & ~mixture.failed
        if bool((before == used).all()):
            break
    if bool(mixture.faulty.any()):
        rows = sum(lengths) - MAX_ROWS_OF_CHAINS
        if rows <= 0:
            faults, failed = fit_faults(mixture, lengths)
        else:  # the chain of the last rows; readings are classified by themselves
            last = mixture._replace(
                log_works=mixture.log_works[rows:], log_failed=mixture.log_failed[rows:]
            )
            (faults, _), failed = fit_faults(last, [MAX_ROWS_OF_CHAINS]), mixture.failed
        used = x.isfinite() & ~failed
    kept = torch.where(used, x, torch.nan) if faults.any else x
    return faults, [
        each._replace(obs=obs) if faults.any else each
        for each, obs in zip(recordings, kept.split(lengths), strict=True)
    ]


def former(states: Float[Tensor, "T d"], delay: int) -> Float[Tensor, "T d"]:
    """Return the states of ``delay`` steps before; in the first steps, the first one."""
    return states[(torch.arange(len(states), device=states.device) - delay).clamp_min(0)]

"""Alarms: out-of-distribution observations, innovation outliers, divergence.

Each is a score of a step, compared with its distribution over held-out steps of the training data
(`Tail`):

- out of distribution: the distance of x_t to the nearest training observation;
- innovation: log(||m||^2 / m(x_t)), where m(x) = sum_i w_i k_X(x_i, x) is the predicted embedding
  of the observation. As E m(X) = sum_i w_i m(x_i) = ||m||^2 for a draw X from the prediction, this
  is how much smaller the predicted density is at x_t than at its own draws on average;
- divergence: the median innovation score of the last `WINDOW` observations that are not out of
  distribution. A single outlier does not change it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Generator, Tensor

from kbf.filters.gating import observe
from kbf.filters.kernel.filter import KernelBayesFilter
from kbf.filters.kernel.update.nearest_draws import LocalUpdate
from kbf.filters.kernel.update.rule import DenseUpdate, PrimalUpdate
from kbf.filters.protocols import Filter, move, where
from kbf.filters.wrapper import innermost
from kbf.recording import as_float
from kbf.rkhs.linalg import evenly

# Innovation scores that divergence is detected from; more than half of them must be known.
WINDOW = 5
# Most training observations, and most scores, that a monitor keeps.
MOST_KEPT = 512
# Least number of scores that a tail is fitted to.
MIN_HELD_OUT_STEPS = 10
# Share of the scores that the exponential tail is fitted to.
TAIL_SHARE = 0.1
# Density over its mean at which innovation scores are capped: features of low rank do not resolve
# smaller values.
LEAST_DENSITY = 1e-6
# Names of alarms; the first that applies is reported.
ALARMS = ("diverged", "out_of_distribution", "innovation_outlier", "")


class Tail(NamedTuple):
    """Distribution of a score over held-out steps: empirical, with an exponential upper tail.

    The tail holds the upper `TAIL_SHARE` of the scores.

    The tail gives p-values below one over the number of scores.

    Attributes:
        scores: in ascending order. threshold: u, where the tail begins. mean: of the excess over u.
    """

    scores: Tensor
    threshold: Tensor
    mean: Tensor

    def p_value(self, score: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Share of held-out steps with a score at least this large; NaN for NaN.

        (1 + #{s_i >= s}) / (n + 1) below u, and `TAIL_SHARE` exp(-(s - u) / mean excess) above it.
        """
        n = len(self.scores)
        ranked = (1 + n - torch.searchsorted(self.scores, score.contiguous())) / (n + 1)
        beyond = TAIL_SHARE * torch.exp((self.threshold - score) / self.mean)
        return torch.where(score <= self.threshold, ranked.to(score), beyond)


def fit_tail(scores: Float[Tensor, " n"]) -> Tail:
    """Fit a `Tail` to scores; NaN scores are ignored.

    Raises:
        ValueError: fewer than `MIN_HELD_OUT_STEPS` scores.
    """
    scores = scores[~scores.isnan()].sort().values
    if len(scores) < MIN_HELD_OUT_STEPS:
        raise ValueError(
            f"a monitor needs at least {MIN_HELD_OUT_STEPS} held-out steps, got {len(scores)}"
        )
    threshold = scores.quantile(1 - TAIL_SHARE)
    above = scores[scores > threshold] - threshold
    least = 1e-3 * (threshold - scores[0]).clamp_min(torch.finfo(scores.dtype).eps)
    mean = torch.maximum(above.mean(), least) if len(above) else least
    return Tail(scores[evenly(len(scores), MOST_KEPT)], threshold, mean)


class Check(NamedTuple):
    """Result of `Monitor.check` for one step, each ``b``.

    Attributes:
        out_of_distribution: p-value of the distance to the training observations. innovation:
            p-value under the prediction (NaN for filters without a kernel). Both are NaN where
            nothing is observed.
        alarm: whether either is below the monitor's rate. diverged: whether the track has diverged,
            by the last innovation scores of observations that are not out of distribution.
        recent: ``b WINDOW``, innovation scores of the last steps, for the next check; NaN after a
            divergence.
    """

    out_of_distribution: Tensor
    innovation: Tensor
    alarm: Tensor
    diverged: Tensor
    recent: Tensor

    def names(self, rate: Tensor) -> list[str]:
        """Return the first alarm of each row that applies, or an empty text, by their order.

        diverged, out_of_distribution, innovation_outlier. ``rate`` is that of the monitor.
        """
        outside = self.out_of_distribution < rate
        flags = torch.stack([self.diverged, outside, self.alarm, torch.ones_like(outside)])
        return [ALARMS[k] for k in flags.int().argmax(0).tolist()]


class Monitor(NamedTuple):
    """Distributions of the three scores, and the training observations that distances refer to.

    Attributes:
        obs: ``m q``, at most `MOST_KEPT` training observations, flattened, as the innermost filter
            takes them.
        out_of_distribution: tail of distances. innovation: tail of innovation scores, and
            divergence: of their medians; both None for filters without a kernel.
        rate: false alarms per step and kind.
    """

    obs: Tensor
    out_of_distribution: Tail
    innovation: Tail | None
    divergence: Tail | None
    rate: Tensor

    def check(
        self,
        filter: Filter[Any],
        predicted: Any,
        obs: Shaped[Tensor, "b *x"],
        *,
        last: Check | None = None,
        mask: Bool[Tensor, " b"] | None = None,
    ) -> Check:
        """Check an observation before the update.

        Args:
            filter: the running filter.
            predicted: its state after ``predict``.
            obs: x_t, in the units of ``filter``.
            last: the check of the previous step, of which ``recent`` is used; None at the start,
                and after a restart of all.
            mask: False where nothing is observed.
        """
        inner, x = innermost(filter, obs)
        seen = torch.ones(len(x), dtype=torch.bool, device=x.device) if mask is None else mask
        unknown = x.new_full((len(x),), torch.nan, dtype=self.obs.dtype)
        outside = self.out_of_distribution.p_value(nearest(x, self.obs)).where(seen, unknown)
        innovation, diverged = unknown, torch.zeros_like(seen)
        recent = unknown[:, None].expand(-1, WINDOW) if last is None else last.recent
        strange = outside < self.rate
        if (
            self.innovation is not None
            and self.divergence is not None
            and isinstance(inner, KernelBayesFilter)
        ):
            score = innovation_score(inner, predicted.weights, x).to(unknown).where(seen, unknown)
            innovation = self.innovation.p_value(score)
            recent = torch.cat([recent[:, 1:], torch.where(strange, unknown, score)[:, None]], 1)
            diverged = self.divergence.p_value(lower_median(recent)) < self.rate
            recent = torch.where(diverged[:, None], unknown[:, None], recent)
        return Check(outside, innovation, strange | (innovation < self.rate), diverged, recent)

    def step(
        self,
        filter: Filter[Any],
        state: Any,
        obs: Shaped[Tensor, "b *x"],
        *,
        last: Check | None = None,
        mask: Bool[Tensor, " b"] | None = None,
        control: Float[Tensor, "b k"] | None = None,
        generator: Generator | None = None,
    ) -> tuple[Any, Check]:
        """Predict, check and update; diverged tracks are updated from the prior.

        Arguments as of `check` and `kbf.filters.rollout.step`.
        """
        predicted = move(filter, state, control=control, generator=generator)
        found = self.check(filter, predicted, obs, last=last, mask=mask)
        if bool(found.diverged.any()):
            start = filter.init(len(obs), generator=generator)
            fresh = move(filter, start, control=control, generator=generator)
            predicted = where(found.diverged, fresh, predicted)
        return observe(filter, predicted, obs, mask)[0], found

    def stored(self) -> dict[str, Any]:
        """The monitor as nested dicts of tensors on the CPU, for a checkpoint."""
        return moved(self._asdict(), "cpu")

    @staticmethod
    def read(stored: dict[str, Any] | None, device: torch.device | str = "cpu") -> Monitor | None:
        """The monitor that `stored` returned; None for None."""
        if stored is None:
            return None
        found: dict[str, Any] = moved(stored, device)
        tails: dict[str, Any] = {k: Tail(**v) for k, v in found.items() if isinstance(v, dict)}
        return Monitor(**(found | tails))


def moved(value: Any, device: torch.device | str) -> Any:
    """Tensors, and dicts and tails of tensors as dicts, on a device; None for None."""
    if isinstance(value, Tensor | None):
        return None if value is None else value.to(device)
    items = value if isinstance(value, dict) else value._asdict()
    return {name: moved(each, device) for name, each in items.items()}


def nearest(x: Shaped[Tensor, "b *x"], obs: Float[Tensor, "m q"]) -> Float[Tensor, " b"]:
    """Euclidean distance of each x to the nearest row of ``obs``; infinite where it overflows."""
    flat = as_float(x, obs.dtype).flatten(1)
    distance = torch.cdist(flat, obs).amin(1)
    return torch.where(distance.isnan() & ~flat.isnan().any(1), torch.inf, distance)


def innovation_score(
    filter: KernelBayesFilter, weights: Float[Tensor, "b n"], x: Shaped[Tensor, "b *x"]
) -> Float[Tensor, " b"]:
    """Innovation score log(E m(X) / m(x)), X drawn from the prediction w.

    m = sum_i w_i k_X(x_i, .) / sum_i w_i.

    It is at most -log `LEAST_DENSITY`. With features, m(x) = mu^T psi(x), mu = Psi^T w / sum w, and
    E m(X) = ||mu||^2. NaN for rules without a kernel.
    """
    rule = filter.rule
    if (
        isinstance(rule, PrimalUpdate | LocalUpdate)
        and rule.psi is not None
        and rule.features is not None
    ):
        mu = weights.to(rule.features) @ rule.features
        at, mean = (mu * rule.psi(x).to(mu)).sum(-1), mu.square().sum(-1)
    elif isinstance(rule, DenseUpdate):
        w = weights.to(rule.gram)
        query = rule.kernel(x.flatten(1).to(rule.obs), rule.obs, bandwidth=rule.bandwidth)
        at, mean = (w * query).sum(-1), ((w @ rule.gram) * w).sum(-1)
    else:
        return weights.new_full((len(weights),), torch.nan)
    # weights that are all 0 predict nothing: every observation is then an outlier
    share = torch.where(mean > 0, at * weights.sum(-1) / mean, 0)
    return -share.clamp_min(LEAST_DENSITY).log()


def lower_median(recent: Float[Tensor, "*b w"]) -> Float[Tensor, "*b"]:
    """Lower median of the values that are not NaN; NaN unless these are more than half."""
    known = (~recent.isnan()).sum(-1, keepdim=True)
    ordered = recent.sort(-1).values  # NaN at the end
    median = ordered.gather(-1, (known - 1).clamp_min(0) // 2)
    return torch.where(known > recent.shape[-1] // 2, median, torch.nan).squeeze(-1)


def running_median(scores: Float[Tensor, "*b T"]) -> Float[Tensor, "*b T"]:
    """Median of the last `WINDOW` scores at each step, as `Monitor.check` computes it."""
    padded = torch.nn.functional.pad(scores, (WINDOW - 1, 0), value=torch.nan)
    return lower_median(padded.unfold(-1, WINDOW, 1))

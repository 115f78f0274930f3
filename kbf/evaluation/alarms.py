"""Whether an observation can be trusted: is it like those of the recordings, was it to be expected, is the track lost?

Three numbers are looked at, each against what it was at steps of the training data that were held
out (`Tail`):

- novelty: the distance of x_t to the nearest training observation;
- surprise: log(||m||^2 / m(x_t)), with m the predicted embedding of the observation, m(x) = sum_i
w_i k_X(x_i, x): how much less
  dense the prediction is at x_t than at its own draws on average, as E m(X) = sum_i w_i m(x_i) =
  ||m||^2;
- lost: the median surprise of the last `WINDOW` observations that were not novel. One bad
observation does not move it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Generator, Tensor

from kbf.filters.kernel.filter import KernelBayesFilter
from kbf.filters.kernel.update.nearest_draws import LocalUpdate
from kbf.filters.kernel.update.rule import DenseUpdate, PrimalUpdate
from kbf.filters.protocols import Filter, move
from kbf.filters.rollout import observe, where
from kbf.filters.wrapper import innermost
from kbf.recording import as_float
from kbf.rkhs.linalg import evenly

WINDOW = 5
"""Surprises that the verdict "lost" looks at; it needs more than half of them."""
MOST_KEPT = 512
"""Most training observations, and most scores, that a monitor keeps."""
TAIL_SHARE = 0.1
"""Share of the scores that the tail is fitted to."""
LEAST_DENSITY = 1e-6
"""Density over its mean below which all surprises are the same: features of low rank cannot tell smaller numbers apart."""


class Tail(NamedTuple):
    """Scores of held-out steps, and an exponential tail beyond their upper `TAIL_SHARE`: p-values below one over their number.

    Attributes:
        scores: in ascending order. threshold: u, from which on the tail counts. mean: of the excess
            over u.
    """

    scores: Tensor
    threshold: Tensor
    mean: Tensor

    def p_value(self, score: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """The share of ordinary steps with such a score or a larger one; NaN stays NaN.

        (1 + #{s_i >= s}) / (n + 1) below u, and `TAIL_SHARE` exp(-(s - u) / mean excess) beyond it.
        """
        n = len(self.scores)
        ranked = (1 + n - torch.searchsorted(self.scores, score.contiguous())) / (n + 1)
        beyond = TAIL_SHARE * torch.exp((self.threshold - score) / self.mean)
        return torch.where(score <= self.threshold, ranked.to(score), beyond)


def fit_tail(scores: Float[Tensor, " n"]) -> Tail:
    """The tail of some scores; NaN ones are left out.

    Raises:
        ValueError: fewer than ten scores.
    """
    scores = scores[~scores.isnan()].sort().values
    if len(scores) < 10:
        raise ValueError(f"a monitor needs at least 10 held-out steps, got {len(scores)}")
    threshold = scores.quantile(1 - TAIL_SHARE)
    above = scores[scores > threshold] - threshold
    least = 1e-3 * (threshold - scores[0]).clamp_min(torch.finfo(scores.dtype).eps)
    mean = torch.maximum(above.mean(), least) if len(above) else least
    return Tail(scores[evenly(len(scores), MOST_KEPT)], threshold, mean)


class Check(NamedTuple):
    """What was found at one step, each ``b``.

    Attributes:
        novelty: p-value of the observation's distance to the training observations. surprise:
            p-value under the prediction (NaN where the filter has no kernel). NaN where nothing was
            observed.
        alarm: either is below the monitor's rate. lost: the track is: the last surprises were too
            large, of observations that are not novel.
        recent: ``b WINDOW``, surprises of the last steps, for the next check; emptied where the
            track was lost.
    """

    novelty: Tensor
    surprise: Tensor
    alarm: Tensor
    lost: Tensor
    recent: Tensor


class Monitor(NamedTuple):
    """The three tails, and the training observations that novelty is measured from.

    Attributes:
        obs: ``m q``, at most `MOST_KEPT` training observations, flat, as the innermost filter sees
            them.
        novelty: of distances. surprise: and lost: None where the filter has no kernel.
        rate: false alarms a step and kind.
    """

    obs: Tensor
    novelty: Tail
    surprise: Tail | None
    lost: Tail | None
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
        """Judge an observation before the filter takes it in.

        Args:
            filter: whose state it is.
            predicted: its state after ``predict``.
            obs: x_t, in the units of ``filter``.
            last: the check of the step before; None at the start, and after a restart of all.
            mask: False where nothing was observed.
        """
        inner, x = innermost(filter, obs)
        seen = torch.ones(len(x), dtype=torch.bool, device=x.device) if mask is None else mask
        unknown = x.new_full((len(x),), torch.nan, dtype=self.obs.dtype)
        novelty = torch.where(seen, self.novelty.p_value(nearest(x, self.obs)), unknown)
        surprise, lost = unknown, torch.zeros_like(seen)
        recent = unknown[:, None].expand(-1, WINDOW) if last is None else last.recent
        strange = novelty < self.rate
        if (
            self.surprise is not None
            and self.lost is not None
            and isinstance(inner, KernelBayesFilter)
        ):
            score = torch.where(seen, surprise_of(inner, predicted.weights, x).to(unknown), unknown)
            surprise = self.surprise.p_value(score)
            recent = torch.cat([recent[:, 1:], torch.where(strange, unknown, score)[:, None]], 1)
            lost = self.lost.p_value(middle(recent)) < self.rate
            recent = torch.where(lost[:, None], unknown[:, None], recent)
        return Check(novelty, surprise, strange | (surprise < self.rate), lost, recent)

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
        """Predict, check, update; where the track is lost, from the prior. Arguments as of `check` and `kbf.filters.rollout.step`."""
        predicted = move(filter, state, control=control, generator=generator)
        found = self.check(filter, predicted, obs, last=last, mask=mask)
        if bool(found.lost.any()):
            fresh = move(
                filter,
                filter.init(len(obs), generator=generator),
                control=control,
                generator=generator,
            )
            predicted = where(found.lost, fresh, predicted)
        return observe(filter, predicted, obs, mask)[0], found

    def stored(self) -> dict[str, Any]:
        """As nested dicts of tensors on the CPU, for a checkpoint."""

        def leaf(value: Any) -> Any:
            if isinstance(value, Tail):
                return {name: each.cpu() for name, each in value._asdict().items()}
            return None if value is None else value.cpu()

        return {name: leaf(value) for name, value in self._asdict().items()}

    @staticmethod
    def read(stored: dict[str, Any] | None, device: torch.device | str = "cpu") -> Monitor | None:
        """From what a checkpoint keeps; None if it keeps none."""
        if stored is None:
            return None

        def leaf(value: Any) -> Any:
            if isinstance(value, dict):
                return Tail(**{name: each.to(device) for name, each in value.items()})
            return None if value is None else value.to(device)

        return Monitor(**{name: leaf(value) for name, value in stored.items()})


def nearest(x: Shaped[Tensor, "b *x"], obs: Float[Tensor, "m q"]) -> Float[Tensor, " b"]:
    """The Euclidean distance of each x to the nearest of ``obs``."""
    flat = as_float(x, obs.dtype).flatten(1)
    distance = torch.cdist(flat, obs).amin(1)
    return torch.where(
        distance.isnan() & ~flat.isnan().any(1), torch.inf, distance
    )  # too far for any number


def surprise_of(
    filter: KernelBayesFilter, weights: Float[Tensor, "b n"], x: Shaped[Tensor, "b *x"]
) -> Float[Tensor, " b"]:
    """The surprise log(E m(X) / m(x)), m = sum_i w_i k_X(x_i, .) / sum_i w_i, X drawn from the prediction w.

    It is at most -log `LEAST_DENSITY`.

    With features m(x) = mu^T psi(x), mu = Psi^T w / sum w, and E m(X) = ||mu||^2. NaN for rules
    without a kernel.
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
    share = torch.where(mean > 0, at * weights.sum(-1) / mean, 0)  # no weights: no prediction
    return -share.clamp_min(LEAST_DENSITY).log()


def middle(recent: Float[Tensor, "*b w"]) -> Float[Tensor, "*b"]:
    """The median (the lower one of two) of those that are not NaN; NaN where these are not more than half."""
    known = (~recent.isnan()).sum(-1, keepdim=True)
    ordered = recent.sort(-1).values  # NaN at the end
    median = ordered.gather(-1, (known - 1).clamp_min(0) // 2)
    return torch.where(known > recent.shape[-1] // 2, median, torch.nan).squeeze(-1)

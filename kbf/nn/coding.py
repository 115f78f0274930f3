"""Codes of images: what an encoder thinks the state is, good enough for every filter of vectors to run on.

A `Code` holds several encoders with linear heads, its *members*, each fitted (`kbf.pretraining`) to all recordings but one chunk.
Filters learn from the codes of that chunk, which come from the member that has not seen it, and so learn how wrong codes of new
images are; a new image is coded by the mean over the members.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Generator, Tensor, nn

from kbf.filters.base import Backward, Filter, move, smoother_of
from kbf.manifolds import CIRCLE, FLAT, Manifold, manifold_of
from kbf.sequence import Sequence, as_float


class Code(nn.Module):
    """Images ``m *x`` -> codes ``m d``: the mean over members of mean + scale head(encoder(x)), brought to where states live.

    Attributes:
        z_mean: ``d``, mean of the training states. z_scale: one standard deviation for all components. circle: states have norm 1.
    """

    z_mean: Tensor
    z_scale: Tensor
    circle: Tensor

    def __init__(self, encoders: Iterable[nn.Module], d: int) -> None:
        """Untrained members.

        Args:
            encoders: ``m *x`` -> ``m p`` with an attribute ``features``, p; one for each member.
            d: components of the state that an image tells.
        """
        super().__init__()
        self.encoders = nn.ModuleList(encoders)
        self.heads = nn.ModuleList(nn.Linear(int(encoder.features), d) for encoder in self.encoders)  # pyright: ignore[reportArgumentType]
        self.register_buffer("z_mean", torch.zeros(d))
        self.register_buffer("z_scale", torch.ones(()))
        self.register_buffer("circle", torch.tensor(False))

    def prepare(self, states: Float[Tensor, "n d"]) -> None:
        """Keep mean, scale and manifold of the training states."""
        spread = states.var(0, correction=0).mean().sqrt()
        self.z_mean.copy_(states.mean(0))
        self.z_scale.copy_(torch.where(spread > 0, spread, 1))
        self.circle.fill_(states.shape[-1] == 2 and manifold_of(states) == CIRCLE)

    @property
    def manifold(self) -> Manifold:
        """Where codes live."""
        return CIRCLE if bool(self.circle) else FLAT

    def member(self, k: int, x: Shaped[Tensor, "m *x"]) -> Float[Tensor, "m d"]:
        """The code of member k alone, as it was regressed."""
        return self.z_mean + self.z_scale * self.heads[k](self.encoders[k](as_float(x, self.z_mean.dtype)))

    def forward(self, x: Shaped[Tensor, "m *x"]) -> Float[Tensor, "m d"]:
        """The code of new images."""
        codes = [self.member(k, x) for k in range(len(self.encoders))]
        mean = torch.stack(codes).mean(0)
        if mean.shape[-1] != 2:
            return mean
        return torch.where(self.circle, CIRCLE.project(mean), mean)  # a step that is exported cannot ask which it is

    @torch.no_grad()
    def crossfit(self, sequence: Sequence, held: Shaped[Tensor, " T"], batch_size: int = 256) -> Sequence:
        """The sequence with codes ``T d`` for observations; step t is coded by member ``held[t]``, which has not seen it."""
        self.eval()
        codes = self.z_mean.new_zeros(len(held), len(self.z_mean))
        for k in range(len(self.encoders)):
            for rows in (held == k).nonzero()[:, 0].split(batch_size):
                codes[rows] = self.manifold.project(self.member(k, sequence.obs[rows]))
        return sequence._replace(obs=codes.to(sequence.states))


class CodedFilter(nn.Module):
    """A filter of codes as a filter of images: each observation is coded first."""

    def __init__(self, code: Code, inner: Filter[Any], dtype: torch.dtype) -> None:
        """``inner`` takes codes of type ``dtype``."""
        super().__init__()
        self.code, self.inner, self.dtype = code, inner, dtype
        self.controlled = getattr(inner, "controlled", 0)

    def init(self, batch: int, *, generator: Generator | None = None) -> Any:
        """The state of the inner filter, as in all that follows."""
        return self.inner.init(batch, generator=generator)

    def predict(self, state: Any, *, control: Tensor | None = None, generator: Generator | None = None) -> Any:
        """Move."""
        return move(self.inner, state, control=control, generator=generator)

    def observed(self, obs: Shaped[Tensor, "b *x"]) -> Tensor:
        """What the inner filter observes: the codes."""
        return self.code(obs).to(self.dtype)

    def update(self, state: Any, obs: Shaped[Tensor, "b *x"]) -> Any:
        """Code the images, then observe the codes."""
        return self.inner.update(state, self.observed(obs))

    def estimate(self, state: Any) -> Tensor:
        """The inner filter's, ``b d``."""
        return self.inner.estimate(state)

    def diagnostics(self, state: Any) -> dict[str, Tensor]:
        """The inner filter's, if it has any."""
        diagnose = getattr(self.inner, "diagnostics", None)
        return {} if diagnose is None else diagnose(state)

    def covariance(self, state: Any) -> Tensor | None:
        """The inner filter's, ``b d d``; None if it has none."""
        spread = getattr(self.inner, "covariance", None)
        return None if spread is None else spread(state)

    def smoother(self) -> Backward:
        """The inner filter's."""
        return smoother_of(self.inner)

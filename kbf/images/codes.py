"""Codes of images: what an encoder thinks the state is, good enough for every filter of vectors to run on.

A `Code` holds several encoders with linear heads, its *members*, each fitted (`kbf.training.encoder_stage`) to all recordings but
one chunk.
Filters learn from the codes of that chunk, which come from the member that has not seen it, and so learn how wrong codes of new
images are; a new image is coded by the mean over the members.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from kbf.filters.protocols import Filter
from kbf.filters.wrapper import FilterWrapper
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
        self.encoders: nn.ModuleList = nn.ModuleList(encoders)
        self.heads: nn.ModuleList = nn.ModuleList(nn.Linear(int(encoder.features), d) for encoder in self.encoders)  # pyright: ignore[reportArgumentType]
        self.register_buffer("z_mean", torch.zeros(d))
        self.register_buffer("z_scale", torch.ones(()))
        self.register_buffer("circle", torch.tensor(False))

    def prepare(self, states: Float[Tensor, "n d"]) -> None:
        """Keep mean, scale and manifold of the training states (`settle` may leave the latter again)."""
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

    @torch.no_grad()
    def settle(
        self, sequences: list[Sequence], held: list[Shaped[Tensor, " T"]], visible: list[Float[Tensor, "T d"]]
    ) -> list[Sequence]:
        """`crossfit` of all recordings, on the circle only if codes there are nearer to the states than as they were regressed.

        A code is the mean of the states that an image may show: of a poor image it is short, and its length is what says how much
        to trust it. Codes of good images are long, and what is off the circle is error. The codes are those of one member each, of
        images that it has not seen. ``visible``: states that codes stand for.
        """
        on_circle, self.circle = self.circle, torch.zeros_like(self.circle)
        raw = [self.crossfit(s, own) for s, own in zip(sequences, held, strict=True)]
        if bool(on_circle):
            observed = [slice(None) if s.mask is None else s.mask for s in raw]
            codes = torch.cat([s.obs[rows] for s, rows in zip(raw, observed, strict=True)])
            z = torch.cat([states[rows] for states, rows in zip(visible, observed, strict=True)]).to(codes)
            self.circle = (CIRCLE.project(codes) - z).square().sum() < (codes - z).square().sum()
        return [s._replace(obs=self.manifold.project(s.obs)) for s in raw]


class CodedFilter(FilterWrapper):
    """A filter of codes as a filter of images: each observation is coded first."""

    code: Code
    dtype: torch.dtype

    def __init__(self, code: Code, inner: Filter[Any], dtype: torch.dtype) -> None:
        """``inner`` takes codes of type ``dtype``."""
        super().__init__(inner)
        self.code, self.dtype = code, dtype

    def observed(self, obs: Shaped[Tensor, "b *x"]) -> Tensor:
        """The codes."""
        return self.code(obs).to(self.dtype)

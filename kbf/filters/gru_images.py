"""Gated recurrent units over codes with variances, trained end to end: the recurrent baseline of learned filters of images."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from kbf.filters.end_to_end import LEAST_VARIANCE, EndToEndFilter, positive


class GRUImagesState(NamedTuple):
    """h ``b k`` after the last step, and that before the last predict."""

    h: Tensor
    before: Tensor


class GRUImages(EndToEndFilter[GRUImagesState]):
    """A recurrent net in the place of a filter: the same encoder with two heads and the same loss as `RKNFilter`.

    1. Code: an image x becomes w(x) ``m`` and variances r(x) ``m``.
    2. Predict: h <- GRU(0, h). Update: the same move with the observation, h <- GRU((w, r, 1), h before it).
    3. Read out: the state from h, by an MLP, and its variances, by another.

    Here both read-outs see all of h, and codes have any length.

    References: Becker et al. (2019), Recurrent Kalman Networks, section 5: their LSTM and GRU; Cho et al. (2014).
    """

    def __init__(
        self,
        d: int,
        q: int | tuple[int, ...],
        *,
        m: int = 15,
        units: int = 75,
        hidden: int = 30,
        encoder: nn.Module | None = None,
    ) -> None:
        """An untrained net.

        Args:
            d: components of the state. q: components of an observation, or its shape.
            m: of a code. units: k, of h. hidden: units of the read-outs. encoder: as in `EndToEndFilter`.
        """
        super().__init__(d, q, m, encoder)
        self.m = m
        self.cell = nn.GRUCell(2 * m + 1, units)
        self.readout = nn.Sequential(nn.Linear(units, hidden), nn.Tanh(), nn.Linear(hidden, d))
        self.readout_variance = nn.Sequential(nn.Linear(units, hidden), nn.Tanh(), nn.Linear(hidden, d))

    def init(self, batch: int, *, generator: Generator | None = None) -> GRUImagesState:
        """h = 0."""
        zero = self.z_mean.new_zeros(batch, self.cell.hidden_size)
        return GRUImagesState(zero, zero)

    def predict(self, state: GRUImagesState, *, generator: Generator | None = None) -> GRUImagesState:
        """Move on without an observation."""
        return GRUImagesState(self.cell(state.h.new_zeros(len(state.h), self.cell.input_size), state.h), state.h)

    def take_in(self, state: GRUImagesState, w: Float[Tensor, "b m"], r: Float[Tensor, "b m"]) -> GRUImagesState:
        """The same move, with a code and its variances."""
        return state._replace(h=self.cell(torch.cat([w, r, torch.ones_like(w[:, :1])], -1), state.before))

    def mean(self, state: GRUImagesState) -> Float[Tensor, "*b d"]:
        """The read-out, in standard units."""
        return self.readout(state.h)

    def spread(self, state: GRUImagesState) -> Float[Tensor, "*b d d"]:
        """Diagonal, in standard units."""
        return (positive(self.readout_variance(state.h)) + LEAST_VARIANCE).diag_embed()

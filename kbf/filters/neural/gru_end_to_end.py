"""Gated recurrent units over codes with variances, trained end to end: the recurrent baseline of learned filters of images."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from kbf.filters.neural.base import LEAST_VARIANCE, EndToEndFilter, positive


class GRUImagesState(NamedTuple):
    """h ``b k`` after the last step, that before the last predict, and the control ``b u`` of it, in standard units."""

    h: Tensor
    before: Tensor
    control: Tensor


class GRUImages(EndToEndFilter[GRUImagesState]):
    """A recurrent net in the place of a filter: the same encoder with two heads and the same loss as `RKNFilter`.

    1. Code: an image x becomes w(x) ``m`` and variances r(x) ``m``.
    2. Predict: h <- GRU((0, u), h). Update: the same move with the observation, h <- GRU((w, r, 1,
    u), h before it).
    3. Read out: the state from h, by an MLP, and its variances, by another.

    Here both read-outs see all of h, and codes have any length.

    References: Becker et al. (2019), Recurrent Kalman Networks, section 5: their LSTM and GRU; Cho
    et al. (2014).
    """

    def __init__(
        self,
        d: int,
        q: int | tuple[int, ...],
        *,
        m: int = 15,
        units: int = 75,
        hidden: int = 30,
        controls: int = 0,
        encoder: nn.Module | None = None,
    ) -> None:
        """An untrained net.

        Args:
            d: components of the state. q: components of an observation, or its shape.
            m: of a code. units: k, of h. hidden: units of the read-outs. controls, encoder: as in
                `EndToEndFilter`.
        """
        super().__init__(d, q, m, encoder, controls)
        self.m = m
        self.cell = nn.GRUCell(2 * m + 1 + controls, units)
        self.readout = nn.Sequential(nn.Linear(units, hidden), nn.Tanh(), nn.Linear(hidden, d))
        self.readout_variance = nn.Sequential(
            nn.Linear(units, hidden), nn.Tanh(), nn.Linear(hidden, d)
        )

    def init(self, batch: int, *, generator: Generator | None = None) -> GRUImagesState:
        """h = 0."""
        zero = self.z_mean.new_zeros(batch, self.cell.hidden_size)
        return GRUImagesState(zero, zero, zero[:, : self.controlled])

    def predict(
        self,
        state: GRUImagesState,
        *,
        control: Float[Tensor, "b u"] | None = None,
        generator: Generator | None = None,
    ) -> GRUImagesState:
        """Move on without an observation."""
        acted = self.acted(control, len(state.h))
        none = acted.new_zeros(len(acted), 2 * self.m + 1)
        return GRUImagesState(self.cell(torch.cat([none, acted], -1), state.h), state.h, acted)

    def take_in(
        self, state: GRUImagesState, w: Float[Tensor, "b m"], r: Float[Tensor, "b m"]
    ) -> GRUImagesState:
        """The same move, with a code and its variances."""
        inputs = torch.cat([w, r, torch.ones_like(w[:, :1]), state.control], -1)
        return state._replace(h=self.cell(inputs, state.before))

    def mean(self, state: GRUImagesState) -> Float[Tensor, "*b d"]:
        """The read-out, in standard units."""
        return self.readout(state.h)

    def spread(self, state: GRUImagesState) -> Float[Tensor, "*b d d"]:
        """Diagonal, in standard units."""
        return (positive(self.readout_variance(state.h)) + LEAST_VARIANCE).diag_embed()

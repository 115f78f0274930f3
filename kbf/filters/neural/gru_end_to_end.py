"""Gated recurrent network trained end to end with its image encoder.

The recurrent baseline of learned filters of images.

References: Becker et al. (2019), section 5; Cho et al. (2014).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from kbf.filters.neural.base import LEAST_VARIANCE, EndToEndFilter, positive


class GRUImagesState(NamedTuple):
    """State of a `GRUImages`.

    Attributes:
        h: ``b k``, hidden state.
        before: ``b k``, the h before the last predict.
        control: ``b u``, of the last predict, in standard units.
    """

    h: Tensor
    before: Tensor
    control: Tensor


class GRUImages(EndToEndFilter[GRUImagesState]):
    """A recurrent network with the encoder and the loss of `RKNFilter`.

    1. Encode: an image x becomes w(x) ``m`` and variances r(x) ``m``.
    2. Predict: h <- GRU((0, u), h).
    3. Update: the same step with the observation, h <- GRU((w, r, 1, u), h before it).
    4. Read out: the state from h by an MLP, and its variances by another.

    Unlike in `RKNFilter`, both read-outs depend on all of h, and encodings have any length.

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
        """Initialise an untrained network.

        Args:
            d: components of the state.
            q: components of an observation, or its shape.
            m: components of an encoding.
            units: k, components of h.
            hidden: units of the read-outs.
            controls, encoder: as in `EndToEndFilter`.
        """
        super().__init__(d, q, m, encoder, controls)
        self.m: int = m
        self.cell: nn.GRUCell = nn.GRUCell(2 * m + 1 + controls, units)
        self.readout: nn.Sequential = nn.Sequential(
            nn.Linear(units, hidden), nn.Tanh(), nn.Linear(hidden, d)
        )
        self.readout_variance: nn.Sequential = nn.Sequential(
            nn.Linear(units, hidden), nn.Tanh(), nn.Linear(hidden, d)
        )

    def init(self, batch: int, *, generator: Generator | None = None) -> GRUImagesState:
        """Return h = 0."""
        zero = self.z_mean.new_zeros(batch, self.cell.hidden_size)
        return GRUImagesState(zero, zero, zero[:, : self.controlled])

    def predict(
        self,
        state: GRUImagesState,
        *,
        control: Float[Tensor, "b u"] | None = None,
        generator: Generator | None = None,
    ) -> GRUImagesState:
        """Return the state one step later without an observation."""
        acted = self.acted(control, len(state.h))
        none = acted.new_zeros(len(acted), 2 * self.m + 1)
        return GRUImagesState(self.cell(torch.cat([none, acted], -1), state.h), state.h, acted)

    def take_in(
        self, state: GRUImagesState, w: Float[Tensor, "b m"], r: Float[Tensor, "b m"]
    ) -> GRUImagesState:
        """Return the state after the same step with an encoding and its variances."""
        inputs = torch.cat([w, r, torch.ones_like(w[:, :1]), state.control], -1)
        return state._replace(h=self.cell(inputs, state.before))

    def mean(self, state: GRUImagesState) -> Float[Tensor, "*b d"]:
        """Return the read-out, in standard units."""
        return self.readout(state.h)

    def spread(self, state: GRUImagesState) -> Float[Tensor, "*b d d"]:
        """Return the diagonal covariance, in standard units."""
        return (positive(self.readout_variance(state.h)) + LEAST_VARIANCE).diag_embed()

"""Recurrent baselines: gated recurrent units (GRU) over vectors, or trained with an image encoder.

References: Cho et al. (2014); Nix and Weigend (1994); Becker et al. (2019), section 5.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Generator, Tensor, nn
from torch.nn import functional

from kbf.filters.neural.base import (
    LEAST_VARIANCE,
    EndToEndFilter,
    mean_and_variance_loss,
    positive,
)
from kbf.filters.neural.lstm import LSTMFilter, uniform_start


class GRUState(NamedTuple):
    """State of a `GRUFilter` or of `GRUImages`.

    Attributes:
        h: ``b k``, hidden state.
        before: ``b k``, the h before the last predict.
        control: ``b u``, of the last predict, in standard units.
    """

    h: Tensor
    before: Tensor
    control: Tensor


class GRUFilter(LSTMFilter):
    """Gated recurrent units over standardised observations, with a mean and a variance read-out.

    Scaling, the flag of missing observations and controls are those of `LSTMFilter`. There is no
    encoder: the cell receives the observation. ``predict`` advances with the zero input, ``update``
    repeats the same step with the observation.

    The mean is fitted by squared error. The variance of each component is exp of a linear function
    of h, fitted by the Gaussian log score around the current mean. No gradient of the variance
    reaches the cell, so that it does not change the mean.
    """

    def __init__(
        self,
        d: int,
        q: int | tuple[int, ...],
        *,
        hidden: int = 64,
        controls: int = 0,
        generator: Generator | None = None,
    ) -> None:
        """Initialise an untrained network; arguments as of `LSTMFilter`."""
        width = q if isinstance(q, int) else torch.Size(q).numel()
        super().__init__(
            d,
            q,
            hidden=hidden,
            encoder=nn.Flatten(1),
            features=width,
            controls=controls,
            generator=generator,
        )
        self.rnn: nn.LSTM | nn.GRU = nn.GRU(width + 1 + controls, hidden, batch_first=True)
        for parameter in self.rnn.parameters():
            nn.init.uniform_(parameter, -(hidden**-0.5), hidden**-0.5, generator=generator)
        self.log_variance: nn.Linear = nn.Linear(hidden, d)
        uniform_start(self.log_variance, generator)

    def cell(self, inputs: Float[Tensor, "b c"], h: Float[Tensor, "b k"]) -> Float[Tensor, "b k"]:
        """Return h' = (1 - u) n + u h with n = tanh(W x + b + r (U h + b')) and gates r, u."""
        W, U, bias, more_bias = self.rnn.all_weights[0]
        (r, u, n), (hr, hu, hn) = (
            functional.linear(a, M, v).chunk(3, -1)
            for a, M, v in ((inputs, W, bias), (h, U, more_bias))
        )
        keep = (u + hu).sigmoid()
        return (1 - keep) * (n + (r + hr).sigmoid() * hn).tanh() + keep * h

    def init(self, batch: int, *, generator: Generator | None = None) -> GRUState:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return h = 0."""
        zero = self.z_mean.new_zeros(batch, self.rnn.hidden_size)
        return GRUState(zero, zero, zero[:, : self.controlled])

    def predict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        state: GRUState,
        *,
        control: Float[Tensor, "b u"] | None = None,
        generator: Generator | None = None,
    ) -> GRUState:
        """Return the state one step later without an observation, given the control if any."""
        acted = state.control if control is None else self.standard(control)
        none = acted.new_zeros(len(acted), self.rnn.input_size - self.controlled)
        return GRUState(self.cell(torch.cat([none, acted], -1), state.h), state.h, acted)

    def observe(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state: GRUState, obs: Shaped[Tensor, "b *x"]
    ) -> tuple[GRUState, Bool[Tensor, " b"]]:
        """Return the state after the same step with the observation, and whether h is not NaN."""
        h = self.cell(torch.cat([self.encode(obs), state.control], -1), state.before)
        total = h.sum(-1)
        return state._replace(h=h), total == total  # NaN is not

    def estimate(self, state: GRUState) -> Float[Tensor, "b d"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the read-out of h, ``b d``, in the units of the data."""
        return self.z_mean + self.z_scale * self.readout(state.h)

    def covariance(self, state: GRUState) -> Float[Tensor, "b d d"]:
        """Return the diagonal covariance, ``b d d``, in the units of the data."""
        return (self.z_scale.square() * self.log_variance(state.h).exp()).diag_embed()

    def loss(
        self,
        states: Float[Tensor, "b T d"],
        obs: Shaped[Tensor, "b T *x"],
        mask: Bool[Tensor, "b T"] | None = None,
        controls: Float[Tensor, "b T u"] | None = None,
        *,
        burn_in: int = 0,
    ) -> Float[Tensor, ""]:
        """Return `mean_and_variance_loss` in standard units."""
        h = self.hidden_states(obs, mask, controls)[:, burn_in:]
        residual = (states[:, burn_in:] - self.z_mean) / self.z_scale - self.readout(h)
        return mean_and_variance_loss(residual, self.log_variance(h.detach()))


class GRUImages(EndToEndFilter[GRUState]):
    """Gated recurrent units trained with their image encoder by the loss of `RKNFilter`.

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

    def init(self, batch: int, *, generator: Generator | None = None) -> GRUState:
        """Return h = 0."""
        zero = self.z_mean.new_zeros(batch, self.cell.hidden_size)
        return GRUState(zero, zero, zero[:, : self.controlled])

    def predict(
        self,
        state: GRUState,
        *,
        control: Float[Tensor, "b u"] | None = None,
        generator: Generator | None = None,
    ) -> GRUState:
        """Return the state one step later without an observation."""
        acted = self.acted(control, len(state.h))
        none = acted.new_zeros(len(acted), 2 * self.m + 1)
        return GRUState(self.cell(torch.cat([none, acted], -1), state.h), state.h, acted)

    def take_in(
        self, state: GRUState, w: Float[Tensor, "b m"], r: Float[Tensor, "b m"]
    ) -> GRUState:
        """Return the state after the same step with an encoding and its variances."""
        inputs = torch.cat([w, r, torch.ones_like(w[:, :1]), state.control], -1)
        return state._replace(h=self.cell(inputs, state.before))

    def mean(self, state: GRUState) -> Float[Tensor, "*b d"]:
        """Return the read-out, in standard units."""
        return self.readout(state.h)

    def spread(self, state: GRUState) -> Float[Tensor, "*b d d"]:
        """Return the diagonal covariance, in standard units."""
        return (positive(self.readout_variance(state.h)) + LEAST_VARIANCE).diag_embed()

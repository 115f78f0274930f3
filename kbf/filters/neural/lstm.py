"""Recurrent baseline: encoder, LSTM cell, linear read-out; the filter and its recipe are one module."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Generator, Tensor, nn
from torch.nn import functional

from kbf.filters.neural.base import check_memory, controls_of, multi_layer, store_units
from kbf.recording import Recording
from kbf.runtime.html_repr import ShownModule

LARGEST = 1e15
"""Most that an encoder is given, in standard units or those of an image."""


class RecurrentState(NamedTuple):
    """State of an `LSTMFilter`.

    Attributes:
        h: ``b k``, hidden state. c: ``b k``, cell state.
        gates: ``b 4k``, U h + bias from the h *before* the last predict (`LSTMFilter.recur`):
            update adds the observation's part.
        before: ``b k``, the c before the last predict.
    """

    h: Tensor
    c: Tensor
    gates: Tensor
    before: Tensor


def lstm_gates(
    gates: Float[Tensor, "b four_k"], c: Float[Tensor, "b k"]
) -> tuple[Float[Tensor, "b k"], Float[Tensor, "b k"]]:
    """Cell of an LSTM: c' = s(f) c + s(i) tanh(g), h' = s(o) tanh(c').

    (i, f, g, o) are the four parts of the gates, s is the logistic function.

    References: Hochreiter and Schmidhuber (1997); Gers et al. (2000) for f. The order is that of
    `torch.nn.LSTM`.
    """
    i, f, g, o = gates.chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


class LSTMFilter(ShownModule):
    """LSTM over encoded observations, as a filter: gates = U h + bias + W (e(x), 1) with an observation, U h + bias without.

    The input of the cell is the encoded observation and a flag that says "observed"; a missing
    observation is the zero input. Predict computes U h + bias and moves h and c on as a step
    without observation; update takes the same U h + bias, adds the observation's part and moves the
    *old* h and c on. So a step with an observation costs one cell (the products with U and W once
    each), a masked step moves on in time by U alone, and h masked steps predict h steps ahead. One
    observation a step: a second update replaces the first.

    States are standardised by the training part (`prepare`), and so are observations, unless the
    encoder is one of images: such a one says how wide its output is (`kbf.images.encoders`), and
    gets images as they are. The estimate is in the units of the data. Windows of whole sequences go
    through ``forward``: the same numbers as the step-by-step filter, encoded all at once.

    Controls enter the cell beside the observation, standardised, whether something is observed or
    not.

    With ``feedback`` the estimate before the last move enters the cell as well, in standard units:
    gates = ... + V y, y = R h + r the read-out. As y is linear in h, U + V R and bias + V r take
    the place of U and bias: the net can represent what it can without, no more, from other weights;
    training alone may end elsewhere.
    """

    x_mean: Tensor
    x_scale: Tensor
    z_mean: Tensor
    z_scale: Tensor
    u_mean: Tensor
    u_scale: Tensor

    def __init__(
        self,
        d: int,
        q: int | tuple[int, ...],
        *,
        hidden: int = 64,
        sizes: Sequence[int] = (64, 32),
        encoder: nn.Module | None = None,
        features: int | None = None,
        feedback: bool = False,
        controls: int = 0,
        generator: Generator | None = None,
    ) -> None:
        """An untrained net.

        Args:
            d: components of the state.
            q: components of an observation, or its shape (an image: ``c h w``).
            hidden: k, size of h and c.
            sizes: widths of the encoder, an MLP with ReLU over flattened observations; the last is
                what the cell sees.
            encoder: takes its place, ``b *x`` -> ``b features``. It gets standardised observations,
                or images as they are if it has an attribute ``features``, as those of
                `kbf.images.encoders`.
            features: width of ``encoder``'s output; None takes its own ``features``.
            feedback: let the previous estimate enter the cell.
            controls: k, components of a control; 0 for recordings without.
            generator: of the first weights (those of a given ``encoder`` are left alone).

        Raises:
            ValueError: an encoder that does not say its width without ``features``, or ``features``
                without an encoder.
        """
        super().__init__()
        own = getattr(encoder, "features", None)
        self.raw: bool = isinstance(own, int)  # some nets of torchvision have a module of this name
        features = own if features is None and isinstance(own, int) else features
        if (encoder is None) != (features is None):
            raise ValueError(
                "give encoder and features (the width of its output) together, or neither"
            )
        self.shape: tuple[int, ...] = (q,) if isinstance(q, int) else tuple(q)
        self.controlled = controls
        self.rnn: nn.LSTM | nn.GRU = nn.LSTM(
            (features or sizes[-1]) + 1 + controls, hidden, batch_first=True
        )
        self.readout: nn.Linear = nn.Linear(hidden, d)
        self.feedback: nn.Linear | None = nn.Linear(d, 4 * hidden, bias=False) if feedback else None
        mlp = encoder is None
        self.encoder: nn.Module = (
            multi_layer(math.prod(self.shape), sizes) if encoder is None else encoder
        )
        for layer in [
            self.rnn,
            self.readout,
            *(self.encoder.modules() if mlp else []),
            *([self.feedback] if feedback else []),
        ]:
            uniform_start(layer, generator)
        self.register_buffer("x_mean", torch.zeros(self.shape))
        self.register_buffer("x_scale", torch.ones(self.shape))
        self.register_buffer("z_mean", torch.zeros(d))
        self.register_buffer("z_scale", torch.ones(d))
        if controls:
            self.register_buffer("u_mean", torch.zeros(controls))
            self.register_buffer("u_scale", torch.ones(controls))

    def prepare(self, memory: list[Recording], generator: Generator | None = None) -> None:
        """Store mean and standard deviation of the training part's states and controls, and of observations that are standardised.

        Components of a vector have a scale each, the pixels of an image one for all. Constant
        components are left unscaled.

        Raises:
            ValueError: states, observations or controls of another size than the net was built for,
                or no observation at all.
        """
        z, x = check_memory(memory, self.z_mean.shape, self.shape)
        u = controls_of(memory, self.controlled)
        store_units(self.z_mean, self.z_scale, z)
        if not self.raw:
            store_units(self.x_mean, self.x_scale, x)
        if u is not None:
            store_units(self.u_mean, self.u_scale, u)

    def fit(self, memory: Recording | list[Recording] | None = None) -> LSTMFilter:
        """The net itself: it needs no memory."""
        return self

    def encode(self, obs: Shaped[Tensor, "b *x"]) -> Float[Tensor, "b k"]:
        """The input of the cell for observations ``b *x``: encoded, with the flag 1 behind.

        What is beyond `LARGEST` saturates all the same; so large sums would overflow, and how
        depends on their order.
        """
        x = obs if self.raw else (obs - self.x_mean) / self.x_scale
        e = self.encoder(
            x.clamp(-LARGEST, LARGEST) + 0 * x if x.is_floating_point() else x
        )  # 0 * inf is NaN: an impossible one
        return torch.cat([e, e.new_ones(len(e), 1)], -1)

    def recurrence(self) -> tuple[Float[Tensor, "four_k k"], Float[Tensor, " four_k"]]:
        """U and bias; with feedback U + V R and bias + V r."""
        _, U, bias, more_bias = self.rnn.all_weights[0]
        if self.feedback is None:
            return U, bias + more_bias
        V = self.feedback.weight
        return U + V @ self.readout.weight, bias + more_bias + V @ self.readout.bias

    def recur(self, h: Float[Tensor, "b k"]) -> Float[Tensor, "b four_k"]:
        """U h + bias."""
        return functional.linear(h, *self.recurrence())

    def init(self, batch: int, *, generator: Generator | None = None) -> RecurrentState:
        """Start from h = c = 0: the estimate is near the mean of the training states."""
        zero = self.z_mean.new_zeros(batch, self.rnn.hidden_size)
        return RecurrentState(zero, zero, self.recur(zero), zero)

    def predict(
        self,
        state: RecurrentState,
        *,
        control: Float[Tensor, "b u"] | None = None,
        generator: Generator | None = None,
    ) -> RecurrentState:
        """Move on without observation, with the control if there is one."""
        gates = self.recur(state.h)
        if control is not None:
            gates = gates + functional.linear(
                self.standard(control), self.rnn.all_weights[0][0][:, -self.controlled :]
            )
        return RecurrentState(*lstm_gates(gates, state.c), gates, state.c)

    def update(self, state: RecurrentState, obs: Shaped[Tensor, "b *x"]) -> RecurrentState:
        """The same move, with the observation ``b *x``."""
        return self.observe(state, obs)[0]

    def observe(
        self, state: RecurrentState, obs: Shaped[Tensor, "b *x"]
    ) -> tuple[RecurrentState, Bool[Tensor, " b"]]:
        """Update, and whether h is no NaN: anything else, however large, only saturates the gates."""
        W = self.rnn.all_weights[0][0]
        W = W[:, : -self.controlled] if self.controlled else W
        h, c = lstm_gates(state.gates + functional.linear(self.encode(obs), W), state.before)
        total = h.sum(-1)
        return state._replace(h=h, c=c), total == total  # NaN is not

    def estimate(self, state: RecurrentState) -> Float[Tensor, "b d"]:
        """The read-out of h, ``b d``, in the units of the data."""
        return self.z_mean + self.z_scale * self.readout(state.h)

    def standard(self, control: Float[Tensor, "*b u"]) -> Float[Tensor, "*b u"]:
        """Controls in standard units."""
        return (control - self.u_mean) / self.u_scale

    def forward(
        self,
        obs: Shaped[Tensor, "b T *x"],
        mask: Bool[Tensor, "b T"] | None = None,
        controls: Float[Tensor, "b T u"] | None = None,
    ) -> Float[Tensor, "b T d"]:
        """The estimates of a `rollout` from the start, all observations encoded at once: fast, for training.

        Args:
            obs: ``b T *x``.
            mask: ``b T``, False = not observed (the values there must be finite).
            controls: ``b T k``, for a net that takes some.
        """
        return self.z_mean + self.z_scale * self.readout(self.hidden_states(obs, mask, controls))

    def hidden_states(
        self,
        obs: Shaped[Tensor, "b T *x"],
        mask: Bool[Tensor, "b T"] | None = None,
        controls: Float[Tensor, "b T u"] | None = None,
    ) -> Float[Tensor, "b T k"]:
        """h after each step; arguments as of `forward`."""
        if mask is None:
            u = self.encode(obs.flatten(0, 1)).unflatten(0, obs.shape[:2])
        else:  # batch norm must not see what was not observed
            u = self.z_mean.new_zeros(*mask.shape, self.rnn.input_size - self.controlled)
            u[mask] = self.encode(obs[mask]).to(u)  # autocast's may be of another type
        if controls is not None:
            u = torch.cat([u, self.standard(controls)], -1)
        if self.feedback is None:
            return self.rnn(u)[0]
        U, bias = self.recurrence()
        weights = {"weight_hh_l0": U, "bias_ih_l0": bias, "bias_hh_l0": torch.zeros_like(bias)}
        return torch.func.functional_call(self.rnn, weights, (u,))[0]

    def window_estimates(
        self,
        memory: list[Recording],
        windows: Recording,
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> Float[Tensor, "b T d"]:
        """``forward`` on windows; there is no memory, and an encoder changes images by itself (`kbf.images.augment.Augment`)."""
        return self(windows.obs, windows.mask, windows.controls)


def uniform_start(layer: nn.Module, generator: Generator | None) -> None:
    """Draw the weights of a linear layer or an LSTM anew, U(-1, 1) / sqrt(inputs or hidden), with forget biases of 1.

    References: Jozefowicz et al. (2015) for the forget bias.
    """
    if not isinstance(layer, nn.Linear | nn.LSTM):
        return
    bound = (layer.in_features if isinstance(layer, nn.Linear) else layer.hidden_size) ** -0.5
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -bound, bound, generator=generator)
    if isinstance(layer, nn.LSTM):
        _, _, bias, more_bias = layer.all_weights[0]
        for values, start in ((bias, 1.0), (more_bias, 0.0)):
            nn.init.constant_(values[layer.hidden_size : 2 * layer.hidden_size], start)

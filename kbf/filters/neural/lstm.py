"""Recurrent baseline: long short-term memory (LSTM) over encoded observations.

One module is both the network and the filter.

References: Hochreiter and Schmidhuber (1997); Gers et al. (2000).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Generator, Tensor, nn
from torch.nn import functional

from kbf.filters.neural.base import Standardised, multi_layer
from kbf.filters.protocols import UpdateByObserve
from kbf.recording import Recording
from kbf.runtime.html_repr import ShownModule

# Largest absolute value that an encoder receives; larger values are clamped.
#
# Units saturate far below it, and larger sums would overflow, depending on their order.
MAX_ENCODER_INPUT = 1e15


class RecurrentState(NamedTuple):
    """State of an `LSTMFilter`.

    Attributes:
        h: ``b k``, hidden state. c: ``b k``, cell state.
        gates: ``b 4k``, U h + bias of the h *before* the last predict (`LSTMFilter.recur`), to
            which the update adds the term of the observation.
        before: ``b k``, the c before the last predict.
    """

    h: Tensor
    c: Tensor
    gates: Tensor
    before: Tensor


def lstm_gates(
    gates: Float[Tensor, "b four_k"], c: Float[Tensor, "b k"]
) -> tuple[Float[Tensor, "b k"], Float[Tensor, "b k"]]:
    """Return h' and c' of an LSTM cell: c' = s(f) c + s(i) tanh(g), h' = s(o) tanh(c').

    (i, f, g, o) are the four parts of the gates, s is the logistic function.

    References: Hochreiter and Schmidhuber (1997); Gers et al. (2000) for f. The order is that of
    `torch.nn.LSTM`.
    """
    i, f, g, o = gates.chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


class LSTMFilter(UpdateByObserve[Any], Standardised, ShownModule):
    """An LSTM over encoded observations, as a filter.

    The gates are U h + bias + W (e(x), 1) with an observation x and U h + bias without one. The
    input of the cell is the encoded observation e(x) and a flag for "observed"; a missing
    observation is the zero input. ``predict`` computes U h + bias and advances h and c without an
    observation. ``update`` uses the same U h + bias, adds the term of the observation and advances
    the *old* h and c. A step therefore costs one cell evaluation, and h masked steps predict h
    steps ahead. Each step takes one observation: a second update replaces the first.

    States are standardised by the training recordings (`prepare`). So are observations, unless the
    encoder has an attribute ``features``, as the encoders of images do (`kbf.images.encoders`):
    these receive images as they are. Estimates are in the units of the data. ``forward`` returns
    the estimates of whole windows, equal to those of the step-by-step filter, and encodes all
    observations at once.

    Standardised controls are inputs of the cell in every step, observed or not.

    With ``feedback`` the estimate before the last move is an input, too: gates = ... + V y with the
    read-out y = R h + r in standard units. Since y is linear in h, this replaces U by U + V R and
    bias by bias + V r. The network represents the same functions as without feedback, but training
    may end elsewhere.
    """

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
        """Initialise an untrained network.

        Args:
            d: components of the state.
            q: components of an observation, or its shape (of an image ``c h w``).
            hidden: k, size of h and c.
            sizes: widths of the default encoder, an MLP with ReLU over flattened observations; the
                last is the width of e(x).
            encoder: replaces the default encoder, ``b *x`` -> ``b features``. It receives
                standardised observations, or images as they are if it has an attribute
                ``features``.
            features: width of the output of ``encoder``; None uses its attribute ``features``.
            feedback: use the previous estimate as an input of the cell.
            controls: k, components of a control; 0 for recordings without controls.
            generator: of the initial weights; those of a given ``encoder`` are kept.

        Raises:
            ValueError: an encoder of unknown width without ``features``, or ``features`` without an
                encoder.
        """
        super().__init__()
        own = getattr(encoder, "features", None)
        # some networks of torchvision have a module of this name
        self.raw: bool = isinstance(own, int)
        features = own if features is None and isinstance(own, int) else features
        if (encoder is None) != (features is None):
            raise ValueError(
                "give encoder and features (the width of its output) together, or neither"
            )
        self.register_units(d, q, controls)
        self.rnn: nn.LSTM | nn.GRU = nn.LSTM(
            (features or sizes[-1]) + 1 + controls, hidden, batch_first=True
        )
        self.readout: nn.Linear = nn.Linear(hidden, d)
        self.feedback: nn.Linear | None = nn.Linear(d, 4 * hidden, bias=False) if feedback else None
        mlp = encoder is None
        self.encoder: nn.Module = (
            multi_layer(math.prod(self.shape), sizes) if encoder is None else encoder
        )
        own_layers = self.encoder.modules() if mlp else []
        for layer in [self.rnn, self.readout, *own_layers, self.feedback]:
            uniform_start(layer, generator)

    def encode(self, obs: Shaped[Tensor, "b *x"]) -> Float[Tensor, "b k"]:
        """Return the input of the cell for observations ``b *x``: e(x) and the flag 1."""
        x = self.encoder_input(obs)
        if x.is_floating_point():
            # + 0 * x: an infinite observation becomes NaN, which is rejected
            x = x.clamp(-MAX_ENCODER_INPUT, MAX_ENCODER_INPUT) + 0 * x
        e = self.encoder(x)
        return torch.cat([e, e.new_ones(len(e), 1)], -1)

    def recurrence(self) -> tuple[Float[Tensor, "four_k k"], Float[Tensor, " four_k"]]:
        """Return U and bias; with feedback U + V R and bias + V r."""
        _, U, bias, more_bias = self.rnn.all_weights[0]
        if self.feedback is None:
            return U, bias + more_bias
        V = self.feedback.weight
        return U + V @ self.readout.weight, bias + more_bias + V @ self.readout.bias

    def recur(self, h: Float[Tensor, "b k"]) -> Float[Tensor, "b four_k"]:
        """Return U h + bias."""
        return functional.linear(h, *self.recurrence())

    def init(self, batch: int, *, generator: Generator | None = None) -> RecurrentState:
        """Return h = c = 0, whose estimate is near the mean of the training states."""
        zero = self.z_mean.new_zeros(batch, self.rnn.hidden_size)
        return RecurrentState(zero, zero, self.recur(zero), zero)

    def predict(
        self,
        state: RecurrentState,
        *,
        control: Float[Tensor, "b u"] | None = None,
        generator: Generator | None = None,
    ) -> RecurrentState:
        """Return the state one step later without an observation, given the control if any."""
        gates = self.recur(state.h)
        if control is not None:
            W = self.rnn.all_weights[0][0][:, -self.controlled :]
            gates = gates + functional.linear(self.standard(control), W)
        return RecurrentState(*lstm_gates(gates, state.c), gates, state.c)

    def observe(
        self, state: RecurrentState, obs: Shaped[Tensor, "b *x"]
    ) -> tuple[RecurrentState, Bool[Tensor, " b"]]:
        """Return the state after the same step with the observation, and whether h is not NaN.

        Large x only saturate the gates.
        """
        W = self.rnn.all_weights[0][0]
        W = W[:, : -self.controlled] if self.controlled else W
        h, c = lstm_gates(state.gates + functional.linear(self.encode(obs), W), state.before)
        total = h.sum(-1)
        return state._replace(h=h, c=c), total == total  # NaN is not

    def estimate(self, state: RecurrentState) -> Float[Tensor, "b d"]:
        """Return the read-out of h, ``b d``, in the units of the data."""
        return self.z_mean + self.z_scale * self.readout(state.h)

    def forward(
        self,
        obs: Shaped[Tensor, "b T *x"],
        mask: Bool[Tensor, "b T"] | None = None,
        controls: Float[Tensor, "b T u"] | None = None,
    ) -> Float[Tensor, "b T d"]:
        """Return the estimates of a `rollout` from the initial state, for training.

        All observations are encoded at once, which is faster than step by step.

        Args:
            obs: ``b T *x``.
            mask: ``b T``, False where nothing was observed (values there must be finite).
            controls: ``b T k``, for a network with controls.
        """
        return self.z_mean + self.z_scale * self.readout(self.hidden_states(obs, mask, controls))

    def hidden_states(
        self,
        obs: Shaped[Tensor, "b T *x"],
        mask: Bool[Tensor, "b T"] | None = None,
        controls: Float[Tensor, "b T u"] | None = None,
    ) -> Float[Tensor, "b T k"]:
        """Return h after each step; arguments as of `forward`."""
        if mask is None:
            u = self.encode(obs.flatten(0, 1)).unflatten(0, obs.shape[:2])
        else:  # batch normalisation must not depend on missing observations
            u = self.z_mean.new_zeros(*mask.shape, self.rnn.input_size - self.controlled)
            u[mask] = self.encode(obs[mask]).to(u)  # autocast may return another type
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
        """Return ``forward`` of the windows.

        The memory is not used, and encoders augment images themselves
        (`kbf.images.augment.Augment`).
        """
        return self(windows.obs, windows.mask, windows.controls)


def uniform_start(layer: nn.Module | None, generator: Generator | None) -> None:
    """Draw the weights of a linear layer or an LSTM from U(-1, 1) / sqrt(inputs or hidden).

    Biases of forget gates are 1. Other layers, and None, are left as they are.

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

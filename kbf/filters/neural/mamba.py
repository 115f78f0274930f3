"""Selective state-space network (Mamba-2) over vectors, with a mean and a variance read-out.

A layer maps u ``T e`` to outputs ``T e``. With [g, v, B, C, d] = linear(u), where v, B, C pass a
causal convolution of width 4 and SiLU, heads of width p, B_t and C_t ``n`` shared by the heads, and
D_t = softplus(d_t + bias) > 0 and A < 0, one number a head:

    S_t = exp(D_t A) S_{t-1} + D_t v_t B_t^T,    y_t = S_t C_t + w v_t,

and the output is linear(RMSNorm(y SiLU(g))). The same in parallel over a block of steps (`scan`):

    Y = (L o (C B^T)) diag(D) V,    L_ts = exp(A sum_{r=s+1..t} D_r) for s <= t, else 0.

References: Gu and Dao (2023), Mamba; Dao and Gu (2024), Transformers are SSMs, sections 3 and 6
(the dual form) and 7 (the layer).
"""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Generator, Tensor, nn
from torch.nn import functional

from kbf.filters.neural.base import Standardised, mean_and_variance_loss
from kbf.filters.neural.lstm import MAX_ENCODER_INPUT, uniform_start
from kbf.filters.protocols import UpdateByObserve
from kbf.runtime.html_repr import ShownModule

# Steps that `scan` computes at once: its matrices L have their square as size.
SCAN_STEPS = 64
# Width of the convolution.
TAPS = 4
# Ranges of D at d = 0 and of -A at the start, those of the reference implementation.
START_RATES = (1e-3, 1e-1)
START_DECAYS = (1.0, 16.0)


def scan(
    v: Float[Tensor, "b T h p"],
    D: Float[Tensor, "b T h"],
    A: Float[Tensor, " h"],
    B: Float[Tensor, "b T n"],
    C: Float[Tensor, "b T n"],
    S: Float[Tensor, "b h p n"],
    block: int = SCAN_STEPS,
) -> tuple[Float[Tensor, "b T h p"], Float[Tensor, "b h p n"]]:
    """Return y_t = S_t C_t for all t, and the last S.

    S_t = exp(D_t A) S_{t-1} + D_t v_t B_t^T.
    Steps of a block are computed in parallel, and S is passed from block to block.

    References: Dao and Gu (2024), section 6.
    """
    found = []
    for V, rate, b, c in zip(*(each.split(block, 1) for each in (v, D, B, C)), strict=True):
        a = (A * rate).cumsum(1)
        later = torch.ones(a.shape[1], a.shape[1], dtype=torch.bool, device=a.device).triu(1)
        gap = (a[:, :, None] - a[:, None]).masked_fill(later[..., None], -math.inf)
        W = (c @ b.mT)[..., None] * gap.exp() * rate[:, None]
        y = torch.einsum("btsh,bshp->bthp", W, V)
        found.append(y + a.exp()[..., None] * torch.einsum("btn,bhpn->bthp", c, S))
        left = (a[:, -1:] - a).exp() * rate
        S = a[:, -1].exp()[..., None, None] * S + torch.einsum("bsh,bshp,bsn->bhpn", left, V, b)
    return torch.cat(found, 1), S


class SelectiveLayer(nn.Module):
    """One layer of the module's equations, in parallel (``forward``) or one step at a time."""

    def __init__(self, width: int, heads: int, head_width: int, n: int) -> None:
        """Initialise the weights of all but the linear maps, which the network draws.

        Args:
            width: e, of inputs and outputs.
            heads, head_width: h and p.
            n: length of B and C.
        """
        super().__init__()
        inner = heads * head_width
        self.heads, self.n, self.inner = heads, n, inner
        self.channels: int = inner + 2 * n
        self.norm: nn.RMSNorm = nn.RMSNorm(width)
        self.enter: nn.Linear = nn.Linear(width, inner + self.channels + heads)
        self.taps: nn.Parameter = nn.Parameter(torch.empty(self.channels, TAPS))
        self.taps_bias: nn.Parameter = nn.Parameter(torch.zeros(self.channels))
        self.log_decay: nn.Parameter = nn.Parameter(torch.empty(heads))
        self.rate_bias: nn.Parameter = nn.Parameter(torch.empty(heads))
        self.skip: nn.Parameter = nn.Parameter(torch.ones(heads))
        self.inner_norm: nn.RMSNorm = nn.RMSNorm(inner)
        self.leave: nn.Linear = nn.Linear(inner, width)

    def start(self, generator: Generator | None) -> None:
        """Draw the weights: D log-uniform in `START_RATES`, -A uniform in `START_DECAYS`."""
        for layer in (self.enter, self.leave):
            uniform_start(layer, generator)
        nn.init.uniform_(self.taps, -(TAPS**-0.5), TAPS**-0.5, generator=generator)
        low, high = (math.log(rate) for rate in START_RATES)
        with torch.no_grad():
            rate = self.rate_bias.uniform_(low, high, generator=generator).exp()
            self.rate_bias.copy_(rate + (-torch.expm1(-rate)).log())  # softplus of it is the rate
            self.log_decay.uniform_(*START_DECAYS, generator=generator).log_()

    def split(
        self, u: Float[Tensor, "*b e"]
    ) -> tuple[Float[Tensor, "*b i"], Float[Tensor, "*b c"], Float[Tensor, "*b h"]]:
        """Return g, the channels (v, B, C) before the convolution, and D."""
        g, channels, d = self.enter(self.norm(u)).split([self.inner, self.channels, self.heads], -1)
        return g, channels, functional.softplus(d + self.rate_bias)

    def convolved(
        self, channels: Float[Tensor, "*b c taps"]
    ) -> tuple[Float[Tensor, "*b h p"], Float[Tensor, "*b n"], Float[Tensor, "*b n"]]:
        """Return v, B, C from the channels of the last `TAPS` steps."""
        x = functional.silu((channels * self.taps).sum(-1) + self.taps_bias)
        v, B, C = x.split([self.inner, self.n, self.n], -1)
        return v.unflatten(-1, (self.heads, -1)), B, C

    def output(
        self, u: Float[Tensor, "*b e"], y: Float[Tensor, "*b h p"], g: Float[Tensor, "*b i"]
    ) -> Float[Tensor, "*b e"]:
        """Return u + linear(RMSNorm(y SiLU(g)))."""
        return u + self.leave(self.inner_norm(y.flatten(-2) * functional.silu(g)))

    def forward(self, u: Float[Tensor, "b T e"]) -> Float[Tensor, "b T e"]:
        """Return the outputs of all steps, from S = 0."""
        g, channels, D = self.split(u)
        window = functional.pad(channels, (0, 0, TAPS - 1, 0)).unfold(1, TAPS, 1)
        v, B, C = self.convolved(window)
        S = u.new_zeros(len(u), self.heads, v.shape[-1], self.n)
        y, _ = scan(v, D, -self.log_decay.exp(), B, C, S)
        return self.output(u, y + self.skip[:, None] * v, g)

    def step(
        self, u: Float[Tensor, "b e"], S: Float[Tensor, "b h p n"], before: Float[Tensor, "b c s"]
    ) -> tuple[Float[Tensor, "b e"], Float[Tensor, "b h p n"], Float[Tensor, "b c s"]]:
        """Return the output of one step, S after it, and the channels of the last steps."""
        g, channels, D = self.split(u)
        window = torch.cat([before, channels[..., None]], -1)
        v, B, C = self.convolved(window)
        keep = (-self.log_decay.exp() * D).exp()
        S = keep[..., None, None] * S + (D[..., None] * v)[..., None] * B[:, None, None]
        y = (S * C[:, None, None]).sum(-1) + self.skip[:, None] * v
        return self.output(u, y, g), S, window[..., 1:]


class MambaState(NamedTuple):
    """State of a `MambaFilter`; the leaves with ``before`` are those before the last predict.

    Attributes:
        S: ``b l h p n``, of all layers. channels: ``b l c 3``, inputs of the convolutions.
        features: ``b e``, what the read-outs receive.
        S_before, channels_before: as S and channels.
        control: ``b k``, of the last predict, in standard units.
    """

    S: Tensor
    channels: Tensor
    features: Tensor
    S_before: Tensor
    channels_before: Tensor
    control: Tensor


class MambaFilter(UpdateByObserve[Any], Standardised, ShownModule):
    """A selective state-space network over standardised observations, as a filter.

    The input of a step is linear(x, 1, u) with an observation x and a control u, and linear(0, 0,
    u) without an observation. ``predict`` advances without one, ``update`` repeats the same step
    with it. Mean and variance are linear and exp of a linear function of the features of the last
    layer; the loss is that of `kbf.filters.neural.gru.GRUFilter`.
    """

    def __init__(
        self,
        d: int,
        q: int | tuple[int, ...],
        *,
        hidden: int = 64,
        layers: int = 2,
        heads: int = 4,
        head_width: int = 32,
        n: int = 16,
        controls: int = 0,
        generator: Generator | None = None,
    ) -> None:
        """Initialise an untrained network.

        Args:
            d: components of the state.
            q: components of an observation, or its shape.
            hidden: e, width of the layers.
            layers: their number.
            heads, head_width, n: of a layer, h, p and n.
            controls: k, components of a control; 0 for recordings without controls.
            generator: of the initial weights.

        Raises:
            ValueError: a size below 1.
        """
        super().__init__()
        if min(hidden, layers, heads, head_width, n) < 1:
            raise ValueError(
                "hidden, layers, heads, head_width and n must be at least 1, "
                f"got {(hidden, layers, heads, head_width, n)}"
            )
        self.raw: bool = False
        self.register_units(d, q, controls)
        self.width: int = math.prod(self.shape)
        self.enter: nn.Linear = nn.Linear(self.width + 1 + controls, hidden)
        self.layers: nn.ModuleList = nn.ModuleList(
            SelectiveLayer(hidden, heads, head_width, n) for _ in range(layers)
        )
        self.norm: nn.RMSNorm = nn.RMSNorm(hidden)
        self.readout: nn.Linear = nn.Linear(hidden, d)
        self.log_variance: nn.Linear = nn.Linear(hidden, d)
        for layer in (self.enter, self.readout, self.log_variance):
            uniform_start(layer, generator)
        for layer in self.layers:
            layer.start(generator)  # pyright: ignore[reportCallIssue]

    def encode(self, obs: Shaped[Tensor, "*b q"]) -> Float[Tensor, "*b i"]:
        """Return observations in standard units with the flag 1."""
        x = self.encoder_input(obs)
        # + 0 * x: an infinite observation becomes NaN, which is rejected
        x = x.clamp(-MAX_ENCODER_INPUT, MAX_ENCODER_INPUT) + 0 * x
        return torch.cat([x, torch.ones_like(x[..., :1])], -1)

    def init(self, batch: int, *, generator: Generator | None = None) -> MambaState:
        """Return zeros, whose estimate is near the mean of the training states."""
        first: Any = self.layers[0]
        zero = self.z_mean.new_zeros(batch, len(self.layers))
        S = zero[..., None, None, None].expand(
            -1, -1, first.heads, first.inner // first.heads, first.n
        )
        channels = zero[..., None, None].expand(-1, -1, first.channels, TAPS - 1)
        features = self.z_mean.new_zeros(batch, self.readout.in_features)
        control = self.z_mean.new_zeros(batch, self.controlled)
        return MambaState(S, channels, features, S, channels, control)

    def advance(self, state: MambaState, seen: Float[Tensor, "b i"]) -> MambaState:
        """Return the state after one step from ``S_before``, with an observation and its flag."""
        u, S, channels = self.enter(torch.cat([seen, state.control], -1)), [], []
        for k, layer in enumerate(self.layers):
            u, s, c = layer.step(u, state.S_before[:, k], state.channels_before[:, k])  # pyright: ignore[reportCallIssue]
            S.append(s)
            channels.append(c)
        return state._replace(
            S=torch.stack(S, 1), channels=torch.stack(channels, 1), features=self.norm(u)
        )

    def predict(
        self,
        state: MambaState,
        *,
        control: Float[Tensor, "b k"] | None = None,
        generator: Generator | None = None,
    ) -> MambaState:
        """Return the state one step later without an observation, given the control if any."""
        acted = state.control if control is None else self.standard(control)
        moved = MambaState(*state[:3], state.S, state.channels, acted)
        return self.advance(moved, acted.new_zeros(len(acted), self.width + 1))

    def observe(
        self, state: MambaState, obs: Shaped[Tensor, "b q"]
    ) -> tuple[MambaState, Bool[Tensor, " b"]]:
        """Return the state after the same step with the observation, and whether it is not NaN."""
        updated = self.advance(state, self.encode(obs))
        total = updated.features.sum(-1)
        return updated, total == total  # NaN is not

    def estimate(self, state: MambaState) -> Float[Tensor, "b d"]:
        """Return the read-out of the features, ``b d``, in the units of the data."""
        return self.z_mean + self.z_scale * self.readout(state.features)

    def covariance(self, state: MambaState) -> Float[Tensor, "b d d"]:
        """Return the diagonal covariance, ``b d d``, in the units of the data."""
        return (self.z_scale.square() * self.log_variance(state.features).exp()).diag_embed()

    def hidden_states(
        self,
        obs: Shaped[Tensor, "b T q"],
        mask: Bool[Tensor, "b T"] | None = None,
        controls: Float[Tensor, "b T k"] | None = None,
    ) -> Float[Tensor, "b T e"]:
        """Return the features after each step, in parallel over time.

        Args:
            obs: ``b T q``.
            mask: ``b T``, False where nothing was observed (values there must be finite).
            controls: ``b T k``, for a network with controls.
        """
        seen = self.encode(obs)
        seen = seen if mask is None else torch.where(mask[..., None], seen, 0)
        u = self.enter(seen if controls is None else torch.cat([seen, self.standard(controls)], -1))
        for layer in self.layers:
            u = layer(u)
        return self.norm(u)

    def loss(
        self,
        states: Float[Tensor, "b T d"],
        obs: Shaped[Tensor, "b T *x"],
        mask: Bool[Tensor, "b T"] | None = None,
        controls: Float[Tensor, "b T k"] | None = None,
        *,
        burn_in: int = 0,
    ) -> Float[Tensor, ""]:
        """Return `mean_and_variance_loss` in standard units."""
        h = self.hidden_states(obs, mask, controls)[:, burn_in:]
        z = (states[:, burn_in:] - self.z_mean) / self.z_scale
        return mean_and_variance_loss(z - self.readout(h), self.log_variance(h.detach()))

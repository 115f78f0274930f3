"""Gated recurrent units that fit themselves to recordings: a rival of filters where memory counts and no model is simple."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Generator, Tensor
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

from kbf.data.windows import Span, first_steps, folds, stack, take, without
from kbf.filters.ensemble import EnsembleFilter
from kbf.filters.neural.gru import GRUFilter
from kbf.filters.regression.window import checked
from kbf.recording import Recording, control_width, pad
from kbf.runtime.html_repr import ShownModule
from kbf.runtime.threads import side_by_side

HELD, MOST = 5, 10_000
"""Parts that the recordings are cut into, one of which each net is stopped on; steps of it that are looked at, at most."""
UPDATES, LOOKS = 1000, 25
"""Updates of a net, at most, where nobody says how many; times that it is looked at while it learns."""
BATCH, BURN_IN = 32, 10
"""Windows in a batch; first steps of a window that do not count."""


class FittedGRU(ShownModule):
    """The mean of a few `kbf.filters.neural.gru.GRUFilter`, each trained on windows of the recordings without one part of them.

    Each net is kept as it was when its squared error on that part, run through from its beginning,
    was least; its variances are then scaled to the errors there. The covariance is that of the
    mixture: wider where the nets disagree.

    `fit` trains, and keeps the weights: the filter of the same recordings is not trained again.

    References: Cho et al. (2014); Prechelt (1998) for stopping early; Lakshminarayanan et al.
    (2017) for means of nets.
    """

    weights: Tensor
    learned_from: Tensor

    def __init__(
        self,
        *,
        networks: int = 2,
        hidden: int = 64,
        updates: int | None = None,
        window: int = 100,
        lr: float = 5e-3,
        seed: int = 0,
    ) -> None:
        """What to train.

        Args:
            networks: nets. hidden: units of each.
            updates: of the weights, with AdamW, under a learning rate that rises to ``lr`` and
                falls to 0; None for 200 and one more for every ten steps of the recordings, at most
                `UPDATES`.
            window: steps of a window; half the recordings, at least, must be as long, else it is
                shorter.
            seed: of weights and windows.

        Raises:
            ValueError: no network, unit, update, or window.
        """
        super().__init__()
        if min(networks, hidden, 1 if updates is None else updates, window) < 1 or not lr > 0:
            raise ValueError(
                f"networks, hidden, updates, window and lr: {(networks, hidden, updates, window, lr)} must be positive"
            )
        self.networks, self.hidden, self.updates, self.window, self.lr, self.seed = (
            networks,
            hidden,
            updates,
            window,
            lr,
            seed,
        )
        self.register_buffer("weights", torch.zeros(0))
        self.register_buffer("learned_from", torch.zeros(0, dtype=torch.float64))

    def prepare(self, memory: list[Recording], generator: Generator | None = None) -> None:
        """Nothing to choose beforehand."""

    def fit(self, memory: Recording | list[Recording] | None) -> EnsembleFilter:
        """The nets, trained on ``memory``, in its dtype and on its device.

        Raises:
            ValueError: no memory, observations that are no vectors, or too few steps.
        """
        sequences = checked(memory, type(self).__name__)
        d, like = sequences[0].states.shape[1], sequences[0].states
        nets = [
            self.untrained(sequences, self.networks * self.seed + k) for k in range(self.networks)
        ]
        ratio_dim = fingerprint(sequences)
        if len(self.weights) == 0 or not torch.equal(ratio_dim, self.learned_from.to(ratio_dim)):
            side_by_side(lambda k: self.train_net(nets[k], sequences, k), range(len(nets)))
            self.weights = torch.cat(
                [parameters_to_vector(net.parameters()) for net in nets]
            ).detach()
            self.learned_from = ratio_dim
        for net, values in zip(nets, self.weights.chunk(len(nets)), strict=True):
            vector_to_parameters(values, net.parameters())
            net.to(like).eval().requires_grad_(False)
        shares = like.new_full((len(nets), d), 1 / len(nets))
        return EnsembleFilter(
            {f"net{k}": net for k, net in enumerate(nets)}, shares, like.new_zeros(len(nets), d, d)
        )

    def untrained(self, sequences: list[Recording], seed: int) -> GRUFilter:
        """A net in single precision, with the units of the recordings."""
        first, device = sequences[0], sequences[0].states.device
        generator = torch.Generator().manual_seed(seed)
        width = control_width(sequences)
        net = GRUFilter(
            first.states.shape[1],
            first.obs.shape[1],
            hidden=self.hidden,
            controls=width,
            generator=generator,
        )
        net.prepare([single(s) for s in sequences])
        return net.to(device)

    @torch.enable_grad()
    def train_net(self, net: GRUFilter, sequences: list[Recording], k: int) -> None:
        """Train one net on all but one part of the recordings, and stop it there."""
        sequences = [single(s) for s in sequences]
        spans = folds([len(s.states) for s in sequences], HELD)[(2 * k + 1) % HELD]
        rest, held = without(sequences, spans), pad(first_steps(take(sequences, spans), MOST))
        generator = torch.Generator().manual_seed(self.networks * self.seed + k)
        updates = self.updates or min(UPDATES, 200 + sum(len(s.states) for s in sequences) // 10)
        optimiser = torch.optim.AdamW(net.parameters(), lr=self.lr, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimiser, self.lr, total_steps=updates, pct_start=0.1
        )
        least, best = math.inf, parameters_to_vector(net.parameters()).detach()
        for update, windows in enumerate(random_windows(rest, self.window, updates, generator)):
            burn_in = min(BURN_IN, windows.states.shape[1] // 5)
            loss = net.loss(
                windows.states, windows.obs, windows.mask, windows.controls, burn_in=burn_in
            )
            optimiser.zero_grad()
            loss.backward()
            clip_grad_norm_(net.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            if (update + 1) % max(1, updates // LOOKS) == 0 or update + 1 == updates:
                error = float(held_out_error(net, held)[0])
                if error < least:
                    least, best = error, parameters_to_vector(net.parameters()).detach().clone()
        vector_to_parameters(best, net.parameters())
        with (
            torch.no_grad()
        ):  # variances in the head are exponentials of linear functions: a factor is a shift
            net.log_variance.bias.add_(held_out_error(net, held)[1].log())

    def hyperparameters(self) -> dict[str, float]:
        """Sizes, for logs."""
        return {"networks": float(self.networks), "hidden": float(self.hidden)}


def single(sequence: Recording) -> Recording:
    """In single precision."""
    controls = None if sequence.controls is None else sequence.controls.float()
    return sequence._replace(
        states=sequence.states.float(), obs=sequence.obs.float(), controls=controls
    )


def fingerprint(sequences: list[Recording]) -> Float[Tensor, " s"]:
    """Sums that tell recordings apart: of steps, states, observations, and of their squares."""
    seen = torch.cat([s.obs if s.mask is None else s.obs[s.mask] for s in sequences]).double()
    states = torch.cat([s.states for s in sequences]).double()
    return torch.stack(
        [
            states.new_tensor(float(len(states))),
            *(f(x) for x in (states, seen) for f in (torch.sum, square_sum)),
        ]
    )


def square_sum(x: Tensor) -> Float[Tensor, ""]:
    """sum x^2."""
    return x.square().sum()


def random_windows(
    sequences: list[Recording], most: int, count: int, generator: Generator
) -> Iterator[Recording]:
    """``count`` batches of windows that begin anywhere, of ``most`` steps, or as many as recordings with half the steps have."""
    lengths = torch.tensor([len(s.states) for s in sequences])
    order = lengths.argsort(descending=True)
    half = int((lengths[order].cumsum(0) * 2 >= lengths.sum()).int().argmax())
    width = min(most, int(lengths[order][half]))
    starts = (lengths - width + 1).clamp_min(0)
    for _ in range(count):
        chosen = torch.multinomial(starts.float(), BATCH, replacement=True, generator=generator)
        shares = torch.rand(BATCH, generator=generator)
        first = (shares * starts[chosen]).long()
        yield stack(
            sequences,
            [Span(k, a, a + width) for k, a in zip(chosen.tolist(), first.tolist(), strict=True)],
        )


@torch.no_grad()
def held_out_error(
    net: GRUFilter, held: Recording
) -> tuple[Float[Tensor, ""], Float[Tensor, " d"]]:
    """Of a net run through recordings: the mean squared error in standard units, and that over the net's variances, ``d``.

    The first fifth of a recording, at most 25 steps, does not count.
    """
    h = net.hidden_states(held.obs, held.mask, held.controls)
    first = min(25, held.states.shape[1] // 5)
    known = held.states[:, first:].isfinite().all(-1)
    left = (((held.states - net.z_mean) / net.z_scale - net.readout(h))[:, first:])[known].square()
    return left.mean(), (left / net.log_variance(h)[:, first:][known].exp()).mean(0)

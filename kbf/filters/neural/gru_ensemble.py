"""Ensembles of recurrent networks with early stopping, fitted without Lightning.

`FittedGRU` has gated recurrent units, `FittedMamba` selective state-space networks.

References: Cho et al. (2014); Dao and Gu (2024); Prechelt (1998) for early stopping;
Lakshminarayanan et al. (2017) for ensembles.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

from kbf.data.windows import Span, common_length, first_steps, folds, stack, take, without
from kbf.filters.ensemble import EnsembleFilter
from kbf.filters.neural.gru import GRUFilter
from kbf.filters.neural.mamba import MambaFilter
from kbf.filters.neural.sensor_flags import FlaggedFilter, SensorFlags
from kbf.filters.protocols import Filter, WithoutHyperparameters
from kbf.filters.regression.window import checked
from kbf.recording import Recording, control_width, pad
from kbf.runtime.deadline import check_deadline
from kbf.runtime.threads import side_by_side

# Parts that the recordings are cut into; early stopping of each network uses one of them.
VALIDATION_PARTS = 5
# Steps of that part that are evaluated, at most.
MAX_VALIDATION_STEPS = 10_000
# Updates of a network, at most, unless their number is given.
MAX_UPDATES = 1000
# Evaluations of the validation error during training.
VALIDATIONS = 25
# Windows in a batch.
BATCH_SIZE = 32
# First steps of a window without loss.
BURN_IN = 10
# First steps of a recording that the validation error leaves out, at most.
MAX_SKIPPED_STEPS = 25


# Networks with a mean and a variance read-out, that are linear in their hidden states.
Network = GRUFilter | MambaFilter


class FittedGRU(WithoutHyperparameters):
    """The mean of several `kbf.filters.neural.gru.GRUFilter`.

    Each network is trained on windows of the recordings without one part. It keeps the weights with
    the smallest squared error on that part, and its variances are then scaled to the errors there.
    The covariance is that of the mixture, which is larger where the networks disagree.

    `fit` trains and stores the weights. Fitting the same recordings again uses the stored weights.

    With ``allow_missing_sensors`` components of an observation may be NaN: inputs are the mean in
    their place, and a flag for each sensor (`kbf.filters.neural.sensor_flags`).
    """

    allow_missing_sensors: bool = False
    network: type[GRUFilter] | type[MambaFilter] = GRUFilter

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
        """Store the sizes of the networks and of their training.

        Args:
            networks: networks of the ensemble.
            hidden: units of each.
            updates: AdamW updates of the weights; None for 200 plus a tenth of the steps of the
                recordings, at most `MAX_UPDATES`.
            window: steps of a window. It is shorter where recordings with half of the steps are.
            lr: largest learning rate of the one-cycle schedule.
            seed: of weights and windows.

        Raises:
            ValueError: a size or a learning rate that is not positive.
        """
        super().__init__()
        if min(networks, hidden, 1 if updates is None else updates, window) < 1 or not lr > 0:
            raise ValueError(
                "networks, hidden, updates, window and lr must be positive, "
                f"got {(networks, hidden, updates, window, lr)}"
            )
        self.networks, self.hidden, self.updates = networks, hidden, updates
        self.window, self.lr, self.seed = window, lr, seed
        self.weights: Tensor = nn.Buffer(torch.zeros(0))
        self.fingerprint: Tensor = nn.Buffer(torch.zeros(0, dtype=torch.float64))

    def fit(self, memory: Recording | list[Recording] | None) -> EnsembleFilter | FlaggedFilter:
        """Return the ensemble trained on ``memory``, in its dtype and on its device.

        Raises:
            ValueError: no memory, observations that are not vectors, or too few steps.
        """
        missing = self.allow_missing_sensors
        recordings = checked(memory, type(self).__name__, allow_missing_sensors=missing)
        if not missing:
            return self.fit_networks(recordings)
        flags = SensorFlags.of(recordings)
        return FlaggedFilter(self.fit_networks([flags.recording(s) for s in recordings]), flags)

    def fit_networks(self, recordings: list[Recording]) -> EnsembleFilter:
        """Return the ensemble trained on recordings without missing sensors."""
        d, like = recordings[0].states.shape[1], recordings[0].states
        seeds = [self.networks * self.seed + k for k in range(self.networks)]
        nets = [self.untrained(recordings, seed) for seed in seeds]
        current = fingerprint(recordings)
        if len(self.weights) == 0 or not torch.equal(current, self.fingerprint.to(current)):
            side_by_side(lambda k: self.train_net(nets[k], recordings, k), range(len(nets)))
            self.weights = torch.cat(
                [parameters_to_vector(net.parameters()) for net in nets]
            ).detach()
            self.fingerprint = current
        for net, values in zip(nets, self.weights.chunk(len(nets)), strict=True):
            vector_to_parameters(values, net.parameters())
            net.to(like).eval().requires_grad_(False)
        shares = like.new_full((len(nets), d), 1 / len(nets))
        members: dict[str, Filter[Any]] = {f"net{k}": net for k, net in enumerate(nets)}
        return EnsembleFilter(members, shares, like.new_zeros(len(nets), d, d))

    def untrained(self, recordings: list[Recording], seed: int) -> Network:
        """Return an untrained network in single precision, scaled by the recordings."""
        first, device = recordings[0], recordings[0].states.device
        generator = torch.Generator().manual_seed(seed)
        settings = {"hidden": self.hidden, "controls": control_width(recordings)}
        sizes = first.states.shape[1], first.obs.shape[1]
        net = self.network(*sizes, **settings, generator=generator)
        net.prepare([single(s) for s in recordings])
        return net.to(device)

    @torch.enable_grad()
    def train_net(self, net: Network, recordings: list[Recording], k: int) -> None:
        """Train one network on all but one part of the recordings; that part stops it early."""
        recordings = [single(s) for s in recordings]
        spans = folds([len(s.states) for s in recordings], VALIDATION_PARTS)[
            (2 * k + 1) % VALIDATION_PARTS
        ]
        rest = without(recordings, spans)
        held = pad(first_steps(take(recordings, spans), MAX_VALIDATION_STEPS))
        generator = torch.Generator().manual_seed(self.networks * self.seed + k)
        updates = self.updates or min(
            MAX_UPDATES, 200 + sum(len(s.states) for s in recordings) // 10
        )
        optimiser = torch.optim.AdamW(net.parameters(), lr=self.lr, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimiser, self.lr, total_steps=updates, pct_start=0.1
        )
        least, best = math.inf, parameters_to_vector(net.parameters()).detach()
        for update, windows in enumerate(random_windows(rest, self.window, updates, generator)):
            check_deadline()
            loss = net.loss(
                windows.states,
                windows.obs,
                windows.mask,
                windows.controls,
                burn_in=min(BURN_IN, windows.states.shape[1] // 5),
            )
            optimiser.zero_grad()
            loss.backward()
            clip_grad_norm_(net.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            if (update + 1) % max(1, updates // VALIDATIONS) == 0 or update + 1 == updates:
                error = float(held_out_error(net, held)[0])
                if error < least:
                    least, best = error, parameters_to_vector(net.parameters()).detach().clone()
        vector_to_parameters(best, net.parameters())
        with (
            torch.no_grad()
        ):  # the head is exp of a linear function: a factor is a shift of its bias
            net.log_variance.bias.add_(held_out_error(net, held)[1].log())

    def hyperparameters(self) -> dict[str, float]:
        """Return the sizes, for loggers."""
        return {"networks": float(self.networks), "hidden": float(self.hidden)}


class FittedMamba(FittedGRU):
    """As `FittedGRU`, with one `kbf.filters.neural.mamba.MambaFilter`, which trains more slowly."""

    network = MambaFilter

    def __init__(self, *, networks: int = 1, **settings: Any) -> None:
        """Store the sizes, as `FittedGRU`."""
        super().__init__(networks=networks, **settings)


def single(recording: Recording) -> Recording:
    """Return the recording in single precision."""
    controls = None if recording.controls is None else recording.controls.float()
    return recording._replace(
        states=recording.states.float(), obs=recording.obs.float(), controls=controls
    )


def fingerprint(recordings: list[Recording]) -> Float[Tensor, " s"]:
    """Return the number of steps and sums of states, observations and their squares.

    Recordings with equal sums count as the same.
    """
    seen = torch.cat([s.obs if s.mask is None else s.obs[s.mask] for s in recordings]).double()
    states = torch.cat([s.states for s in recordings]).double()
    sums = [total for x in (states, seen) for total in (x.sum(), x.square().sum())]
    return torch.stack([states.new_tensor(float(len(states))), *sums])


def random_windows(
    recordings: list[Recording], most: int, count: int, generator: Generator
) -> Iterator[Recording]:
    """Yield ``count`` batches of windows with random starts.

    A window has ``most`` steps, or as many as recordings with half of all steps have.
    """
    lengths = torch.tensor([len(s.states) for s in recordings])
    width = min(most, common_length(lengths.tolist()))
    starts = (lengths - width + 1).clamp_min(0)
    for _ in range(count):
        chosen = torch.multinomial(
            starts.float(), BATCH_SIZE, replacement=True, generator=generator
        )
        first = (torch.rand(BATCH_SIZE, generator=generator) * starts[chosen]).long()
        starts_of = zip(chosen.tolist(), first.tolist(), strict=True)
        yield stack(recordings, [Span(k, a, a + width) for k, a in starts_of])


@torch.no_grad()
def held_out_error(net: Network, held: Recording) -> tuple[Float[Tensor, ""], Float[Tensor, " d"]]:
    """Return the mean squared error in standard units, and ``d``, its ratio to the variances.

    The first fifth of each recording, at most `MAX_SKIPPED_STEPS` steps, is left out.
    """
    h = net.hidden_states(held.obs, held.mask, held.controls)
    first = min(MAX_SKIPPED_STEPS, held.states.shape[1] // 5)
    known = held.states[:, first:].isfinite().all(-1)
    left = (((held.states - net.z_mean) / net.z_scale - net.readout(h))[:, first:])[known].square()
    return left.mean(), (left / net.log_variance(h)[:, first:][known].exp()).mean(0)

"""Mixture density networks: an ensemble, each network stopped early on a held-out block."""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from kbf.densities.base import LOG_2PI, Candidate, ParametricDensity, blocks, pick, uniform
from kbf.runtime.deadline import check_deadline
from kbf.ssm import normal

# Least logarithm of a component's standard deviation, in units of the outputs' own.
MIN_LOG_STD = -5.0
# Weights ``nets a b`` and biases ``nets 1 b`` in turn.
Layers = tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class MixtureDensityNetwork(ParametricDensity):
    """The even mixture of several networks' mixtures of K Gaussians with diagonal covariances.

    Attributes:
        layers: of all networks side by side; tanh between them. Inputs and outputs are
            standardised.
        input_mean, input_scale: ``d``. output_mean, output_scale: ``q``.
    """

    layers: Layers
    input_mean: Tensor
    input_scale: Tensor
    output_mean: Tensor
    output_scale: Tensor

    def standardised(self, u: Float[Tensor, "*b d"]) -> Float[Tensor, "n d"]:
        """Return the inputs of the networks, as rows."""
        return (u.reshape(-1, u.shape[-1]) - self.input_mean.to(u)) / self.input_scale.to(u)

    def components(self, inputs: Float[Tensor, "nets n d"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the `heads` of each network at its own inputs."""
        layers = tuple(layer.to(inputs) for layer in self.layers)
        return heads(run(layers, inputs), len(self.output_mean))

    def parameters(self, u: Float[Tensor, "*b d"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the parameters of all networks' components at u, standardised.

        These are log shares ``*b k``, and means and log standard deviations ``*b k q``.
        """
        rows, nets = self.standardised(u), len(self.layers[0])
        log_shares, means, sizes = self.components(rows.expand(nets, -1, -1))
        log_shares = log_shares.log_softmax(-1) - math.log(nets)
        log_shares, means, sizes = (
            part.movedim(0, 1).flatten(1, 2).unflatten(0, u.shape[:-1])
            for part in (log_shares[..., None], means, sizes)
        )
        return log_shares[..., 0], means, sizes

    def given(
        self, y: Float[Tensor, "*b q"], parameters: tuple[Tensor, ...]
    ) -> Float[Tensor, "*e"]:
        """Return `log_density` from the components at u."""
        white = (y - self.output_mean.to(y)) / self.output_scale.to(y)
        return log_mixture(white, *parameters) - self.output_scale.log().sum().to(y)

    def sample(
        self, u: Float[Tensor, "*b d"], generator: Generator | None = None
    ) -> Float[Tensor, "*b q"]:
        """Draw y given u.

        Each point is assigned at random to one of ``nets * ceil(n / nets)`` slots, of which each
        network has an equal number. A network is evaluated only at its own points.
        """
        rows, nets, q = self.standardised(u), len(self.layers[0]), len(self.output_mean)
        places = rows.new_empty(nets * (-(-len(rows) // nets)))
        taken = uniform(places, generator).argsort()[: len(rows)]
        inputs = rows.new_zeros(len(places), rows.shape[-1]).index_copy(0, taken, rows)
        log_shares, means, sizes = (
            part.flatten(0, 1)[taken] for part in self.components(inputs.unflatten(0, (nets, -1)))
        )
        chosen = pick(log_shares.log_softmax(-1), generator)[:, None, None].expand(-1, 1, q)
        mean, size = means.gather(1, chosen)[:, 0], sizes.gather(1, chosen)[:, 0]
        drawn = mean + size.exp() * normal(mean, generator)
        y = self.output_mean.to(u) + self.output_scale.to(u) * drawn
        return y.reshape(*u.shape[:-1], q)

    def mean(self, u: Float[Tensor, "*b d"]) -> Float[Tensor, "*b q"]:
        """E[y | u]."""
        log_shares, means, _ = self.parameters(u)
        return self.output_mean.to(u) + self.output_scale.to(u) * (
            log_shares.exp()[..., None] * means
        ).sum(-2)

    def covariance(self, u: Float[Tensor, "*b d"]) -> Float[Tensor, "*b q q"]:
        """Cov[y | u] by the law of total variance."""
        log_shares, means, sizes = self.parameters(u)
        shares, scale = log_shares.exp(), self.output_scale.to(u)
        moved = means - (shares[..., None] * means).sum(-2, keepdim=True)
        second = (2 * sizes).exp().diag_embed() + moved[..., :, None] * moved[..., None, :]
        return scale[:, None] * (shares[..., None, None] * second).sum(-3) * scale


def run(layers: Layers, inputs: Float[Tensor, "nets n d"]) -> Float[Tensor, "nets n h"]:
    """All networks at once."""
    for k in range(0, len(layers) - 2, 2):
        inputs = torch.baddbmm(layers[k + 1], inputs, layers[k]).tanh()
    return torch.baddbmm(layers[-1], inputs, layers[-2])


def heads(outputs: Float[Tensor, "*b h"], q: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits ``*b K``, means and log standard deviations ``*b K q``."""
    K = outputs.shape[-1] // (1 + 2 * q)
    logits, means, sizes = outputs.split([K, K * q, K * q], -1)
    return (
        logits,
        means.unflatten(-1, (K, q)),
        MIN_LOG_STD + nn.functional.softplus(sizes.unflatten(-1, (K, q)) - MIN_LOG_STD),
    )


def log_mixture(
    y: Float[Tensor, "*b q"], log_shares: Tensor, means: Tensor, sizes: Tensor
) -> Float[Tensor, "*e"]:
    """Log density of a mixture of diagonal Gaussians."""
    white = (y[..., None, :] - means) * (-sizes).exp()
    return (log_shares - (0.5 * (white.square() + LOG_2PI) + sizes).sum(-1)).logsumexp(-1)


def fit_networks(
    u: Float[Tensor, "n d"],
    y: Float[Tensor, "n q"],
    *,
    components: int = 6,
    hidden: int = 48,
    networks: int = 4,
    rounds: int = 600,
    patience: int = 120,
    lr: float = 1e-2,
    decay: float = 1e-3,
    seed: int = 0,
) -> Candidate:
    """Fit an ensemble by AdamW on all points at once.

    Network k is not fitted to block k; its best epoch is selected there.

    Args:
        u: inputs ``n d``. y: outputs ``n q``.
        components: K. hidden: width of the two hidden layers. networks: of the ensemble.
        rounds: at most. patience: rounds without a better score of any network that end it.
        lr: to start with. decay: of the weights.
        seed: of the first weights.

    References: Bishop (1994), Mixture density networks.
    """
    (n, d), q = u.shape, y.shape[1]
    spread_u, spread_y = u.std(0), y.std(0)
    scale_u, scale_y = (
        torch.where(spread_u > 0, spread_u, 1),
        torch.where(spread_y > 0, spread_y, 1),
    )
    inputs, targets = ((u - u.mean(0)) / scale_u).float(), ((y - y.mean(0)) / scale_y).float()
    generator = torch.Generator().manual_seed(seed)
    sizes, first = [d, hidden, hidden, components * (1 + 2 * q)], []
    for a, b in pairwise(sizes):
        weights, biases = (torch.randn(networks, rows, b, generator=generator) for rows in (a, 1))
        first += [weights * a**-0.5, 0.1 * biases]
    middles = slice(components, components * (1 + q))
    first[-1][..., middles] = torch.randn(networks, 1, components * q, generator=generator)
    first[-2][..., :components] *= 0.1
    layers = tuple(layer.to(u.device).requires_grad_() for layer in first)
    best_layers = [layer.detach().clone() for layer in layers]
    parts = [part.to(u.device) for part in blocks(n, networks)]
    out = torch.stack(parts)
    share = (~out) / (~out).sum(1, keepdim=True)
    optimiser = torch.optim.AdamW(layers, lr=lr, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, rounds, eta_min=lr / 20)
    best, held_out, waited = (
        torch.full((networks,), -torch.inf).to(inputs),
        torch.zeros(n).to(inputs),
        0,
    )
    with torch.enable_grad():
        for _ in range(rounds):
            check_deadline()
            logits, means, spreads = heads(run(layers, inputs.expand(networks, -1, -1)), q)
            score = log_mixture(targets, logits.log_softmax(-1), means, spreads)
            held = torch.where(out, score, 0).detach().sum(1) / out.sum(1)
            better = held > best + 1e-4
            waited = 0 if bool(better.any()) else waited + 1
            best = torch.where(better, held, best)
            for kept, layer in zip(best_layers, layers, strict=True):
                kept[better] = layer.detach()[better]
            for k in better.nonzero()[:, 0].tolist():
                held_out[parts[k]] = score.detach()[k, parts[k]]
            if waited > patience:
                break
            optimiser.zero_grad()
            (-(score * share).sum()).backward()
            nn.utils.clip_grad_norm_(layers, 5.0)
            optimiser.step()
            schedule.step()
    density = MixtureDensityNetwork(
        tuple(layer.to(u) for layer in best_layers), u.mean(0), scale_u, y.mean(0), scale_y
    )
    return Candidate(density, held_out.to(y) - scale_y.log().sum())

"""Encodings: state estimates of single images by cross-fitted encoders, for filters of vectors.

An `Encoding` holds several encoders with linear heads, its *members*, each fitted
(`kbf.training.encoder_stage`) to all recordings but one chunk. This chunk is encoded by the member
that was not fitted to it, so that filters learn from encodings with the errors that encodings of
new images have. A new image is encoded by the mean over the members.

Members with ``components`` predict a density ratio r(x, z) (`kbf.densities.ratio`): where the state
may be, with which uncertainty, and whether the image is informative. Their heads are trained by
-log r (`kbf.training.encoder_stage`), and a new image has the mean of their ratios. Filters that
take such ratios get the whole row (``returns_ratio``), other filters its mean.

With few images a kernel ridge regression on pixels (`kbf.images.pixel_ridge`) may have a smaller
held-out error than the encoders (`kbf.training.pixel_choice`); it is then used in their place.
"""

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from kbf.densities.ratio import (
    DENSITY_POINTS,
    RatioDensity,
    StateDensity,
    encoding_width,
    fit_state_density,
    mixed,
)
from kbf.filters.protocols import Filter
from kbf.filters.wrapper import FilterWrapper
from kbf.images.pixel_ridge import PixelRidge
from kbf.manifolds import CIRCLE, FLAT, Manifold, manifold_of
from kbf.recording import Recording, as_float

# Logarithm of pi_0 over the other shares, before training.
LITTLE_DOUBT = -5.0

# Least and largest logarithm of one over a standard deviation, in units of the states'.
LOG_ROOTS = (-3.0, 7.0)


class Encoding(nn.Module):
    """Images ``m *x`` -> encodings ``m d``: the mean over members of mean + scale head(encoder(x)).

    Attributes:
        z_mean: ``d``, mean of the training states. z_scale: one standard deviation for all
            components. circle: states have norm 1.
        components: Gaussians of a member's ratio, 0 for point estimates. points: ``500 d``, width:
            ``()``, of p(z), with components.
        returns_ratio: encodings are whole ratios ``m w`` (`kbf.densities.ratio.mixed`), not only
            their means.
        pixels: encodes images in place of the members, once it is fitted.
    """

    z_mean: Tensor
    z_scale: Tensor
    circle: Tensor
    points: Tensor
    width: Tensor

    def __init__(self, encoders: Iterable[nn.Module], d: int, components: int = 0) -> None:
        """Untrained members.

        Args:
            encoders: ``m *x`` -> ``m p`` with an attribute ``features``, p; one for each member.
            d: components of the state that an image determines.
            components: of a member's ratio; 0 for members that predict a mean only.
        """
        super().__init__()
        self.encoders: nn.ModuleList = nn.ModuleList(encoders)
        self.components: int = components
        self.returns_ratio: bool = False
        self.pixels: PixelRidge = PixelRidge()
        numbers = encoding_width(d, components) - d if components else d
        self.heads: nn.ModuleList = nn.ModuleList(
            nn.Linear(int(encoder.features), numbers)  # pyright: ignore[reportArgumentType]
            for encoder in self.encoders
        )
        self.register_buffer("z_mean", torch.zeros(d))
        self.register_buffer("z_scale", torch.ones(()))
        self.register_buffer("circle", torch.tensor(False))
        if components:
            self.register_buffer("points", torch.zeros(DENSITY_POINTS, d))
            self.register_buffer("width", torch.ones(()))
            # otherwise the first, uninformative images make all later ones uninformative
            for head in self.heads:
                nn.init.constant_(head.bias[:1], LITTLE_DOUBT)  # pyright: ignore[reportIndexIssue, reportArgumentType]

    def prepare(self, states: Float[Tensor, "n d"]) -> None:
        """Keep mean, scale and manifold of the training states, and their density."""
        spread = states.var(0, correction=0).mean().sqrt()
        self.z_mean.copy_(states.mean(0))
        self.z_scale.copy_(torch.where(spread > 0, spread, 1))
        self.circle.fill_(
            states.shape[-1] == 2 and manifold_of(states) == CIRCLE and not self.components
        )
        if self.components:
            density = fit_state_density(states)
            self.points.copy_(density.points)
            self.width.copy_(density.width)

    @property
    def manifold(self) -> Manifold:
        """The space of the encodings."""
        return CIRCLE if bool(self.circle) else FLAT

    def output(self, k: int, x: Shaped[Tensor, "m *x"]) -> Tensor:
        """Returns the output of member k, in its own units."""
        return self.heads[k](self.encoders[k](as_float(x, self.z_mean.dtype)))

    def member(self, k: int, x: Shaped[Tensor, "m *x"]) -> Float[Tensor, "m d"]:
        """The encoding by member k alone, without projection; the mean of a ratio."""
        output = self.output(k, x)
        return (
            self.row(output)[:, : len(self.z_mean)]
            if self.components
            else self.z_mean + self.z_scale * output
        )

    def row(self, output: Float[Tensor, "m k"]) -> Float[Tensor, "m w"]:
        """Returns the ratio of a member in the units of the states, E[z | x] first.

        E[z | x] = pi_0 E[z] + sum_j pi_j m_j.
        """
        d, J = len(self.z_mean), self.components
        log_shares = output[:, : J + 1].log_softmax(-1)
        centres, entries = (
            output[:, J + 1 :].unflatten(-1, (J, -1)).split([d, d * (d + 1) // 2], -1)
        )
        centres = self.z_mean + self.z_scale * centres
        rows, columns = torch.tril_indices(d, d, device=output.device)
        roots = torch.where(
            rows == columns, entries.clamp(*LOG_ROOTS) - self.z_scale.log(), entries / self.z_scale
        )
        means = torch.cat([self.z_mean.expand(len(output), 1, d), centres], 1)
        mean = (log_shares.exp()[..., None] * means).sum(1)
        return torch.cat([mean, log_shares, torch.cat([centres, roots], -1).flatten(1)], -1)

    @property
    def density(self) -> RatioDensity:
        """Returns the density of the rows of members with components."""
        return RatioDensity(StateDensity(self.points, self.width))

    def forward(self, x: Shaped[Tensor, "m *x"]) -> Float[Tensor, "m d"]:
        """The encodings of new images."""
        if self.returns_ratio:
            return mixed(
                [self.row(self.output(k, x)) for k in range(len(self.encoders))], len(self.z_mean)
            )
        if self.pixels.fitted:
            mean = self.pixels(x).to(self.z_mean)
        else:
            mean = torch.stack([self.member(k, x) for k in range(len(self.encoders))]).mean(0)
        if mean.shape[-1] != 2:
            return mean
        return torch.where(
            self.circle, CIRCLE.project(mean), mean
        )  # a step that is exported cannot ask which it is

    @torch.no_grad()
    def crossfit(
        self, recording: Recording, held: Shaped[Tensor, " T"], batch_size: int = 256
    ) -> Recording:
        """Returns the recording with encodings as observations; member ``held[t]`` encodes step t.

        Encodings by members with components are whole ratios ``T w``, else ``T d``.
        """
        self.eval()
        d, members = len(self.z_mean), len(self.encoders)
        encodings = self.z_mean.new_zeros(
            len(held), encoding_width(d, members * self.components) if self.components else d
        )
        for k in range(members):
            for rows in (held == k).nonzero()[:, 0].split(batch_size):
                images = recording.obs[rows]
                if self.components:
                    encodings[rows] = mixed(
                        [self.row(self.output(k, images))] * members, d, alone=k
                    )
                else:
                    encodings[rows] = self.manifold.project(self.member(k, images))
        return recording._replace(obs=encodings.to(recording.states))


class EncodedFilter(FilterWrapper):
    """A filter of encodings as a filter of images: each observation is encoded first."""

    def __init__(self, code: nn.Module, inner: Filter[Any], dtype: torch.dtype) -> None:
        """``code`` encodes images; ``inner`` takes encodings of type ``dtype``."""
        super().__init__(inner)
        self.code, self.dtype = code, dtype

    def observed(self, obs: Shaped[Tensor, "b *x"]) -> Tensor:
        """The encodings."""
        return self.code(obs).to(self.dtype)

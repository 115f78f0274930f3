"""Kernel Bayes Filter whose observation kernel is learned: k(x, x') = psi(x)^T psi(x') with an encoder psi."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Generator, Tensor, nn

from kbf.filters.kernel.kbf import KBF, stacked
from kbf.filters.kernel.update.rule import PrimalUpdate
from kbf.filters.rollout import rollout
from kbf.recording import Recording, as_float, as_recordings
from kbf.rkhs.rules import RULES


class FeatureKBF(KBF):
    """Kernel Bayes Filter over the recording, with features of an encoder in the rule ("IW(NN)" with a net fitted in two stages).

    Two routes train it. Two-stage: the encoder first, by the ridge loss of its features
    (`kbf.training.encoder_stage`), then the filter. End to end: the loss is the filter's own error,
    and its gradient reaches the encoder, both bandwidths of the states and the three ridges,
    through the rule, the ratio and all steps of a window. The bandwidth of the observations is of
    no matter here.

    The net stays in eval mode while it is trained end to end, so that statistics of batch norm,
    fitted before, do not change, and the same image has the same features in the memory and in a
    window.

    References: Xu et al. (2022), section 3.3 and appendix B.2, for the first route.
    """

    def __init__(
        self,
        encoder: nn.Module | None,
        constant: bool = True,
        standardise: bool = True,
        **settings: Any,
    ) -> None:
        """What to build.

        Args:
            encoder: ``m *x`` -> ``m p``.
            constant: add a feature that is 1 everywhere, the offset of the regression inside the
                rule.
            standardise: shift and scale the features so that those of the training part, when
                `prepare` is called, have mean 0 and mean ||psi||^2 = 1: the ridges then mean the
                same for every encoder.
            settings: of `KBF`; the rule must have a form over features
                (`kbf.rkhs.rules.Rule.primal`).

        Raises:
            ValueError: as `KBF`; a rule that has no form for features; or no encoder, where the
                data names none.
        """
        super().__init__(**settings)
        if encoder is None:
            raise ValueError(
                "FeatureKBF learns features of images, and this data brings no encoder: name one in model.net.encoder"
            )
        if RULES[self.rule].primal is None:
            others = " or ".join(name for name, rule in RULES.items() if rule.primal is not None)
            raise ValueError(f"FeatureKBF: rule={self.rule} needs full Gram matrices; use {others}")
        self.standardise = standardise
        self.psi: Psi = Psi(encoder, constant).eval()

    @property
    def encoder(self) -> nn.Module:
        """The net that makes the features, without shift, scale and constant."""
        return self.psi.encoder

    own_encoder = encoder
    """It is fitted before the filter (`kbf.filters.protocols.WindowModel`)."""

    def train(self, mode: bool = True) -> FeatureKBF:
        """Set the training mode of all parts but the encoder, which stays in eval mode."""
        super().train(mode)
        self.psi.eval()
        return self

    def prepare(self, memory: list[Recording], generator: Generator | None = None) -> None:
        """Set the features' mean and scale, then what `KBF` sets."""
        if self.standardise:
            self.psi.prepare(stacked(as_recordings(memory))[1])
        super().prepare(memory, generator)

    def obs_scale(self, obs: Tensor, *, diagonal: bool = False) -> Tensor:
        """1, in place of a median distance: the rule works on features, and uses no bandwidth of the observations."""
        return torch.ones((), dtype=torch.float64, device=obs.device)

    def update_of(self, obs: Tensor, bandwidth: Tensor, reg: Tensor) -> nn.Module:
        """Return the rule over the features of the memory's observations ``n *x``."""
        settings = {"rule": self.rule, "dtype": self.dtype, "local": self.local}
        return PrimalUpdate(self.psi, obs[:, None], reg, **settings)

    def window_estimates(
        self,
        memory: list[Recording],
        windows: Recording,
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> Float[Tensor, "b T d"]:
        """The estimates of a `rollout` of the filter over ``memory``, all images encoded at once: fast, for training.

        Args:
            memory: recordings.
            windows: a batch ``b T``.
            change: of the windows' images ``m *x``, before they are encoded.
        """
        filter, images = self.fit(memory), windows.obs.flatten(0, 1)
        features = self.psi(images if change is None else change(images))
        filter.rule.psi = nn.Identity()  # the filter is new, and nobody else's
        seen = features.unflatten(0, windows.obs.shape[:2])
        return rollout(filter, seen, mask=windows.mask, controls=windows.controls).estimates


class Psi(nn.Module):
    """Features of an encoder, in batches, shifted and scaled, with a constant one behind them if that is wanted."""

    mean: Tensor
    scale: Tensor
    encoder: nn.Module
    constant: bool
    batch_size: int

    def __init__(self, encoder: nn.Module, constant: bool, batch_size: int = 256) -> None:
        super().__init__()
        self.encoder, self.constant, self.batch_size = encoder, constant, batch_size
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))

    @torch.no_grad()
    def prepare(self, x: Shaped[Tensor, "m *x"]) -> None:
        """Give the features of these images mean 0 and mean squared norm 1."""
        psi = self.encode(x)
        self.mean = psi.mean(0).to(self.mean)
        size = (psi - self.mean).square().sum(-1).mean().sqrt()
        self.scale = torch.where(size > 0, size, 1).to(self.scale)

    def forward(self, x: Shaped[Tensor, "m *x"]) -> Float[Tensor, "m p"]:
        """The features psi(x) ``m p``, in float32 or float64: the encoder's, shifted and scaled, and the constant one if wanted."""
        psi = (self.encode(x) - self.mean) / self.scale
        return torch.cat([psi, torch.ones_like(psi[:, :1])], -1) if self.constant else psi

    def encode(self, x: Shaped[Tensor, "m *x"]) -> Float[Tensor, "m p"]:
        """The encoder's own features ``m p``, made in batches."""
        first = next(self.encoder.parameters(), None)
        dtype = torch.float32 if first is None else first.dtype
        psi = torch.cat([self.encoder(as_float(part, dtype)) for part in x.split(self.batch_size)])
        return psi.to(torch.promote_types(psi.dtype, torch.float32))

"""Kernel Bayes Filter with a learned observation kernel k(x, x') = psi(x)^T psi(x')."""

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
    """Kernel Bayes Filter over the recordings, with features of an encoder in the rule.

    There are two ways of training. In two stages ("IW(NN)") the encoder is fitted first, by the
    ridge loss of its features (`kbf.training.encoder_stage`), then the filter. End to end, the loss
    is the error of the filter, and its gradient reaches the encoder, both bandwidths of the states
    and the three ridges, through the rule, the ratio and all steps of a window. The bandwidth of
    the observations is not used.

    The encoder remains in eval mode while it is trained end to end. So the statistics of batch
    norm do not change, and an image has the same features in the memory and in a window.

    References: Xu et al. (2022), section 3.3 and appendix B.2, for the first route.
    """

    def __init__(
        self,
        encoder: nn.Module | None,
        constant: bool = True,
        standardise: bool = True,
        **settings: Any,
    ) -> None:
        """Store the encoder and the settings.

        Args:
            encoder: ``m *x`` -> ``m p``.
            constant: add a constant feature 1, the offset of the regression in the rule.
            standardise: shift and scale the features so that those of the training part, at the
                call of `prepare`, have mean 0 and mean ||psi||^2 = 1. Ridges are then comparable
                between encoders.
            settings: of `KBF`; the rule must have a form over features
                (`kbf.rkhs.rules.Rule.primal`).

        Raises:
            ValueError: as `KBF`; a rule without a form over features; or no encoder.
        """
        super().__init__(**settings)
        if encoder is None:
            raise ValueError(
                "FeatureKBF requires an encoder, and the data set has no default: "
                "set model.net.encoder"
            )
        if self.select == "kernel_mean_cv":
            raise ValueError(
                "FeatureKBF: select=kernel_mean_cv compares kernels of the observations, and "
                "features take their place; use paper or kulsif_loo"
            )
        if RULES[self.rule].primal is None:
            others = " or ".join(name for name, rule in RULES.items() if rule.primal is not None)
            raise ValueError(f"FeatureKBF: rule={self.rule} needs full Gram matrices; use {others}")
        self.standardise = standardise
        self.psi: Psi = Psi(encoder, constant).eval()

    @property
    def encoder(self) -> nn.Module:
        """The network that computes the features, without shift, scale and constant."""
        return self.psi.encoder

    own_encoder = encoder
    """The encoder that is fitted before the filter (`kbf.filters.protocols.WindowModel`)."""

    def train(self, mode: bool = True) -> FeatureKBF:
        """Set the training mode of all parts but the encoder, which stays in eval mode."""
        super().train(mode)
        self.psi.eval()
        return self

    def prepare(self, memory: list[Recording], generator: Generator | None = None) -> None:
        """Set mean and scale of the features, then the hyper-parameters of `KBF`."""
        if self.standardise:
            self.psi.prepare(stacked(as_recordings(memory))[1])
        super().prepare(memory, generator)

    def obs_scale(self, obs: Tensor, *, diagonal: bool = False) -> Tensor:
        """Return 1: the rule uses features, and no bandwidth of the observations."""
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
        """Return the estimates of a `rollout` over ``memory``, with all images encoded at once.

        Args:
            memory: recordings.
            windows: a batch ``b T``.
            change: augmentation of the windows' images ``m *x`` before they are encoded.
        """
        filter, images = self.fit(memory), windows.obs.flatten(0, 1)
        features = self.psi(images if change is None else change(images))
        filter.rule.psi = nn.Identity()  # observations are features; the filter is not shared
        seen = features.unflatten(0, windows.obs.shape[:2])
        return rollout(
            filter, seen, mask=windows.mask, controls=windows.controls, gradients=True
        ).estimates


class Psi(nn.Module):
    """Features of an encoder in batches, shifted and scaled, with an optional constant feature."""

    def __init__(self, encoder: nn.Module, constant: bool, batch_size: int = 256) -> None:
        super().__init__()
        self.encoder, self.constant, self.batch_size = encoder, constant, batch_size
        self.mean: Tensor = nn.Buffer(torch.zeros(()))
        self.scale: Tensor = nn.Buffer(torch.ones(()))

    @torch.no_grad()
    def prepare(self, x: Shaped[Tensor, "m *x"]) -> None:
        """Set shift and scale so that features of these images have mean 0, mean square norm 1."""
        psi = self.encode(x)
        self.mean = psi.mean(0).to(self.mean)
        size = (psi - self.mean).square().sum(-1).mean().sqrt()
        self.scale = torch.where(size > 0, size, 1).to(self.scale)

    def forward(self, x: Shaped[Tensor, "m *x"]) -> Float[Tensor, "m p"]:
        """Return the features psi(x) ``m p`` in float32 or float64."""
        psi = (self.encode(x) - self.mean) / self.scale
        return torch.cat([psi, torch.ones_like(psi[:, :1])], -1) if self.constant else psi

    def encode(self, x: Shaped[Tensor, "m *x"]) -> Float[Tensor, "m p"]:
        """Return the output of the encoder ``m p``, computed in batches."""
        first = next(self.encoder.parameters(), None)
        dtype = torch.float32 if first is None else first.dtype
        psi = torch.cat([self.encoder(as_float(part, dtype)) for part in x.split(self.batch_size)])
        return psi.to(torch.promote_types(psi.dtype, torch.float32))

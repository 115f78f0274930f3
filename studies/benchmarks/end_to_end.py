"""Training an encoder through the filter, by p features (primal) and by Gram matrices (dual).

One step of training, as `kbf.filters.kernel.feature_kbf.FeatureKBF` takes it: the encoder is
applied to the memory and to a batch of windows, the operators are built, the windows are filtered,
and the loss, the filter's mean squared error, is differentiated with respect to encoder, bandwidths
and ridges. Both sides have the same encoder, and the same transition and ratio of low rank, made
for the primal form: only the rule differs, its primal form over Psi ``n p`` or
`importance_weighted` over the full Gram matrix Psi Psi^T ``n n``. So the ratios are smaller than
they would be against full Gram matrices throughout. Both compute the same weights; loss and
gradient are compared in float64.

The memory is what autograd keeps from the forward pass for the backward pass, each storage counted
once; on a GPU it is the peak of what is allocated beyond what was there before.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kbf.data.synthetic import SyntheticData
from kbf.filters.kernel.feature_kbf import FeatureKBF
from kbf.filters.kernel.update.rule import DenseUpdate
from kbf.plots.charts import Figure, curves
from kbf.recording import Recording
from kbf.rkhs import rules
from kbf.ssm import oscillatory
from studies.benchmarks.base import Claim, Row, Settings, Tell, alternate, synchronise

SIZES: dict[str, dict[str, Any]] = {
    "full": {"sizes": [125, 250, 500], "p": 32, "windows": 8, "steps": 20, "rounds": 3},
    "smoke": {"sizes": [40], "p": 4, "windows": 2, "steps": 5, "rounds": 1},
}
PRIMAL, DUAL = "primal", "dual"


class DualKBF(FeatureKBF):
    """The same filter, its rule over the full Gram matrix of the features."""

    def update_of(self, obs: Tensor, bandwidth: Tensor, reg: Tensor) -> nn.Module:
        """The dual rule; a query comes as features, and the bandwidth is of no matter."""
        return DenseUpdate(rules.importance_weighted, inner, bandwidth, self.psi(obs), reg).to(
            self.dtype
        )


def inner(x: Tensor, y: Tensor, *, bandwidth: Tensor) -> Tensor:
    """<x, y>."""
    return x @ y.mT


def run(settings: Settings, tell: Tell) -> list[Row]:
    """Time and memory of each form at each n, and how far apart their losses and gradients are."""
    rows, last = [], max(settings["sizes"])
    data = SyntheticData(
        oscillatory(), n_train=last, n_test=settings["windows"] * settings["steps"], seed=0
    )
    windows = moved(cut(data.test[0], settings["windows"]), settings["device"])
    for n in settings["sizes"]:
        tell(f"n = {n}")
        memory = moved(
            Recording(data.train[0].states[:n], data.train[0].obs[:n]), settings["device"]
        )
        models = {form: model(form, settings["p"], memory) for form in (PRIMAL, DUAL)}
        loss, gradient, size = {}, {}, {}
        for form, net in models.items():
            size[form] = held(net, memory, windows) / 2**20
            loss[form], gradient[form] = train_step(net, memory, windows)
        seconds = alternate(
            {form: partial(train_step, net, memory, windows) for form, net in models.items()},
            rounds=settings["rounds"],
        )
        apart = ((gradient[PRIMAL] - gradient[DUAL]).norm() / gradient[DUAL].norm()).item()
        rows += [
            {
                "n": n,
                "p": settings["p"],
                "form": form,
                "seconds": seconds[form],
                "MiB": size[form],
                "loss": loss[form],
            }
            | {
                "times faster than dual": seconds[DUAL] / seconds[form],
                "times less memory than dual": size[DUAL] / size[form],
            }
            | {"loss apart": abs(loss[form] / loss[DUAL] - 1), "gradients apart": apart}
            for form in models
        ]
    return rows


def model(form: str, p: int, memory: Recording) -> FeatureKBF:
    """The filter of one form, always with the same numbers; of the p features one is constant.

    The encoder is a small one, of vectors, so that the filter is what is measured.
    """
    torch.manual_seed(0)
    q = memory.obs.shape[-1]
    encoder = nn.Sequential(
        nn.Linear(q, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, p - 1)
    )
    net = (FeatureKBF if form == PRIMAL else DualKBF)(encoder.double().to(memory.obs.device))
    net.prepare([memory])
    return net.to(memory.obs.device)


def cut(sequence: Recording, windows: int) -> Recording:
    """A batch of windows, one after the other."""
    return Recording(
        *(part.unflatten(0, (windows, -1)) for part in (sequence.states, sequence.obs))
    )


def moved(sequence: Recording, device: str) -> Recording:
    """States and observations on a device."""
    return Recording(sequence.states.to(device), sequence.obs.to(device))


def loss_of(net: FeatureKBF, memory: Recording, windows: Recording) -> Tensor:
    """The filter's mean squared error over the windows."""
    return (net.window_estimates([memory], windows) - windows.states).square().sum(-1).mean()


def train_step(net: FeatureKBF, memory: Recording, windows: Recording) -> tuple[float, Tensor]:
    """The loss, and its gradient with respect to all learned parameters as one vector."""
    net.zero_grad()
    loss = loss_of(net, memory, windows)
    loss.backward()
    return loss.item(), torch.cat(
        [p.grad.flatten() for p in net.parameters() if p.grad is not None]
    )


def held(net: FeatureKBF, memory: Recording, windows: Recording) -> int:
    """Bytes of memory that a training step takes, as described at the top of this file."""
    if memory.obs.device.type == "cuda":
        synchronise()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        train_step(net, memory, windows)
        synchronise()
        return torch.cuda.max_memory_allocated() - before
    storages: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(net, memory, windows)
    return sum(storage.nbytes() for storage in storages.values())


def claims(rows: list[Row]) -> list[Claim]:
    """Time and memory that the primal form saves at the largest n, and equality of the losses."""
    row = max((row for row in rows if row["form"] == PRIMAL), key=lambda row: row["n"])
    where = f"n = {row['n']}, p = {row['p']}"
    verdicts = [
        Claim(
            f"at least 10 times {words} than the dual form, {where}",
            f"{row[key]:.1f} times",
            row[key] >= 10,
        )
        for words, key in (
            ("faster", "times faster than dual"),
            ("less memory", "times less memory than dual"),
        )
    ]
    apart = max(max(row["loss apart"], row["gradients apart"]) for row in rows)
    return [
        *verdicts,
        Claim("the same loss and gradient to 1e-6, relative", f"{apart:.1e}", apart <= 1e-6),
    ]


def draw(rows: list[Row]) -> Figure:
    """Time and memory of a step of training against n."""
    both = [
        {**row, "value": row[key], "measure": words}
        for key, words in (("seconds", "seconds, forward and backward"), ("MiB", "MiB held"))
        for row in rows
    ]
    return curves(
        both,
        x="n",
        y="value",
        by="form",
        panel="measure",
        log="xy",
        ylabel=" ",
        title="Training an encoder through the filter",
    )

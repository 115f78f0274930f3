"""Kills right before a random operation on files.

What is done again or resumed ends with the same numbers, to the last bit.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from kbf.cli import main
from kbf.commands.support.run_states import read_runs
from kbf.fitted.checkpoint import BEST
from studies.stress.cases import (
    CHECKPOINT,
    Killer,
    Outcome,
    chosen,
    forked,
    give_checkpoint,
    load_all,
    operations,
    run_words,
)
from studies.stress.damage import same


class Victim(NamedTuple):
    """A command that is killed, its repetition, its result, and the number of kills."""

    words: list[str]
    again: Callable[[Path], list[str]]
    result: Callable[[Path], object]
    kills: int


def recording(folder: Path) -> None:
    """A filter, and its input."""
    give_checkpoint(folder)
    rows = np.random.default_rng(0).normal(size=(80, 2))
    (folder / "obs.csv").write_text("x_0,x_1\n" + "".join(f"{a},{b}\n" for a, b in rows))


def tensors(path: Path) -> object:
    """What a checkpoint holds of a filter."""
    contents = torch.load(path, weights_only=True)
    learned = {key: value for key, value in contents["kbf"].items() if key != "provenance"}
    return {"state_dict": contents["state_dict"], "kbf": learned}


def arrays(path: Path) -> object:
    """The numbers of an npz."""
    return {
        name: torch.from_numpy(value)
        for name, value in np.load(path).items()
        if value.dtype.kind in "bfiu"
    }


def trained(folder: Path) -> object:
    """Weights, operators and errors of a run."""
    metrics = json.loads((folder / "run" / "metrics.json").read_text())
    errors = {key: value for key, value in metrics.items() if key.endswith("mse")}
    return [
        tensors(folder / "run" / "checkpoints" / f"{name}.ckpt") for name in ("best", "last")
    ], errors


def resumed(folder: Path) -> list[str]:
    """A training run goes on from its last checkpoint, or begins again where there is none."""
    last = folder / "run" / "checkpoints" / "last.ckpt"
    whole = (folder / "run" / "metrics.json").exists()
    rest = ["logger=none", "particles=50", "calibrate=false"]
    return (
        ["train", f"ckpt_path={last}", *rest]
        if last.exists() and not whole
        else [*VICTIMS["train"].words, "overwrite=true"]
    )


def swept(folder: Path) -> object:
    """Weights and errors of the runs of a sweep, all of which must be finished."""
    runs = read_runs(folder / "sweep")
    if (states := {each.state for each in runs}) != {"finished"}:
        return states
    errors = [{k: v for k, v in run.metrics.items() if k.endswith("mse")} for run in runs]
    return errors, [tensors(run.folder / "checkpoints" / BEST) for run in runs]


def compared(folder: Path) -> object:
    """The rows of a comparison, without times."""
    with (folder / "run" / "runs.csv").open() as file:
        return [
            {key: row[key] for key in ("n_train", "seed", "model", "test.mse")}
            for row in csv.DictReader(file)
        ]


def filtered(folder: Path) -> object:
    """Estimates and state."""
    return (folder / "out.csv").read_text(), torch.load(folder / "state.pt", weights_only=True)


def restarted(folder: Path) -> list[str]:
    """The command of a restart: removes the state, so that filtering starts from the prior."""
    (folder / "state.pt").unlink(missing_ok=True)
    return VICTIMS["filter"].words


SMALL_LSTM = [
    *("model=lstm", "n_train=60", "data.n_test=10", "model.training.epochs=3"),
    *("model.training.window=5", "model.training.folds=1", "+model.net.hidden=4"),
    *("logger=none", "particles=50", "calibrate=false"),
]
SWEEP = ["train", "-m", *SMALL_LSTM, "seed=0,1,2", "hydra.sweep.dir=sweep"]
VICTIMS = {
    "train": Victim(["train", *SMALL_LSTM, "run_dir=run"], resumed, trained, 60),
    "sweep": Victim(SWEEP, lambda folder: SWEEP, swept, 30),
    "compare": Victim(
        [
            "compare",
            "models=[frame]",
            "n_train=[40]",
            "data.n_test=10",
            "runs=2",
            "particles=50",
            "run_dir=run",
            "calibrate=false",
        ]
        + ["workers=0"],
        lambda folder: VICTIMS["compare"].words,
        compared,
        30,
    ),
    "compare in processes": Victim(
        [
            "compare",
            "models=[kalman]",
            "n_train=[40]",
            "data.n_test=10",
            "runs=1",
            "particles=50",
            "run_dir=run",
            "workers=1",
        ],
        lambda folder: VICTIMS["compare in processes"].words,
        compared,
        2,
    ),
    "filter": Victim(
        ["filter", f"checkpoint={CHECKPOINT}", "input=obs.csv", "output=out.csv", "state=state.pt"],
        restarted,
        filtered,
        40,
    ),
    "append": Victim(
        ["append", f"checkpoint={CHECKPOINT}", "out=new.ckpt", "seed=5", "n_train=40"],
        lambda folder: VICTIMS["append"].words,
        lambda folder: tensors(folder / "new.ckpt"),
        40,
    ),
    "export": Victim(
        ["export", f"checkpoint={CHECKPOINT}", "format=torchscript", "steps=2", "out=step.pt"],
        lambda folder: VICTIMS["export"].words,
        lambda folder: json.loads((folder / "step.pt.json").read_text())["inputs"],
        15,
    ),
    "data": Victim(
        ["data", "n_train=50", "data.n_test=10", "run_dir=run"],
        lambda folder: VICTIMS["data"].words,
        lambda folder: arrays(folder / "run" / "data.npz"),
        15,
    ),
    "render": Victim(
        ["data", "render", "maze", "size=[6,8]", "out=views.npz"],
        lambda folder: VICTIMS["render"].words,
        lambda folder: (arrays(folder / "views.npz"), (folder / "views.png").read_bytes()),
        15,
    ),
}


def run(folder: Path, share: float = 1.0, names: Iterable[str] = VICTIMS) -> Iterator[Outcome]:
    """Kill each victim before every operation on files, or before randomly chosen ones."""
    load_all()
    for name in names:
        victim, generator = VICTIMS[name], random.Random(f"kills of {name}")
        if not (wanted := max(round(victim.kills * share), min(1, victim.kills // 10))):
            continue
        count = operations(victim.words, folder / name / "whole", recording)
        reference = victim.result(folder / name / "whole")
        points = chosen(count, wanted, generator)
        points += [generator.randint(1, count) for _ in range(wanted - len(points))]
        for number, at in enumerate(points):
            yield Outcome(
                f"kills of {name}",
                f"operation {at} of {count}",
                killed(victim, folder / name / str(number), at, reference),
            )


def killed(victim: Victim, folder: Path, at: int, reference: object) -> str:
    """Kill, go on, compare; what is wrong, or nothing."""
    folder.mkdir(parents=True)
    recording(folder)
    code, output = forked(lambda: run_words(victim.words), folder, lambda: Killer(folder, at))
    if code != -9:
        return f"not killed: exit code {code}: {output[-150:]}"
    words = victim.again(folder)
    code, output = forked(
        lambda: run_words(words) if words == victim.words else main(words), folder
    )
    if code:
        return f"exit code {code} of {' '.join(words[:2])}: {output[-200:]}"
    if not same(victim.result(folder), reference):
        return "another result than without the kill"
    litter = [str(path.relative_to(folder)) for path in folder.rglob(".*-*")]
    return f"litter: {', '.join(litter)}" if litter else ""

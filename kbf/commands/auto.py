"""``kbf train model=auto``: try several models on a validation part, and go on with the best."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kbf.commands.support.console import console, seconds_of, with_limits, without_model_selection
from kbf.data.dataset import Data
from kbf.data.windows import hold_out
from kbf.evaluation.score import Score, score
from kbf.filters.protocols import Filter
from kbf.filters.selection.cross_validation import MOST, Held, Row, Search
from kbf.recording import Recording
from kbf.runtime.atomic_files import scratch
from kbf.runtime.errors import FitError
from kbf.training.checkpoint import Trained
from kbf.training.fit import train


def choose(
    config: dict[str, Any], data: Data, *, trust: bool = False
) -> tuple[dict[str, Any], list[Row]]:
    """The configuration of the best candidate, and what was tried, the best first, in the same words as the net under a model.

    Each candidate learns from the training part without its end, and is scored on that (or on
    ``data.validation``) by the loop that scores everything; the measure is the NMSE, as the
    components of a state may have units of their own. One that cannot be built or does not fit the
    data is noted and left out. No test data is seen.

    Raises:
        ValueError: too few training steps to hold some out, or no candidate that works.
    """
    auto = config["model"]
    fit, held = held_out_part(data, auto["validation"])
    scale = torch.cat([s.states for s in fit]).double().var(0, correction=0).cpu()
    search = Search([(fit, held)], scale, seconds_of(config.get("budget")))
    columns = [
        TextColumn("trying {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    ]
    with (
        scratch(config["run_dir"]) as folder,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        bar = progress.add_task("", total=len(auto["candidates"]))
        for name, model in auto["candidates"].items():
            progress.update(bar, description=escape(name))
            recipe = Recipe(
                with_model(config, without_model_selection(model)), folder, data.extent, trust
            )
            search.attempt(name, recipe.fit, timed=bool(search.rows), run=recipe.run)
            progress.advance(bar)
    rows = search.table()
    if rows[0].nmse is None:
        reasons = "; ".join(f"{row.model}: {row.note}" for row in rows)
        raise ValueError(f"model=auto: none of the models works on this data. {reasons}")
    return with_model(config, auto["candidates"][rows[0].model]), rows


@contextmanager
def unsuitable() -> Iterator[None]:
    """Raise a `FitError` where the checks of training reject a recipe for this data, or memory runs out."""
    try:
        yield
    except (ValueError, torch.OutOfMemoryError) as error:
        raise FitError(str(error)) from error


class Recipe:
    """A configuration of ``kbf train`` as a model that a `kbf.filters.selection.cross_validation.Search` can fit: the whole of it is trained."""

    def __init__(self, config: dict[str, Any], folder: Path, extent: Any, trust: bool) -> None:
        """``folder``: of checkpoints, and of encoded images, which all recipes share. ``extent``, ``trust``: as of training."""
        self.config, self.folder, self.extent, self.trust = config, folder, extent, trust

    @unsuitable()
    def fit(self, memory: list[Recording]) -> Filter[Any]:
        """The filter after training.

        Raises:
            FitError: not for so many steps, or as training.
        """
        name, n, auto = (
            self.config["model"]["name"],
            sum(len(s.states) for s in memory),
            self.config["auto"],
        )
        if not (auto["least"].get(name) or 0) <= n <= (auto["most"].get(name) or n):
            raise ValueError(f"not tried on {n} training steps")
        encodings = self.folder / "codes.pt"
        self.trained = held_out_filter(
            self.config,
            memory,
            self.folder / name,
            trust=self.trust,
            encodings=encodings,
            extent=self.extent,
        )
        return self.trained.filter

    @unsuitable()
    def run(self, filter: Filter[Any], held: list[Recording]) -> Held:
        """One run through the held-out part, from its start; cut into `MOST` stretches."""
        left = torch.cat([s.states.double().cpu() for s in held]) - torch.cat(
            held_out_score(self.trained, held).estimates
        )
        return [(each, None) for each in left.tensor_split(min(MOST, len(left)))]


def held_out_part(data: Data, share: float) -> tuple[list[Recording], list[Recording]]:
    """What to fit and what to score a choice on: the data's own validation part, else the end of the training part (`hold_out`)."""
    return (data.train, data.validation) if data.validation else hold_out(data.train, share)


def held_out_filter(
    config: dict[str, Any],
    fit: list[Recording],
    directory: Path,
    *,
    trust: bool = False,
    **settings: Any,
) -> Trained:
    """The model of ``config`` after it was fitted to ``fit``.

    Args:
        config: of ``kbf train``. fit: recordings to learn from. directory: for checkpoints.
        trust, settings: as of `kbf.training.fit.train`.

    Raises:
        ValueError: data that is too short for the model, or several processes.
    """
    quiet = {
        **config,
        "callbacks": None,
        "trainer": {**config["trainer"], "enable_progress_bar": False},
    }
    trained = train(quiet, fit, directory, trust=trust, **settings)
    if trained is None:
        raise ValueError(
            "model=auto and hold_out run in one process: use trainer=cpu or trainer=gpu"
        )
    return trained


def held_out_score(trained: Trained, held: list[Recording]) -> Score:
    """What a trained model does on recordings that it has not learned from."""
    module = trained.module
    return score(
        trained.filter,
        held,
        seed=module.config["seed"],
        dtype=module.input_dtype,
        device=module.device,
    )


def with_model(config: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """The configuration with one of the candidates as its model, and a trainer that goes with it."""
    return {
        **config,
        "auto": config.get("auto", config["model"]),
        "model": model,
        "trainer": with_limits(config["trainer"], model),
    }

"""``model=auto``: selects a model by its error on a validation part."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kbf.config.run_settings import seconds_of, with_limits, without_model_selection
from kbf.data.dataset import Data
from kbf.data.windows import hold_out
from kbf.evaluation.score import Score, score
from kbf.filters.protocols import Filter
from kbf.filters.selection.cross_validation import MAX_BLOCKS, Held, Row, Search
from kbf.filters.selection.requirements import check_meets
from kbf.fitted.checkpoint import Trained
from kbf.fitted.model_checks import check_repeats
from kbf.recording import Recording
from kbf.runtime.atomic_files import scratch
from kbf.runtime.errors import FitError
from kbf.runtime.progress import shown_progress
from kbf.training.fit import train


def choose(
    config: dict[str, Any],
    data: Data,
    *,
    trust: bool = False,
    require: Sequence[str] = (),
) -> tuple[dict[str, Any], list[Row]]:
    """Return the configuration of the best candidate, and all candidates, the best first.

    Each candidate is trained on the training part without its end and scored on that end, or on
    ``data.validation``. The measure is the NMSE, since the components of a state may have different
    units. A candidate that cannot be built or does not fit the data is noted and left out. No test
    data is used.

    Args:
        config: of ``kbf train``, with the candidates as its model.
        data: training part and, if it has one, validation part.
        trust: as in `kbf.training.fit.train`.
        require: what candidates must meet (`kbf.filters.selection.requirements.REQUIREMENTS`).

    Raises:
        ValueError: there are too few training steps to hold some out, or no candidate works; or
            ``data.held=true``.
    """
    auto = config["model"]
    check_repeats("auto", config.get("data") or {})
    fit, held = held_out_part(data, auto["validation"])
    scale = torch.cat([r.states for r in fit]).double().var(0, correction=0).cpu()
    search = Search([(fit, held)], scale, seconds_of(config.get("budget")))
    count, shown = len(auto["candidates"]), config["trainer"]["enable_progress_bar"]
    with scratch(config["run_dir"]) as folder:
        for k, (name, model) in enumerate(auto["candidates"].items(), 1):
            candidate = with_model(config, without_model_selection(model))
            recipe = Recipe(candidate, folder, data.extent, trust, require)
            with shown_progress(f"model=auto: candidate {k} of {count}", shown):
                search.attempt(name, recipe.fit, timed=bool(search.running), run=recipe.run)
        search.finish()
    rows = search.table()
    if rows[0].nmse is None:
        reasons = "; ".join(f"{row.model}: {row.note}" for row in rows)
        raise ValueError(f"model=auto: none of the models works on this data. {reasons}")
    return with_model(config, auto["candidates"][rows[0].model]), rows


@contextmanager
def unsuitable() -> Iterator[None]:
    """Raise a `FitError` where training rejects a recipe for this data, or memory runs out."""
    try:
        yield
    except (ValueError, torch.OutOfMemoryError) as error:
        raise FitError(str(error)) from error


@dataclass
class Recipe:
    """A whole training run as a model that `kbf.filters.selection.cross_validation.Search` can fit.

    Attributes:
        config: of ``kbf train``.
        folder: of checkpoints and of encoded images, which all recipes share.
        extent: of images, as in `kbf.training.fit.train`.
        trust: as in `kbf.training.fit.train`.
        require: what the filter must meet, as in `choose`.
    """

    config: dict[str, Any]
    folder: Path
    extent: Any
    trust: bool
    require: Sequence[str] = ()

    @unsuitable()
    def fit(self, memory: list[Recording]) -> Filter[Any]:
        """Train on ``memory`` and return the filter.

        Raises:
            FitError: the model is not a candidate for so many steps, or training rejects it.
        """
        name, auto = self.config["model"]["name"], self.config["auto"]
        n = sum(len(r.states) for r in memory)
        if not (auto["least"].get(name) or 0) <= n <= (auto["most"].get(name) or n):
            raise ValueError(f"not a candidate on {n} training steps")
        self.trained: Trained = held_out_filter(
            self.config,
            memory,
            self.folder / name,
            trust=self.trust,
            encodings=self.folder / "codes.pt",
            extent=self.extent,
        )
        check_meets(self.trained.filter, self.require)
        return self.trained.filter

    @unsuitable()
    def run(self, filter: Filter[Any], held: list[Recording]) -> Held:
        """Return the errors on the held-out part, in at most `MAX_BLOCKS` blocks."""
        estimates = torch.cat(held_out_score(self.trained, held).estimates)
        errors = torch.cat([r.states.double().cpu() for r in held]) - estimates
        return errors.tensor_split(min(MAX_BLOCKS, len(errors)))


def held_out_part(data: Data, share: float) -> tuple[list[Recording], list[Recording]]:
    """Return the recordings to fit a candidate to, and those to score it on.

    The latter are the data's own validation part, else the end of the training part.
    """
    return (data.train, data.validation) if data.validation else hold_out(data.train, share)


def held_out_filter(
    config: dict[str, Any],
    fit: list[Recording],
    directory: Path,
    *,
    trust: bool = False,
    **settings: Any,
) -> Trained:
    """Train the model of ``config`` on ``fit``, without callbacks and progress bar.

    Args:
        config: of ``kbf train``.
        fit: the training part.
        directory: for checkpoints.
        trust: as in `kbf.training.fit.train`.
        settings: as in `kbf.training.fit.train`.

    Raises:
        ValueError: the data is too short for the model, or the trainer starts several processes.
    """
    trainer = {**config["trainer"], "enable_progress_bar": False}
    quiet = {**config, "callbacks": None, "trainer": trainer}
    single = "model=auto and hold_out run"
    trained = train(quiet, fit, directory, trust=trust, single=single, **settings)
    assert trained is not None  # as in one process
    return trained


def held_out_score(trained: Trained, held: list[Recording]) -> Score:
    """Return the scores of a trained model on recordings that it was not trained on."""
    module, seed = trained.module, trained.module.config["seed"]
    return score(trained.filter, held, seed=seed, dtype=module.input_dtype, device=module.device)


def with_model(config: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with a candidate as its model, and the trainer of that model."""
    return {
        **config,
        "auto": config.get("auto", config["model"]),
        "model": model,
        "trainer": with_limits(config["trainer"], model),
    }

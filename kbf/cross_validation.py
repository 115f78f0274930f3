"""`cross_validate`: models fitted to folds of recordings and scored on the rest, column by column.

Folds are whole recordings, or blocks of time with a gap on both sides. Their training parts
overlap, so that the scores of folds are not independent; standard errors and tests are corrected
for it.
"""

import inspect
import multiprocessing
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kbf.data.files.dataset import FileData
from kbf.data.files.folds import Part, parts_of, without_near
from kbf.data.files.in_memory import numbers_of
from kbf.data.files.layout import Contents, rows_of
from kbf.data.files.splits import correlation_time, described
from kbf.data.windows import Span
from kbf.evaluation.metrics import corrected_t, mean_and_error
from kbf.fitted.estimates import Estimates
from kbf.fitted.python_words import in_python
from kbf.fitted.results import Result, Source
from kbf.fitted.scores import column_scores
from kbf.fitted.training_data import read
from kbf.fitting import check_choice, fit_source, warn_of_problems
from kbf.runtime.errors import DataError

# Scores of a column in each fold.
SCORES = ("rmse", "nmse", "coverage_95", "crps")


class Job(NamedTuple):
    """One model on one split; `run_job` fits and scores it.

    Attributes:
        train, test: recordings. settings: of their columns. how: arguments of `fit_source`.
        about: entries of the rows of `CrossValidation.to_frame`.
    """

    train: Contents
    test: Contents
    settings: dict[str, Any]
    how: dict[str, Any]
    about: dict[str, Any]


class Done(NamedTuple):
    """What a job returns; `Estimates` themselves do not travel between processes."""

    rows: list[dict[str, Any]]
    result: Result
    schema: Any
    calibration: Any
    source: Source
    likelihood: Any


class CrossValidation:
    """Scores and estimates of models on the folds of a cross-validation.

    Attributes:
        estimates: by model, the `Estimates` of the test part of each fold.
        overlap: n_test / n_train, the mean over the folds.
        gap: steps on each side of test rows that are not trained on.
    """

    def __init__(
        self, rows: list[dict[str, Any]], estimates: dict[str, list[Estimates]], gap: int
    ) -> None:
        """Keep the rows of `to_frame`, the estimates, and the gap in steps."""
        self._rows = rows
        self.estimates: dict[str, list[Estimates]] = estimates
        self.gap: int = gap
        sizes = {row["fold"]: row["n_test"] / row["n_train"] for row in rows}
        self.overlap: float = sum(sizes.values()) / len(sizes)

    def to_frame(self) -> Any:
        """Return the scores of each fold, model and column of the state, a DataFrame.

        Columns: fold, test_part (recordings, and their steps if they are not whole), model, column,
        n_train, n_test (rows with known states), and rmse, nmse, coverage_95, crps
        (`kbf.fitted.scores.column_scores`; NaN where a filter has none).
        """
        import pandas as pd

        return pd.DataFrame(self._rows)

    def summary(self) -> Any:
        """Return the means over the folds, a DataFrame with a row for each model and column.

        ``rmse_se`` and ``nmse_se`` are standard errors of the means, with the variance
        (1/J + n_test / n_train) s^2 of J folds (Nadeau and Bengio, 2003); NaN for a single fold.
        """
        import pandas as pd

        found = {}
        for name in self._names("model"):
            for column in self._names("column"):
                row: dict[str, Any] = {}
                for score in SCORES:
                    mean, error = mean_and_error(self._values(name, column, score), self.overlap)
                    row[score] = mean
                    if score in ("rmse", "nmse"):
                        row[f"{score}_se"] = error
                found[name, column] = row | {"folds": len(self.estimates[name])}
        frame = pd.DataFrame.from_dict(found, orient="index")
        frame.index = pd.MultiIndex.from_tuples(found, names=["model", "column"])
        return frame

    def compare(self, reference: str, *, score: str = "rmse") -> Any:
        """Return the paired differences of the other models from one, a DataFrame.

        A row for each other model and column: the mean ``difference`` (negative where the model has
        the smaller score), its standard error ``se``, and ``p_value`` of the corrected resampled
        t-test (`kbf.evaluation.metrics.corrected_t`). Both are NaN for a single fold.

        Args:
            reference: the name of a model.
            score: rmse, nmse or crps.

        Raises:
            ValueError: an unknown model or score.
        """
        import pandas as pd

        names = self._names("model")
        if reference not in names:
            raise ValueError(f"reference: {reference!r} is not among {', '.join(names)}")
        if score not in ("rmse", "nmse", "crps"):
            raise ValueError(f"score must be rmse, nmse or crps, got {score!r}")
        rows = []
        for name in names:
            for column in self._names("column") if name != reference else []:
                pair = (self._values(each, column, score) for each in (name, reference))
                mean, se, p = corrected_t([a - b for a, b in zip(*pair, strict=True)], self.overlap)
                rows.append([name, column, mean, se, p])
        return pd.DataFrame(rows, columns=["model", "column", "difference", "se", "p_value"])

    def __repr__(self) -> str:
        folds = len({row["fold"] for row in self._rows})
        return (
            f"CrossValidation({folds} folds, gap of {self.gap} steps)\n{self.summary().to_string()}"
        )

    def _repr_html_(self) -> str:
        return self.summary().to_html()

    def _names(self, key: str) -> list[str]:
        return list(dict.fromkeys(row[key] for row in self._rows))

    def _values(self, model: str, column: str, score: str) -> list[float]:
        """A score in each fold."""
        return [
            row[score] for row in self._rows if (row["model"], row["column"]) == (model, column)
        ]


def cross_validate(
    data: Any = None,
    *,
    states: Any,
    models: Sequence[str] | str = ("kbf",),
    cv: Any = 5,
    gap: int | None = None,
    workers: int = 1,
    budget: str | int | float | None = None,
    seed: int = 0,
    **settings: Any,
) -> CrossValidation:
    """Fit models to all recordings but one fold and score them on it, for each fold.

    The models of a fold have the same training and test rows. Rows of a recording that are next to
    a test block are correlated with it and are not trained on. A recording whose middle is tested
    becomes two training recordings.

    Args:
        data, states: as of `kbf.fit`.
        models: names among ``configs/model``.
        cv: the number of folds: of whole recordings if there are as many, else of blocks of time of
            each recording. ``"leave_one_recording_out"``; a splitter of scikit-learn, whose groups
            are the recordings; or pairs of (train rows, test rows), numbers from 0 in the order of
            the data.
        gap: number of rows on each side of test rows that are not trained on. None is the
            autocorrelation time of the states (`kbf.data.files.splits.correlation_time`).
        workers: number of processes. A script with more than one needs
            ``if __name__ == "__main__":``.
        budget: time for comparing candidates in each fit, as of `kbf.fit`.
        seed: of everything that is drawn.
        settings: ``observations`` and the other arguments of `kbf.fit`, except ``model``.

    Raises:
        kbf.DataError: as `kbf.fit`; or a fold without training or test rows.
        ValueError: an unknown ``cv``, or impossible numbers.

    >>> import kbf, numpy as np
    >>> z = np.random.default_rng(0).normal(size=(90, 1))
    >>> found = kbf.cross_validate(states=z, observations=z + 0.1, models=["kalman"], cv=3)
    >>> found.to_frame().shape
    (3, 10)
    """
    names = [models] if isinstance(models, str) else list(models)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"models must be one or more different names, got {names}")
    for name in names:
        check_choice("model", name)
    if "model" in settings:
        raise ValueError("cross_validate takes models=[...], not model")
    if type(workers) is not int or workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers!r}")
    if gap is not None and (type(gap) is not int or gap < 0):
        raise ValueError(f"gap must be a number of rows or None, got {gap!r}")
    known = inspect.signature(read).parameters.keys() - {"test"}
    columns = {key: settings.pop(key) for key in [*settings] if key in known}
    source, read_as, contents = read(data, states=states, **columns)
    warn_of_problems(source)
    encoded = [source.encode(each, False).states for each in source.recordings]
    steps = correlation_time(encoded) if gap is None else gap
    with in_python():
        parts = [
            Part(without_near(part, steps), part.test) for part in parts_of(contents.recordings, cv)
        ]
    how = {"progress": False, **settings, "budget": budget, "seed": seed}
    jobs = [
        job_of(k, part, contents, encoded, read_as, {**how, "model": name}, steps)
        for k, part in enumerate(parts)
        for name in names
    ]
    done = list(run_all(jobs, workers))
    estimates: dict[str, list[Estimates]] = {name: [] for name in names}
    for job, each in zip(jobs, done, strict=True):
        made = Estimates(
            each.result,
            each.schema,
            each.calibration,
            each.source,
            likelihood=lambda each=each: each.likelihood,
        )
        estimates[job.about["model"]].append(made)
    return CrossValidation([row for each in done for row in each.rows], estimates, steps)


def job_of(
    fold: int,
    part: Part,
    contents: Contents,
    states: list[Tensor],
    settings: dict[str, Any],
    how: dict[str, Any],
    gap: int,
) -> Job:
    """Return the job of a model on one split.

    Raises:
        DataError: no known states for the training, or for the test.
    """
    counts = {}
    for name, spans in part._asdict().items():
        pieces = [states[k][start:stop].isfinite().all(1) for k, start, stop in spans]
        counts[name] = sum(int(each.sum()) for each in pieces)
        if not counts[name]:
            what = "training" if name == "train" else "test"
            near = f"; the gap next to test rows is {gap}, gap=0 keeps all" if spans == [] else ""
            raise DataError(f"fold {fold}: no {what} rows with known states are left{near}")
    recordings = contents.recordings
    names, lengths = [each.name for each in recordings], [len(each.obs) for each in recordings]
    about = {
        "fold": fold,
        "test_part": described(part.test, names, lengths),
        "model": how["model"],
        "n_train": counts["train"],
        "n_test": counts["test"],
    }
    train, test = (taken(contents, spans) for spans in part)
    numbers = torch.cat(numbers_of(test.recordings)).argsort().argsort()
    ranked = numbers.split([len(each.obs) for each in test.recordings])
    in_order = [
        each._replace(rows=rank) for each, rank in zip(test.recordings, ranked, strict=True)
    ]
    return Job(train, test._replace(recordings=in_order), settings, how, about)


def taken(contents: Contents, spans: list[Span]) -> Contents:
    """Return the recordings that consist of the steps of the spans."""
    pieces = []
    for k, start, stop in spans:
        each = contents.recordings[k]
        name = described([Span(0, start, stop)], [each.name], [len(each.obs)])
        pieces.append(rows_of(torch.arange(start, stop), each, name))
    return contents._replace(recordings=pieces)


def run_job(job: Job) -> Done:
    """Fit the model of a job, filter the test recordings, and score the estimates."""
    with in_python():
        source = FileData(None, contents=job.train, **job.settings)
    fitted = fit_source(source, job.settings, **job.how)
    made, schema = fitted.filter(job.test, seed=job.how["seed"]), fitted.schema
    rows = torch.cat(numbers_of(job.test.recordings)).argsort()
    truth = [schema.encode(each.states) for each in job.test.recordings if each.states is not None]
    scores = column_scores(made, torch.cat(truth).double()[rows], schema)
    about = {key: job.about[key] for key in ("fold", "test_part", "model")}
    sizes = {key: job.about[key] for key in ("n_train", "n_test")}
    table = [
        {
            **about,
            "column": column,
            **sizes,
            **{score: scores[score][k] if score in scores else np.nan for score in SCORES},
        }
        for k, column in enumerate(schema.parts())
    ]
    calibration = fitted.trained.calibration
    return Done(table, made.result, schema, calibration, made._source, made.log_likelihood)


def run_all(jobs: list[Job], workers: int) -> Iterable[Done]:
    """Yield the results of the jobs in their order, computed in processes if asked."""
    if workers == 1:
        yield from map(run_job, jobs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(jobs)), context) as pool:
        yield from pool.map(run_job, jobs)

"""`StateEstimator`: a filter fitted by `kbf.fit`, as a scikit-learn regressor.

The rows of X are the observations x_t in the order of time, those of y the states z_t; the
prediction of a row is E[z_t | x_1, ..., x_t] within its recording. Requires
``pip install "kbf[sklearn]"``.
"""

from __future__ import annotations

import warnings
from numbers import Integral
from typing import Any, ClassVar

import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.metrics import r2_score
from sklearn.utils import check_array, check_consistent_length, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from kbf.fitted.fitted_filter import FittedFilter
from kbf.fitting import fit
from kbf.runtime.errors import DataWarning
from kbf.sklearn.settings import Array

# Names of the columns that `kbf.fit` receives, apart from those of X and y.
RECORDING = "recording"
TIME = "time"


class StateEstimator(RegressorMixin, BaseEstimator):
    """States from observations up to the present row, by a filter that `kbf.fit` selects.

    A row is estimated from the rows before it, so the rows of each recording are in the order of
    time. Which recording a row belongs to is a column of X, since scikit-learn does not pass
    ``groups`` to `predict` in cross-validation: without the column, the test rows of several
    recordings would be filtered as one.

    In a pipeline the columns ``recording`` and ``time`` pass through the steps before. A
    StandardScaler for the observations alone, which keeps names::

        ColumnTransformer(
            [("scale", StandardScaler(), ["s1", "s2"])],
            remainder="passthrough",
            verbose_feature_names_out=False,
        ).set_output(transform="pandas")

    `kbf.fit` scales all columns itself, so that a scaler is not required.

    Args:
        model: a name among ``configs/model``.
        recording: the column of X that identifies the recording of each row, numbers or texts: a
            name if X is a DataFrame, or a position. Rows of several recordings may be interleaved.
            None: X is one recording, unless ``groups`` is given.
        time: the column of X with the times, by name or position. A DatetimeIndex or TimedeltaIndex
            of X is the time by itself.
        bounds: smallest and largest possible value of outputs, by name if y is a DataFrame or
            Series, or by position: ``{0: (0, None)}``.
        allow_missing_sensors: use the other observations of a row where some are NaN. None does so
            if rows of the training are partly missing.
        budget: time for comparing models: ``"90s"``, ``"10m"``, or seconds; None for any time.
        threads: of the computation; None leaves them.
        random_state: of everything that is drawn; an integer is the ``seed`` of `kbf.fit`.

    Attributes:
        filter_: the `kbf.FittedFilter`, with columns named like those of X and y.
        n_features_in_: columns of X, with those of recording and time. feature_names_in_: their
            names, if X is a DataFrame.

    >>> z = np.cumsum(np.random.default_rng(0).normal(size=(80, 1)), axis=0)
    >>> X = np.hstack([z + 0.1, np.repeat([[1], [2]], 40, axis=0)])
    >>> estimator = StateEstimator(model="kalman", recording=1).fit(X, z[:, 0])
    >>> estimator.predict(X).shape, bool(estimator.score(X, z[:, 0]) > 0.99)
    ((80,), True)
    """

    # With metadata routing enabled, cross-validation passes ``groups`` to all three.
    __metadata_request__fit: ClassVar[dict[str, bool]] = {"groups": True}
    __metadata_request__predict: ClassVar[dict[str, bool]] = {"groups": True}
    __metadata_request__score: ClassVar[dict[str, bool]] = {"groups": True}

    def __init__(
        self,
        *,
        model: Any = "kbf",
        recording: Any = None,
        time: Any = None,
        bounds: Any = None,
        allow_missing_sensors: Any = None,
        budget: Any = "8m",
        threads: Any = 1,
        random_state: Any = None,
    ) -> None:  # scikit-learn requires that settings are checked by fit, not here
        self.model: Any = model
        self.recording: Any = recording
        self.time: Any = time
        self.bounds: Any = bounds
        self.allow_missing_sensors: Any = allow_missing_sensors
        self.budget: Any = budget
        self.threads: Any = threads
        self.random_state: Any = random_state

    def fit(self, X: Any, y: Any, groups: Any = None) -> StateEstimator:
        """Fit a filter to recordings of observations and states.

        Args:
            X: ``T c``, observations, and the columns of recording and time. NaN is a missing
                observation.
            y: states ``T`` or ``T d``.
            groups: the recording of each row ``T``, in place of the column ``recording``.

        Raises:
            ValueError: arrays that scikit-learn refuses, or a column that is missing.
            kbf.FitError: the data do not determine a fit.
        """
        validate_data(self, as_table(self, X), y, reset=True, skip_check_array=True)
        frame = self._frame(X, groups, min_rows=2)
        outputs = checked(self, y, "y", dtype=np.float64, ensure_2d=False)
        check_consistent_length(frame, outputs)
        observations = [name for name in frame if name not in (RECORDING, TIME)]
        names = column_names(y, outputs.reshape(len(outputs), -1).shape[1], "y")
        states = [unlike(name, list(frame)) for name in names]
        frame[states] = outputs.reshape(len(outputs), -1)
        draw = self.random_state
        if not isinstance(draw, Integral):
            draw = check_random_state(draw).randint(2**31 - 1)
        self.single_: bool = outputs.ndim == 1
        self.seed_: int = int(draw)
        self.by_groups_: bool = self.recording is None and groups is not None
        self.filter_: FittedFilter = fit(
            frame,
            states=states,
            observations=observations,
            recording=RECORDING if RECORDING in frame else None,
            time=TIME if TIME in frame else None,
            bounds=self._bounds(names, states),
            allow_missing_sensors=self.allow_missing_sensors,
            model=self.model,
            budget=self.budget,
            seed=self.seed_,
            threads=self.threads,
            progress=False,
        )
        return self

    def predict(self, X: Any, groups: Any = None, return_std: bool = False) -> Any:
        """Return E[z_t | x_1, ..., x_t] of each row, ``T`` or ``T d`` as y was.

        Args:
            X: rows of new recordings, each from its start.
            groups: the recording of each row, in place of the column ``recording``.
            return_std: return the standard deviations, too, calibrated on held-out training rows.

        Raises:
            ValueError: arrays that scikit-learn refuses, or standard deviations of a filter without
                any.
        """
        check_is_fitted(self)
        validate_data(self, as_table(self, X), reset=False, skip_check_array=True)
        if self.by_groups_ and groups is None:
            warnings.warn(
                "fit was given groups, predict was not: all rows are filtered as one recording; "
                "StateEstimator(recording=COLUMN) identifies recordings in both",
                DataWarning,
                stacklevel=2,
            )
        estimates = self.filter_.filter(self._frame(X, groups), seed=self.seed_)
        if not return_std:
            return self._shaped(estimates.mean)
        if estimates.std is None:
            raise ValueError(f"the filter {self.filter_.model_name} has no standard deviations")
        return self._shaped(estimates.mean), self._shaped(estimates.std)

    def score(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> float:
        """Return R2 of the predictions, uniformly averaged over outputs."""
        return float(r2_score(y, self.predict(X, groups=groups), sample_weight=sample_weight))

    def _frame(self, X: Any, groups: Any, min_rows: int = 1) -> Any:
        """X as a DataFrame: observations, and the columns `RECORDING` and `TIME` if there are any.

        Raises:
            ValueError: a column that is missing, or observations that are not numbers.
        """
        import pandas as pd

        table = as_table(self, X)
        special = {
            role: position(table, column, role)
            for role, column in ((RECORDING, self.recording), (TIME, self.time))
            if column is not None
        }
        others = [k for k in range(table.shape[1]) if k not in special.values()]
        values = checked(
            self,
            table.iloc[:, others] if hasattr(table, "iloc") else table[:, others],
            "X",
            dtype=np.float64,
            ensure_all_finite="allow-nan",
            ensure_min_samples=min_rows,
        )
        names = column_names(table, table.shape[1], "x")
        index = getattr(table, "index", None)
        timed = isinstance(index, pd.DatetimeIndex | pd.TimedeltaIndex)
        frame = pd.DataFrame(
            values,
            columns=[unlike(names[k], [RECORDING, TIME]) for k in others],
            index=index.rename(TIME) if timed and TIME not in special else None,
        )
        for role, k in special.items():
            column = table.iloc[:, k].array if hasattr(table, "iloc") else table[:, k]
            frame[role] = pd.array(column) if role == RECORDING else column
        if groups is not None:
            check_consistent_length(frame, groups)
            frame[RECORDING] = np.asarray(groups)
        unknown = np.flatnonzero(frame[RECORDING].isna()) if RECORDING in frame else []
        if len(unknown):
            raise ValueError(f"row {unknown[0]} of X has no recording")
        return frame

    def _bounds(self, names: list[str], states: list[str]) -> dict[str, Any] | None:
        """Bounds by the names that `kbf.fit` receives; unknown keys stay, and are refused there."""
        if self.bounds is None:
            return None
        by_key: dict[Any, str] = {
            **dict(enumerate(states)),
            **dict(zip(names, states, strict=True)),
        }
        return {by_key.get(key, str(key)): ends for key, ends in dict(self.bounds).items()}

    def _shaped(self, values: Array) -> Array:
        """Values ``T d`` in the shape of y."""
        return values[:, 0] if self.single_ else values

    def __sklearn_tags__(self) -> Any:
        """Return the tags: several outputs and NaN among the observations are supported."""
        tags = super().__sklearn_tags__()
        tags.target_tags.single_output, tags.target_tags.multi_output = True, True
        tags.input_tags.allow_nan = True
        return tags


def as_table(estimator: Any, X: Any) -> Any:
    """Return a DataFrame of pandas, or an array ``T c`` of any kind of entries.

    Raises:
        ValueError: an array without two dimensions, or of complex numbers.
    """
    if hasattr(X, "columns") and (hasattr(X, "iloc") or hasattr(X, "to_pandas")):
        return X if hasattr(X, "iloc") else X.to_pandas()
    return checked(estimator, X, "X", dtype=None, ensure_all_finite=False, ensure_min_samples=0)


def checked(estimator: Any, values: Any, name: str, **settings: Any) -> Any:
    """Return an array that scikit-learn accepts; ``name`` is in the message of errors."""
    return check_array(values, estimator=estimator, input_name=name, **settings)


def position(table: Any, column: Any, what: str) -> int:
    """Return the position of a column that is given by name or position.

    Raises:
        ValueError: there is no such column.
    """
    names = [str(name) for name in getattr(table, "columns", ())]
    if isinstance(column, str) and column in names:
        return names.index(column)
    width = table.shape[1]
    if isinstance(column, Integral) and -width <= int(column) < width:
        return int(column) % width
    there = f"columns {', '.join(names)}" if names else f"{width} columns without names"
    raise ValueError(
        f"{what}={column!r} is no column of X, which has {there}. A step of a pipeline before "
        "that returns arrays drops names: .set_output(transform='pandas') keeps them"
    )


def column_names(values: Any, count: int, letter: str) -> list[str]:
    """Return the names of the columns of a DataFrame or Series, or x1, x2, ..."""
    if hasattr(values, "iloc"):
        own = [*values.columns] if hasattr(values, "columns") else [values.name]
        if all(isinstance(name, str) for name in own):
            return own
    return [f"{letter}{k + 1}" for k in range(count)]


def unlike(name: str, others: list[str]) -> str:
    """Return a name, with underscores appended until it is none of the others."""
    while name in others:
        name += "_"
    return name

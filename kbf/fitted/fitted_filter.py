"""`FittedFilter`: a fitted model that filters, smooths, forecasts and scores recordings.

`kbf.fit` returns one and `kbf.load` reads one from a checkpoint. The methods take data as
`kbf.fit` does, find the columns by the names of the training, and return `Estimates`.
"""

from __future__ import annotations

import copy
import os
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Generator, Tensor

from kbf.data.files.layout import Contents
from kbf.filters.rollout import rollout
from kbf.filters.smoothing import smooth
from kbf.fitted.checkpoint import load_filter, save_checkpoint
from kbf.fitted.compatibility import piece_differences, seen_in_training
from kbf.fitted.estimates import Estimates
from kbf.fitted.held_out_calibration import learn_smoothed
from kbf.fitted.inputs import Inputs, following, inputs_of, read_for, recording_of
from kbf.fitted.online import OnlineFilter
from kbf.fitted.online_estimator import OnlineEstimator
from kbf.fitted.results import Result, Source, continued, in_order, joined, row_order
from kbf.fitted.runs import (
    as_recording,
    batch_of,
    check_horizon,
    future_controls,
    log_likelihoods,
    moved,
    moved_from,
    smoothed_paths,
    step_through,
    step_through_all,
)
from kbf.fitted.scores import baseline_nmse, column_scores, forecast_nmse
from kbf.fitted.summary import Summary
from kbf.runtime.errors import DataWarning

if TYPE_CHECKING:
    from kbf.export.step import Exported


class FittedFilter(Summary):
    """A fitted filter with its columns, scaling, encoders, calibration and alarms.

    Attributes:
        trained: model, filter, calibration and monitor (`kbf.fitted.checkpoint.Trained`).
        schema: names and kinds of the columns.
        config: the configuration that it was fitted with.
    """

    def filter(
        self,
        data: Any = None,
        *,
        observations: Any = None,
        controls: Any = None,
        mask: Any = None,
        state: Any = None,
        seed: int = 0,
    ) -> Estimates:
        """Estimate the states of each row from the observations up to it.

        Each recording starts from the prior, and again after a gap in time of more than
        `kbf.data.files.timestamps.LARGEST_GAP` steps, as in training.

        Args:
            data: a DataFrame, recordings, paths, or a list of them, as of `kbf.fit`.
            observations: in place of ``data``, an array ``T q`` or ``B T q``, or images.
            controls: ``T k``; mask: ``T`` bool, False where nothing was observed. Both go with
                ``observations``.
            state: `Estimates.state` of the rows before, to continue; None starts from the prior.
                A gap in time between them starts from the prior, as in one recording.
            seed: of filters that draw random numbers. `online` with the same seed returns the
                numbers of the first recording, unless a diverged track is re-initialised, where
                the rows of a batch are drawn again.

        Raises:
            DataError: data that does not fit the columns of the training.
        """
        pieces, rows, source, end = self._inputs(
            data, observations=observations, controls=controls, mask=mask
        )
        generator = torch.Generator(self._device).manual_seed(seed)
        estimator = OnlineEstimator(self.trained, self.schema, generator=generator)
        results = []
        if state is not None:
            *leaves, before = state
            pieces[0], moves = following(pieces[0], before, self._data)
            if moves:
                estimator.live.state, estimator.live.rejections, estimator.recent = leaves
            results.append(step_through(estimator, self.trained, pieces[0], moves - 1))
        results += step_through_all(estimator, self.trained, pieces[len(results) :])
        live = estimator.live
        return self.estimates(
            in_order(results, rows),
            source,
            state=(live.state, live.rejections, estimator.recent, end),
            likelihood=lambda: log_likelihoods(self.trained, pieces, rows, seed),
        )

    def smooth(
        self,
        data: Any = None,
        *,
        observations: Any = None,
        controls: Any = None,
        mask: Any = None,
        lag: int | None = None,
        seed: int = 0,
    ) -> Estimates:
        """Estimate the states of each row from all observations, or from ``lag`` later ones.

        The first call recalibrates the smoother's covariances on held-out training steps, which
        takes about as long as filtering the training data.

        Args:
            data, observations, controls, mask, seed: as of `filter`.
            lag: number of later observations; None takes all of the recording.

        Raises:
            DataError: as `filter`.
            ValueError: a filter without a smoother, or a negative lag.
        """
        if not self.capabilities["smooth"]:
            raise ValueError(self._cannot("smooth"))
        pieces, rows, source, _ = self._inputs(
            data, observations=observations, controls=controls, mask=mask
        )
        if lag not in self._smoothers:
            known = self.trained.calibration is not None
            self._smoothers[lag] = learn_smoothed(self.trained, lag=lag) if known else None
        calibration, results, smoothed = self._smoothers[lag], [], []
        for piece in pieces:
            found = smooth(
                self.trained.filter,
                **batch_of(self.trained, piece),
                lag=lag,
                generator=torch.Generator(self._device).manual_seed(seed),
            )
            smoothed.append(found)
            C = None if found.covariances is None else found.covariances[0].double().cpu()
            if C is not None and calibration is not None:
                C = calibration.covariance(C)
            results.append(Result(found.estimates[0].double().cpu(), C, None, {}))

        def paths(n: int, generator: Generator) -> Tensor:
            """Draws in the order of the rows of the input."""
            drawn = smoothed_paths(self.trained, pieces, smoothed, calibration, n, generator)
            return torch.cat(drawn, 1)[:, row_order(rows)]

        settings: dict[str, Any] = {
            "calibration": calibration,
            "paths": paths if lag is None else None,
        }
        return self.estimates(in_order(results, rows), source, **settings)

    def forecast(
        self, data: Any, horizon: int, *, controls: Any = None, seed: int = 0
    ) -> Estimates:
        """Forecast the ``horizon`` steps after the end of each recording.

        The index continues that of the data by the median time step.

        Args:
            data: as of `filter`.
            horizon: number of steps.
            controls: ``horizon k``, the controls of these steps, for a filter with controls; or a
                DataFrame, or a mapping for each step.
            seed: of filters that draw random numbers.

        Raises:
            DataError: as `filter`.
            ValueError: a horizon below 1, or controls that are missing or of another shape.
        """
        check_horizon(horizon)
        future = future_controls(self.trained, controls, horizon)
        pieces, _, source, _ = self._inputs(data)
        last = {recording_of(piece): piece for piece in pieces}
        generator = torch.Generator(self._device).manual_seed(seed)
        results, names, times = [], [], []
        step = self.time_step
        for name, piece in last.items():
            state = rollout(
                self.trained.filter, **batch_of(self.trained, piece), generator=generator
            ).state
            results.append(moved(self.trained, state, future, horizon, generator))
            names += [name] * horizon
            if piece.times is not None and step is not None:
                times.append(piece.times[-1].numpy() + step * np.arange(1, horizon + 1))
        index = None
        if source.index is not None and len(last) == 1:
            index = continued(source.index, horizon)
        ahead = Source(names, np.concatenate(times) if times else None, index)
        return self.estimates(joined(results), ahead)

    def historical_forecasts(
        self, data: Any, horizon: int, *, stride: int = 1, seed: int = 0
    ) -> Estimates:
        """Forecast from every ``stride``-th row the 1 to ``horizon`` next steps.

        Forecasts that need controls beyond the end of a recording are left out.

        Returns:
            Estimates with one row for each origin and step; `Estimates.to_frame` has the index
            (origin, step): the number of the row that is the last one observed, and the number of
            steps after it.

        Raises:
            DataError: as `filter`.
            ValueError: a horizon or a stride below 1.
        """
        check_horizon(horizon)
        if stride < 1:
            raise ValueError(f"stride must be at least 1, got {stride}")
        import pandas as pd

        pieces, rows, _, _ = self._inputs(data)
        generator = torch.Generator(self._device).manual_seed(seed)
        results, names, origins = [], [], []
        for piece, where in zip(pieces, rows, strict=True):
            states: list[Any] = []
            batch = batch_of(self.trained, piece)
            rollout(self.trained.filter, **batch, generator=generator, states=states)
            found, made = moved_from(
                self.trained,
                states,
                [t for t in range(0, len(states), stride) if where[t] >= 0],
                batch["controls"],
                horizon,
                generator,
            )
            results += [] if found is None else [found]
            names += [piece.name] * len(made)
            origins += [(int(where[t]), k) for t, k in made]
        index = pd.MultiIndex.from_tuples(origins, names=["origin", "step"])
        ahead = Source(names, None, index)
        return self.estimates(joined(results), ahead)

    def evaluate(
        self,
        data: Any,
        *,
        smooth: bool = False,
        horizon: int = 0,
        baselines: bool = True,
        seed: int = 0,
    ) -> Any:
        """Score the filter on recordings with known states, which it should not be fitted to.

        Args:
            data: recordings with states, as of `kbf.fit`.
            smooth: score smoothed estimates as well (``rmse_smoothed``, ...).
            horizon: score the forecasts of 1 to ``horizon`` steps as well (``nmse_ahead_1``, ...).
            baselines: the NMSE of plain estimators, fitted to the filter's memory
                (``nmse_window_ridge``, ``nmse_kalman``, ``nmse_mean``).
            seed: of filters that draw random numbers.

        Returns:
            A DataFrame with a row for each column of the state: rmse, nmse, coverage_95, crps
            (`kbf.fitted.scores.column_scores`), and what else is asked for.

        Raises:
            DataError: as `filter`.
        """
        import pandas as pd

        given, data = data, read_for(self._data, data, states=True)  # once, for all methods below
        pieces, rows, _, _ = inputs_of(self._data, data)
        if given is not data:
            warn_of(piece_differences(self.trained, pieces, self.reference))
        warn_of(seen_in_training(self.trained, list(map(as_recording, pieces))), depth=3)
        order = row_order(rows)
        states = torch.cat([as_recording(each).states for each in pieces]).double()[order]
        found = column_scores(self.filter(data, seed=seed), states, self.schema)
        if smooth:
            scores = column_scores(self.smooth(data, seed=seed), states, self.schema)
            found |= {f"{name}_smoothed": values for name, values in scores.items()}
        if horizon:
            ahead = self.historical_forecasts(data, horizon, seed=seed)
            found |= forecast_nmse(ahead, states, rows, horizon, self.schema)
        if baselines:
            found |= baseline_nmse(self.trained, pieces, self.schema)
        return pd.DataFrame(found, index=self.schema.parts())

    def append(
        self, data: Any, *, budget: int | None = None, refit: bool = False, seed: int = 0
    ) -> FittedFilter:
        """Return a filter whose memory contains further recordings; this one does not change.

        Bandwidths, ridges, scaling and encoders stay; calibration and alarms are learned again.

        Args:
            data: recordings with states, as of `kbf.fit`.
            budget: upper bound on the steps of the memory; the steps that cover it best are kept.
            refit: select bandwidths, ridges, densities and the model again, as `kbf.fit` does;
                scaling and encoders stay.
            seed: of filters that draw random numbers.

        Raises:
            DataError: as `filter`, or no row with known states.
            ValueError: a model without a memory.
        """
        from kbf.fitted.append import append, known_parts

        if not self.capabilities["append"]:
            raise ValueError(self._cannot("append"))
        pieces, _, _, _ = inputs_of(self._data, data, states=True)
        new = known_parts(list(map(as_recording, pieces)))
        warn_of(seen_in_training(self.trained, new), depth=3)
        made = append(copy.deepcopy(self).trained, new, budget=budget, refit=refit, seed=seed)
        return FittedFilter(made.trained)

    def online(
        self,
        *,
        state: str | os.PathLike[str] | None = None,
        max_delay: float = 0.0,
        compile: bool = False,
        seed: int = 0,
    ) -> OnlineFilter:
        """Return a running filter that takes one observation at a time.

        Args:
            state: a file that `OnlineFilter.save` has written, to continue; None starts from the
                prior.
            max_delay: seconds by which a reading may be late.
            compile: compile the step, which takes some seconds and makes steps faster.
            seed: of filters that draw random numbers.

        Raises:
            ValueError: a state of another filter, or a negative delay.
        """
        return OnlineFilter(self, state=state, max_delay=max_delay, compile=compile, seed=seed)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the checkpoint, atomically; `kbf.load` and all ``kbf`` commands read it."""
        save_checkpoint(self.trained, path)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the bytes of the checkpoint; filters may contain functions."""
        with tempfile.TemporaryDirectory(prefix="kbf-") as folder:
            path = Path(folder) / "filter.ckpt"
            self.save(path)
            return unpickled, (path.read_bytes(), str(self._device), self.trained.module.trust)

    def export(
        self, path: str | os.PathLike[str], *, format: str | None = None, steps: int = 50
    ) -> Exported:
        """Write one step as a program for other machines; see `kbf.fitted.program.export_step`.

        Args:
            path: of the program.
            format: onnx, torch_export or torchscript; None takes that of the ending.
            steps: on which program and filter are compared.

        Raises:
            ValueError: an unknown format, or a filter that cannot be exported.
        """
        from kbf.fitted.program import export_step  # torch.export is slow to import

        return export_step(self.trained, path, format, steps=steps)

    # How

    @property
    def _data(self) -> dict[str, Any]:
        """Settings of the training data, with the columns."""
        return {**(self.config.get("data") or {}), "column_schema": self.schema.to_dict()}

    @property
    def _device(self) -> torch.device:
        return self.trained.module.device

    def _inputs(self, data: Any, **others: Any) -> Inputs:
        """Recordings in the columns of the training; warns of differences from the training."""
        found = inputs_of(self._data, data, **others)
        if not isinstance(data, Contents):  # which `evaluate` has read, for several methods
            warn_of(piece_differences(self.trained, found.pieces, self.reference))
        return found


def load(path: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> FittedFilter:
    """Read a fitted filter from its checkpoint; nothing in the file is executed.

    Args:
        path: written by `FittedFilter.save` or ``kbf train``, or ``example:rotation``, one that
            comes with kbf.
        device: of the filter.

    Raises:
        kbf.fitted.checkpoint.CheckpointError: there is no such file, or it is no checkpoint.
        ValueError: PyTorch has no such device.

    >>> kbf.load("example:rotation").columns["states"]  # doctest: +SKIP
    ['z_0', 'z_1']
    """
    return FittedFilter(load_filter(path, device=device))


def warn_of(differences: list[str], *, depth: int = 4) -> None:
    """Warn of differences between recordings and the training data, and of rows that both have."""
    for text in differences:
        warnings.warn(text, DataWarning, stacklevel=depth)


def unpickled(checkpoint: bytes, device: str, trust: bool) -> FittedFilter:
    """Return the filter of a checkpoint's bytes, for `pickle` and `copy`."""
    with tempfile.TemporaryDirectory(prefix="kbf-") as folder:
        path = Path(folder) / "filter.ckpt"
        path.write_bytes(checkpoint)
        return FittedFilter(load_filter(path, device=device, trust=trust))

"""`fit`: recordings in, a fitted filter out. ``kbf train`` fits with the same functions.

The configuration is that of ``kbf train data=own``; `fit` sets the columns and reads data in
memory, the command reads a file.
"""

import os
import shlex
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kbf.data.dataset import Data, completed, load_data
from kbf.data.files.bounds import checked_bounds
from kbf.data.files.column_schema import ColumnSchema
from kbf.data.files.dataset import FileData
from kbf.data.files.layout import plain
from kbf.data.files.report import Report, examine
from kbf.filters.selection.requirements import REQUIREMENTS
from kbf.fitted.checkpoint import Trained
from kbf.fitted.fitted_filter import FittedFilter
from kbf.fitted.held_out_calibration import learn_and_keep
from kbf.fitted.python_words import in_python, python_words
from kbf.fitted.summary import CAPABILITIES
from kbf.fitted.training_data import python_numbers, read
from kbf.runtime.errors import DataError, DataWarning, FitError, nearest
from kbf.runtime.hydra_quoting import quoted
from kbf.runtime.interpolation import incomplete, literal, resolved
from kbf.runtime.progress import shown_progress
from kbf.runtime.provenance import provenance
from kbf.runtime.threads import limited_threads


def fit(
    data: Any = None,
    *,
    states: Any,
    observations: Any = None,
    images: Any = None,
    controls: Any = None,
    recording: Any = None,
    time: Any = None,
    mask: Any = None,
    angles: Sequence[str] | Mapping[str, str] = (),
    rotations: Sequence[Sequence[str]] = (),
    bounds: Mapping[str, Any] | None = None,
    units: Mapping[str, str] | None = None,
    allow_missing_sensors: bool | None = None,
    missing: Sequence[Any] | Mapping[str, Sequence[Any]] | None = None,
    time_as_control: bool = False,
    control_timing: str = "into",
    root: str | os.PathLike[str] | None = None,
    latency: Mapping[str, float] | None = None,
    size: Sequence[int] | None = None,
    reading: Mapping[str, Any] | None = None,
    model: str = "kbf",
    config: Mapping[str, Any] | None = None,
    encoder: str | None = None,
    training: Mapping[str, Any] | None = None,
    require: Sequence[str] = (),
    validation: float = 0.0,
    calibrate: bool = True,
    budget: str | int | float | None = "8m",
    seed: int = 0,
    device: str = "cpu",
    threads: int | None = 1,
    progress: bool = True,
) -> FittedFilter:
    """Fit a filter that estimates states from observations, to recordings of both.

    Fits what ``kbf train data=own`` fits: scales all columns, selects a model by cross-validation
    on blocks of the recordings, and learns the widths of intervals and the alarms on held-out
    blocks. All rows are for training; nothing is kept for a test.

    Args:
        data: a DataFrame, a list or dict of DataFrames (one for each recording), a `Recording` or
            a list of them, or the path of a file, a pattern (``"runs/*.csv"``) or a list of paths.
            None if ``states`` and the others are arrays.
        states: columns of the states; without ``data`` an array ``T d`` or ``B T d``, or a list
            of arrays ``T d``.
        observations: columns of the observations, also as patterns (``"s*"``), which do not match
            columns that have another role; or arrays like ``states``. A dict has the columns of
            each sensor, ``{"gps": ["lat", "lon"]}``: where one of them is missing all are.
        images: the column with names of image files; or an array of images, uint8
            ``T H W``, ``T H W C`` or ``T C H W``.
        controls: columns of controls that act in the move to a row; or arrays.
        recording: the column (or index level) with the name of the recording of each row. Rows of
            several recordings may be interleaved.
        time: the column of times, or several that are joined (``["Date", "Time"]``). A
            DatetimeIndex or TimedeltaIndex is the time by itself.
        mask: the column, or an array of bool, that is False where nothing was observed.
        angles: columns that are angles in radians, or a dict of names and ``"degrees"`` or
            ``"radians"``.
        rotations: groups of columns that are rotations: 4 (quaternion w x y z) or 9 (matrix).
        bounds: smallest and largest possible value of state columns; None for no bound.
        units: of the columns, for labels. Nothing is converted.
        allow_missing_sensors: use the other observations of a row where some are missing. None
            does so if rows of the training are partly missing.
        missing: values that stand for a missing one, such as ``[-999]``, or ``{"s1": [0]}`` for
            single columns.
        time_as_control: the duration of each move is a control, for irregular times.
        control_timing: controls act in the move ``"into"`` their row, or ``"from"`` it.
        root: the folder of the image files that ``images`` names; None is that of the table, or
            the present one for a DataFrame. It is stored: `FittedFilter.filter` uses it, too.
        latency: seconds (steps without times) by which the readings of a sensor are late,
            ``{"gps": 0.3}``. They are moved to the rows of their own time.
        size: height and width that images are resized to.
        reading: how the data is written, by the names of ``data=own``: ``{"date_format":
            "%d/%m/%Y %H:%M", "sort_by_time": True}``; and of CSV files ``text_encoding``,
            ``decimal``, ``thousands``, ``comment``, ``skip_lines``, ``units_row``, ``header``.
        model: a name of the guide's table of models; ``"auto"`` fits several and selects the one
            with the least error on the end of the recordings.
        config: further settings of ``kbf train`` by their names, as in
            ``{"model.net.transition": "gaussian"}``.
        encoder: of images, a name among ``configs/encoder``.
        training: settings of models trained by gradient, as in ``{"epochs": 20}``.
        require: capabilities that the filter must have (`FittedFilter.capabilities`), as in
            ``["smooth", "export"]``. Candidates without smooth, export, missing_sensors or
            intervals are not selected; others are an error where the selected one lacks them.
        validation: share of the recordings that models trained by gradient are validated on.
        calibrate: learn intervals and alarms, and select among models.
        budget: time for comparing models and calibrating: ``"90s"``, ``"10m"``, or seconds; None
            for any time.
        seed: of everything that is drawn.
        device: ``"cpu"`` or ``"cuda"``.
        threads: of the computation, restored afterwards; one is fastest where matrices are small.
            Where other processes need the cores, set the environment variable
            ``OMP_WAIT_POLICY=PASSIVE`` before Python starts: OpenMP reads it when PyTorch is
            loaded. None leaves them.
        progress: show what is fitted, in terminals and notebooks.

    Raises:
        kbf.DataError: columns that are missing, values that are not numbers, times that decrease.
        kbf.FitError: the data do not determine a fit.
        ValueError: an unknown model or setting.

    >>> import kbf, numpy as np
    >>> z = np.cumsum(np.random.default_rng(0).normal(size=(60, 1)), axis=0)
    >>> fitted = kbf.fit(states=z, observations=z + 0.1, model="kalman", progress=False)
    >>> fitted.filter(observations=z[:3] + 0.1).mean.shape
    (3, 1)
    """
    if allow_missing_sensors is None and "missing_sensors" in require:
        allow_missing_sensors = True
    source, settings, _ = read(
        data,
        states=states,
        observations=observations,
        images=images,
        controls=controls,
        recording=recording,
        time=time,
        mask=mask,
        angles=angles,
        rotations=rotations,
        allow_missing_sensors=allow_missing_sensors,
        missing=missing,
        time_as_control=time_as_control,
        control_timing=control_timing,
        root=root,
        latency=latency,
        size=size,
        reading=reading,
        validation=validation,
    )
    bounds = plain_bounds(bounds, source.column_schema)
    warn_of_problems(source, bounds)
    return fit_source(
        source,
        settings,
        bounds=bounds,
        units=units,
        model=model,
        config=config,
        encoder=encoder,
        training=training,
        require=require,
        calibrate=calibrate,
        budget=budget,
        seed=seed,
        device=device,
        threads=threads,
        progress=progress,
    )


def fit_source(
    source: FileData,
    settings: dict[str, Any],
    *,
    bounds: Mapping[str, Any] | None = None,
    units: Mapping[str, str] | None = None,
    model: str = "kbf",
    config: Mapping[str, Any] | None = None,
    encoder: str | None = None,
    training: Mapping[str, Any] | None = None,
    require: Sequence[str] = (),
    calibrate: bool = True,
    budget: str | int | float | None = None,
    seed: int = 0,
    device: str = "cpu",
    threads: int | None = 1,
    progress: bool = True,
) -> FittedFilter:
    """Fit a filter to recordings that `read` has returned with their settings; as `fit`."""
    from kbf.config.prepare import configure
    from kbf.config.run_settings import with_selection
    from kbf.model_choice import choose

    stated = {
        "bounds": plain_bounds(bounds, source.column_schema),
        "units": None if units is None else dict(units),
    }
    check_known_units(units, source)
    if unknown := sorted(set(require) - set(CAPABILITIES)):
        raise ValueError(
            f"require: {unknown[0]!r} is no capability; there are {', '.join(CAPABILITIES)}"
        )
    given = {
        "intervals": calibrate,
        "alarms": calibrate,
        "controls": bool(source.column_schema.controls),
    }
    if lacking := [name for name in require if not given.get(name, True)]:
        needs = "controls=" if lacking[0] == "controls" else "calibrate=True"
        raise ValueError(f"require: {lacking[0]} needs {needs}")
    check_choice("model", model)
    check_choice("encoder", encoder)
    words = ["data=own", f"model={model}", f"seed={seed}", "logger=none"]
    words += ["trainer=cpu" if device == "cpu" else "trainer=gpu", f"calibrate={calibrate}"]
    words += [] if encoder is None else [f"encoder@data.encoding.encoder={encoder}"]
    words.append(f"budget={'null' if budget is None else budget}")
    words += [f"model.training.{key}={word_of(value)}" for key, value in (training or {}).items()]
    words += [f"{key}={word_of(value)}" for key, value in (config or {}).items()]
    whole = configure("train", words)
    own = {**whole["recipe"]["data"], **literal({**settings, **stated})}
    whole["recipe"] = {**whole["recipe"], "data": own, "n_train": None}
    checked = load_data({**settings, "source": {}}, source=source)
    whole = with_shapes(whole, checked)
    if not progress:
        whole["trainer"] = {**whole["trainer"], "enable_progress_bar": False}
    selectable = [name for name in require if name in REQUIREMENTS]
    with (
        limited_threads(threads),
        unchanged_globals(),
        tempfile.TemporaryDirectory(prefix="kbf-") as folder,
    ):
        names = dict.fromkeys(str(each.file) for each in source.recordings)
        files = [path.resolve() for name in names if (path := Path(name)).is_file()]
        record = provenance(files=files) | {"command": shlex.join(sys.argv)}
        if "candidates" in whole["model"]:
            whole, rows = choose({**whole, "run_dir": folder}, checked, require=selectable)
            whole["model"] = {**whole["model"], "compared": [list(row) for row in rows]}
        whole = with_selection(whole)
        if selectable and whole["model"].get("model_selection"):
            whole["model"] = {**whole["model"], "require": selectable}
        trained = fit_model(whole, checked, Path(folder), provenance=record)
    assert trained is not None
    fitted = FittedFilter(trained)
    if lacking := [name for name in require if not fitted.capabilities[name]]:
        raise FitError(f"model={model}: the filter {fitted.model_name} lacks {lacking[0]}")
    return fitted


def check(
    data: Any = None,
    *,
    states: Any,
    test: float = 0.2,
    bounds: Mapping[str, Any] | None = None,
    units: Mapping[str, str] | None = None,
    **columns: Any,
) -> Report:
    """Report what recordings contain, and warn of problems for filters; nothing is fitted.

    The report of ``kbf data check``: lengths, ranges and missing values, and warnings of outliers,
    undeclared angles, repeated rows and test rows outside of the training region.

    Args:
        data, states: as of `fit`.
        test: share of the end of each recording that is compared with the rest.
        bounds, units: as of `fit`. A state with bounds is not reported as one that may need them.
        columns: ``observations`` and the other arguments of `fit` that describe columns.

    Raises:
        kbf.DataError: as `fit`.
    """
    source = read(data, states=states, test=test, **columns)[0]
    check_known_units(units, source)
    report = examine(source, plain_bounds(bounds, source.column_schema))
    found = ([python_words(text) for text in each] for each in (report.warnings, report.causes))
    return Report(report.recordings, report.columns, *found)


def fit_model(
    config: dict[str, Any], data: Data, directory: Path, **settings: Any
) -> Trained | None:
    """Fit the model of a complete configuration, and calibrate it; writes its checkpoints.

    Args:
        config: of ``kbf train``, with shapes (`with_shapes`).
        data: training part and, if it has one, validation part.
        directory: of the checkpoints.
        settings: further arguments of `kbf.training.fit.train`.

    Returns:
        The model; None in the helper processes of a distributed run.

    Raises:
        ValueError: as `kbf.training.fit.train`.
    """
    from kbf.training.fit import is_helper, train

    steps = sum(len(each.states) for each in data.train)
    title = f"fitting {config['model']['name']} to {steps:,} steps"
    shown = config["trainer"]["enable_progress_bar"] and not is_helper()
    with shown_progress(title, shown):
        trained = train(config, data.train, directory, validation=data.validation, **settings)
        if trained is None or not config["calibrate"]:
            return trained
        try:
            trained = learn_and_keep(trained, directory, data.validation, seed=config["seed"])
        except ValueError as error:
            warnings.warn(f"no calibration and no alarms: {error}", DataWarning, stacklevel=2)
            return trained
    if trained.monitor is None:
        text = "no alarms: nearly no training step has observations of all sensors"
        warnings.warn(text, DataWarning, stacklevel=2)
    return trained


def with_shapes(config: dict[str, Any], data: Data) -> dict[str, Any]:
    """Return the configuration of a run with what only its recordings contain, and resolved."""
    if not incomplete(config["recipe"]):
        return config
    recipe = completed(config["recipe"], data)
    whole = resolved({**literal(config), **literal(recipe), "model": config["model"]})
    return {**config, **{key: whole[key] for key in ("model", "data", "n_train")}, "recipe": recipe}


def check_choice(group: str, name: str | None) -> None:
    """Raise a ValueError for a name that no configuration of a group has, with the nearest."""
    from kbf.config.composition import choices_of

    choices = choices_of("train", group)
    if name is not None and name not in choices:
        raise ValueError(f"there is no {group} {name!r}; {nearest(name, choices)}")


def check_known_units(units: Mapping[str, str] | None, source: FileData) -> None:
    """Raise a `DataError` for the unit of a column that is not used."""
    schema = source.column_schema
    known = [*schema.columns("states"), *schema.columns("observations"), *schema.controls]
    if unknown := [name for name in units or {} if name not in known]:
        raise DataError(f"units: there is no column {unknown[0]!r}; there are {', '.join(known)}")


def plain_bounds(
    bounds: Mapping[str, Any] | None, schema: ColumnSchema
) -> dict[str, list[Any]] | None:
    """Return bounds as lists of Python's numbers, for the configuration.

    Raises:
        DataError: of a column that is no state, or an angle or rotation; or no pair in order.
    """
    if bounds is None:
        return None
    if not isinstance(bounds, Mapping):
        raise DataError(f"bounds must name columns of the states, as {{'x': [0, 1]}}; got {bounds}")
    states = schema.columns("states")
    if unknown := [name for name in bounds if name not in states]:
        hint = nearest(str(unknown[0]), states, "they are")
        raise DataError(f"bounds: {unknown[0]!r} is no column of the states; {hint}")
    turning = [name for part in schema.states if part.kind != "number" for name in part.names]
    if without := [name for name in bounds if name in turning]:
        raise DataError(f"bounds: {without[0]!r} is an angle or rotation, which have no bounds")
    with in_python():
        return checked_bounds(plain(python_numbers(bounds)), schema)


def word_of(value: Any) -> str:
    """Return a setting as Hydra reads it on a command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{word_of(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(word_of, value)) + "]"
    return quoted(value) if isinstance(value, str) else str(value)


def warn_of_problems(source: FileData, bounds: Mapping[str, Any] | None = None) -> None:
    """Warn of what `check` reports."""
    for text in examine(source, bounds).warnings:
        warnings.warn(python_words(text), DataWarning, stacklevel=3)


@contextmanager
def unchanged_globals() -> Iterator[None]:
    """Context after which random generators and filters of warnings are as before."""
    import random

    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(), warnings.catch_warnings():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)

"""The data set of a user's files: ``data=own``."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kbf.data.files.column_schema import ColumnSchema, column_schema_of
from kbf.data.files.latency import checked_latency, without_latency
from kbf.data.files.layout import Contents, FileRecording, Layout, layout_of, plain
from kbf.data.files.read import in_schema_order, read_all, trained_layout
from kbf.data.files.splits import (
    Share,
    correlation_time,
    cut_at,
    described,
    first_steps,
    fold_of,
    split as split_by,
    where_known,
)
from kbf.data.files.timestamps import (
    LARGEST_GAP,
    UNEVEN_SHARE,
    check_times,
    encode_recording,
    median_step,
    pieces_at_gaps,
    uneven,
    with_control_timing,
    with_missing_steps,
    with_time_control,
)
from kbf.data.windows import Span, take
from kbf.recording import Recording
from kbf.rkhs.linalg import varying
from kbf.runtime.errors import nearest
from kbf.runtime.html_repr import Shown


class FileData(Shown):
    """Recordings of a file, split into parts.

    Recordings are split at gaps in time. Training recordings are also split at steps whose state is
    unknown. In the test part the observations of these steps are filtered, but the steps are not
    scored; their states are NaN.

    Attributes:
        train, validation, test: lists of `Recording`, float64 (images uint8).
        column_schema: names and kinds of the columns. own_step: the median time step, or None.
        time_step: that of the checkpoint, if one is given.
        spans: the position of each part in ``recordings``, by name of the part.
        test_part: the recordings of the test part, and their steps where they are not whole.
        notes: remarks on files and times, in sentences.
    """

    unscored = True  # a test step may have no known state

    @staticmethod
    def memory_needed(**_: Any) -> int:
        """Returns 0: a recording on this machine has the length that it has."""
        return 0

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str] | None,
        *,
        angles: Sequence[str] = (),
        rotations: Sequence[Sequence[str]] = (),
        angle_unit: str = "radians",
        time_as_control: bool = False,
        control_timing: str = "into",
        latency: Mapping[str, float] | None = None,
        allow_missing_sensors: bool = False,
        sensors: Mapping[str, Sequence[str]] | None = None,
        cut_missing: bool = False,
        split: str = "time",
        validation: Share | Sequence[str] = 0.0,
        test: Share | Sequence[str] = 0.2,
        fold: int | None = None,
        folds: int | None = None,
        gap: int | None = None,
        n_train: int | None = None,
        column_schema: dict[str, Any] | None = None,
        time_step: float | None = None,
        contents: Contents | None = None,
        **roles: Any,
    ) -> None:
        """Read the recordings and split them.

        Args:
            path: see `kbf.data.files.read.read_all`.
            angles: columns that are angles. angle_unit: radians or degrees.
            rotations: groups of 4 columns (quaternion w x y z) or 9 (matrix, by rows).
            time_as_control: whether the duration of each move is a control.
            control_timing: whether a control acts in the move "into" its row, or "from" it.
            latency: by column, the time by which the readings of a sensor are late.
            allow_missing_sensors: whether a step counts as observed if any of its columns is
                present, for models that support missing sensors; otherwise all must be.
            sensors: columns of the observations of each sensor, which are missing together.
            cut_missing: whether training recordings are split at missing observations, for models
                that require complete ones.
            split, validation, test: see `kbf.data.files.splits.split`.
            fold, folds: number of the fold that is the test part, from 0, and the number of folds.
            gap: steps on each side of a test block that are not trained on; None for the
                `kbf.data.files.splits.correlation_time` of the states.
            n_train: number of training steps that are used, from the first on; None for all.
            column_schema: of a checkpoint, which the columns must match. time_step: its median time
                step.
            contents: recordings that were read already, in place of those of ``path``.
            roles: columns and how they are written, see `kbf.data.files.layout.Layout`.

        Raises:
            FileNotFoundError, ValueError: errors of the readers, or an empty part.
        """
        if path is None and contents is None:
            raise ValueError("data=own needs a file: data.path=FILE")
        for name, value in (
            ("time_as_control", time_as_control),
            ("allow_missing_sensors", allow_missing_sensors),
            ("cut_missing", cut_missing),
        ):
            if not isinstance(value, bool):
                raise ValueError(f"data.{name} must be true or false, got {value!r}")
        if unknown := [name for name in roles if name not in Layout._fields]:
            raise ValueError(
                f"there is no data.{unknown[0]}; {nearest(unknown[0], Layout._fields)}"
            )
        layout = layout_of(roles)
        if column_schema is not None:
            layout = trained_layout(layout, ColumnSchema.from_dict(column_schema))
        if contents is None:
            contents = read_all(plain(path), layout)
        path = contents.recordings[0].file if path is None else path
        check_not_empty(contents, str(path))
        constant: list[str] = []
        if column_schema is not None:
            schema = ColumnSchema.from_dict(column_schema)
        else:
            columns = [*contents.states, *contents.observations, *contents.controls]
            codes = layout.missing if isinstance(layout.missing, Mapping) else {}
            if unknown := [name for name in codes if name not in columns]:
                raise ValueError(
                    f"data.missing: there is no column {unknown[0]!r}; "
                    f"{nearest(unknown[0], columns, 'they are')}"
                )
            chosen = column_schema_of(
                contents.states,
                contents.observations,
                contents.controls,
                plain(angles),
                plain(rotations),
                angle_unit,
                plain(sensors),
            )
            schema, constant = without_constants(chosen, contents)
        self.column_schema: ColumnSchema = schema
        contents = in_schema_order(contents, self.column_schema)
        check_columns(contents, self.column_schema, str(path))
        for each in contents.recordings:
            check_times(each)
        self.control_timing: str = control_timing
        self.allow_missing_sensors: bool = allow_missing_sensors
        self.own_step: float | None = median_step(contents.recordings)
        self.time_step: float | None = self.own_step if time_step is None else time_step
        late = checked_latency(plain(latency), self.column_schema.columns("observations"))
        timed = [
            without_latency(
                with_control_timing(each, control_timing),
                self.column_schema.columns("observations"),
                late,
                self.time_step,
            )
            for each in contents.recordings
        ]
        self.recordings: list[FileRecording] = [
            with_time_control(recording, self.time_step) if time_as_control else recording
            for recording in timed
        ]
        whole = [self.encode(recording, allow_missing_sensors) for recording in self.recordings]
        known = [s.states.isfinite().all(1) for s in whole]
        pieces = [pieces_at_gaps(recording, self.time_step) for recording in self.recordings]
        usable = [
            k if s.mask is None or not cut_missing else k & s.mask
            for k, s in zip(known, whole, strict=True)
        ]
        lengths = [len(s.states) for s in whole]
        parts = split_by(
            [recording.name for recording in self.recordings],
            lengths,
            split,
            plain(validation),
            plain(test),
            fold_of(
                split,
                fold,
                folds,
                lambda: correlation_time([s.states for s in whole]) if gap is None else gap,
            ),
        )
        cuts = {part: cut_at(spans, pieces) for part, spans in parts.items()}
        self.spans: dict[str, list[Span]] = {
            "train": where_known(cuts["train"], usable.__getitem__),
            "validation": where_known(cuts["validation"], usable.__getitem__),
            "test": [s for s in cuts["test"] if bool(known[s.recording][s.start : s.stop].any())],
        }
        if n_train is not None and test != "all":
            self.spans["train"] = first_steps(self.spans["train"], n_train)
        known_parts: tuple[list[Recording], ...] = tuple(
            [
                s._replace(mask=None) if s.mask is not None and bool(s.mask.all()) else s
                for s in take(whole, self.spans[part])
            ]
            for part in ("train", "validation", "test")
        )
        self.test_part: str = described(parts["test"], [r.name for r in self.recordings], lengths)
        self.train: list[Recording] = known_parts[0]
        self.validation: list[Recording] = known_parts[1]
        self.test: list[Recording] = (
            known_parts[2]
            if time_as_control
            else [
                self.with_missing_steps(s, span)
                for s, span in zip(known_parts[2], self.spans["test"], strict=True)
            ]
        )
        if (not self.test and test != 0) or (
            test != "all" and sum(len(s.states) for s in self.train) < 2
        ):
            sizes = ", ".join(
                f"{part} {sum(s.stop - s.start for s in spans)}"
                for part, spans in self.spans.items()
            )
            raise ValueError(
                f"{path}: too few steps with known states ({sizes} of {sum(lengths)}): "
                "change data.test or data.split"
            )
        check_observed(self.train, str(path))
        self.notes: list[str] = [
            *contents.notes,
            *constant,
            *self.remarks(pieces, known, time_as_control),
        ]

    def encode(self, recording: FileRecording, allow_missing_sensors: bool) -> Recording:
        """Converts a recording for filters: unknown states are NaN, missing observations 0."""
        obs, states, mask, controls = encode_recording(
            recording, self.column_schema, allow_missing_sensors=allow_missing_sensors
        )
        assert states is not None
        if mask is not None and obs.ndim == 2:
            obs = torch.where(mask[:, None], obs, 0)
        return Recording(states, obs, mask, controls=controls)

    def with_missing_steps(self, part: Recording, span: Span) -> Recording:
        """Inserts the steps of a part that have no row, as filters predict through them."""
        times = self.recordings[span.recording].times
        leaves, _ = with_missing_steps(
            part._asdict(),
            None if times is None else times[span.start : span.stop],
            self.time_step,
        )
        found: Any = leaves  # states and observations are not None
        if found["mask"] is not None and found["obs"].ndim == 2:
            found["obs"] = torch.where(found["mask"][:, None], found["obs"], 0)
        return Recording(**found)

    def remarks(
        self, pieces: list[list[tuple[int, int]]], known: list[Tensor], time_as_control: bool
    ) -> list[str]:
        """Returns remarks on gaps, irregular times and steps without a state."""
        notes = []
        gaps = [
            r.place(start)
            for r, each in zip(self.recordings, pieces, strict=True)
            for start, _ in each[1:]
        ]
        if gaps:
            notes.append(
                f"{len(gaps)} gaps in time of more than {LARGEST_GAP:g} median steps: "
                f"recordings are split there (first: {gaps[0]})"
            )
        total, off, where = uneven(self.recordings, self.time_step)
        if off and not time_as_control:
            notes.append(
                f"the duration of {off} of {total} moves differs from the median by more than "
                f"{100 * UNEVEN_SHARE:g} % (first: {where}). Filters assume equal durations: "
                "data.time_as_control=true makes the duration a control, or resample the recording"
            )
        if missing := sum(int((~k).sum()) for k in known):
            notes.append(f"{missing} steps without a state: they are neither trained on nor scored")
        return notes


def check_observed(train: list[Recording], path: str) -> None:
    """Raises a ValueError if no training step has an observation."""
    if train and all(s.mask is not None and not bool(s.mask.any()) for s in train):
        raise ValueError(
            f"{path}: no training step has all observations: data.allow_missing_sensors=true uses "
            "steps with some of them (sensors that alternate, or of different rates)"
        )


def check_not_empty(contents: Contents, path: str) -> None:
    """Raises a ValueError for a column of states or observations without any value."""
    for side, names in (("states", contents.states), ("obs", contents.observations)):
        values = [getattr(each, side) for each in contents.recordings]
        if any(each is None or each.ndim != 2 for each in values):
            continue
        empty = torch.stack([each.isnan().all(0) for each in values]).all(0)
        if bool(empty.any()):
            raise ValueError(
                f"{path}: the column {names[int(empty.nonzero()[0])]} is empty: leave it out"
            )


def without_constants(schema: ColumnSchema, contents: Contents) -> tuple[ColumnSchema, list[str]]:
    """Returns the schema without observations and controls that never vary, and a note of them.

    They hold no information, and their covariances are singular. One column is kept in any case.
    """
    constant: dict[str, list[str]] = {}
    for side, leaf in (("observations", "obs"), ("controls", "controls")):
        values = [getattr(each, leaf) for each in contents.recordings]
        if any(each is None or each.ndim != 2 for each in values):
            continue
        names = [
            name
            for name, column in zip(
                getattr(contents, side), torch.cat(values).split(1, 1), strict=True
            )
            if not varying(column)
        ]
        numbers = {part.names[0] for part in schema.observations if part.kind == "number"}
        constant[side] = [name for name in names if side == "controls" or name in numbers]
    left_out = constant.get("observations", [])
    observations = tuple(part for part in schema.observations if part.names[0] not in left_out)
    if not observations:
        observations, constant["observations"] = schema.observations, []
    controls = tuple(name for name in schema.controls if name not in constant.get("controls", []))
    names = [name for each in constant.values() for name in each]
    notes = [f"these columns never vary and are left out: {', '.join(names)}"] if names else []
    return schema._replace(observations=observations, controls=controls), notes


def check_columns(contents: Contents, schema: ColumnSchema, path: str) -> None:
    """Raises a ValueError unless states and observations are those of the schema."""
    for side in ("states", "observations"):
        mine, theirs = getattr(contents, side), schema.columns(side)
        if sorted(mine) != sorted(theirs):
            raise ValueError(
                f"{path}: its {side} are {', '.join(mine)}; "
                f"those of the training {', '.join(theirs) or 'images'}"
            )

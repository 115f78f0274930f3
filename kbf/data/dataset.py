"""`Data`: training and test sequences, and the true model where it is known; `load_data` makes it from a configuration."""

from __future__ import annotations

from typing import Any, NamedTuple

from kbf.recording import MASK_MISSING, Recording, as_recordings, mask_missing
from kbf.runtime import html_repr
from kbf.runtime.instantiate import build
from kbf.ssm import StateSpace


class Data(NamedTuple):
    """A data set, checked.

    Attributes:
        train: recordings to learn from. test: recordings to score on, which nothing may be learned
            from.
        problem: the true model, or None. With it there is a floor.
        decoded: the test sequences as the problem observes them: ``test`` itself, or for images
            what they show.
        renderer: of images, who rendered them. extent: the coordinates of an image's left, right,
            bottom and top edge, where states are positions in it.
        validation: recordings to choose by; without them models that need some hold out a part of
            ``train``.
        column_schema: of data with named columns, what leads from them to states and back
            (`kbf.data.files.ColumnSchema`).
        notes: what a person should know of the data, in sentences.
    """

    train: list[Recording]
    test: list[Recording]
    problem: StateSpace | None
    decoded: list[Recording]
    renderer: str | None = None
    extent: tuple[float, float, float, float] | None = None
    validation: list[Recording] = []  # noqa: RUF012 (a tuple of lists, never changed)
    column_schema: Any = None
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return html_repr.described("Data", self._asdict())

    def _repr_html_(self) -> str:
        return html_repr.page(
            "Data",
            self._asdict(),
            self.test[0].states if self.test else None,
            "states of the test part",
        )


def load_data(config: dict[str, Any], *, trust: bool = False) -> Data:
    """Build and check the data set of a ``data`` configuration.

    ``config["source"]`` names a class whose objects have ``train`` and ``test`` (lists of
    `Recording`) and may have ``problem``, ``decoded``, ``renderer``, ``extent``, ``validation``,
    ``column_schema`` and ``notes``. With ``config["missing"]``, NaN observations are treated as missing,
    with ``config["allow_missing_sensors"]`` they may be silent sensors. A source with ``unscored``
    may have no training part, and test steps whose state is NaN: not known, and not scored.

    Raises:
        ValueError: shapes that do not fit, or NaN or infinite values that are not to be treated as
            missing.
    """
    if not isinstance(config.get("source"), dict):
        raise ValueError(
            f"data.source must be a class and its settings, got {config.get('source')!r:.100}"
        )
    source = build(config["source"], trust=trust, kinds=("source",))
    parts = {}
    unscored = getattr(source, "unscored", False)
    for name in ("train", "validation", "test"):
        sequences = list(getattr(source, name, []))
        if config.get("missing"):
            sequences = [mask_missing(s) for s in sequences]
        checked = (
            [s._replace(states=s.states.nan_to_num()) for s in sequences]
            if unscored and name == "test"
            else sequences
        )
        try:
            if sequences or (name != "validation" and not unscored):
                as_recordings(
                    checked, allow_missing_sensors=bool(config.get("allow_missing_sensors"))
                )
            parts[name] = sequences
        except ValueError as error:
            hint = (
                " From the command line: data.missing=true." if MASK_MISSING in str(error) else ""
            )
            raise ValueError(f"{name} data {config.get('name', '')}: {error}{hint}") from error
    known = [*parts["train"], *parts["test"]]
    if known and config.get("d", d := known[0].states.shape[1]) not in (None, d):
        raise ValueError(
            f"data.d={config['d']}: the states of data {config.get('name', '')} have {d} components"
        )
    decoded = getattr(source, "decoded", None) or parts["test"]
    problem, renderer, extent = (
        getattr(source, name, None) for name in ("problem", "renderer", "extent")
    )
    column_schema, notes = (
        getattr(source, "column_schema", None),
        tuple(getattr(source, "notes", ())),
    )
    return Data(
        parts["train"],
        parts["test"],
        problem,
        decoded,
        renderer,
        extent,
        parts["validation"],
        column_schema,
        notes,
    )

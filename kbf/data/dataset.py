"""`Data`: training and test recordings, and the true model if it is known.

`load_data` makes it from a configuration, and `completed` adds its shapes to the configuration.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from kbf.data.files.bounds import checked_bounds, few_valued
from kbf.recording import MASK_MISSING, Recording, as_recordings, control_width, mask_missing
from kbf.runtime import html_repr
from kbf.runtime.instantiate import build
from kbf.runtime.interpolation import SHAPES
from kbf.ssm import StateSpace


class Data(NamedTuple):
    """A checked data set.

    Attributes:
        train: recordings for training. test: recordings for scores, which are used for nothing
            else.
        problem: the true model, or None. It determines the floor (the Bayes-optimal error).
        decoded: the test recordings with the observations of the problem: ``test`` itself, or the
            content of its images.
        renderer: the origin of the images. extent: the coordinates of an image's left, right,
            bottom and top edge, if states are positions in it.
        validation: recordings for selection; models that require some otherwise hold out a part of
            ``train``.
        column_schema: of data with named columns, their names and kinds
            (`kbf.data.files.column_schema.ColumnSchema`).
        time_step: median time between two steps, if the recordings have times; of a filter that is
            scored, that of its training. own_step: that of these recordings.
        source: of data with named columns, the object that was read.
        notes: remarks on the data, in sentences.
        test_part: name of the test part of a split of recordings.
    """

    train: list[Recording]
    test: list[Recording]
    problem: StateSpace | None
    decoded: list[Recording]
    renderer: str | None = None
    extent: tuple[float, float, float, float] | None = None
    validation: list[Recording] = []  # noqa: RUF012 (a tuple of lists, never changed)
    column_schema: Any = None
    time_step: float | None = None
    own_step: float | None = None
    source: Any = None
    notes: tuple[str, ...] = ()
    test_part: str = ""

    def __repr__(self) -> str:
        return html_repr.described("Data", self._asdict())

    def _repr_html_(self) -> str:
        return html_repr.page(
            "Data",
            self._asdict(),
            self.test[0].states if self.test else None,
            "states of the test part",
        )

    def shapes(self) -> dict[str, Any]:
        """Returns the entries `SHAPES` of a ``data`` configuration.

        Returns:
            ``d``: components of the state. ``q``: shape of the filter's observations, ``[d]`` for
            images, since their encoders estimate the state. ``image``: shape of an image, or None.
            ``k``: components of a control. ``column_schema`` and ``time_step``: as the attributes,
            the former as a dict.
        """
        first = [*self.train, *self.test][0]
        d, shape = first.states.shape[1], list(first.obs.shape[1:])
        images, schema = len(shape) == 3, self.column_schema
        return {
            "d": d,
            "q": [d] if images else shape,
            "image": shape if images else None,
            "k": control_width(first),
            "column_schema": None if schema is None else schema.to_dict(),
            "time_step": self.time_step,
        }


def load_data(config: dict[str, Any], *, trust: bool = False, source: Any = None) -> Data:
    """Builds and checks the data set of a ``data`` configuration.

    ``config["source"]`` names a class whose objects have ``train`` and ``test`` (lists of
    `Recording`) and may have ``problem``, ``decoded``, ``renderer``, ``extent``, ``validation``,
    ``column_schema``, ``time_step``, ``own_step``, ``test_part`` and ``notes``. With
    ``config["missing"]``, NaN observations are missing observations; with
    ``config["allow_missing_sensors"]``, single components may be NaN. A source with ``unscored``
    may have an empty training part, and test steps whose state is NaN, which are not scored. An
    object ``source`` takes the place of the named class.

    Raises:
        ValueError: shapes that do not agree, or NaN or infinite values that are not declared as
            missing.
    """
    if source is None and not isinstance(config.get("source"), dict):
        raise ValueError(
            f"data.source must be a class and its settings, got {config.get('source')!r:.100}"
        )
    if source is None:
        source = build(config["source"], trust=trust, kinds=("source",))
    parts = {}
    unscored = getattr(source, "unscored", False)
    for name in ("train", "validation", "test"):
        recordings = list(getattr(source, name, []))
        if config.get("missing") is True:
            recordings = [mask_missing(r) for r in recordings]
        checked = recordings
        if unscored and name == "test":
            checked = [r._replace(states=r.states.nan_to_num()) for r in recordings]
        try:
            if recordings or (name != "validation" and not unscored):
                as_recordings(
                    checked, allow_missing_sensors=bool(config.get("allow_missing_sensors"))
                )
            parts[name] = recordings
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
    others = {
        name: getattr(source, name)
        for name in (
            "problem",
            "renderer",
            "extent",
            "column_schema",
            "time_step",
            "own_step",
            "test_part",
        )
        if hasattr(source, name)
    }
    return Data(
        **parts,
        **{"problem": None, **others},
        decoded=getattr(source, "decoded", None) or parts["test"],
        source=source if hasattr(source, "column_schema") else None,
        notes=tuple(getattr(source, "notes", ())),
    )


def completed(recipe: Mapping[str, Any], data: Data) -> dict[str, Any]:
    """Returns a configuration with what only its recordings contain.

    In ``recipe["data"]``, entries of `SHAPES` that are null are set, vectors get no encoder, and
    states of few values get their bounds. An
    ``n_train`` that is null becomes the number of training steps. Other entries, and interpolations
    that depend on these, stay as they are.

    Args:
        recipe: an unresolved configuration with ``data`` and ``n_train``.
        data: its recordings.
    """
    settings, shapes = dict(recipe["data"]), data.shapes()
    settings |= {key: shapes[key] for key in SHAPES if settings.get(key, 0) is None}
    if "image" in settings and settings["image"] is None:
        settings["encoding"] = None
    if (schema := data.column_schema) is not None and "bounds" in settings:
        declared = checked_bounds(settings["bounds"], schema)
        settings["bounds"] = few_valued(schema, data.train) | declared or None
    if (n_train := recipe["n_train"]) is None:
        n_train = sum(len(r.states) for r in data.train)
    return {**recipe, "data": settings, "n_train": n_train}

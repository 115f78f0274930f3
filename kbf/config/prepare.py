"""Configuration of a command, from the words of a command line: `prepare` completes and checks it.

Every way to a run goes through `prepare`: a single command, each run of a sweep (``--multirun``),
the models of ``kbf compare``, and the experiments of the papers (`studies.papers.images`), so that
all of them are checked alike. No data is read: of recordings in files, the shapes are unknown here,
and `kbf.data.dataset.completed` adds them.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from kbf.config.composition import (
    COMMAND_FOLDER,
    composing,
    config_dir,
    plain,
    short,
    unknown_setting,
    unlocked,
)
from kbf.config.run_settings import check_equations, lacks_equations
from kbf.runtime.hydra_quoting import as_text, exists
from kbf.runtime.interpolation import (
    environment_as_text,
    incomplete,
    literal,
    settled,
    variables_named,
    with_references,
)

# Settings that define the data of a run; a checkpoint stores them as its ``recipe``.
RECIPE = ("data", "n_train", "seed")

# Sources whose recordings have a length of their own: the files of ``data=own``, and recordings
# that packages contain or simulate. For them ``n_train`` may be null, for all training steps.
RECORDED = ("kbf.FileData", "kbf.RecordedData")

# Settings that are whole numbers, with their lower bounds. Commands that need more check that.
COUNTS = {
    **dict.fromkeys(("runs", "particles", "turns", "recordings", "threads"), 1),
    **dict.fromkeys(
        ("n_train", "seed", "workers", "lag", "horizon", "animation_steps", "steps"), 0
    ),
}

# Settings that are true or false.
SWITCHES = (
    *("smooth", "calibrate", "alarms", "compile", "animation", "trust", "overwrite"),
    *("largest", "watch"),
)

# Settings that name a file or a folder.
PATHS = ("run_dir", "checkpoint", "ckpt_path", "input", "output", "out", "state", "folder")

# Settings that may be null although their default is not.
NULLABLE = ("threads", "ckpt_path")


def configure(
    command: str, overrides: list[str], *, name: str | None = None, folders: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Returns the configuration of a single run of a command; arguments as of `composing`.

    >>> configure("train", ["model=ekf", "n_train=50"])["model"]["net"]
    {'_target_': 'kbf.EKF', 'model': {'_target_': 'kbf.rotation'}, 'initial': 'memory'}
    """
    with composing(command, overrides, name=name, folders=folders) as composed:
        return prepare(command, composed, overrides)


def prepare(command: str, composed: Any, overrides: list[str]) -> dict[str, Any]:
    """Returns the configuration of a command as a plain dict, from what Hydra has composed.

    It is resolved, except for entries that are resolved later with other seeds or sizes: ``recipe``
    (`RECIPE`); of a comparison, ``bases`` (a training configuration for each model); and ``model``
    where shapes or ``n_train`` are null, since only the recordings contain them
    (`kbf.data.dataset.completed`). Of a training run ``explicit`` is True where the command line
    sets model or data. References to environment variables stay text in groups of settings, such as
    ``model`` (`kbf.runtime.interpolation`); other settings have the value, and ``references`` has
    their text, where there is any. ``command`` has the words of the command line.

    Args:
        command: a command of ``kbf``.
        composed: Hydra's configuration of the job, without Hydra's own part, which is available as
            ``HydraConfig``. It is completed in place.
        overrides: the words of the command line.

    Raises:
        ValueError: a setting that is not possible, with its name and the possible values.
    """
    named = {word.lstrip("+~").partition("=")[0] for word in overrides}
    with unlocked(composed):
        complete_run_dir(composed, named)
        drop_arguments_of_other_classes(composed, overrides)
        complete_data(composed, named)
    check(command, composed)
    return completed(command, composed, named) | {"command": words_of(command, overrides)}


def words_of(command: str, overrides: list[str]) -> list[str]:
    """Returns the words of the command line of a single job, also of one of a sweep."""
    from hydra.core.hydra_config import HydraConfig

    job, words = HydraConfig.get(), [command, *overrides]
    if job.job.config_name not in (None, short(command)):
        words.append(f"--config-name={job.job.config_name}")
    added = [each for each in job.runtime.config_sources if each.provider == "command-line"]
    return words + [f"--config-dir={each.path}" for each in added]


def completed(command: str, composed: Any, named: set[str]) -> dict[str, Any]:
    """Returns the plain dict of `prepare`, of a configuration that is complete and checked."""
    from omegaconf import OmegaConf

    if command in ("evaluate", "append"):
        return on_a_checkpoint(composed)
    if "data" not in composed:
        return referring(composed)
    unresolved: Any = OmegaConf.to_container(composed, resolve=False)
    recipe = {key: unresolved[key] for key in RECIPE}
    if command == "compare":
        return comparison(composed, recipe)
    if "model" in unresolved:
        check_equations(unresolved["model"], unresolved["data"])
    late = ("model",) if incomplete(recipe) else ()
    config = {**unresolved, **referring(composed, skip=late)}
    settings = {key.split(".")[0] for key in named}
    return {
        **config,
        "recipe": settled(recipe, {key: config[key] for key in recipe}),
        "explicit": not settings.isdisjoint({"model", "experiment", *RECIPE}),
    }


def referring(composed: Any, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns a configuration as a plain dict that refers to the environment, as of `prepare`."""
    values = plain(composed, skip=skip)
    with environment_as_text():
        texts = with_references(values, plain(composed, skip=skip))
    groups = {key: text for key, text in texts.items() if isinstance(text, dict)}
    references = {key: text for key, text in texts.items() if text != values[key]}
    others = {key: text for key, text in references.items() if key not in groups}
    return values | groups | ({"references": others} if others else {})


def complete_run_dir(composed: Any, named: set[str]) -> None:
    """Set the run directory where none is given: of the resumed run, else Hydra's output folder.

    ``hydra.run.dir=FOLDER`` is equivalent to ``run_dir=FOLDER``. In a sweep each run has a folder
    of its own.

    Raises:
        ValueError: the checkpoint of the resumed run is in no run directory.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    if "run_dir" not in composed or "run_dir" in named:
        return
    if composed.get("ckpt_path"):
        checkpoint = str(composed.ckpt_path)
        folder = Path(checkpoint).resolve().parent
        if folder.name != "checkpoints" and exists(checkpoint):
            raise ValueError(
                f"ckpt_path={checkpoint} is in no run directory (RUN/checkpoints/last.ckpt): "
                "give run_dir=FOLDER as well"
            )
        composed.run_dir = as_text(str(folder.parent))
    elif HydraConfig.get().mode == RunMode.MULTIRUN or "hydra.run.dir" in named:
        composed.run_dir = HydraConfig.get().runtime.output_dir
    elif names := names_in_folder(composed, named):
        folder = plain(composed, resolve=False)["run_dir"]
        composed.run_dir = f"{folder}-{as_text('+'.join(names))}"


def names_in_folder(composed: Any, named: set[str]) -> list[str]:
    """Returns names that a default run directory ends with, which tell runs of a command apart.

    They are the run that a checkpoint is of, or its own name; of commands without a checkpoint and
    a single model the file of recordings, and the models of a comparison, if the command line names
    them.
    """
    if "checkpoint" in composed:
        path = Path(str(composed.checkpoint).removeprefix("example:")).absolute()
        in_run = path.parent.name == "checkpoints"
        return [path.parent.parent.name if in_run else path.stem]
    if "model" in composed or "data" not in composed:  # the folder of a training has its time
        return []
    files, models = plain(composed.data, resolve=False).get("path"), []
    first = files[0] if isinstance(files, list) and files else files
    if "models" in named and composed.get("models"):
        models = [composed.models] if isinstance(composed.models, str) else composed.models
    names = [*([Path(str(first)).stem] if first else []), *map(str, models)]
    return [re.sub(r"[^\w.+-]+", "_", name) for name in names]


def complete_data(composed: Any, named: set[str]) -> None:
    """Complete settings of recordings that have a length of their own (`RECORDED`).

    The path of ``data=own`` becomes absolute, so that a checkpoint finds the file from any folder.
    Where ``n_train`` is not given it is null, which means all training steps, and "all" in
    ``run_dir``.
    """
    data = composed.get("data")
    if not is_recorded(data):
        return
    if data.get("path") is not None:
        make_absolute(data)
    if "n_train" in composed and "n_train" not in named:
        composed.n_train = None
    folder = plain(composed, resolve=False).get("run_dir")
    if composed.get("n_train") is None and isinstance(folder, str):
        composed.run_dir = folder.replace("${n_train}", "all")


def is_recorded(data: Any) -> bool:
    """Whether the source of a ``data`` configuration is one of `RECORDED`."""
    source = None if data is None else data.get("source")
    return isinstance(source, Mapping) and source.get("_target_") in RECORDED


def make_absolute(data: Any) -> None:
    """Make the paths of recordings absolute, which OmegaConf then reads literally.

    One that refers to the environment stays a reference.
    """
    from omegaconf import OmegaConf

    with environment_as_text():
        paths = [str(p) for p in (data.path if OmegaConf.is_list(data.path) else [data.path])]
    if not any(map(variables_named, paths)):
        found = [as_text(str(Path(path).expanduser().resolve())) for path in paths]
        data.path = found if OmegaConf.is_list(data.path) else found[0]


def drop_arguments_of_other_classes(composed: Any, overrides: list[str]) -> None:
    """Where the command line sets another class, remove the arguments that it does not have.

    An override such as ``data.encoding.encoder._target_=NAME`` keeps the arguments that the new
    class has as well, and those that the command line names.
    """
    import inspect

    from omegaconf import OmegaConf

    from kbf.runtime.instantiate import locate

    named = {word.lstrip("+").partition("=")[0] for word in overrides}
    for key in sorted(key for key in named if key.endswith("._target_")):
        path = key.removesuffix("._target_")
        node = OmegaConf.select(composed, path)
        parameters = inspect.signature(locate(node["_target_"])).parameters
        if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
            continue
        for name in [name for name in node if name != "_target_" and name not in parameters]:
            if f"{path}.{name}" not in named:
                del node[name]


def comparison(composed: Any, recipe: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration of a comparison, with that of each model on the same data."""
    from hydra.core.hydra_config import HydraConfig

    several = {
        key: [v] if isinstance(v := composed[key], int | str | None) else list(v)
        for key in ("n_train", "models")
    }
    if not several["models"]:
        raise ValueError("models must be one or more, got none")
    trainer = plain(composed, resolve=False)["trainer"]
    runtime = HydraConfig.get().runtime
    main = ("hydra", "main", "schema", COMMAND_FOLDER)
    folders = tuple(
        f"{source.schema}://{source.path}"
        for source in runtime.config_sources
        if source.provider not in main
    )
    bases: dict[str, Any] = {}
    # Of the default models those are left out that recordings without equations do not allow.
    named = any(word.startswith("models=") for word in HydraConfig.get().overrides.task)
    for model in several["models"]:
        words = [f"data={runtime.choices['data']}", f"model={model}", "logger=none"]
        with composing("train", words, folders=folders) as whole:
            net = plain(whole, resolve=False)["model"]
        name = str(net["name"])
        if lacks_equations(net, recipe["data"]) and not named:
            continue
        check_equations(net, recipe["data"])
        if name in bases:
            raise ValueError(
                f"models: two of them have the name {name!r}, which identifies their results: "
                "rename one"
            )
        bases[name] = {**recipe, "model": net, "trainer": trainer}
    recipe["n_train"] = None if None in several["n_train"] else several["n_train"][0]
    with unlocked(composed):
        composed.n_train = recipe["n_train"]
    return {**plain(composed, skip=("trainer",)), **several, "recipe": recipe, "bases": bases}


def on_a_checkpoint(composed: Any) -> dict[str, Any]:
    """Returns the configuration of a command on a checkpoint, whose data the command line changes.

    Raises:
        CheckpointError: the checkpoint does not contain the data settings of ``kbf train``.
        ValueError: the command line sets something that its data does not have.
    """
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from kbf.fitted.checkpoint import CheckpointError, read_checkpoint

    path, given = composed.checkpoint, composed.get("data")
    other_data = HydraConfig.get().runtime.choices.get("data") is not None
    stored = read_checkpoint(path)["hyper_parameters"]["config"]
    if "recipe" not in stored and not other_data:
        raise CheckpointError(f"{path} has no settings of its training data: give data=NAME")
    recipe = literal(stored.get("recipe", {}))
    written_by_train = (
        recipe.keys() <= set(RECIPE)
        and all(type(recipe.get(key)) in (int, NoneType) for key in ("n_train", "seed"))
        and (not recipe or isinstance(recipe.get("data"), dict))
    )
    if not written_by_train:
        raise CheckpointError(
            f"{path} was not written by kbf train: its recipe is not data, n_train and seed"
        )
    recipe |= {key: composed[key] for key in ("n_train", "seed") if composed[key] is not None}
    if other_data:
        recipe["data"] = plain(composed, resolve=False)["data"]
        if is_recorded(given):
            recipe["n_train"] = composed.n_train
    tree: Any = OmegaConf.create(recipe)
    if given is not None and not other_data:
        OmegaConf.set_struct(tree, True)
        try:
            tree.merge_with({"data": given})
        except OmegaConfBaseException as error:
            raise ValueError(unknown_setting(str(error.full_key or ""), tree)) from error
        # All steps of other recordings are for the test, unless the command line splits them.
        if "path" in given and is_recorded(tree.data):
            make_absolute(tree.data)
            tree.n_train = None
            if not {"test", "split"} & given.keys():
                tree.data.test = "all"
    values = {**plain(composed, skip=RECIPE), **plain(tree)}
    with environment_as_text():
        texts = with_references(values, {**plain(composed, skip=RECIPE), **plain(tree)})
    given = [str(values["data"].get(key)) for key in given or ()]
    config = {**values, "own_data": other_data, "given": given}
    # The environment is read here: a checkpoint's references are escaped, those are the user's.
    references = {key: text for key, text in texts.items() if text != values[key]}
    return config | ({"references": references} if references else {})


def check(command: str, composed: Any) -> None:
    """Check the settings of a composed configuration; a path that is a number becomes a text.

    Null is allowed where it is the default.

    Raises:
        ValueError: a setting is missing, a count is no whole number or too small, a switch is no
            bool, or a path is empty.
    """
    from omegaconf import OmegaConf

    file = f"{short(command)}.yaml"
    defaults: Any = OmegaConf.to_container(OmegaConf.load(config_dir() / file), resolve=False)
    if missing := [key for key in defaults if key not in {*composed.keys(), "defaults", "hydra"}]:
        raise ValueError(
            f"the configuration lacks {missing[0]}: configs/{file} has all that kbf {command} needs"
        )

    def required(keys: Iterable[str]) -> dict[str, Any]:
        """Returns the settings of ``keys``, without those that are null and may be."""
        given = [k for k in keys if k in composed and not OmegaConf.is_missing(composed, k)]
        nullable = {k for k in given if k in NULLABLE or defaults.get(k) is None}
        return {k: composed[k] for k in given if composed[k] is not None or k not in nullable}

    for key, value in required(COUNTS).items():
        several = command == "compare" and key == "n_train" and OmegaConf.is_list(value)
        check_counts(key, list(value) if several else [value], composed.get("data"))
    for key, value in required(SWITCHES).items():
        if not isinstance(value, bool):
            raise ValueError(f"{key} must be true or false, got {value!r}")
    share = composed.get("hold_out", 0.0)
    if type(share) not in (int, float) or not 0 <= share < 1:
        raise ValueError(f"hold_out must be a share, from 0 to below 1; got {share!r}")
    devices = OmegaConf.select(composed, "trainer.devices")
    named = isinstance(devices, str) and devices != "auto"
    if named and not devices.replace(",", "").lstrip("-").isdigit():
        raise ValueError(
            "trainer.devices must be a number of devices, a list of their numbers, or auto; "
            f"got {devices!r}"
        )
    for key, value in required(PATHS).items():
        named = list(value) if key == "input" and OmegaConf.is_list(value) else [value]
        if isinstance(value, int | float) and not isinstance(value, bool):  # a folder named 2026
            OmegaConf.update(composed, key, str(value))
        elif not named or not all(isinstance(each, str) and each for each in named):
            what = "folder" if key == "run_dir" else "file"
            raise ValueError(f"{key} must name a {what}, got {value!r}")


def check_counts(key: str, numbers: list[Any], data: Any) -> None:
    """Raise a ValueError unless all numbers of a setting are whole and at least their bound."""
    if not numbers:
        raise ValueError(f"{key} must be one number or more, got none")
    for number in numbers:
        if number is None and key == "n_train" and is_recorded(data):
            continue
        if type(number) is not int:
            raise ValueError(f"{key} must be a whole number, got {number!r}")
        if number < COUNTS[key]:
            raise ValueError(f"{key} must be at least {COUNTS[key]}, got {number}")

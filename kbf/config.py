"""From the words of a command line to the configuration of a command. Hydra composes, `prepare` completes and checks.

Every way to a run goes through `prepare`: a single command, each run of a sweep (``--multirun``),
the models that ``kbf compare`` runs, and the experiments of the papers (`studies.papers.images`).
So what is checked in one is checked in all.

Nothing heavy is imported before something is composed.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import NoneType
from typing import Any

from kbf.runtime.hydra_quoting import as_text, exists
from kbf.runtime.interpolation import literal, settled

COUNTS = {
    **dict.fromkeys(("runs", "particles", "turns", "sequences", "threads"), 1),
    **dict.fromkeys(
        ("n_train", "seed", "workers", "lag", "horizon", "animation_steps", "steps"), 0
    ),
}
"""Settings that are whole numbers, with the least that each may be; commands that need more say so themselves."""
SWITCHES = ("smooth", "calibrate", "alarms", "compile", "animation", "trust", "overwrite")
"""Settings that are true or false."""
PATHS = ("run_dir", "checkpoint", "ckpt_path", "input", "output", "out", "state")
"""Settings that name a file or a folder."""
NULLABLE = ("threads", "ckpt_path")
"""Settings that may be null although their default is not."""
OWN_DATA = "kbf.FileData"
"""The source of ``data=own``."""
RECORDED_DATA = "kbf.RecordedData"
"""The source of recordings that packages carry or make."""


def configure(
    command: str, overrides: list[str], *, name: str | None = None, folders: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The configuration of a single run of a command, as `prepare` makes it; arguments as of `composing`.

    >>> configure("train", ["model=ekf", "n_train=50"])["model"]["net"]
    {'_target_': 'kbf.EKF', 'model': {'_target_': 'kbf.rotation'}}
    """
    with composing(command, overrides, name=name, folders=folders) as composed:
        return prepare(command, composed, overrides)


def prepare(command: str, composed: Any, overrides: list[str]) -> dict[str, Any]:
    """The configuration of a command as a plain dict, from what Hydra has composed; the one way to a run.

    Resolved, but for two entries that are filled in later, with other seeds or sizes: ``recipe``
    (data, n_train, seed) and, of a comparison, ``bases`` (a training configuration for each model).
    Of a training run ``explicit`` is True where the command line sets model or data.

    Args:
        command: as in ``kbf.cli.COMMANDS``.
        composed: Hydra's configuration of the job, without Hydra's own part; it is completed in
            place.
        overrides: the words of the command line. Hydra's own part of the configuration is in force
            (``HydraConfig``).

    Raises:
        ValueError: a setting that cannot be, with its name and what it may be.
    """
    from omegaconf import OmegaConf

    spoken = {word.lstrip("+~").partition("=")[0] for word in overrides}
    with unlocked(composed):
        complete_run_dir(composed, spoken)
        drop_arguments_of_other_classes(composed, overrides)
        fill_in_own_data(composed, overrides)
        fill_in_recorded(composed, overrides)
    check(command, composed)
    if command in ("evaluate", "append"):
        return on_a_checkpoint(composed)
    if "data" not in composed:
        return plain(composed)
    unresolved: Any = OmegaConf.to_container(composed, resolve=False)
    recipe = {key: unresolved[key] for key in ("data", "n_train", "seed")}
    if command == "compare":
        return comparison(composed, recipe)
    explicit = {key.split(".")[0] for key in spoken} & {
        "model",
        "data",
        "n_train",
        "seed",
        "experiment",
    }
    config = plain(composed)
    return {
        **config,
        "recipe": settled(recipe, {key: config[key] for key in recipe}),
        "explicit": bool(explicit),
    }


def complete_run_dir(composed: Any, spoken: set[str]) -> None:
    """Set the run directory where none is given: that of the resumed run, else Hydra's output folder.

    ``hydra.run.dir=FOLDER`` does what ``run_dir=FOLDER`` does; of a sweep each run has a folder of
    its own.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    if "run_dir" not in composed or "run_dir" in spoken:
        return
    if composed.get("ckpt_path"):
        composed.run_dir = as_text(str(directory_of_run(str(composed.ckpt_path))))
    elif HydraConfig.get().mode == RunMode.MULTIRUN or "hydra.run.dir" in spoken:
        composed.run_dir = HydraConfig.get().runtime.output_dir


def drop_arguments_of_other_classes(composed: Any, overrides: list[str]) -> None:
    """Where the command line puts another class (``data.encoding.encoder._target_=NAME``), leave out what only the old one takes.

    The new class keeps those arguments that it takes, and gets those that the command line names.
    """
    import inspect

    from omegaconf import OmegaConf

    from kbf.runtime.instantiate import locate

    spoken = {word.lstrip("+").partition("=")[0] for word in overrides}
    for key in sorted(key for key in spoken if key.endswith("._target_")):
        path = key.removesuffix("._target_")
        node = OmegaConf.select(composed, path)
        parameters = inspect.signature(locate(node["_target_"])).parameters
        if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
            continue
        for name in [name for name in node if name != "_target_" and name not in parameters]:
            if f"{path}.{name}" not in spoken:
                del node[name]


def fill_in_recorded(composed: Any, overrides: list[str]) -> None:
    """Set ``n_train`` of a recording of a package to all steps, where it is not given."""
    data = composed.get("data")
    if not is_of(data, RECORDED_DATA) or "n_train" not in composed:
        return
    from omegaconf import OmegaConf

    from kbf.data.recorded import training_steps

    if takes_everything(composed, overrides):
        raw = OmegaConf.create({**plain(composed, resolve=False), "n_train": None})
        with suppress(
            ValueError
        ):  # a package that is missing, or wrong settings: the error comes when the data are loaded
            every = training_steps(OmegaConf.to_container(raw.data.source, resolve=True))  # pyright: ignore
            composed.n_train = with_every(composed.n_train, every)


def takes_everything(composed: Any, overrides: list[str]) -> bool:
    """Whether all steps are to be learned from, for want of a number or as one of the sizes of a comparison."""
    said = any(
        word.lstrip("+").startswith("n_train=") and word != "n_train=null" for word in overrides
    )
    return not said or None in sizes(composed.get("n_train"))


def with_every(n_train: Any, every: int) -> Any:
    """``n_train`` with ``every`` in the place of null.

    >>> with_every([100, None], 900), with_every(None, 900)
    ([100, 900], 900)
    """
    return (
        [every if n is None else n for n in n_train]
        if isinstance(n_train, Iterable) and None in sizes(n_train)
        else every
    )


def sizes(n_train: Any) -> list[int | None]:
    """Of ``n_train``, one number or the several of a comparison; null is all steps."""
    return list(n_train) if isinstance(n_train, Iterable) else [n_train]


def fill_in_own_data(composed: Any, overrides: list[str]) -> None:
    """What only the file can tell of recordings of one's own: shapes, and the number of training steps."""
    data = composed.get("data")
    if not is_own(data) or data.get("path") is None or "d" not in data:
        return
    from omegaconf import OmegaConf

    from kbf.data.files import complete

    data.path = as_text(
        str(Path(str(data.path)).expanduser().resolve())
    )  # a checkpoint must find it from anywhere
    everything = takes_everything(composed, overrides)
    raw = OmegaConf.create({**plain(composed, resolve=False), "n_train": None})
    source: Any = OmegaConf.to_container(raw.data.source, resolve=True)
    shapes = complete({key: value for key, value in source.items() if key != "_target_"})
    if shapes["image"] is None:
        data.encoding = None
    if everything and "n_train" in composed:
        composed.n_train = with_every(composed.n_train, shapes["n_train"])
    for key in ("d", "q", "image", "k", "column_schema", "time_step"):
        data[key] = shapes[key]


def check(command: str, composed: Any) -> None:
    """Raise a ValueError if a number that counts is no whole number or too small, a switch no bool, or a path empty.

    Null is allowed where it is the default.
    """
    from omegaconf import OmegaConf

    defaults: Any = OmegaConf.to_container(
        OmegaConf.load(config_dir() / f"{short(command)}.yaml"), resolve=False
    )
    if missing := [key for key in defaults if key not in {*composed.keys(), "defaults", "hydra"}]:
        raise ValueError(
            f"the configuration lacks {missing[0]}: configs/{short(command)}.yaml has all that kbf {command} needs"
        )
    several = ("n_train",) if command == "compare" else ()

    def free(key: str, value: Any) -> bool:  # to be null
        return value is None and (key in NULLABLE or key not in defaults or defaults[key] is None)

    for key, least in COUNTS.items():
        value = composed.get(key)
        if key not in composed or free(key, value):
            continue
        numbers = list(value) if key in several and OmegaConf.is_list(value) else [value]
        if not numbers:
            raise ValueError(f"{key} must be one number or more, got none")
        for number in numbers:
            if number is None and key == "n_train" and is_of(composed.get("data"), RECORDED_DATA):
                continue  # all steps of a recording whose package is missing: the error comes when the data are loaded
            if type(number) is not int:
                raise ValueError(f"{key} must be a whole number, got {number!r}")
            if number < least:
                raise ValueError(f"{key} must be at least {least}, got {number}")
    for key in SWITCHES:
        if (
            key in composed
            and not isinstance(value := composed[key], bool)
            and not free(key, value)
        ):
            raise ValueError(f"{key} must be true or false, got {value!r}")
    share = composed.get("hold_out", 0.0)
    if type(share) not in (int, float) or not 0 <= share < 1:
        raise ValueError(f"hold_out must be a share, from 0 to below 1; got {share!r}")
    devices = OmegaConf.select(composed, "trainer.devices")
    if (
        isinstance(devices, str)
        and devices != "auto"
        and not devices.replace(",", "").lstrip("-").isdigit()
    ):
        raise ValueError(
            f"trainer.devices must be a number of devices, a list of their numbers, or auto; got {devices!r}"
        )
    for key in PATHS:
        if (
            key not in composed
            or OmegaConf.is_missing(composed, key)
            or free(key, value := composed[key])
        ):
            continue
        if isinstance(value, int | float) and not isinstance(value, bool):  # a folder named 2026
            OmegaConf.update(composed, key, str(value))
        elif not isinstance(value, str) or not value:
            raise ValueError(
                f"{key} must name a {'folder' if key == 'run_dir' else 'file'}, got {value!r}"
            )


def comparison(composed: Any, recipe: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a comparison: that of each model around the same data."""
    from hydra.core.hydra_config import HydraConfig

    several = {
        key: [v] if isinstance(v := composed[key], int | str | None) else list(v)
        for key in ("n_train", "models")
    }
    if not several["models"]:
        raise ValueError("models must be one or more, got none")
    trainer = plain(composed, resolve=False)["trainer"]
    data, runtime = HydraConfig.get().runtime.choices["data"], HydraConfig.get().runtime
    main = ("hydra", "main", "schema", COMMAND_FOLDER)
    folders = tuple(
        f"{source.schema}://{source.path}"
        for source in runtime.config_sources
        if source.provider not in main
    )
    bases: dict[str, Any] = {}
    for model in several["models"]:
        with composing(
            "train", [f"data={data}", f"model={model}", "logger=none"], folders=folders
        ) as whole:
            net = plain(whole, resolve=False)["model"]
        if str(net["name"]) in bases:
            raise ValueError(
                f"models: two of them have the name {net['name']!r}, by which results are kept: give one another"
            )
        bases[str(net["name"])] = {**recipe, "model": net, "trainer": trainer}
    with unlocked(composed):
        composed.n_train = several["n_train"][0]
    whole = {
        key: value for key, value in plain(composed, skip=("trainer",)).items() if key != "n_train"
    }
    return {**whole, **several, "recipe": recipe, "bases": bases}


def on_a_checkpoint(composed: Any) -> dict[str, Any]:
    """Returns the configuration of a command on a checkpoint: its data, changed by the command line."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from kbf.training.checkpoint import CheckpointError, read_checkpoint

    other_data, said = (
        HydraConfig.get().runtime.choices.get("data") is not None,
        composed.get("data"),
    )
    stored = read_checkpoint(composed.checkpoint)["hyper_parameters"]["config"]
    if "recipe" not in stored and not other_data:
        raise CheckpointError(
            f"{composed.checkpoint} does not say what data it was trained on: give data=NAME"
        )
    recipe = literal(stored.get("recipe", {}))
    if recipe.keys() - {"data", "n_train", "seed"} or any(
        type(recipe.get(k)) not in (int, NoneType) for k in ("n_train", "seed")
    ):
        raise CheckpointError(
            f"{composed.checkpoint} was not written by kbf train: its recipe is not data, n_train and seed"
        )
    if recipe and not isinstance(recipe.get("data"), dict):
        raise CheckpointError(
            f"{composed.checkpoint} was not written by kbf train: its recipe names no data"
        )
    recipe |= {key: composed[key] for key in ("n_train", "seed") if composed[key] is not None}
    if other_data:
        recipe["data"] = plain(composed, resolve=False)["data"]
    tree: Any = OmegaConf.create(recipe)
    if said is not None and not other_data:
        OmegaConf.set_struct(tree, True)
        try:
            tree.merge_with({"data": said})
        except OmegaConfBaseException as error:
            raise ValueError(no_setting(str(error.full_key or ""), tree)) from error
        if "path" in said and is_own(tree.data):
            other_recordings(tree, said)
    config = {
        **plain(composed, skip=("data", "n_train", "seed")),
        **plain(tree),
        "own_data": other_data,
    }
    return config | {"given": [str(config["data"].get(key)) for key in said or ()]}


def other_recordings(tree: Any, said: Any) -> None:
    """Other recordings for a checkpoint's filter: all their steps are for the test, if nothing else is said."""
    tree.data.path = as_text(str(Path(str(tree.data.path)).expanduser().resolve()))
    tree.n_train = None
    if not {"test", "split"} & said.keys():
        tree.data.test = "all"


def compose(command: str, overrides: list[str]) -> Any:
    """Returns Hydra's unresolved configuration of a command, completed by the shapes of a file."""
    with composing(command, overrides) as composed:
        with unlocked(composed):
            fill_in_own_data(composed, overrides)
        return composed


COMMAND_FOLDER = "kbf command"
"""The name, in Hydra's search path, of the folder with what only one command has: ``configs/compare/experiment``."""


@functools.cache
def search_path() -> Any:
    """Returns Hydra's plugin that adds folders to the search path, registered once a process.

    Its attribute ``folders`` lists them as pairs of provider and path.
    """
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class Folders(SearchPathPlugin):
        folders: tuple[tuple[str, str], ...] = ()

        def manipulate_search_path(self, search_path: Any) -> None:
            for provider, path in self.folders:
                search_path.append(provider, path)

    Plugins.instance().register(Folders)
    return Folders


@contextmanager
def hydra_of(command: str, folders: tuple[str, ...] = ()) -> Iterator[Any]:
    """Hydra with the search path of a command; the previous Hydra is restored afterwards.

    Args:
        command: its own folder among the configurations is searched, too.
        folders: further ones, as ``file://PATH`` or ``pkg://NAME``.
    """
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig

    own = config_dir() / short(command)
    added = [(COMMAND_FOLDER, f"file://{own}")] if own.is_dir() else []
    search_path().folders = (*added, *(("command-line", folder) for folder in folders))
    before, job = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
    GlobalHydra.instance().clear()
    try:
        initialize_config_dir(str(config_dir()), job_name="kbf", version_base="1.3")
        yield GlobalHydra.instance().hydra
    finally:
        search_path().folders = ()
        GlobalHydra.instance().hydra, HydraConfig.instance().cfg = before, job


@contextmanager
def composing(
    command: str, overrides: list[str], *, name: str | None = None, folders: tuple[str, ...] = ()
) -> Iterator[Any]:
    """Hydra's configuration of a single job, without Hydra's own part, which is in force meanwhile (``HydraConfig``).

    Args:
        command: as in ``kbf.cli.COMMANDS``.
        overrides: words of a command line.
        name: of another primary configuration (``--config-name``).
        folders: where to look besides (``--config-dir``), as of `hydra_of`.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import ConfigCompositionException

    name = name or short(command)
    with hydra_of(command, folders):
        try:
            whole = hydra.compose(
                name, words_for_hydra(command, overrides), return_hydra_config=True
            )
        except ConfigCompositionException as error:
            key = str(error).partition("Could not override '")[2].partition("'")[0]
            if not key or "is not in struct" not in str(error.__cause__):
                raise
            groups = [word for word in words_for_hydra(command, overrides) if is_choice(word)]
            raise ValueError(no_setting(key, hydra.compose(name, groups))) from error
        with unlocked(whole):
            whole.hydra.job.num, whole.hydra.job.id = 0, "0"
            whole.hydra.runtime.output_dir = os.path.abspath(str(whole.hydra.run.dir))
        HydraConfig.instance().set_config(whole)
        job = copy.deepcopy(whole)
        with unlocked(job):
            del job["hydra"]
        yield job


def words_for_hydra(command: str, overrides: list[str], *, sweep: bool = False) -> list[str]:
    """The words of a command line as Hydra composes them.

    Of a comparison ``n_train=100,300`` is a list (of a ``sweep``, ``--multirun``, these are two
    comparisons, as Hydra reads it); ``+experiment=NAME`` is ``experiment=NAME``, since the group is
    there; settings of a checkpoint's data are kept for `on_a_checkpoint`.

    >>> words_for_hydra("compare", ["n_train=100,300", "+experiment=quick"])
    ['n_train=[100,300]', 'experiment=quick']
    >>> words_for_hydra("evaluate", ["data.n_test=50"])
    ['++data.n_test=50']
    """
    if command == "compare" and not sweep:
        overrides = [as_list(word) for word in overrides]
    if command in ("evaluate", "append") and not any(
        word.lstrip("+").startswith("data=") for word in overrides
    ):
        overrides = [
            f"++{word.lstrip('+')}" if word.lstrip("+").startswith("data.") else word
            for word in overrides
        ]
    groups = {f"+{group}" for group in groups_of(command)}
    return [word[1:] if word.partition("=")[0] in groups else word for word in overrides]


def groups_of(command: str) -> list[str]:
    """The groups that a command's configuration is composed of, in their order.

    >>> groups_of("floor")
    ['data']
    """
    head = (
        (config_dir() / f"{short(command)}.yaml").read_text(encoding="utf-8").partition("\n\n")[0]
    )
    named = [
        line.strip("- \n").split(":")[0] for line in head.splitlines() if line.startswith("  - ")
    ]
    return [group for group in named if group != "_self_"]


def choices_of(command: str, group: str) -> list[str]:
    """What a group offers to a command.

    >>> "quick" in choices_of("compare", "experiment")
    True
    """
    folders = (config_dir() / group, config_dir() / short(command) / group)
    return sorted(path.stem for folder in folders for path in folder.glob("*.yaml"))


def is_choice(word: str) -> bool:
    """Whether a word chooses from a group, and sets no key."""
    key = word.partition("=")[0]
    return "." not in key and (config_dir() / key).is_dir()


def no_setting(key: str, config: Any) -> str:
    """What to say of a setting that a configuration does not have: what comes near, or which data set has it."""
    import difflib

    from omegaconf import DictConfig, OmegaConf

    group, _, rest = key.partition(".")
    if group == "data" and rest in OmegaConf.load(config_dir() / "data" / "own.yaml"):
        return f"there is no setting {key} here: recordings of your own are data=own"
    inside, dot, last = key.rpartition(".")
    siblings = OmegaConf.select(config, inside) if inside else config
    near = difflib.get_close_matches(
        last,
        [str(name) for name in siblings] if isinstance(siblings, DictConfig) else [],
        1,
        cutoff=0.7,
    )
    if near:
        return f"there is no setting {key}; did you mean {inside}{dot}{near[0]}?"
    if (
        "." in inside or inside == "trainer"
    ):  # what is in there goes to a class, which refuses what it does not know
        return f"there is no setting {key}; one that a class takes and its configuration leaves out: +{key}=VALUE"
    return f"there is no setting {key}; see kbf COMMAND --help"


def is_own(data: Any) -> bool:
    """Whether a ``data`` configuration is of recordings of one's own."""
    return is_of(data, OWN_DATA)


def is_of(data: Any, target: str) -> bool:
    """Whether the source of a ``data`` configuration is of this class."""
    source = None if data is None else data.get("source")
    return source is not None and hasattr(source, "get") and source.get("_target_") == target


@contextmanager
def unlocked(config: Any) -> Iterator[None]:
    """A configuration that may be changed, and get new keys, inside of ``with``."""
    from omegaconf import flag_override

    with flag_override(config, ["struct", "readonly"], [False, False]):
        yield


def directory_of_run(ckpt_path: str) -> Path:
    """The run directory of a checkpoint, where its run goes on.

    Raises:
        ValueError: the checkpoint is in no run directory.
    """
    folder = Path(ckpt_path).resolve().parent
    if folder.name != "checkpoints" and exists(ckpt_path):
        raise ValueError(
            f"ckpt_path={ckpt_path} is in no run directory (RUN/checkpoints/last.ckpt): say run_dir=FOLDER as well"
        )
    return folder.parent


def plain(config: Any, *, resolve: bool = True, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """A configuration as a plain dict."""
    from omegaconf import OmegaConf

    if skip:
        config = OmegaConf.masked_copy(config, [key for key in config if key not in skip])
    container: Any = OmegaConf.to_container(config, resolve=resolve, throw_on_missing=True)
    return container


def short(command: str) -> str:
    """The name of a command's configuration and module."""
    return command.split()[-1]


def config_dir() -> Path:
    """The configurations: inside the installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parent
    for directory in (package / "configs", package.parent / "configs"):
        if (directory / "train.yaml").is_file():
            return directory
    raise FileNotFoundError(
        f"no configurations in {package} nor in {package.parent}: is kbf installed completely?"
    )


def as_list(word: str) -> str:
    """``n_train=100,300`` as Hydra's ``n_train=[100,300]``; null, all steps of a recording, as it is.

    >>> as_list("n_train=100,300"), as_list("n_train=null")
    ('n_train=[100,300]', 'n_train=null')
    """
    key, _, value = word.partition("=")
    return (
        f"{key}=[{value}]"
        if key in ("n_train", "models") and value != "null" and not value.startswith("[")
        else word
    )

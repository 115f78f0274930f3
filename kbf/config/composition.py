"""Composition: Hydra merges the configuration files of a command and the words of a command line.

The groups and choices of a command are read from its configuration file, without Hydra.
"""

import copy
import functools
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# The name, in Hydra's search path, of the folder with the groups of a single command, such as
# ``configs/compare/experiment``.
COMMAND_FOLDER = "kbf command"


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
    """Yields Hydra with the search path of a command, and restores the previous Hydra afterwards.

    Args:
        command: its own folder of the configurations is searched as well.
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
    """Yields the unresolved configuration of a single job, without Hydra's own part.

    That part is available as ``HydraConfig`` inside of ``with``.

    Args:
        command: a command of ``kbf``.
        overrides: the words of a command line.
        name: of another primary configuration (``--config-name``).
        folders: further folders that are searched (``--config-dir``), see `hydra_of`.

    Raises:
        ValueError: a setting that the configuration does not have.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import ConfigCompositionException

    name, words = name or short(command), words_for_hydra(command, overrides)
    with hydra_of(command, folders):
        try:
            whole = hydra.compose(name, words, return_hydra_config=True)
        except ConfigCompositionException as error:
            key = str(error).partition("Could not override '")[2].partition("'")[0]
            if not key or "is not in struct" not in str(error.__cause__):
                raise
            raise ValueError(unknown_setting(key, without_settings(name, words))) from error
        if any(word.startswith("+") for word in overrides):
            check_added(command, overrides, without_settings(name, words))
        with unlocked(whole):
            whole.hydra.job.num, whole.hydra.job.id = 0, "0"
            whole.hydra.runtime.output_dir = os.path.abspath(str(whole.hydra.run.dir))
        HydraConfig.instance().set_config(whole)
        job = copy.deepcopy(whole)
        with unlocked(job):
            del job["hydra"]
        yield job


def words_for_hydra(command: str, overrides: list[str], *, sweep: bool = False) -> list[str]:
    """Returns the words of a command line in Hydra's syntax.

    In a comparison ``n_train=100,300`` is a list; in a ``sweep`` (``--multirun``) it means two
    comparisons, as in Hydra. ``+experiment=NAME`` becomes ``experiment=NAME``, since the group is
    in the defaults. Settings of a checkpoint's data are added (``++``) for `prepare` to merge.

    >>> words_for_hydra("compare", ["n_train=100,300", "+experiment=quick"])
    ['n_train=[100,300]', 'experiment=quick']
    >>> words_for_hydra("evaluate", ["data.n_test=50"])
    ['++data.n_test=50']
    """
    if command == "compare" and not sweep:
        overrides = [as_list(word) for word in overrides]
    bare = {word: word.lstrip("+") for word in overrides}
    if command in ("evaluate", "append") and not any(
        word.startswith("data=") for word in bare.values()
    ):
        overrides = [f"++{bare[w]}" if bare[w].startswith("data.") else w for w in overrides]
    groups = {f"+{group}" for group in groups_of(command)}
    return [word[1:] if word.partition("=")[0] in groups else word for word in overrides]


def as_list(word: str) -> str:
    """Returns ``n_train=100,300`` as ``n_train=[100,300]``; null, all steps of a recording, stays.

    >>> as_list("n_train=100,300"), as_list("n_train=null")
    ('n_train=[100,300]', 'n_train=null')
    """
    key, _, value = word.partition("=")
    single = key not in ("n_train", "models") or value == "null" or value.startswith("[")
    return word if single else f"{key}=[{value}]"


def groups_of(command: str) -> list[str]:
    """Returns the groups in the defaults of a command's configuration, in their order.

    >>> groups_of("floor")
    ['data']
    """
    text = (config_dir() / f"{short(command)}.yaml").read_text(encoding="utf-8")
    head = text.partition("\n\n")[0].splitlines()
    named = [line.strip("- \n").split(":")[0] for line in head if line.startswith("  - ")]
    return [group for group in named if group != "_self_"]


def choices_of(command: str, group: str) -> list[str]:
    """Returns the choices of a group that a command has.

    >>> "quick" in choices_of("compare", "experiment")
    True
    """
    folders = (config_dir() / group, config_dir() / short(command) / group)
    return sorted(path.stem for folder in folders for path in folder.glob("*.yaml"))


def without_settings(name: str, words: list[str]) -> Any:
    """Returns a configuration with the words that select from a group, without other words."""
    import hydra

    return hydra.compose(name, [w for w in words if (config_dir() / w.partition("=")[0]).is_dir()])


def check_added(command: str, words: list[str], config: Any) -> None:
    """Check the settings that words such as ``+KEY=VALUE`` add to a configuration.

    New keys are arguments of a class, of the trainer, of a logger or of a callback, or keys that
    another choice of the group has. All of these are checked where they are used.

    Args:
        command: a command of ``kbf``.
        words: the words of its command line.
        config: the configuration without settings.

    Raises:
        ValueError: a setting that no configuration of the command has.
    """
    for word in words:
        key = word.lstrip("+").partition("=")[0]
        if not word.startswith("+") or "@" in key or key in groups_of(command):
            continue
        group, _, rest = key.partition(".")
        name = rest.partition(".")[0]
        closed = group in ("model", "data") and name not in {*(config.get(group) or ())}
        if group not in {*config, "hydra"} or (closed and name not in keys_of(group)):
            raise ValueError(unknown_setting(key, config))


def keys_of(group: str) -> set[str]:
    """Returns the keys that the choices of a group have.

    >>> {"net", "dtype"} <= keys_of("model")
    True
    """
    from omegaconf import OmegaConf

    return {
        str(key) for path in (config_dir() / group).rglob("*.yaml") for key in OmegaConf.load(path)
    }


def unknown_setting(key: str, config: Any) -> str:
    """Returns the message about a setting that a configuration does not have, with the nearest.

    Names are those of the configuration, and the arguments of a class that it leaves out.
    """
    import difflib

    from omegaconf import DictConfig, OmegaConf

    from kbf.runtime.instantiate import locate

    group, _, rest = key.partition(".")
    if group == "data" and rest in OmegaConf.load(config_dir() / "data" / "own.yaml"):
        return f"there is no setting {key} here: recordings of your own are data=own"
    inside, node, parts = "", config, key.split(".")
    while len(parts) > 1 and isinstance(
        inner := OmegaConf.select(config, f"{inside}{parts[0]}"), DictConfig
    ):
        inside, node = f"{inside}{parts.pop(0)}.", inner
    present, known = [str(name) for name in node], [str(name) for name in node]
    with suppress(ValueError):  # no class, or one without a signature
        known += inspect.signature(locate(node.get("_target_"))).parameters
    advice = "; see the --help of the command"
    if near := difflib.get_close_matches(parts[0], known, 1, cutoff=0.7):
        plus = "" if near[0] in present else "+"
        advice = f"; did you mean {plus}{inside}{'.'.join([near[0], *parts[1:]])}?"
    # These keys become arguments of a class, which rejects those that it does not have.
    elif len(parts) == 1 and ("." in inside[:-1] or inside == "trainer."):
        advice = f"; one that a class takes and its configuration leaves out: +{key}=VALUE"
    return f"there is no setting {key}{advice}"


@contextmanager
def unlocked(config: Any) -> Iterator[None]:
    """Context in which a configuration may be changed and may get new keys."""
    from omegaconf import flag_override

    with flag_override(config, ["struct", "readonly"], [False, False]):
        yield


def plain(config: Any, *, resolve: bool = True, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns a configuration as a plain dict, without the keys of ``skip``."""
    from omegaconf import OmegaConf

    def container(node: Any) -> Any:
        """Returns a node in Python's types."""
        if not OmegaConf.is_config(node):
            return node
        return OmegaConf.to_container(node, resolve=resolve, throw_on_missing=True)

    if not resolve:
        return container(config)
    return {str(key): container(config[key]) for key in config if key not in skip}


def short(command: str) -> str:
    """Returns the name of a command's configuration and module."""
    return command.split()[-1]


def config_dir() -> Path:
    """Returns the folder of the configurations, in the installed package or next to it in a clone.

    Raises:
        FileNotFoundError: there is none.
    """
    package = Path(__file__).resolve().parent.parent
    for directory in (package / "configs", package.parent / "configs"):
        if (directory / "train.yaml").is_file():
            return directory
    raise FileNotFoundError(
        f"no configurations in {package} nor in {package.parent}: is kbf installed completely?"
    )

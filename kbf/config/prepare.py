"""Configuration of a command, from the words of a command line: `prepare` completes and checks it.

Every way to a run goes through `prepare`: a single command, each run of a sweep (``--multirun``),
the models of ``kbf compare``, and the experiments of the papers (`studies.papers.images`), so that
all of them are checked alike.
"""

from __future__ import annotations

from pathlib import Path
from types import NoneType
from typing import Any

from kbf.config.checks import check
from kbf.config.composition import COMMAND_FOLDER, composing, plain, unknown_setting, unlocked
from kbf.config.data_settings import OWN_DATA, absolute, complete_data, has_source
from kbf.runtime.hydra_quoting import as_text, exists
from kbf.runtime.interpolation import literal, settled

# Settings that define the data of a run; a checkpoint stores them as its ``recipe``.
RECIPE = ("data", "n_train", "seed")


def configure(
    command: str, overrides: list[str], *, name: str | None = None, folders: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Returns the configuration of a single run of a command; arguments as of `composing`.

    >>> configure("train", ["model=ekf", "n_train=50"])["model"]["net"]
    {'_target_': 'kbf.EKF', 'model': {'_target_': 'kbf.rotation'}}
    """
    with composing(command, overrides, name=name, folders=folders) as composed:
        return prepare(command, composed, overrides)


def prepare(command: str, composed: Any, overrides: list[str]) -> dict[str, Any]:
    """Returns the configuration of a command as a plain dict, from what Hydra has composed.

    It is resolved, except for two entries that are resolved later with other seeds or sizes:
    ``recipe`` (`RECIPE`) and, of a comparison, ``bases`` (a training configuration for each model).
    Of a training run ``explicit`` is True where the command line sets model or data.

    Args:
        command: a command of ``kbf``.
        composed: Hydra's configuration of the job, without Hydra's own part, which is available as
            ``HydraConfig``. It is completed in place.
        overrides: the words of the command line.

    Raises:
        ValueError: a setting that is not possible, with its name and the possible values.
    """
    from omegaconf import OmegaConf

    named = {word.lstrip("+~").partition("=")[0] for word in overrides}
    with unlocked(composed):
        complete_run_dir(composed, named)
        drop_arguments_of_other_classes(composed, overrides)
        complete_data(composed, overrides)
    check(command, composed)
    if command in ("evaluate", "append"):
        return on_a_checkpoint(composed)
    if "data" not in composed:
        return plain(composed)
    unresolved: Any = OmegaConf.to_container(composed, resolve=False)
    recipe = {key: unresolved[key] for key in RECIPE}
    if command == "compare":
        return comparison(composed, recipe)
    config = plain(composed)
    settings = {key.split(".")[0] for key in named}
    return {
        **config,
        "recipe": settled(recipe, {key: config[key] for key in recipe}),
        "explicit": not settings.isdisjoint({"model", "experiment", *RECIPE}),
    }


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
    for model in several["models"]:
        words = [f"data={runtime.choices['data']}", f"model={model}", "logger=none"]
        with composing("train", words, folders=folders) as whole:
            net = plain(whole, resolve=False)["model"]
        name = str(net["name"])
        if name in bases:
            raise ValueError(
                f"models: two of them have the name {name!r}, which identifies their results: "
                "rename one"
            )
        bases[name] = {**recipe, "model": net, "trainer": trainer}
    with unlocked(composed):
        composed.n_train = several["n_train"][0]
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
    tree: Any = OmegaConf.create(recipe)
    if given is not None and not other_data:
        OmegaConf.set_struct(tree, True)
        try:
            tree.merge_with({"data": given})
        except OmegaConfBaseException as error:
            raise ValueError(unknown_setting(str(error.full_key or ""), tree)) from error
        # All steps of other recordings are for the test, unless the command line splits them.
        if "path" in given and has_source(tree.data, OWN_DATA):
            tree.data.path, tree.n_train = absolute(tree.data.path), None
            if not {"test", "split"} & given.keys():
                tree.data.test = "all"
    config = {**plain(composed, skip=RECIPE), **plain(tree), "own_data": other_data}
    return config | {"given": [str(config["data"].get(key)) for key in given or ()]}

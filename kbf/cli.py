"""The command line: ``kbf COMMAND [overrides]``, the commands of `COMMANDS`. The only file that knows hydra.

Nothing heavy is imported before a command runs, so that ``kbf --help`` answers at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kbf import __version__

COMMANDS = {
    "train": (
        "fit one model on one data set and score it",
        [
            ("kbf train", "the Kernel Bayes Filter on the rotation data"),
            ("kbf train model=lstm data=oscillatory n_train=900 seed=3", "another model, another problem"),
            ("kbf train model=lstm model.training.lr=0.01 run_dir=runs/mine", "other hyper-parameters, a place of your own"),
            ("kbf train data=dsprites encoder@data.coding.encoder=resnet18", "images, and another encoder for them"),
            ("kbf train data=own data.path=rec.csv data.states=[x,y] data.observations=[a,b]", "recordings of your own"),
            ("kbf train ckpt_path=runs/mine/checkpoints/last.ckpt", "go on with an interrupted run"),
            ("kbf train model=auto", "tries several models on held-out steps and keeps the best"),
            ("kbf train --multirun model=kbf,lstm seed=0,1,2", "a sweep; add launcher=joblib to run it in parallel"),
        ],
    ),
    "evaluate": (
        "score a checkpoint, from itself alone",
        [
            ("kbf evaluate checkpoint=runs/mine/checkpoints/best.ckpt", "on the test part of its own data"),
            ("kbf evaluate checkpoint=runs/mine/checkpoints/best.ckpt seed=7 data.n_test=1000", "on other draws of it"),
            ("kbf evaluate checkpoint=runs/mine/checkpoints/best.ckpt data=oscillatory", "on another problem"),
            ("kbf evaluate checkpoint=runs/mine/checkpoints/best.ckpt animation=true", "with a moving picture, filter.gif"),
            ("kbf evaluate checkpoint=example:rotation", "a trained filter that comes with kbf"),
            ("kbf evaluate checkpoint=best.ckpt smooth=true horizon=5", "with hindsight, and 1 to 5 steps ahead"),
        ],
    ),
    "filter": (
        "estimates of new observations, from files or as they come",
        [
            ("kbf filter checkpoint=best.ckpt input=rec.csv output=estimates.csv", "a recording; each line an observation"),
            ("sensor | kbf filter checkpoint=best.ckpt input=- state=now.pt", "a stream; a restart goes on from now.pt"),
            ("kbf filter checkpoint=best.ckpt input=views output=out.npz covariance=full", "a folder of images"),
        ],
    ),
    "export": (
        "one step of a filter as a program for other machines",
        [
            ("kbf export checkpoint=best.ckpt format=onnx out=step.onnx", "for ONNX Runtime; scripts/serve.py serves it"),
            ("kbf export checkpoint=best.ckpt format=torch_export out=step.pt2", "for torch.export.load and AOTInductor"),
            ("kbf export checkpoint=best.ckpt format=torchscript out=step.pt", "for torch.jit.load, and LibTorch in C++"),
        ],
    ),
    "append": (
        "add recordings to a trained filter's memory, without training again",
        [
            ("kbf append checkpoint=best.ckpt data.path=new.csv out=better.ckpt", "more recordings with the same columns"),
            ("kbf append checkpoint=best.ckpt data.path=new.csv out=better.ckpt budget=5000", "and no more than 5,000 points"),
        ],
    ),
    "compare": (
        "many models on the same sequences: table, test, picture",
        [
            ("kbf compare data=rotation n_train=100,300 runs=5", "all models; resumes where it was stopped"),
            ("kbf compare models=kbf,lstm,ekf n_train=300 runs=30 workers=4", "some models, in four processes"),
            ("kbf compare experiment=quick", "a first look"),
        ],
    ),
    "reproduce": (
        "an experiment of a paper: figures, tests and a verdict",
        [
            ("kbf reproduce posterior_mean", "as in the paper; resumes where it was stopped"),
            ("kbf reproduce all preset=quick workers=2", "every experiment, in a quarter of an hour"),
            ("kbf reproduce --list", "their names"),
        ],
    ),
    "bench": (
        "a benchmark: both sides in one process, with ratios",
        [
            ("kbf bench step", "one step of a filter against the dense and the published one"),
            ("kbf bench all threads=2", "every benchmark, with two threads"),
            ("kbf bench --list", "their names"),
        ],
    ),
    "data": (
        "write a data set as arrays, with a picture",
        [("kbf data data=oscillatory n_train=500 seed=1", "data.npz and data.png")],
    ),
    "data render": (
        "write the views of a full rotation, as frames for data=dmlab",
        [
            ("kbf data render dmlab level=nav_maze_static_01 out=lab.npz", "DeepMind Lab itself; goes on where it was stopped"),
            ("kbf data render maze seed=3 turns=2 out=maze.npz", "this package's ray caster, which needs nothing else"),
            ("kbf train data=dmlab data.frames=lab.npz", "the frames as data"),
            ("kbf data render pendulum steps=1000 out=pendulum.npz", "Gymnasium's pendulum: recordings for data=own"),
        ],
    ),
    "data check": (
        "read a recording of your own: what is in it, and what is wrong with it",
        [
            ("kbf data check rec.csv data.states=[x,y] data.observations=[a,b]", "report.md, series.png, states.png, and warnings"),
            ("kbf data check runs.npz data.split=sequence data.test=0.3", "arrays of several recordings"),
            ("kbf train data=own data.path=rec.csv data.states=[x,y] data.observations=[a,b]", "the same settings learn from it"),
        ],
    ),
    "floor": (
        "the least error that any filter can reach",
        [
            ("kbf floor data=rotation n_train=300 runs=30", "with its standard error over 30 draws of the data"),
            ("kbf floor data=rotation smooth=true", "of any smoother"),
        ],
    ),
}
FLAGS = """\
  -h, --help       this text
  --cfg            print the configuration and stop
  -m, --multirun   run once for each combination of comma-separated values
  --debug          show the traceback of an error"""


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 1 when a part of a comparison failed, 2 for input that cannot be used."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "--version" in words:
        print(f"kbf {__version__}")
        return 0
    flags = {word for word in words if word.startswith("-")}
    words = [word for word in words if word not in flags]
    if not words:
        print(general_help())
        return 0 if flags & {"-h", "--help"} else 2
    if words[:2] == ["data", "render"]:  # a command of two words, and the name of a renderer after it
        words[:2] = ["data render"]
        positional = "renderer"
    elif words[:2] == ["data", "check"]:  # and a file after it, whose name hydra must not read
        words[:2] = ["data check"]
        if len(words) > 1 and "=" not in words[1]:
            words[1] = f"data.path={quoted(words[1])}"
        positional = "path"
    else:
        positional = "name"
    if words[0] in ("data render", "reproduce", "bench") and len(words) > 1 and "=" not in words[1]:
        words[1] = f"{positional}={words[1]}"
    command, overrides = words[0], words[1:]
    known = {"-h", "--help", "--cfg", "-m", "--multirun", "--debug"}
    unknown = flags - (known | {"--list"} if command in ("reproduce", "bench") else known)
    if command not in COMMANDS or unknown:
        wrong = f"no command {command!r}" if command not in COMMANDS else f"no option {sorted(unknown)[0]}"
        print(f"kbf: there is {wrong}; see kbf --help", file=sys.stderr)
        return 2
    if flags & {"-h", "--help"}:
        print(command_help(command))
        return 0
    if stray := [word for word in overrides if "=" not in word and not word.startswith("~")]:
        print(f"kbf {command}: {stray[0]!r} is no setting: write key=value; see kbf {command} --help", file=sys.stderr)
        return 2
    if "--list" in flags:
        from kbf.bench import BENCHMARKS
        from kbf.experiments import EXPERIMENTS

        names = BENCHMARKS if command == "bench" else EXPERIMENTS
        print("\n".join(f"{name:<20}{what}" for name, what in names.items()))
        return 0
    try:
        return run(command, overrides, flags)
    except KeyboardInterrupt:
        advice = " (kbf train ckpt_path=RUN/checkpoints/last.ckpt goes on, or coding.ckpt)" if command == "train" else ""
        print(f"\nkbf: interrupted; what was finished is kept{advice}", file=sys.stderr)
        return 130
    except Exception as error:
        if "--debug" in flags or not expected(error):
            raise
        print(f"kbf {command}: {one_line(error)}", file=sys.stderr)
        return 2


def run(command: str, overrides: list[str], flags: set[str]) -> int:
    """Compose the configuration and hand it to the command."""
    if flags & {"-m", "--multirun"}:
        return multirun(command, overrides)
    config = configure(command, overrides)
    if "--cfg" in flags:
        from omegaconf import OmegaConf

        print(OmegaConf.to_yaml(OmegaConf.create({k: v for k, v in config.items() if k not in ("bases", "explicit", "recipe")})))
        return 0
    code = execute(command, config)
    return code if isinstance(code, int) else 0


def execute(command: str, config: dict[str, Any]) -> Any:
    """Call the command; what it needs is imported here."""
    import importlib
    import os

    if command == "bench" and config["threads"]:  # NumPy's own threads are set before it is loaded
        os.environ["OMP_NUM_THREADS"] = str(config["threads"])
    return importlib.import_module(f"kbf.commands.{short(command)}").run(config)


def configure(command: str, overrides: list[str]) -> dict[str, Any]:
    """The configuration of a command as a plain dict.

    Resolved, but for two entries that are filled in later, with other seeds or sizes: ``recipe`` (data, n_train, seed) and, for a
    comparison, ``bases`` (a training configuration for each model). ``explicit``: the command line spoke of model or data.
    """
    if command in ("evaluate", "append"):
        return configure_evaluation(overrides, command)
    if command in ("data render", "reproduce", "bench", "filter", "export"):
        composed = compose(command, overrides)
        check_numbers(composed)
        return plain(composed)
    if command == "compare":
        overrides = [as_list(word) for word in overrides]
    given = dict(word.lstrip("+~").split("=", 1) for word in overrides if "=" in word)
    if given.get("ckpt_path", "null") != "null" and "run_dir" not in given:  # a run goes on where it is
        overrides = [*overrides, f"run_dir='{Path(given['ckpt_path'].strip(chr(39))).resolve().parent.parent}'"]
    composed = compose(command, overrides)
    check_numbers(composed, several=("n_train",) if command == "compare" else ())
    spoken = {key.split(".")[0] for key in given} & {"model", "data", "n_train", "seed", "experiment"}
    recipe = {key: plain(composed, resolve=False)[key] for key in ("data", "n_train", "seed")}
    if command != "compare":
        return {**plain(composed), "recipe": recipe, "explicit": bool(spoken)}
    return comparison(composed, recipe, [word for word in overrides if word.startswith("hydra.")])


def check_numbers(config: Any, several: tuple[str, ...] = ()) -> None:
    """Raise if a number that counts is no whole number, or for those in ``several`` no list of them, a switch no bool."""
    counts = ("n_train", "seed", "runs", "particles", "workers", "turns", "steps", "sequences", "animation_steps", "threads")
    for key in (*counts, "lag", "horizon"):
        value: Any = config.get(key) or 0
        for number in [value] if key not in several or isinstance(value, int | float | str) else value:
            if not isinstance(number, int) or number < 0:
                raise ValueError(f"{key} must be a whole number, got {number!r}")
    for key in ("smooth", "calibrate", "alarms", "compile", "animation", "trust"):
        if not isinstance(value := config.get(key), bool | None):
            raise ValueError(f"{key} must be true or false, got {value!r}")


def comparison(composed: Any, recipe: dict[str, Any], search: list[str]) -> dict[str, Any]:
    """The configuration of a comparison: that of each model around the same data."""
    from omegaconf import OmegaConf

    several = {key: [v] if isinstance(v := composed[key], int | str) else list(v) for key in ("n_train", "models")}
    first = OmegaConf.create({**composed, "n_train": several["n_train"][0]})
    trainer = plain(composed, resolve=False)["trainer"]
    bases = {}
    for model in several["models"]:
        net = plain(compose("train", [f"model={model}", "logger=none", *search]), resolve=False)["model"]
        if str(net["name"]) in bases:
            raise ValueError(f"models: two of them have the name {net['name']!r}, by which results are kept: give one another")
        bases[str(net["name"])] = {**recipe, "model": net, "trainer": trainer}
    whole = {key: value for key, value in plain(first, skip=("trainer",)).items() if key != "n_train"}
    return {**whole, **several, "recipe": recipe, "bases": bases}


def configure_evaluation(overrides: list[str], command: str = "evaluate") -> dict[str, Any]:
    """The configuration of a command on a checkpoint: the checkpoint's own data, changed by what the command line says of it."""
    from omegaconf import OmegaConf

    other_data = any(word.startswith("data=") for word in overrides)
    settings = [word for word in overrides if not word.lstrip("+~").startswith("data.")]
    composed = compose(command, overrides if other_data else settings)
    check_numbers(composed)
    from kbf.checkpoint import CheckpointError, read_checkpoint

    stored = read_checkpoint(composed.checkpoint)["hyper_parameters"]["config"]
    if "recipe" not in stored and not other_data:
        raise CheckpointError(f"{composed.checkpoint} does not say what data it was trained on: give data=NAME")
    recipe = dict(stored.get("recipe", {}))
    recipe |= {key: composed[key] for key in ("n_train", "seed") if composed[key] is not None}
    if other_data:
        recipe["data"] = plain(composed, resolve=False)["data"]
    tree = OmegaConf.create(recipe)
    OmegaConf.set_struct(tree, True)
    if not other_data:
        try:
            tree.merge_with_dotlist([word for word in overrides if word not in settings])
        except AttributeError as error:  # omegaconf's own kind: a key that is not there
            raise ValueError(no_setting(str(getattr(error, "full_key", "")), tree)) from error
        if any(word.startswith("data.path=") for word in overrides) and is_own(tree.data):
            other_recordings(tree, overrides)
    config = plain(composed, skip=("data", "n_train", "seed"))
    return {**config, **plain(tree), "own_data": other_data}


def compose(command: str, overrides: list[str]) -> Any:
    """Hydra's configuration of a command."""
    import hydra
    from hydra.errors import ConfigCompositionException

    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3", job_name="kbf"):
        try:
            composed = hydra.compose(short(command), overrides)
        except ConfigCompositionException as error:
            key = str(error).partition("Could not override '")[2].partition("'")[0]
            if not key or "is not in struct" not in str(error.__cause__):
                raise
            groups = [
                word for word in overrides if "." not in word.partition("=")[0] and (config_dir() / word.split("=")[0]).is_dir()
            ]
            raise ValueError(no_setting(key, hydra.compose(short(command), groups))) from error
    return filled(composed, overrides)


def no_setting(key: str, config: Any) -> str:
    """What to say of a setting that a configuration does not have: what comes near, or which data set has it."""
    import difflib

    from omegaconf import DictConfig, OmegaConf

    group, _, rest = key.partition(".")
    if group == "data" and rest in OmegaConf.load(config_dir() / "data" / "own.yaml"):
        return f"there is no setting {key} here: recordings of your own are data=own"
    inside, dot, last = key.rpartition(".")
    beside = OmegaConf.select(config, inside) if inside else config
    near = difflib.get_close_matches(last, [str(name) for name in beside] if isinstance(beside, DictConfig) else [], 1, cutoff=0.7)
    if near:
        return f"there is no setting {key}; did you mean {inside}{dot}{near[0]}?"
    if "." in inside or inside == "trainer":  # what is in there goes to a class, which refuses what it does not know
        return f"there is no setting {key}; one that a class takes and its configuration leaves out: +{key}=VALUE"
    return f"there is no setting {key}; see kbf COMMAND --help"


def is_own(data: Any) -> bool:
    """Whether a ``data`` configuration is of recordings of one's own."""
    return data is not None and (data.get("source") or {}).get("_target_") == "kbf.data.own.source.OwnData"


def filled(composed: Any, overrides: list[str]) -> Any:
    """The configuration, with what only the file can tell of recordings of one's own: shapes, and the number of training steps."""
    if not is_own(composed.get("data")) or composed.data.path is None:
        return composed
    from omegaconf import OmegaConf

    from kbf.data.own import complete

    composed.data.path = str(Path(str(composed.data.path)).expanduser().resolve())  # a checkpoint must find it from anywhere
    spoken = any(word.startswith("n_train=") for word in overrides)
    source = OmegaConf.to_container(OmegaConf.create({**plain(composed, resolve=False), "n_train": None}).data.source, resolve=True)
    told = complete({key: value for key, value in source.items() if key != "_target_"})  # pyright: ignore
    if told["image"] is None:
        composed.data.coding = None
    if not spoken and "n_train" in composed:
        composed.n_train = told["n_train"]
    for key in ("d", "q", "image", "k", "boundary", "time_step"):
        composed.data[key] = told[key]
    return composed


def other_recordings(tree: Any, overrides: list[str]) -> None:
    """Other recordings for a checkpoint's filter: all their steps are for the test, if nothing else is said."""
    tree.data.path = str(Path(tree.data.path).expanduser().resolve())
    tree.n_train = None
    if not any(word.startswith(("data.test=", "data.split=")) for word in overrides):
        tree.data.test = "all"


def quoted(word: str) -> str:
    """A word that hydra takes as it is, whatever is in it."""
    escaped = word.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def plain(config: Any, *, resolve: bool = True, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """A configuration as a plain dict, without hydra's own part."""
    from omegaconf import OmegaConf

    if skip:
        config = OmegaConf.masked_copy(config, [key for key in config if key not in skip])
    container: Any = OmegaConf.to_container(config, resolve=resolve, throw_on_missing=True)
    return container


def multirun(command: str, overrides: list[str]) -> int:
    """Let hydra sweep: its launchers and sweepers work as they are. Each run has hydra's output directory as its own."""
    import os

    import hydra

    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach main(), which prints one line
    if not any(word.startswith("run_dir=") for word in overrides):
        overrides = [*overrides, "run_dir='${hydra:runtime.output_dir}'"]
    sys.argv = [sys.argv[0], "--multirun", *overrides]
    hydra.main(config_path=str(config_dir()), config_name=short(command), version_base="1.3")(Task(command))()
    return 0


class Task:
    """One run of a sweep. Returns the validation error where there is one, for sweepers that minimise."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __call__(self, composed: Any) -> float | None:
        """Run it; the progress bars of several runs at once would be a mess."""
        from hydra.core.hydra_config import HydraConfig

        composed = filled(composed, list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else [])
        config = plain(composed)
        recipe = {key: plain(composed, resolve=False)[key] for key in ("data", "n_train", "seed") if key in config}
        if "trainer" in config:
            config["trainer"] = {**config["trainer"], "callbacks": None, "enable_progress_bar": False}
        told = execute(self.command, {**config, "recipe": recipe, "explicit": True})
        return told.get("validation.mse") if isinstance(told, dict) else None


def short(command: str) -> str:
    """The name of a command's configuration and module."""
    return command.split()[-1]


def config_dir() -> Path:
    """The configurations: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for directory in (package / "configs", package.parent / "configs"):
        if (directory / "train.yaml").is_file():
            return directory
    raise FileNotFoundError(f"no configurations in {package} nor in {package.parent}: is kbf installed completely?")


def as_list(word: str) -> str:
    """``n_train=100,300`` as hydra's ``n_train=[100,300]``."""
    key, _, value = word.partition("=")
    return f"{key}=[{value}]" if key in ("n_train", "models") and not value.startswith("[") else word


def expected(error: Exception) -> bool:
    """Whether an error is the input's fault, and not ours."""
    return isinstance(error, ValueError | OSError) or type(error).__module__.split(".")[0] in ("hydra", "omegaconf")


def one_line(error: Exception) -> str:
    """The message of an error, and of what caused it, on one line."""
    texts = [str(error)]
    if isinstance(error, OSError) and error.strerror:  # the system's own: which file, and what is wrong with it
        texts = [str(name) for name in (error.filename2 or error.filename,) if name] + [error.strerror.lower()]
    if override := getattr(error, "override", None):
        texts.insert(0, f"{override!r} cannot be read (brackets must close, other signs need quotes: \"key='a b'\")")
    if type(error).__module__.startswith("hydra") and error.__cause__ is not None:
        texts.append(str(error.__cause__))
    for noise in (
        "Config search path",
        "full_key:",
        "See https://hydra.cc",
    ):  # where hydra looked, what it calls the key, its manual
        texts = [text.partition(noise)[0] for text in texts]
    return ": ".join(" ".join(text.split()) for text in texts if text)


def general_help() -> str:
    """What ``kbf --help`` says."""
    lines = ["Kernel Bayes Filter in PyTorch.", "", "usage: kbf COMMAND [key=value ...]", "", "commands:"]
    lines += [f"  {name:<13}{what}" for name, (what, _) in COMMANDS.items()]
    lines += ["", "options:", FLAGS, "  --version        the version", "", "examples:"]
    lines += [f"  {examples[0][0]}" for _, examples in COMMANDS.values()]
    return "\n".join([*lines, "", "kbf COMMAND --help tells what can be set."])


def command_help(command: str) -> str:
    """What ``kbf COMMAND --help`` says: purpose, examples, and the configuration with its groups."""
    what, examples = COMMANDS[command]
    lines = [f"kbf {command}: {what}", "", "examples:"]
    for line, meaning in examples:
        lines += [f"  {line}", f"      {meaning}"]
    directory = config_dir()
    text = (directory / f"{short(command)}.yaml").read_text(encoding="utf-8")
    head, _, body = text.partition("\n\n")
    lines[1:1] = [line.removeprefix("# ") for line in head.splitlines()[1:] if line.startswith("#")]
    lines += ["", "settings (key=value):", *[f"  {line}" for line in body.partition("\nhydra:")[0].splitlines() if line]]
    if command == "data check":
        own = (directory / "data" / "own.yaml").read_text(encoding="utf-8").partition("\n\n")[2].partition("\nd: ")[0]
        lines += ["", "settings of the recording:", *[f"  data.{line}" for line in own.splitlines()[1:]]]
    groups = [line.strip("- \n").split(":")[0] for line in text.partition("\n\n")[0].splitlines() if line.startswith("  - ")]
    groups = [group for group in groups if group != "_self_"]
    if groups:
        lines += ["", "groups (group=choice; group.key=value changes a key of the choice):"]
    for group in groups:
        choices = sorted(path.stem for path in (directory / group).glob("*.yaml"))
        lines.append(f"  {group:<12}{', '.join(choices)}")
    if "data" in groups:
        choices = sorted(path.stem for path in (directory / "encoder").glob("*.yaml"))
        lines.append(f"  encoder@data.coding.encoder, for images: {', '.join(choices)}")
        lines += ["  settings of data=own: kbf data check --help"] if command != "data check" else []
    return "\n".join([*lines, "", "options:", FLAGS])


if __name__ == "__main__":
    sys.exit(main())

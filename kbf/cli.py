"""The command line: ``kbf COMMAND [overrides]``, the commands of `COMMANDS`. What their configuration is: `kbf.config`.

Nothing heavy is imported before a command runs, so that ``kbf --help`` answers at once.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kbf import __version__
from kbf.config import (
    choices_of,
    composing,
    config_dir,
    configure,
    groups_of,
    hydra_of,
    prepare,
    short,
    words_for_hydra,
)
from kbf.runtime.hydra_quoting import exists, literal_path
from kbf.runtime.optional_dependencies import missing

LACKS = re.compile(r"Could not find 'hydra/(?:launcher|sweeper)/(\w+)'")
"""Hydra's message about a launcher or sweeper that is not installed."""
PLUGINS = {
    "joblib": ("hydra-joblib-launcher", "sweep"),
    "ray": ("hydra-ray-launcher", "cluster"),
    "submitit_local": ("hydra-submitit-launcher", "cluster"),
    "submitit_slurm": ("hydra-submitit-launcher", "cluster"),
    "optuna": ("hydra-optuna-sweeper", "optuna"),
}
"""Their packages, and the extras that bring these."""

COMMANDS = {
    "train": (
        "fit one model on one data set and score it",
        [
            ("kbf train", "the Kernel Bayes Filter on the rotation data"),
            (
                "kbf train model=lstm data=oscillatory n_train=900 seed=3",
                "another model, another problem",
            ),
            (
                "kbf train model=lstm model.training.lr=0.01 run_dir=runs/mine",
                "other hyper-parameters, a place of your own",
            ),
            (
                "kbf train data=dsprites encoder@data.encoding.encoder=resnet18",
                "images, and another encoder for them",
            ),
            (
                "kbf train data=own data.path=rec.csv data.states=[x,y] data.observations=[a,b]",
                "recordings of your own",
            ),
            (
                "kbf train ckpt_path=runs/mine/checkpoints/last.ckpt",
                "go on with an interrupted run",
            ),
            ("kbf train model=auto", "tries several models on held-out steps and keeps the best"),
            (
                "kbf train --multirun model=kbf,lstm seed=0,1,2",
                "a sweep; add launcher=joblib to run it in parallel",
            ),
        ],
    ),
    "evaluate": (
        "score a checkpoint, from itself alone",
        [
            (
                "kbf evaluate checkpoint=runs/mine/checkpoints/best.ckpt",
                "on the test part of its own data",
            ),
            (
                "kbf evaluate checkpoint=runs/mine/checkpoints/best.ckpt seed=7 data.n_test=1000",
                "on other draws of it",
            ),
            (
                "kbf evaluate checkpoint=runs/mine/checkpoints/best.ckpt data=oscillatory",
                "on another problem",
            ),
            (
                "kbf evaluate checkpoint=runs/mine/checkpoints/best.ckpt animation=true",
                "with a moving picture, filter.gif",
            ),
            ("kbf evaluate checkpoint=example:rotation", "a trained filter that comes with kbf"),
            (
                "kbf evaluate checkpoint=best.ckpt smooth=true horizon=5",
                "with smoothing, and forecasts of 1 to 5 steps",
            ),
        ],
    ),
    "filter": (
        "estimates of new observations, from files or as they come",
        [
            (
                "kbf filter checkpoint=best.ckpt input=rec.csv output=estimates.csv",
                "a recording; each line an observation",
            ),
            (
                "sensor | kbf filter checkpoint=best.ckpt input=- state=now.pt",
                "a stream; a restart goes on from now.pt",
            ),
            (
                "kbf filter checkpoint=best.ckpt input=views output=out.npz covariance=full",
                "a folder of images",
            ),
        ],
    ),
    "export": (
        "one step of a filter as a program for other machines",
        [
            (
                "kbf export checkpoint=best.ckpt format=onnx out=step.onnx",
                "for ONNX Runtime; kbf serve serves it",
            ),
            (
                "kbf export checkpoint=best.ckpt format=torch_export out=step.pt2",
                "for torch.export.load and AOTInductor",
            ),
            (
                "kbf export checkpoint=best.ckpt format=torchscript out=step.pt",
                "for torch.jit.load, and LibTorch in C++",
            ),
        ],
    ),
    "serve": (
        "the step of a filter over HTTP",
        [
            (
                "kbf serve program=step.onnx",
                "POST /step with JSON, GET /health; for this machine alone",
            ),
            (
                "kbf serve program=step.onnx host=0.0.0.0 hosts=[filter.example.org]",
                "for others, behind a proxy",
            ),
        ],
    ),
    "append": (
        "add recordings to a trained filter's memory, without training again",
        [
            (
                "kbf append checkpoint=best.ckpt data.path=new.csv out=better.ckpt",
                "more recordings with the same columns",
            ),
            (
                "kbf append checkpoint=best.ckpt data.path=new.csv out=better.ckpt budget=5000",
                "and no more than 5,000 points",
            ),
        ],
    ),
    "compare": (
        "many models on the same sequences: table, test, picture",
        [
            (
                "kbf compare data=rotation n_train=100,300 runs=5",
                "all models; resumes where it was stopped",
            ),
            (
                "kbf compare models=kbf,lstm,ekf n_train=300 runs=30 workers=4",
                "some models, in four processes",
            ),
            ("kbf compare experiment=quick", "a first look"),
        ],
    ),
    "reproduce": (
        "an experiment of a paper: figures, tests and a verdict",
        [
            ("kbf reproduce posterior_mean", "as in the paper; resumes where it was stopped"),
            (
                "kbf reproduce all preset=quick workers=2",
                "every experiment, in a quarter of an hour",
            ),
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
            (
                "kbf data render dmlab level=nav_maze_static_01 out=lab.npz",
                "DeepMind Lab itself; goes on where it was stopped",
            ),
            (
                "kbf data render maze seed=3 turns=2 out=maze.npz",
                "this package's ray caster, which needs nothing else",
            ),
            ("kbf train data=dmlab data.frames=lab.npz", "the frames as data"),
            (
                "kbf data render pendulum steps=1000 out=pendulum.npz",
                "Gymnasium's pendulum: recordings for data=own",
            ),
        ],
    ),
    "data check": (
        "read a recording of your own: what is in it, and what is wrong with it",
        [
            (
                "kbf data check rec.csv data.states=[x,y] data.observations=[a,b]",
                "report.md, series.png, states.png, and warnings",
            ),
            (
                "kbf data check runs.npz data.split=recording data.test=0.3",
                "arrays of several recordings",
            ),
            (
                "kbf train data=own data.path=rec.csv data.states=[x,y] data.observations=[a,b]",
                "the same settings learn from it",
            ),
        ],
    ),
    "floor": (
        "the least error that any filter can reach",
        [
            (
                "kbf floor data=rotation n_train=300 runs=30",
                "with its standard error over 30 draws of the data",
            ),
            ("kbf floor data=rotation smooth=true", "of any smoother"),
        ],
    ),
}
FLAGS = """\
  -h, --help           this text
  -m, --multirun       run once for each combination of comma-separated values
  --cfg [WHICH]        print the configuration and stop: job, hydra or all as composed (--resolve fills in what refers to other
                       settings; --package NAME prints a part); with nothing behind it what the command would get
  --info [WHAT]        how it was composed: defaults, defaults-tree, config, plugins, searchpath or all
  --config-dir FOLDER  where to look for more choices (data/mine.yaml is then data=mine); as hydra.searchpath=[file://FOLDER]
  --config-name NAME   another primary configuration than that of the command
  --shell-completion   install=bash (zsh, fish): eval "$(kbf --shell-completion install=bash)"
  --debug              show the traceback of an error"""
FIGURES = """\
figures, of which each model and data set has some (on the screen shares are percentages; _raw: before recalibration, _smoothed:
by the smoother)"""
VALUES: dict[str, Any] = {
    "--cfg": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    "--config-dir": None,
    "--config-name": None,
    "--package": None,
}
"""Options that a word may follow: one of these, or None for any, which must be there."""
ABBREVIATIONS = {
    **{"-h": "--help", "-m": "--multirun", "-c": "--cfg", "-i": "--info", "-p": "--package"},
    **{"-cd": "--config-dir", "-cn": "--config-name", "-sc": "--shell-completion"},
}
OPTIONS = {
    "--help",
    "--version",
    "--multirun",
    "--resolve",
    "--debug",
    "--list",
    "--shell-completion",
    *VALUES,
}


def read_words(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """The words of a command line without its options, and the options with what follows them.

    Raises:
        ValueError: an option that is not there, or one without the word that it needs.

    >>> read_words(["train", "--cfg", "job", "seed=1", "-m"])
    (['train', 'seed=1'], {'--cfg': 'job', '--multirun': ''})
    """
    left, rest, options = [], list(words), {}
    while rest:
        word, given, value = rest.pop(0).partition("=")
        if not word.startswith("-"):
            left.append(word + given + value)
            continue
        name = ABBREVIATIONS.get(word, word)
        if name not in OPTIONS or (given and name not in VALUES):
            raise ValueError(f"there is no option {word}")
        choices = VALUES.get(name, ())
        if (
            not given
            and rest
            and not rest[0].startswith("-")
            and (choices is None or rest[0] in choices)
        ):
            value = rest.pop(0)
        if choices is None and not value:
            raise ValueError(f"{word} needs a word behind it")
        if choices and value and value not in choices:
            raise ValueError(
                f"{word} must be followed by one of {', '.join(choices)}; got {value!r}"
            )
        options[name] = value
    return left, options


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 1 when a part of a comparison failed, 2 for input that cannot be used."""
    words, code = sys.argv[1:] if argv is None else argv, 0
    try:
        code = interpret(words)
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:  # a full disk, or a reader that has gone: when Python ends it would try again, and say so in its words
        if "--debug" in words:
            raise
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code or refuse(f"standard output: {one_line(error)}")
    return code


def interpret(argv: list[str]) -> int:
    """`main`, whose output may still be on its way."""
    try:
        words, options = read_words(argv)
    except ValueError as error:
        return refuse(f"{error}; see kbf --help")
    if "--version" in options:
        print(f"kbf {__version__}")
        return 0
    if "--shell-completion" in options:
        return complete_words(words)
    if not words:
        print(general_help())
        return 0 if "--help" in options else 2
    if words[:2] == [
        "data",
        "render",
    ]:  # a command of two words, and the name of a renderer after it
        words[:2] = ["data render"]
        positional = "renderer"
    elif words[:2] == ["data", "check"]:  # and a file after it, whose name hydra must not read
        words[:2] = ["data check"]
        if len(words) > 1 and ("=" not in words[1] or exists(words[1])):
            words[1] = literal_path(f"data.path={words[1]}")
        positional = "path"
    else:
        positional = "name"
    if words[0] in ("data render", "reproduce", "bench") and len(words) > 1 and "=" not in words[1]:
        words[1] = f"{positional}={words[1]}"
    command, overrides = words[0], words[1:]
    if command not in COMMANDS:
        return refuse(f"there is no command {command!r}; see kbf --help")
    if "--list" in options and command not in ("reproduce", "bench"):
        return refuse("there is no option --list; see kbf --help")
    if "--help" in options:
        print(command_help(command))
        return 0
    if stray := [
        word
        for word in overrides
        if not word.lstrip("+~").partition("=")[0] or ("=" not in word and word[0] != "~")
    ]:
        return refuse(
            f"{stray[0]!r} is no setting: write key=value; see kbf {command} --help", command
        )
    if "--multirun" not in options:
        overrides = [literal_path(word) for word in overrides]
    try:
        if "--list" in options:
            print(names_of_studies(command))
            return 0
        return run(command, overrides, options)
    except KeyboardInterrupt:
        advice = (
            " (kbf train ckpt_path=RUN/checkpoints/last.ckpt goes on, or encoder.ckpt)"
            if command == "train"
            else ""
        )
        print(f"\nkbf: interrupted; what was finished is kept{advice}", file=sys.stderr)
        return 130
    except Exception as error:
        if "--debug" in options or not expected(error):
            raise
        return refuse(one_line(error), command)


def names_of_studies(command: str) -> str:
    """Return what ``--list`` prints: each benchmark or experiment with a description."""
    from kbf.commands.support.workshop import load_study

    names = (
        load_study("benchmarks").BENCHMARKS
        if command == "bench"
        else load_study("papers").EXPERIMENTS
    )
    return "\n".join(f"{name:<20}{description}" for name, description in names.items())


def refuse(reason: str, command: str = "") -> int:
    """Say on one line why nothing is done; returns the exit code."""
    print(f"kbf{command and ' '}{command}: {reason}", file=sys.stderr)
    return 2


def run(command: str, overrides: list[str], options: dict[str, str]) -> int:
    """Compose the configuration and hand it to the command, or show it."""
    folders: tuple[str, ...] = ()
    if folder := options.get("--config-dir"):
        if not Path(folder).is_dir():
            raise ValueError(f"--config-dir: there is no folder {folder}")
        folders = (f"file://{Path(folder).resolve()}",)
    name = options.get("--config-name")
    if "--info" in options:
        words = words_for_hydra(command, overrides)
        with hydra_of(command, folders) as hydra, logging_as_before():
            hydra.show_info(options["--info"] or "all", name or short(command), words)
        return 0
    if "--cfg" in options or "--resolve" in options or "--package" in options:
        print(shown_configuration(command, overrides, options, name, folders), end="")
        return 0
    if "--multirun" in options:
        return multirun(command, overrides, name, folders)
    code = execute(command, configure(command, overrides, name=name, folders=folders))
    return code if isinstance(code, int) else 0


@contextmanager
def logging_as_before() -> Iterator[None]:
    """Take back what happens inside of ``with`` to the handlers and the level of Python's root logger."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def shown_configuration(
    command: str,
    overrides: list[str],
    options: dict[str, str],
    name: str | None,
    folders: tuple[str, ...],
) -> str:
    """What ``--cfg`` prints, as YAML."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    which = options.get("--cfg", "")
    with composing(command, overrides, name=name, folders=folders) as composed:
        config: Any = prepare(command, composed, overrides)
        if which in ("", "job"):
            inside = ("bases", "explicit", "recipe", "own_data", "given")
            config = (
                composed
                if which and "--resolve" not in options
                else {k: v for k, v in config.items() if k not in inside}
            )
        else:
            hydra: Any = OmegaConf.create(
                OmegaConf.to_container(HydraConfig.instance().cfg, resolve=False)
            )  # pyright: ignore
            del hydra.hydra["help"], hydra.hydra["hydra_help"]  # templates of texts
            config = OmegaConf.merge(hydra, composed) if which == "all" else hydra
        config = OmegaConf.create(config)
        if "--resolve" in options:
            config = OmegaConf.create(
                OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
            )  # pyright: ignore
        if part := options.get("--package"):
            config = OmegaConf.select(config, part)
            if config is None:
                raise ValueError(f"--package: there is no {part} in this configuration")
        return OmegaConf.to_yaml(config) if OmegaConf.is_config(config) else f"{config}\n"


def complete_words(words: list[str]) -> int:
    """``install=SHELL`` and ``uninstall=SHELL`` print what the shell evaluates; ``query=SHELL`` what may come next on its line.

    The line is in COMP_LINE, as of every program that Hydra completes; its first word after ``kbf``
    is the command.
    """
    line = os.environ.get("COMP_LINE", "")
    known, (program, _, rest) = sorted({name.split()[0] for name in COMMANDS}), line.partition(" ")
    command, ended, others = rest.lstrip().partition(" ")
    if words and words[0].startswith("query=") and not ended:
        print("\n".join(name for name in known if name.startswith(command)))
        return 0
    if (two := others.split(" ")[0]) and f"{command} {two}" in COMMANDS:
        command, others = f"{command} {two}", others.partition(" ")[2]
    os.environ["COMP_LINE"] = f"{program} {others}"
    try:
        with hydra_of(command or "train") as hydra:
            hydra.shell_completion(short(command or "train"), words)
    except (ValueError, FileNotFoundError) as error:
        return refuse(f"--shell-completion: {one_line(error)}")
    return 0


def execute(command: str, config: dict[str, Any]) -> Any:
    """Call the command; what it needs is imported here."""
    import importlib

    if command == "bench" and config["threads"]:  # NumPy's own threads are set before it is loaded
        os.environ["OMP_NUM_THREADS"] = str(config["threads"])
    return importlib.import_module(f"kbf.commands.{short(command)}").run(config)


def multirun(
    command: str, overrides: list[str], name: str | None = None, folders: tuple[str, ...] = ()
) -> int:
    """Let Hydra sweep: its launchers and sweepers work as they are. Returns the largest exit code of the runs."""
    words = [*words_for_hydra(command, overrides, sweep=True), "hydra.mode=MULTIRUN"]
    with hydra_of(command, folders) as hydra, logging_as_before():
        results = hydra.multirun(
            config_name=name or short(command), task_function=Task(command), overrides=words
        )
    codes = [job.return_value for batch in results or [] for job in batch]
    return max((code for code in codes if type(code) is int), default=0)


class Task:
    """One run of a sweep."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __call__(self, composed: Any) -> float | int | None:
        """Run it, without progress bars: those of several runs at once would be a mess.

        Returns:
            Of a training run the error on steps that it has not learned from (``held_out.mse``,
            else ``validation.mse``), for
            sweepers that minimise: they get it from every model, since a run of theirs holds steps
                out (``hold_out``) if the
            command line sets nothing else. Of another command its exit code.
        """
        from hydra.core.hydra_config import HydraConfig

        job = HydraConfig.get()
        config = prepare(self.command, composed, list(job.overrides.task))
        if "trainer" in config:
            config["trainer"] = {**config["trainer"], "enable_progress_bar": False}
        searches = not str(job.sweeper["_target_"]).endswith(".BasicSweeper")
        if searches and config.get("hold_out") == 0:
            config["hold_out"] = 0.2
        result = execute(self.command, config)
        if isinstance(result, dict):
            return result.get("held_out.mse", result.get("validation.mse"))
        return result


def expected(error: Exception) -> bool:
    """Whether an error is the input's fault, or a missing package, and not ours."""
    if isinstance(
        error, ImportError
    ):  # of an extra, missing or broken; Lightning's has no module name
        return (error.name or "").split(".")[0] != "kbf"
    if type(error) is RuntimeError and "home directory" in str(error):  # of an unknown ~user
        return True
    return isinstance(error, ValueError | OSError) or type(error).__module__.split(".")[0] in (
        "hydra",
        "omegaconf",
        "lightning",
    )


def one_line(error: Exception) -> str:
    """The message of an error, and of what caused it, on one line."""
    texts = [str(error)]
    if (
        isinstance(error, OSError) and error.strerror
    ):  # the system's own: which file, and what is wrong with it
        texts = [str(name) for name in (error.filename2 or error.filename,) if name] + [
            error.strerror.lower()
        ]
    if override := getattr(error, "override", None):
        texts.insert(
            0,
            f"{override!r} cannot be read (brackets must close, other signs need quotes: \"key='a b'\")",
        )
    if (lacks := LACKS.search(texts[0])) and lacks[1] in PLUGINS:
        return missing(*PLUGINS[lacks[1]], "this sweep")
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
    """Returns the text of ``kbf --help``."""
    lines = [
        "Kernel Bayes Filter in PyTorch.",
        "",
        "usage: kbf COMMAND [key=value ...]",
        "",
        "commands:",
    ]
    lines += [f"  {name:<13}{what}" for name, (what, _) in COMMANDS.items()]
    lines += ["", "options:", FLAGS, "  --version            the version", "", "examples:"]
    lines += [f"  {examples[0][0]}" for _, examples in COMMANDS.values()]
    return "\n".join([*lines, "", "kbf COMMAND --help lists the settings."])


def meanings(command: str) -> list[str]:
    """Returns the lines of a command's help that describe the printed metrics."""
    from kbf.commands.support.metric_descriptions import COLUMNS, METRICS

    if command not in ("train", "evaluate", "filter"):
        return []
    title, described = (
        ("columns of the output, behind sequence, step and time", COLUMNS)
        if command == "filter"
        else (FIGURES, METRICS)
    )
    return ["", f"{title}:", *[f"  {name:<22}{meaning}" for name, meaning in described.items()]]


def command_help(command: str) -> str:
    """Returns the text of ``kbf COMMAND --help``: purpose, examples, and the configuration with its groups."""
    what, examples = COMMANDS[command]
    lines = [f"kbf {command}: {what}", "", "examples:"]
    for line, meaning in examples:
        lines += [f"  {line}", f"      {meaning}"]
    directory = config_dir()
    text = (directory / f"{short(command)}.yaml").read_text(encoding="utf-8")
    head, _, body = text.partition("\n\n")
    lines[1:1] = [line.removeprefix("# ") for line in head.splitlines()[1:] if line.startswith("#")]
    lines += [
        "",
        "settings (key=value):",
        *[f"  {line}" for line in body.partition("\nhydra:")[0].splitlines() if line],
    ]
    if command == "data check":
        own = (
            (directory / "data" / "own.yaml")
            .read_text(encoding="utf-8")
            .partition("\n\n")[2]
            .partition("\nd: ")[0]
        )
        lines += [
            "",
            "settings of the recording:",
            *[f"  data.{line}" for line in own.splitlines()[1:]],
        ]
    lines += meanings(command)
    groups = groups_of(command)
    if groups:
        lines += ["", "groups (group=choice; group.key=value changes a key of the choice):"]
    for group in groups:
        lines.append(f"  {group:<12}{', '.join(choices_of(command, group))}")
    if "data" in groups:
        lines.append(
            f"  encoder@data.encoding.encoder, for images: {', '.join(choices_of(command, 'encoder'))}"
        )
        lines += (
            ["  settings of data=own: kbf data check --help"] if command != "data check" else []
        )
    return "\n".join([*lines, "", "options:", FLAGS])


if __name__ == "__main__":
    sys.exit(main())

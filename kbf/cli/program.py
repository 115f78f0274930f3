"""The program ``kbf``: reads the words of a command line and runs a command.

`kbf.config` composes the configuration. Nothing heavy is imported before a command runs, so that
``kbf --help`` answers at once.
"""

import os
import sys
from pathlib import Path
from typing import Any

from kbf import __version__
from kbf.cli.commands import COMMANDS
from kbf.cli.errors import expected, one_line, refuse, similar
from kbf.cli.execution import execute
from kbf.cli.help import command_help, general_help
from kbf.cli.sweep import multirun, root_logger_restored
from kbf.config.composition import composing, hydra_of, short, words_for_hydra
from kbf.config.prepare import configure, prepare
from kbf.runtime.hydra_quoting import exists, literal_names, literal_path

# Options that a word may follow: one of these, or None for any word, which is required then.
VALUES: dict[str, tuple[str, ...] | None] = {
    "--cfg": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    "--config-dir": None,
    "--config-name": None,
    "--package": None,
}
SWITCHES = ("--help", "--version", "--multirun", "--resolve", "--debug", "--list", "--watch")
OPTIONS = {*SWITCHES, "--shell-completion", *VALUES}
ABBREVIATIONS = {
    **{"-h": "--help", "-m": "--multirun", "-c": "--cfg", "-i": "--info", "-p": "--package"},
    **{"-cd": "--config-dir", "-cn": "--config-name", "-sc": "--shell-completion"},
}

# The setting that the first word of a command may give without its key.
FIRST_WORD = {
    **{"data render": "renderer", "reproduce": "name", "bench": "name"},
    **{"runs": "folder", "runs show": "folder"},
}

# Entries that `prepare` adds to a configuration; --cfg does not print them.
INTERNAL = ("bases", "explicit", "recipe", "own_data", "given", "references", "command")


def main(argv: list[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code: 0; 1 if a part of a comparison failed; 2 for input that cannot be used.
    """
    words, code = sys.argv[1:] if argv is None else argv, 0
    # OpenMP's threads wait for work in a loop by default: where other processes need the cores, two
    # threads are then several times slower than one. OpenMP reads this when PyTorch is loaded.
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        code = interpret(words)
        if sys.stdout is not None:
            sys.stdout.flush()
    # A full disk, or a reader that has closed the pipe. Python would flush again at its exit and
    # print an error of its own, so standard output is replaced.
    except OSError as error:
        if "--debug" in words:
            raise
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code or refuse(f"standard output: {one_line(error)}")
    if argv is None and (threads := sys.modules.get("kbf.runtime.threads")):
        threads.release_memory()  # the process ends
    return code


def interpret(argv: list[str]) -> int:
    """Run a command, without flushing standard output; returns the exit code."""
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
    if (two_words := " ".join(words[:2])) in COMMANDS:
        words[:2] = [two_words]
    command, *overrides = words
    if command not in COMMANDS:
        return refuse(
            f"there is no command {command!r}{similar(command, COMMANDS)}; see kbf --help"
        )
    if "--list" in options and command not in ("reproduce", "bench"):
        return refuse("there is no option --list; see kbf --help")
    if "--watch" in options and command != "runs":
        return refuse("--watch is an option of kbf runs; see kbf --help")
    overrides += ["watch=true"] if "--watch" in options else []
    if "--help" in options:
        print(command_help(command))
        return 0
    overrides = with_keys(command, overrides)
    for word in overrides:
        key, equals, _ = word.partition("=")
        if not key.lstrip("+~") or not (equals or key.startswith("~")):
            hint = similar(f"{command} {word}", COMMANDS)
            reason = f"{word!r} is no setting: write key=value{hint}; see kbf {command} --help"
            return refuse(reason, command)
    if "--multirun" not in options:
        overrides = [literal_names(literal_path(word)) for word in overrides]
    try:
        if "--list" not in options:
            return run(command, overrides, options)
        names = names_of_studies(command)
    except KeyboardInterrupt:
        advice = " (kbf train ckpt_path=RUN/checkpoints/last.ckpt continues, or encoder.ckpt)"
        shown = advice if command == "train" else ""
        print(f"\nkbf: interrupted; what was finished is kept{shown}", file=sys.stderr)
        return 130
    except Exception as error:
        if "--debug" in options or not expected(error):
            raise
        return refuse(one_line(error), command)
    print(names)  # here, since `main` handles the errors of standard output
    return 0


def read_words(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """Returns the words of a command line without options, and the options with their values.

    Raises:
        ValueError: an unknown option, or one without the word that it requires.

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
        follows = not given and rest and not rest[0].startswith("-")
        if follows and (choices is None or rest[0] in choices):
            value = rest.pop(0)
        if choices is None and not value:
            raise ValueError(f"{word} requires a word after it")
        if choices and value and value not in choices:
            several = ", ".join(choices)
            raise ValueError(f"{word} must be followed by one of {several}; got {value!r}")
        options[name] = value
    return left, options


def with_keys(command: str, overrides: list[str]) -> list[str]:
    """Returns the settings of a command, with the key of a first word that is a name or a file.

    >>> with_keys("bench", ["step", "threads=2"])
    ['name=step', 'threads=2']
    """
    first, *others = overrides or [""]
    if first and command == "data check" and ("=" not in first or exists(first)):
        return [literal_path(f"data.path={first}"), *others]
    if first and command in FIRST_WORD and "=" not in first:
        return [f"{FIRST_WORD[command]}={first}", *others]
    return overrides


def names_of_studies(command: str) -> str:
    """Returns what ``--list`` prints: each benchmark or experiment with a description."""
    from kbf.commands.support.workshop import load_study

    names = (
        load_study("benchmarks").BENCHMARKS
        if command == "bench"
        else load_study("papers").EXPERIMENTS
    )
    return "\n".join(f"{name:<20}{description}" for name, description in names.items())


def run(command: str, overrides: list[str], options: dict[str, str]) -> int:
    """Compose the configuration, and run the command or print the configuration."""
    folders: tuple[str, ...] = ()
    if folder := options.get("--config-dir"):
        if not Path(folder).is_dir():
            raise ValueError(f"--config-dir: there is no folder {folder}")
        folders = (f"file://{Path(folder).resolve()}",)
    name = options.get("--config-name")
    if "--info" in options:
        words = words_for_hydra(command, overrides)
        with hydra_of(command, folders) as hydra, root_logger_restored():
            hydra.show_info(options["--info"] or "all", name or short(command), words)
        return 0
    if not options.keys().isdisjoint({"--cfg", "--resolve", "--package"}):
        with composing(command, overrides, name=name, folders=folders) as composed:
            print(shown_configuration(command, composed, overrides, options), end="")
        return 0
    if "--multirun" in options:
        return multirun(command, overrides, name, folders)
    code = execute(command, configure(command, overrides, name=name, folders=folders))
    return code if isinstance(code, int) else 0


def shown_configuration(
    command: str, composed: Any, overrides: list[str], options: dict[str, str]
) -> str:
    """Returns what ``--cfg`` prints, as YAML.

    Raises:
        ValueError: the configuration does not have the part of ``--package``.
    """
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    which, resolve = options.get("--cfg", ""), "--resolve" in options
    config: Any = prepare(command, composed, overrides)
    if which in ("hydra", "all"):
        container = OmegaConf.to_container(HydraConfig.instance().cfg, resolve=False)  # pyright: ignore
        hydra: Any = OmegaConf.create(container)
        del hydra.hydra["help"], hydra.hydra["hydra_help"]  # templates of texts
        config = OmegaConf.merge(hydra, composed) if which == "all" else hydra
    elif which and not resolve:
        config = composed
    else:
        config = {key: value for key, value in config.items() if key not in INTERNAL}
    config = OmegaConf.create(config)
    if resolve:
        container = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
        config = OmegaConf.create(container)  # pyright: ignore
    if part := options.get("--package"):
        config = OmegaConf.select(config, part)
        if config is None:
            raise ValueError(f"--package: there is no {part} in this configuration")
    return OmegaConf.to_yaml(config) if OmegaConf.is_config(config) else f"{config}\n"


def complete_words(words: list[str]) -> int:
    """Print what the shell evaluates for completion, or the candidates for its next word.

    ``install=SHELL`` and ``uninstall=SHELL`` print the former, ``query=SHELL`` the latter. The line
    is in COMP_LINE, as of every program that Hydra completes; its first word after ``kbf`` is the
    command.
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

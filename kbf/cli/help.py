"""Help texts of ``kbf`` and of its commands."""

from kbf.cli.commands import COMMANDS
from kbf.config.composition import choices_of, config_dir, groups_of, short

OPTIONS_TEXT = """\
  -h, --help           this text
  -m, --multirun       run once for each combination of comma-separated values
  --cfg [WHICH]        print the configuration and stop: job, hydra or all as composed (--resolve
                       resolves interpolations; --package NAME prints a part); without a word
                       after it the configuration that the command receives
  --info [WHAT]        how it was composed: defaults, defaults-tree, config, plugins, searchpath
                       or all
  --config-dir FOLDER  further choices of groups (data/mine.yaml becomes data=mine); equivalent to
                       hydra.searchpath=[file://FOLDER]
  --config-name NAME   another primary configuration than that of the command
  --shell-completion   install=bash (zsh, fish): eval "$(kbf --shell-completion install=bash)"
  --watch              of kbf runs: show the table again while runs are written
  --debug              show the traceback of an error"""
METRICS_TITLE = """\
metrics, of which each model and data set has some (on the screen shares are percentages; _raw:
before recalibration, _smoothed: of the smoother)"""


def general_help() -> str:
    """Returns the text of ``kbf --help``."""
    lines = ["Kernel Bayes Filter in PyTorch.", "", "usage: kbf COMMAND [key=value ...]"]
    lines += ["", "commands:", *[f"  {name:<13}{what}" for name, (what, _) in COMMANDS.items()]]
    lines += ["", "options:", OPTIONS_TEXT, "  --version            the version"]
    lines += ["", "examples:", *[f"  {examples[0][0]}" for _, examples in COMMANDS.values()]]
    return "\n".join([*lines, "", "kbf COMMAND --help lists the settings."])


def command_help(command: str) -> str:
    """Returns the text of ``kbf COMMAND --help``: purpose, examples, settings and groups."""
    what, examples = COMMANDS[command]
    directory = config_dir()
    text = (directory / f"{short(command)}.yaml").read_text(encoding="utf-8")
    head, _, body = text.partition("\n\n")
    lines = [f"kbf {command}: {what}"]
    lines += [line.removeprefix("# ") for line in head.splitlines()[1:] if line.startswith("#")]
    lines += ["", "examples:"]
    for words, meaning in examples:
        lines += [f"  {words}", f"      {meaning}"]
    settings = body.partition("\nhydra:")[0].splitlines()
    lines += ["", "settings (key=value):", *[f"  {line}" for line in settings if line]]
    if command == "data check":
        text = (directory / "data" / "own.yaml").read_text(encoding="utf-8").partition("\n\n")[2]
        own = text.partition("\nd: ")[0].splitlines()[1:]
        lines += ["", "settings of the recordings:", *[f"  data.{line}" for line in own]]
    lines += printed_names(command)
    if groups := groups_of(command):
        lines += ["", "groups (group=choice; group.key=value changes a key of the choice):"]
        lines += [f"  {group:<12}{', '.join(choices_of(command, group))}" for group in groups]
    if "data" in groups:
        encoders = ", ".join(choices_of(command, "encoder"))
        lines.append(f"  encoder@data.encoding.encoder, for images: {encoders}")
        if command != "data check":
            lines.append("  settings of data=own: kbf data check --help")
    return "\n".join([*lines, "", "options:", OPTIONS_TEXT])


def printed_names(command: str) -> list[str]:
    """Returns the lines of a command's help that describe metrics or columns of the output."""
    from kbf.commands.support.metric_descriptions import COLUMNS, METRICS

    if command not in ("train", "evaluate", "filter"):
        return []
    title, described = METRICS_TITLE, METRICS
    if command == "filter":
        title, described = "columns of the output, after recording, step and time", COLUMNS
    width = max(map(len, described)) + 2
    return ["", f"{title}:", *[f"  {name:<{width}}{text}" for name, text in described.items()]]

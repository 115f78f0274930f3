"""Pages of the commands: purpose, examples, and tables of settings, groups and options."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from kbf.cli.commands import COMMANDS
from kbf.cli.help import OPTIONS_TEXT
from kbf.commands.support.metric_descriptions import COLUMNS, METRICS
from kbf.config.composition import choices_of, config_dir, groups_of, short

SETTING = re.compile(r"(?P<key>\w+): *(?P<default>.*?) *(?:# (?P<meaning>.*))?")
OPTION = re.compile(r"  (?P<flag>--?\w.*?) {2,}(?P<meaning>.*)")


class Setting(NamedTuple):
    """One setting of a configuration file."""

    key: str
    default: str
    meaning: str


def settings_of(text: str) -> list[Setting]:
    """The settings of a YAML text, one a line; comments without a key continue the one before.

    Raises:
        ValueError: a line that is neither a setting nor a comment.
    """
    found: list[Setting] = []
    for line in filter(None, text.splitlines()):
        if match := SETTING.fullmatch(line):
            found.append(Setting(match["key"], match["default"], match["meaning"] or ""))
        elif line.lstrip().startswith("# ") and found:
            last = found.pop()
            found.append(last._replace(meaning=f"{last.meaning} {line.lstrip('# ')}"))
        else:
            raise ValueError(f"no setting and no comment: {line!r}")
    return found


def command_page(name: str) -> str:
    """The page of a command: what ``kbf NAME --help`` prints, as tables."""
    what, examples = COMMANDS[name]
    text = (config_dir() / f"{short(name)}.yaml").read_text(encoding="utf-8")
    head, _, body = text.partition("\n\n")
    notes = [line.removeprefix("# ") for line in head.splitlines()[1:] if line.startswith("#")]
    lines = [f"# kbf {name}\n", f"{sentence(what)}.", *notes, "", "## Examples\n"]
    for words, meaning in examples:
        lines += [f"{sentence(meaning)}:\n", f"```sh\n{words}\n```\n"]
    lines += ["## Settings\n", "Settings are given as `key=value`.\n"]
    lines += settings_table(settings_of(body.partition("\nhydra:")[0]))
    if name == "data check":
        own = (config_dir() / "data" / "own.yaml").read_text(encoding="utf-8").partition("\n\n")[2]
        stated = settings_of(own.partition("\nd: ")[0])[1:]  # without the name
        lines += ["\n## Settings of the recordings\n"]
        lines += settings_table(each._replace(key=f"data.{each.key}") for each in stated)
    if printed := {"train": METRICS, "evaluate": METRICS, "filter": COLUMNS}.get(name):
        title = "Columns of the output" if printed is COLUMNS else "Metrics"
        lines += [f"\n## {title}\n", *table(("name", "meaning"), named(printed.items()))]
    lines += group_lines(name)
    lines += ["\n## Options\n", *table(("option", "meaning"), named(options()))]
    return "\n".join(lines) + "\n"


def settings_table(settings: Iterable[Setting]) -> list[str]:
    """The table of settings."""
    rows = [
        (code(key), "required" if default == "???" else code(default), escaped(meaning))
        for key, default, meaning in settings
    ]
    return table(("key", "default", "meaning"), rows)


def group_lines(name: str) -> list[str]:
    """The table of a command's groups of configurations; empty without groups."""
    groups = groups_of(name)
    if not groups:
        return []
    rows = [(code(group), ", ".join(map(code, choices_of(name, group)))) for group in groups]
    if "data" in groups:
        encoders = ", ".join(map(code, choices_of(name, "encoder")))
        rows.append((f"{code('encoder@data.encoding.encoder')}, for images", encoders))
    lines = [
        "\n## Groups\n",
        "`group=choice` selects a choice, `group.key=value` changes one of its settings "
        "([configuration](../configuration.md)).\n",
        *table(("group", "choices"), rows),
    ]
    if "data" in groups and name != "data check":
        lines.append("\nSettings of `data=own`: [`kbf data check`](data_check.md).")
    return lines


def options() -> list[tuple[str, str]]:
    """Flags of all commands and their meaning."""
    found: list[tuple[str, str]] = []
    for line in OPTIONS_TEXT.splitlines():
        if match := OPTION.fullmatch(line):
            found.append((match["flag"], match["meaning"]))
        else:
            flag, meaning = found.pop()
            found.append((flag, f"{meaning} {line.strip()}"))
    return found


def sentence(text: str) -> str:
    """The text with a capital, unless it begins with the name of a file."""
    return text if re.match(r"\S+\.\w", text) else text[0].upper() + text[1:]


def named(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Rows of names, as code, and their meaning."""
    return [(code(name), escaped(meaning)) for name, meaning in pairs]


def table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """The lines of a table."""
    return [
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def code(text: str) -> str:
    """The text as code in a cell of a table; empty stays empty."""
    return f"`{text}`" if text else ""


def escaped(text: str) -> str:
    """The text for a cell of a table."""
    return re.sub(r"([|*_<\[])", r"\\\1", text)

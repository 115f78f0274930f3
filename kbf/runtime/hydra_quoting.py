"""Quoting of file names in Hydra overrides, so that Hydra and OmegaConf take them literally."""

from __future__ import annotations

import re
from pathlib import Path

FILE_SETTINGS = (
    *("input", "output", "checkpoint", "state", "out", "run_dir", "ckpt_path"),
    *("data.path", "data.table", "data.frames", "data.images"),
)
"""Settings that name a file or a folder."""

USUAL = re.compile(r"[\w./:+@%~^-]*")
"""Values that need no quotes."""


def quoted(text: str) -> str:
    r"""A word that hydra takes as it is, and that OmegaConf fills nothing into.

    In quotes of hydra's, backslashes count only before a quote; in OmegaConf's text only before
    ``${``.

    >>> print(quoted("it's a=b"), quoted(r"C:\a"), quoted("${a}"))
    'it\'s a=b' 'C:\a' '\${a}'
    """
    text = re.sub(
        r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), as_text(text)
    )
    return f"'{text}'"


def as_text(text: str) -> str:
    """A text into which OmegaConf fills nothing."""
    return re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + r"\${", text)


def unquoted(word: str) -> str:
    """Returns the file name of a word of the command line: the inverse of `quoted`."""
    if len(word) < 2 or word[0] != word[-1] or word[0] not in "'\"":
        return word
    text = re.sub(
        rf"(\\+)({word[0]}|$)", lambda found: found[1][: len(found[1]) // 2] + found[2], word[1:-1]
    )
    return re.sub(r"(\\+)\$\{", lambda found: found[1][: len(found[1]) // 2] + "${", text)


def literal_path(word: str) -> str:
    """Returns ``key=value`` with the value quoted if it names a file and has a special sign.

    Quotes that a person has written stay, and so does what is to be filled in
    (``run_dir=runs/${seed}``), unless there is a file of just this name.
    """
    key, equals, value = word.partition("=")
    if (
        not equals
        or key.lstrip("+") not in FILE_SETTINGS
        or (USUAL.fullmatch(value) and not value.startswith("~"))
    ):
        return word
    there = exists(value)
    if value.startswith("~"):
        return f"{key}={quoted(str(Path.cwd() / value) if there else value)}"
    mine = value[0] in "'\"[" or "${" in value
    return word if mine and not there else f"{key}={quoted(value)}"


def exists(name: str) -> bool:
    """Whether there is a file or a folder of this name, which may be no possible name at all."""
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False

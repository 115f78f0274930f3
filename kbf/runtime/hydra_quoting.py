"""Quoting of file names in Hydra overrides, so that Hydra and OmegaConf read them literally."""

import re
from pathlib import Path

# Settings that name a file or a folder, or are a sign or a format with signs.
LITERAL_SETTINGS = (
    *("input", "output", "checkpoint", "state", "out", "run_dir", "ckpt_path", "folder", "csv"),
    *("data.path", "data.table", "data.frames", "data.images"),
    *("data.date_format", "data.decimal", "data.thousands", "data.comment"),
)

# Values that require no quotes.
USUAL = re.compile(r"[\w./:+@%~^-]*")


def quoted(text: str) -> str:
    r"""Returns a word that Hydra and OmegaConf read as exactly this text.

    Inside of Hydra's quotes, a backslash escapes a quote only; in OmegaConf's text, ``${`` only.

    >>> print(quoted("it's a=b"), quoted(r"C:\a"), quoted("${a}"))
    'it\'s a=b' 'C:\a' '\${a}'
    """
    text = re.sub(
        r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), as_text(text)
    )
    return f"'{text}'"


def as_text(text: str) -> str:
    """Returns a text with ``${`` escaped, so that OmegaConf does not interpolate it."""
    return re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + r"\${", text)


def literal_path(word: str) -> str:
    """Returns ``key=value`` with the value quoted if it is to be literal and has a special sign.

    Quotes on the command line stay, and so do interpolations (``run_dir=runs/${seed}``), unless a
    file of exactly this name exists.
    """
    key, equals, value = word.partition("=")
    if (
        not equals
        or key.lstrip("+") not in LITERAL_SETTINGS
        or (USUAL.fullmatch(value) and not value.startswith("~"))
    ):
        return word
    there = exists(value)
    if value.startswith("~"):
        return f"{key}={quoted(str(Path.cwd() / value) if there else value)}"
    mine = value[0] in "'\"[" or "${" in value
    return word if mine and not there else f"{key}={quoted(value)}"


def exists(name: str) -> bool:
    """Whether a file or a folder of this name exists; False for impossible names."""
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False

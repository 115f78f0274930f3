"""Quoting of file names in Hydra overrides, so that Hydra and OmegaConf read them literally."""

import re
from pathlib import Path

# Settings that name a file or a folder, or are a sign or a format with signs.
LITERAL_SETTINGS = (
    *("input", "output", "checkpoint", "state", "out", "run_dir", "ckpt_path", "folder", "csv"),
    *("data.path", "data.table", "data.frames", "data.images"),
    *("data.date_format", "data.decimal", "data.thousands", "data.comment"),
)

# Settings that name columns, in lists, or as the keys of a mapping.
NAME_SETTINGS = (
    *("data.states", "data.observations", "data.controls", "data.angles", "data.rotations"),
    *("data.time", "data.recording", "data.mask", "data.sensors", "data.bounds", "data.missing"),
    *("data.latency", "data.units"),
)

# Values that require no quotes.
USUAL = re.compile(r"[\w./:+@%~^-]*")

# Names that Hydra reads without quotes: letters of ASCII, numbers, and some signs.
PLAIN_NAME = re.compile(r"[A-Za-z0-9_/\\+.$%*@?| -]*", re.ASCII)

# Signs that a backslash escapes in the key of a mapping.
SIGNS = re.compile(r"([()\[\]])")


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


def literal_names(word: str) -> str:
    r"""Returns ``key=value`` with the names of columns in it quoted where Hydra requires that.

    Names that are quoted stay, and so do interpolations.

    >>> print(literal_names("data.states=[CO(GT),a]"), literal_names("data.latency={T(K): 2}"))
    data.states=['CO(GT)',a] data.latency={T\(K\): 2}
    """
    key, equals, value = word.partition("=")
    if not equals or key.lstrip("+") not in NAME_SETTINGS or "${" in value:
        return word
    return f"{key}={with_quoted_names(value.strip())}"


def with_quoted_names(value: str) -> str:
    """Returns a name, a list of names, or a mapping from names, as Hydra reads it."""
    if value[:1] == "[" and value[-1:] == "]":
        names = [with_quoted_names(each.strip()) for each in split_at(value[1:-1], ",")]
        return f"[{','.join(names)}]"
    if value[:1] == "{" and value[-1:] == "}":
        pairs = []
        for pair in split_at(value[1:-1], ","):
            name, *values = split_at(pair, ":", 1)
            values = [with_quoted_names(each.strip()) for each in values]
            pairs.append(": ".join([SIGNS.sub(r"\\\1", name.strip()), *values]))
        return "{" + ", ".join(pairs) + "}"
    if value[:1] in ("'", '"') or PLAIN_NAME.fullmatch(value):
        return value
    return quoted(value.strip())


def split_at(text: str, sign: str, most: int = -1) -> list[str]:
    """Returns the parts of a text between a sign outside of brackets and quotes.

    >>> split_at("a, 'b,c', d(1,2), [e,f]", ",")
    ['a', " 'b,c'", ' d(1,2)', ' [e,f]']
    """
    parts, depth, quote = [""], 0, ""
    for each in text:
        quote = "" if each == quote else quote or (each if each in "'\"" else "")
        depth += 0 if quote else (each in "([{") - (each in ")]}")
        if each == sign and not depth and not quote and len(parts) != most + 1:
            parts.append("")
        else:
            parts[-1] += each
    return parts


def exists(name: str) -> bool:
    """Whether a file or a folder of this name exists; False for impossible names."""
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False

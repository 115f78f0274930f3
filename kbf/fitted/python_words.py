"""Messages about data with arguments of `kbf.fit` in place of the settings of a command.

Readers and checks of files name settings, such as ``data.recording=COLUMN``.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from kbf.data.files.layout import TEXT_SETTINGS, Layout
from kbf.runtime.errors import DataError

# Settings with other names than the fields of a layout.
OTHERS = (
    *("path", "angles", "rotations", "angle_unit", "sensors", "bounds", "units", "latency"),
    *("allow_missing_sensors", "time_as_control", "control_timing", "test", "validation", "split"),
)

# A setting, as ``data.name``, with a value or without; no file, as data.csv. Angles and their unit
# are one argument.
SETTING = re.compile(
    rf"\bdata\.({'|'.join([*OTHERS, *Layout._fields])})\b"
    r"(?:=(\{(?:[^{}]|\{[^}]*\})*\}|\[[^]]*\]|'[^']*'|[\w-]+))?"
)
ANGLES = re.compile(r"data\.angles=\[([^]]*)\] data\.angle_unit=(\w+)")

# A name or word in a value: no number, and not in quotes.
NAME = re.compile(r"(?<![\w'\".])[^\W\d][^\[\]{}:,'\"]*")
CONSTANTS = {"true": "True", "false": "False", "null": "None"}


@contextmanager
def in_python() -> Iterator[None]:
    """Context that raises errors about data as `DataError`, with arguments of `kbf.fit`."""
    try:
        yield
    except FileNotFoundError:
        raise
    except ValueError as error:
        raise DataError(python_words(str(error))) from error


def python_words(text: str) -> str:
    """Return a message with arguments of `kbf.fit` in place of settings.

    >>> python_words("set data.missing={a: [0]} or data.time_as_control=true")
    "set missing={'a': [0]} or time_as_control=True"
    >>> python_words("data.angles=[h, T(K)] data.angle_unit=degrees")
    "angles={'h': 'degrees', 'T(K)': 'degrees'}"
    >>> python_words("data.thousands=',' declares it")
    "reading={'thousands': ','} declares it"
    """
    if found := ANGLES.search(text):
        names = ", ".join(f"{name}: {found[2]}" for name in found[1].split(", "))
        text = text.replace(found[0], f"data.angles={{{names}}}")
    return SETTING.sub(argument, text)


def argument(found: re.Match[str]) -> str:
    """Return a setting as an argument."""
    name, value = found[1], found[2]
    if value is None:
        return name
    if value in CONSTANTS or value[0] in "[{":
        value = NAME.sub(lambda word: CONSTANTS.get(word[0], repr(word[0])), value)
    elif NAME.fullmatch(value):
        value = repr(value)
    return f"reading={{{name!r}: {value}}}" if name in TEXT_SETTINGS else f"{name}={value}"

"""How the text of a table is written: encoding, lines that are no rows, delimiter, marks."""

import bz2
import csv
import gzip
import io
import itertools
import lzma
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile, ZipFile

import numpy as np

from kbf.data.files.layout import MAX_BYTES, Layout, check_bytes, normalised

# Contents of a cell, in lower case, that represent a missing value.
EMPTY_CELLS = {
    *("", "nan", "-nan", "na", "n/a", "#n/a", "null", "none", "-", "--", "---", "?"),
    *("1.#qnan", "-1.#ind"),  # as the C library of Windows writes it
}

# A number with a decimal comma.
DECIMAL_COMMA = re.compile(r"-?\d+,\d+")

# A number with a mark that may be that of thousands, as in 1,234 or 12,345,678.5.
GROUPED = re.compile(r"-?[1-9]\d{0,2}((?:,\d{3})+(?:\.\d*)?|(?:\.\d{3})+(?:,\d*)?)")

# A column of at least this many such numbers has no decimals if all others are below 1000 and
# whole. Of numbers that have three decimals a tenth ends in 0, which is written in all or in none.
MIN_GROUPED = 5

# The first line of a text that Excel reads as its delimiter.
DELIMITER_LINE = re.compile(r"\s*\"?sep=(.)\"?\s*", re.IGNORECASE)

# Delimiters that are recognised. The last one, the unit separator of ASCII, takes the place of
# spaces that separate or align columns.
ALIGNED = "\x1f"
DELIMITERS = f";\t,|{ALIGNED}"

# Lines of which the numbers of delimiters are compared.
LINES_OF_DIALECT = 20

# Bytes that a text in UTF-16 begins with.
UTF_16 = (b"\xff\xfe", b"\xfe\xff")

# Bytes of the beginning of a text that show how it is written.
BYTES_OF_DIALECT = 2**18


def text_of(path: Path, layout: Layout, most: int | None = None) -> str:
    """Returns the text of a file, which may be compressed; or the whole lines of its beginning.

    Lines that are no rows are blank: those to skip, comments, and the rest of empty rows that
    spreadsheets leave at the end.

    Args:
        path: of a text, or of one that is compressed: ``.gz``, ``.bz2``, ``.xz``, or alone in a
            ``.zip``.
        layout: encoding of the text, lines to skip and comments.
        most: bytes that are read; None for all.

    Raises:
        ValueError: damaged, too large, or not text in this encoding.
    """
    encoding = layout.text_encoding
    try:
        with opened(path) as file:
            content = file.read(most or MAX_BYTES + 1)
        check_bytes(len(content), path)
        if encoding is None and content[:2] in UTF_16:
            encoding = "utf-16"
        whole = len(content) != most
        if not whole and encoding != "utf-16":
            content = content[: content.rfind(b"\n") + 1] or content
        text = content.decode(encoding or "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not text in {encoding or 'UTF-8'}: {error.reason} at byte {error.start}; "
            "save it as UTF-8, or name its encoding, as in data.text_encoding=latin-1"
        ) from error
    except LookupError as error:
        raise ValueError(f"data.text_encoding: there is no encoding {encoding!r}") from error
    except (EOFError, BadZipFile, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    text = text if "\n" in text else text.replace("\r", "\n")
    if layout.skip_lines:
        text = "\n" * layout.skip_lines + text.split("\n", layout.skip_lines)[-1]
    if layout.comment:
        text = re.sub(rf"(?m)^[ \t]*{re.escape(layout.comment)}.*$", "", text)
    text = without_alignment(text)
    return without_empty_rows(text) if whole else text


def without_alignment(text: str) -> str:
    r"""Returns a text with `ALIGNED` between cells that are separated, or aligned, by spaces.

    >>> without_alignment("  t   x\n0.1   5\n0.2  10\n")
    't\x1fx\n0.1\x1f5\n0.2\x1f10\n'
    >>> without_alignment("body temperature\n36.5\n")
    'body temperature\n36.5\n'
    """
    lines = [line for line in text[:BYTES_OF_DIALECT].splitlines() if line.strip()]
    lines = lines[:LINES_OF_DIALECT]
    cells = {len(line.split()) for line in lines}
    if len(lines) < 2 or len(cells) != 1 or cells == {1}:
        return text
    if any(sign in line for line in lines for sign in f'{DELIMITERS}"'):
        return text
    return re.sub(r"(?<=\S) +(?=\S)", ALIGNED, re.sub(r"(?m)^ +| +$", "", text))


def without_empty_rows(text: str) -> str:
    r"""Returns a text without rows at its end that consist of delimiters.

    >>> without_empty_rows("a;b\n1;2\n3;\n;\n;;,,\n")
    'a;b\n1;2\n3;\n'
    """
    end = len(text)
    while (start := text.rfind("\n", 0, max(end - 1, 0)) + 1) and not text[start:end].strip(
        ";,\t \r\n"
    ):
        end = start
    return text[:end]


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Opens a file, or the only one in an archive.

    Raises:
        ValueError: an archive of several files.
    """
    if path.suffix.lower() == ".zip":
        with ZipFile(path) as archive, archive.open(file_in(archive, path)) as file:
            yield file
    else:
        openers = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
        with openers.get(path.suffix.lower(), open)(path, "rb") as file:
            yield file


def file_in(archive: ZipFile, path: Path) -> str:
    """Returns the name of the only file in an archive; macOS adds hidden ones.

    Raises:
        ValueError: it has none, or several.
    """
    names = [
        name
        for name in archive.namelist()
        if not name.endswith("/")
        and not name.startswith("__MACOSX/")
        and not Path(name).name.startswith(".")
    ]
    if len(names) != 1:
        raise ValueError(f"{path} holds {len(names)} files; a table is one file: unpack them")
    return names[0]


class Dialect(NamedTuple):
    """How a text is written.

    Attributes:
        header: names of the columns. width: number of cells of each line; unnamed columns at the
            end hold nothing. lines: that the header takes, with blank lines before it, and units.
        delimiter: comma, semicolon, tab, or another that the first line names. decimal: point or
            comma. doubtful: a number by column that may be a thousand or a decimal.
    """

    header: list[str]
    width: int
    lines: int
    delimiter: str
    decimal: str
    doubtful: dict[str, str]


def dialect_of(path: Path, layout: Layout) -> Dialect:
    """Returns the dialect of a text from its first lines.

    The decimal mark is a comma if that is not the delimiter and there are numbers with it.

    Raises:
        ValueError: as `text_of`, or the header is no CSV.
    """
    text = text_of(path, layout, BYTES_OF_DIALECT)
    lines = [line for line in text.splitlines() if line.strip()]
    named = DELIMITER_LINE.fullmatch(lines[0]) if lines else None
    before = 0  # lines up to the one that names the delimiter
    if named:
        before = text.count("\n", 0, text.index(lines[0])) + 1
        text = text.replace(lines.pop(0), "", 1)
    delimiter = named[1] if named else delimiter_of(lines)
    reader = csv.reader(io.StringIO(text), delimiter=delimiter, strict=True)
    header: list[str] = []
    try:
        if layout.header:
            header = next((cells for cells in reader if any(cells)), [])
        elif lines:
            count = len(next(csv.reader(lines, delimiter=delimiter, strict=True)))
            header = [f"c{k}" for k in range(1, count + 1)]
        end = max(reader.line_num, before)
        if layout.units_row:
            next((cells for cells in reader if any(cells)), [])
            end = reader.line_num
    except csv.Error as error:
        raise ValueError(f"{path}, row {reader.line_num}: this is not CSV: {error}") from error
    width = len(header)
    # Letters with accents are one character, or two as in names of macOS.
    names = [normalised(name.strip()) for name in header]
    while names and not names[-1].strip(",; "):
        names.pop()
    rows = [[cell.strip(' "') for cell in line.split(delimiter)] for line in lines]
    decimal, thousands = layout.decimal, layout.thousands
    if decimal is None:
        commas = delimiter != "," and thousands != ","
        commas = commas and any(DECIMAL_COMMA.fullmatch(cell) for row in rows for cell in row)
        decimal = "," if commas or thousands == "." else "."
    doubtful = {} if layout.decimal or thousands else doubtful_numbers(names, rows[1:])
    return Dialect(names, width, end, delimiter, decimal, doubtful)


def delimiter_of(lines: list[str]) -> str:
    """Returns the delimiter of lines: the first of `DELIMITERS` that all have alike.

    >>> delimiter_of(["1,5;2,5", "1,7;2"]), delimiter_of(["a,b", "1,2;3"])
    (';', ',')
    """
    bare = [re.sub('"[^"]*"', "", line) for line in lines[:LINES_OF_DIALECT]] or [""]
    for delimiter in DELIMITERS:
        counts = {line.count(delimiter) for line in bare}
        if len(counts) == 1 and counts != {0}:
            return delimiter
    return max(f",;\t|{ALIGNED}", key=bare[0].count)


def doubtful_numbers(names: list[str], rows: list[list[str]]) -> dict[str, str]:
    """Returns by column a number as 1,234 if it may be 1234: no other has fewer decimals."""
    found = {}
    columns = itertools.zip_longest(*rows, fillvalue="")
    for name, cells in zip(names, columns, strict=False):
        grouped = [cell for cell in cells if GROUPED.fullmatch(cell)]
        others = {cell for cell in cells if cell.lower() not in EMPTY_CELLS} - set(grouped)
        small = bool(others) and all(re.fullmatch(r"-?\d{1,3}", cell) for cell in others)
        if len(grouped) >= MIN_GROUPED and small:
            found[name] = grouped[0]
    return found


def rows_of(content: bytes, dialect: Dialect, path: Path) -> tuple[np.ndarray, int]:
    """Returns the line numbers of the rows below the header, without blank lines, and their width.

    Rows may all have the same number of further cells at the end, which then must be empty.

    Raises:
        ValueError: a line with another number of cells than the header, or that is no CSV.
    """
    if b'"' in content:
        counts, at = [], []
        lines_of_text = io.TextIOWrapper(io.BytesIO(content), "utf-8", newline="")
        reader = csv.reader(lines_of_text, delimiter=dialect.delimiter, strict=True)
        done = 0
        try:
            for cells in reader:
                if len(cells) > 1 or (cells and (cells[0] == "" or cells[0].strip(" "))):
                    counts.append(len(cells))
                    at.append(reader.line_num)
                done = reader.line_num
        except csv.Error as error:
            raise ValueError(f"{path}, row {done + 1}: this is not CSV: {error}") from error
        lines, cells = np.array(at, dtype="int64"), np.array(counts, dtype="int64")
        lines, cells = lines[lines > dialect.lines], cells[lines > dialect.lines]
    else:
        raw = np.frombuffer(content, dtype=np.uint8)
        ends = np.append(np.flatnonzero(raw == ord("\n")), len(raw))
        marks = np.diff(
            np.searchsorted(np.flatnonzero(raw == ord(dialect.delimiter)), ends), prepend=0
        )
        filled = marks > 0
        for k in np.flatnonzero(~filled).tolist():  # blank, or the only cell of a column
            filled[k] = bool(raw[ends[k - 1] + 1 if k else 0 : ends[k]].tobytes().strip())
        filled[: dialect.lines] = False
        lines, cells = np.flatnonzero(filled) + 1, marks[filled] + 1
    width = dialect.width
    if len(cells) and cells[0] > width and (cells == cells[0]).all():
        width = int(cells[0])
    if (wrong := cells != width).any():
        k = int(wrong.argmax())
        raise ValueError(
            f"{path}, row {lines[k]}: {cells[k]} cells, the header has {dialect.width}"
        )
    return lines, width

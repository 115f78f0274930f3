"""Lines that cannot be read, anywhere in a stream, with on_error=stop and on_error=skip."""

from __future__ import annotations

import pytest
import torch

from kbf.commands.support.stream_reader import MAX_LINE_BYTES, InputColumns, LineError, RowReader
from kbf.data.files.column_schema import ColumnSchema, Part

COLUMNS = InputColumns(
    ColumnSchema((Part("number", ("z",)),), (Part("number", ("a",)), Part("number", ("b",))))
)
LONG = b"7" * (MAX_LINE_BYTES + 50_000)


def rows(data, skip=True, size=2**13):
    told: list[str] = []
    chunks = (data[k : k + size] for k in range(0, len(data), size))
    reader = RowReader(chunks, COLUMNS, torch.float64, on_unreadable=told.append if skip else None)
    return [None if row.obs is None else row.obs[0].tolist() for row in reader], told


@pytest.mark.parametrize("size", [1000, 2**13, 2**22])
def test_a_line_too_long_is_one_step_without_observation(size):
    data = b"a,b\n1,2\n" + LONG + b"\n3,4\n" + LONG + b"\n" + LONG + b"\n5,6\n"
    found, told = rows(data, size=size)
    assert found == [[1, 2], None, [3, 4], None, None, [5, 6]]
    assert [message.partition(":")[0] for message in told] == [
        f"standard input, line {k}" for k in (3, 5, 6)
    ]
    with pytest.raises(
        LineError, match=r"line 3: (no end of a line in 1,048,576 bytes|it has 1 columns)"
    ):
        rows(data, skip=False, size=size)


def test_one_that_never_ends_takes_no_memory_and_ends_with_the_input():
    found, told = rows(b"a,b\n1,2\n" + LONG)
    assert found == [[1, 2], None] and len(told) == 1


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xfe\x00",
        b"%%%",
        b"hello",
        b"[1, 2",
        b"{",
        b"GET / HTTP/1.1",
        b'"q',
        b"x\x00y",
        LONG,
        b"hello\n%%%\n\xff",
    ],
)
@pytest.mark.parametrize("header", [b"", b"b,a\n"])
def test_garbage_in_the_first_lines_is_skipped(garbage, header):
    found, told = rows(garbage + b"\n" + header + b"1,2\n3,4\n")
    assert found == ([[2, 1], [4, 3]] if header else [[1, 2], [3, 4]])
    assert len(told) == garbage.count(b"\n") + 1
    with pytest.raises(LineError, match="line 1"):
        rows(garbage + b"\n" + header + b"1,2\n", skip=False)


def test_a_header_without_the_columns_is_never_skipped():
    """Its rows would be taken for what they are not."""
    for header in (b"u,v", b"a,v", b"a,a", b"u,v,b"):
        with pytest.raises(LineError, match=r"line 1: (there is no column|two columns)"):
            rows(header + b"\n1,2\n")


def test_nothing_but_garbage_is_no_step():
    found, told = rows(b"%%%\n\xff\n" * 100)
    assert found == [] and len(told) == 200

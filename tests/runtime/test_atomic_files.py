"""Files on the disk: whole or absent, one writer at a time, no litter, and no flipped bit that goes
unnoticed.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kbf.runtime import atomic_files
from kbf.runtime.atomic_files import (
    check_archive,
    check_space,
    copy,
    replacing,
    runs,
    scratch,
    sweep,
    write_text,
)
from kbf.runtime.tensor_files import write_tensors


def dead_process() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_the_temporary_file_lies_beside_its_target_and_is_flushed_before_it_is_renamed(
    tmp_path, monkeypatch
):
    """Also where TMPDIR is on another file system, where a rename would copy."""
    monkeypatch.setenv(
        "TMPDIR", "/dev/shm" if Path("/dev/shm").is_dir() else str(tmp_path / "elsewhere")
    )
    done: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.replace
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: (done.append(("flush", os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd)),
    )
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append(("rename", str(a))), rename(a, b)))
    target = tmp_path / "text"
    with replacing(target) as temporary:
        assert temporary.parent == tmp_path
        temporary.write_text("new")
    assert done == [("flush", str(temporary)), ("rename", str(temporary)), ("flush", str(tmp_path))]
    assert target.read_text() == "new"


def test_an_error_leaves_the_old_file_alone(tmp_path):
    target = tmp_path / "text"
    write_text(target, "old")
    with pytest.raises(TypeError), replacing(target) as temporary:
        temporary.write_text(None)  # pyright: ignore[reportArgumentType]
    assert target.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["text"]
    copy(target, tmp_path / "other")
    assert (tmp_path / "other").read_text() == "old"


def test_sweep_removes_what_the_dead_left_and_nothing_else(tmp_path):
    gone, here = dead_process(), os.getpid()
    assert runs(here) and not runs(gone) and runs(1)
    (tmp_path / f".{gone}-last.ckpt").write_text("half")
    (tmp_path / f".{gone}-scratch").mkdir()
    (tmp_path / f".{gone}-scratch" / "codes.pt").write_text("")
    kept = {f".{here}-last.ckpt", ".hidden", "last.ckpt", f"{gone}-own", ".git-ignore"}
    for name in kept:
        (tmp_path / name).write_text("mine")
    sweep(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == kept
    sweep(tmp_path / "not there")


def test_whoever_writes_a_file_next_removes_what_was_to_become_it(tmp_path):
    gone = dead_process()
    for name in ("text", "other"):
        (tmp_path / f".{gone}-{name}").write_text("half")
    write_text(tmp_path / "text", "whole")
    assert {p.name for p in tmp_path.iterdir()} == {"text", f".{gone}-other"}


@pytest.mark.parametrize(
    "name",
    [
        "a=b.ckpt",
        "$HOME.ckpt",
        "it's.ckpt",
        'a"b.ckpt',
        "back\\slash.ckpt",
        "${a}.ckpt",
        "a b.ckpt",
    ],
)
def test_tensors_are_written_under_any_name(tmp_path, name):
    for folder in (tmp_path, tmp_path / name):
        write_tensors({"a": torch.arange(3)}, folder / "other" / name)
        check_archive(folder / "other" / name)
        assert torch.load(folder / "other" / name)["a"].tolist() == [0, 1, 2]
    assert (tmp_path / "other" / name).read_bytes() == (
        tmp_path / name / "other" / name
    ).read_bytes()


def test_scratch_is_inside_and_gone(tmp_path):
    with scratch(tmp_path / "cells") as folder:
        (folder / "x").write_text("")
        assert folder.parent == tmp_path / "cells" and folder.name.startswith(f".{os.getpid()}-")
    assert not (tmp_path / "cells").exists()
    with scratch(tmp_path):
        (tmp_path / "result").write_text("")
    assert [p.name for p in tmp_path.iterdir()] == ["result"]


def test_no_flipped_bit_goes_unnoticed(tmp_path):
    """Of 150 anywhere in the file and 150 among the headers at its end, each is refused or changes
    nothing.
    """
    path, truth = (
        tmp_path / "x.ckpt",
        {"a": torch.arange(300.0), "b": {"c": torch.tensor([1, 2]), "d": "text"}},
    )
    torch.save(truth, path)
    check_archive(path)
    whole, draw, refused = path.read_bytes(), random.Random(0), 0
    headers = whole.index(b"PK\x01\x02")
    bits = [draw.randrange(8 * len(whole)) for _ in range(150)] + [
        draw.randrange(8 * headers, 8 * len(whole)) for _ in range(150)
    ]
    for bit in bits:
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            check_archive(path)
        except ValueError:
            refused += 1
            continue
        try:
            found = torch.load(path, weights_only=True)
        except Exception:  # refused by PyTorch itself
            continue
        assert (
            torch.equal(found["a"], truth["a"])
            and torch.equal(found["b"]["c"], truth["b"]["c"])
            and found["b"]["d"] == "text"
        )
    assert refused > 150


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 broken zip"])
def test_what_is_no_archive_is_one_line(tmp_path, content):
    (tmp_path / "x.ckpt").write_bytes(content)
    with pytest.raises(ValueError, match="zip file") as told:
        check_archive(tmp_path / "x.ckpt")
    assert len(str(told.value).splitlines()) == 1
    with pytest.raises(FileNotFoundError):
        check_archive(tmp_path / "none.ckpt")


def test_flush_takes_what_cannot(tmp_path, monkeypatch):
    def refuse(_):
        raise OSError("not on this file system")

    monkeypatch.setattr(atomic_files.os, "fsync", refuse)
    write_text(tmp_path / "text", "new")
    assert (tmp_path / "text").read_text() == "new"


def test_a_full_disk_names_the_file(tmp_path):
    path = tmp_path / "a.csv"
    with pytest.raises(OSError, match=r"No space left on device: .*a\.csv"), replacing(path):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(FileNotFoundError, match="other"), replacing(path):  # it names a file itself
        (tmp_path / "other" / "x").read_text()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_nearly_full_is_noticed_before_any_work(tmp_path, monkeypatch):
    check_space(tmp_path / "new" / "run", 0)
    assert not (tmp_path / "new").exists()
    usage = SimpleNamespace(free=25 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    check_space(tmp_path, 5 * 2**20)
    message = r"25 MiB are free, and the results need 26: .*run"
    with pytest.raises(OSError, match=message):
        check_space(tmp_path / "new" / "run", 6 * 2**20)

"""Locks of files and folders; the former run of a directory stays until the new one is whole."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kbf.runtime.run_folders import (
    FORMER,
    LOCK,
    RESULT,
    check_no_result,
    locked,
    remove_former,
    set_aside,
    writer_of,
)

# No process has this number.
DEAD = 99999999
HOLD = (
    "import sys; from kbf.runtime.run_folders import locked\nwith locked(sys.argv[1]): print(1, "
    "flush=True); sys.stdin.read()"
)


def test_the_second_process_is_told_and_a_killed_one_stops_nobody(tmp_path):
    (tmp_path / f".{DEAD}-best.ckpt").write_text("half")
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None and process.stdout.readline() == b"1\n"
    assert [p.name for p in tmp_path.iterdir()] == [LOCK]  # the litter of an earlier one is swept
    told = f"is being written by process {process.pid}: wait until it ends, or name another"
    with pytest.raises(ValueError, match=told), locked(tmp_path):
        pass
    assert (tmp_path / LOCK).read_text() == f"process {process.pid}"
    process.kill()
    process.communicate()
    assert (tmp_path / LOCK).exists()
    with locked(tmp_path):
        assert (tmp_path / LOCK).read_text() == f"process {os.getpid()}"
        with pytest.raises(ValueError, match=f"by process {os.getpid()}"), locked(tmp_path):
            pass
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_locked_by_itself(tmp_path):
    out, other = tmp_path / "new" / "a.ckpt", tmp_path / "new" / "b.ckpt"
    with locked(out, file=True):
        assert [path.name for path in out.parent.iterdir()] == [f"{LOCK}-a.ckpt"]
        with locked(other, file=True), locked(out.parent):
            pass
        message = f"a.ckpt is being written by process {os.getpid()}: .* name another file"
        with pytest.raises(ValueError, match=message), locked(out, file=True):
            pass
    assert not out.parent.exists()  # a folder that was made for nothing
    with locked(out, file=True):
        out.write_text("x")
    assert list(out.parent.iterdir()) == [out]


def test_the_writer_of_a_folder(tmp_path):
    assert writer_of(tmp_path) is None
    with locked(tmp_path):
        assert writer_of(tmp_path) == f"process {os.getpid()}"
    (tmp_path / LOCK).write_text(f"process {DEAD}")  # of a process that was killed
    assert writer_of(tmp_path) is None


def test_no_lock_where_no_file_can_be_made(tmp_path):
    (tmp_path / "file").write_text("x")
    with locked(tmp_path / "file" / "folder"), locked(tmp_path / "file" / "x", file=True):
        assert [path.name for path in tmp_path.iterdir()] == ["file"]


def run_of(directory, text):
    """Write the files of a finished run."""
    (directory / "checkpoints").mkdir(parents=True, exist_ok=True)
    files = [directory / RESULT, directory / "checkpoints" / "best.ckpt"]
    for file in files:
        file.write_text(text)
    return files


def test_the_former_run_stays_until_the_new_one_is_whole(tmp_path):
    check_no_result(tmp_path, overwrite=False)
    files = run_of(tmp_path, "first")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds a finished run: name another run_dir"):
        check_no_result(tmp_path, overwrite=False)
    check_no_result(tmp_path, overwrite=True)
    set_aside(tmp_path, files)
    assert not any(file.exists() for file in files) and (tmp_path / "notes.txt").exists()
    files[1].write_text("second, interrupted")
    set_aside(tmp_path, files)  # a third one
    former = [tmp_path / FORMER / file.relative_to(tmp_path) for file in files]
    assert [file.read_text() for file in former] == ["first", "first"]
    assert not files[1].exists()
    run_of(tmp_path, "third")
    remove_former(tmp_path)
    assert not (tmp_path / FORMER).exists() and files[0].read_text() == "third"


def test_a_process_that_is_killed_while_it_moves_loses_nothing(tmp_path, monkeypatch):
    files = run_of(tmp_path, "first")
    replace = os.replace

    def killed(source, target):
        if Path(source).name == RESULT:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        set_aside(tmp_path, files)
    monkeypatch.setattr(os, "replace", replace)
    assert files[0].exists() and not files[1].exists()
    set_aside(tmp_path, files)
    former = [tmp_path / FORMER / file.relative_to(tmp_path) for file in files]
    assert [file.read_text() for file in former] == ["first", "first"]

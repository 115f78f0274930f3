"""One writer at a time: locks of files and folders, and run directories that hold one run each.

Every command locks the files and folders that it writes to (`kbf.cli.execution.execute`). A run
directory that holds a finished run is written to again only with ``overwrite=true``, and the former
run is removed when the new one is whole.
"""

import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from kbf.runtime.atomic_files import sweep

# The file that contains the number of the process that writes to a folder (`locked`).
LOCK = ".lock"
# The lock of a job of a sweep in its run directory, held from its start to its end.
CLAIM = ".lock-job"
# Attempts to lock a file, and the time between them.
LOCK_ATTEMPTS = 3
SECONDS_BETWEEN_ATTEMPTS = 0.02
# The folder in a run directory with the former run, until the new run is whole.
FORMER = ".former"
# The file that a finished run has.
RESULT = "metrics.json"
# The file with the provenance of the results in a folder (`kbf.runtime.provenance`).
ABOUT = "about.json"


@contextmanager
def locked(place: str | os.PathLike[str], *, file: bool = False) -> Iterator[None]:
    """Context with an exclusive lock of a folder, or of a file that is to be written.

    The lock is the system's, on a file with the number of this process, which is removed at the
    end: ``.lock`` in the folder, ``.lock-NAME`` next to the file NAME. A killed process loses the
    lock; the file that it leaves blocks no other. Temporary files of killed processes are removed
    from the folder. Without file locks of the system, and where no file can be made, there is no
    lock.

    Args:
        place: a folder, which is made, or a file.
        file: whether it is a file.

    Raises:
        ValueError: another process has the lock.
    """
    place = Path(place)
    path = place.with_name(f"{LOCK}-{place.name}") if file else place / LOCK
    made = [each for each in path.parents if not each.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        held = lock_file(path, place)
    except OSError:  # no file can be written there, which the command reports
        held = None
    if held is None:
        yield
        return
    try:
        held.truncate(0)
        held.write(f"process {os.getpid()}")
        held.flush()
        if not file:
            sweep(place)
        yield
    finally:
        path.unlink(missing_ok=True)
        held.close()
        with suppress(OSError):  # of those that contain files by now
            for each in made:
                each.rmdir()


def lock_file(path: Path, place: Path) -> IO[str] | None:
    """Return a file that this process has locked; None on a system without locks.

    Raises:
        ValueError: another process has locked it.
    """
    try:
        import fcntl
    except ImportError:
        return None
    attempts = 0
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if (attempts := attempts + 1) < LOCK_ATTEMPTS:  # `writer_of` holds it for an instant
                file.close()
                time.sleep(SECONDS_BETWEEN_ATTEMPTS)
                continue
            file.seek(0)
            owner = file.read().strip() or "another process"
            file.close()
            kind = "file" if path.name != LOCK else "folder"
            raise ValueError(
                f"{place} is being written by {owner}: wait until it ends, or name another {kind}"
            ) from None
        except OSError:  # a file system without locks
            return file
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()  # its owner removed it between our opening and locking it


def writer_of(directory: Path, lock: str = LOCK) -> str | None:
    """Return the process that holds a lock in a folder; None if no process does.

    Processes on other machines are seen where the file system shares its locks.
    """
    if not (directory / lock).exists():
        return None
    try:
        held = lock_file(directory / lock, directory)
    except ValueError as error:
        return str(error).partition(" is being written by ")[2].partition(":")[0]
    except OSError:
        return None
    if held is not None:
        held.close()
    return None


def check_not_locked(directory: Path) -> None:
    """Check that no other process writes to a folder.

    Raises:
        ValueError: one does.
    """
    if (directory / LOCK).exists():
        with locked(directory):
            pass


def check_no_result(directory: Path, *, overwrite: bool) -> None:
    """Check that a folder holds no finished run, or that it may be replaced.

    Raises:
        ValueError: it holds one.
    """
    if (directory / RESULT).exists() and not overwrite:
        raise ValueError(
            f"{directory} holds a finished run: name another run_dir, "
            "or replace it with overwrite=true"
        )


def set_aside(directory: Path, files: Iterable[Path]) -> None:
    """Move the files of a run into the folder `FORMER` of its directory.

    Of several runs that did not finish, one after the other, the last finished one stays there.

    Args:
        directory: of the run.
        files: files and folders in it, at any depth.
    """
    former, files = directory / FORMER, [path for path in files if path.exists()]
    whole = (directory / RESULT).exists()
    if former.exists() and not whole:
        for path in files:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return
    # The result last: a killed process leaves a directory that still counts as finished.
    for path in sorted(files, key=lambda path: path.name == RESULT):
        target = former / path.relative_to(directory)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():  # of a process that was killed while it moved or removed these
            shutil.rmtree(target)
        os.replace(path, target)


def remove_former(directory: Path) -> None:
    """Remove the former run, after the new one is whole."""
    shutil.rmtree(directory / FORMER, ignore_errors=True)

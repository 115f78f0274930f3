"""Work in pieces, each kept as a file as soon as it is done: a killed command goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kbf.commands.support.console import console
from kbf.commands.support.worker_pool import run_all
from kbf.runtime.atomic_files import write_json


@runtime_checkable
class Kept(Protocol):
    """A piece of work, and the file for its result."""

    @property
    def path(self) -> Path:
        """The file."""
        ...


Piece = TypeVar("Piece", bound=Kept)


def read_result(
    path: Path, whole: Callable[[dict[str, Any]], bool] = bool
) -> dict[str, Any] | None:
    """What is kept of a piece; None if nothing is, or if the file is damaged: then the work is done again."""
    if not path.exists():
        return None
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(result, dict) and whole(result):
            return result
    except (ValueError, RecursionError):
        pass
    console.print(
        f"[yellow]{escape(str(path))} is damaged[/]: it is made again",
        highlight=False,
        soft_wrap=True,
    )
    return None


def finish_all(
    work: Callable[[Piece], dict[str, Any]],
    pieces: list[Piece],
    workers: int,
    *,
    name: str,
    called: Callable[[Piece], str],
    shown: Callable[[Piece], str] | None = None,
    order: Callable[[list[Piece]], list[Piece]] = list,
    whole: Callable[[dict[str, Any]], bool] = bool,
) -> tuple[dict[Path, dict[str, Any]], int]:
    """Do what is missing: the results by file, and how many pieces failed.

    Args:
        work: a function at the top level of a module.
        pieces: all of them.
        workers: processes.
        name: what people call the pieces.
        called: what they call one, where it failed.
        shown: what stands beside the bar when it is done; None for the same.
        order: in which the missing ones begin.
        whole: whether a result that was read from a file has all that is needed of it.
    """
    done = {
        piece.path: stored
        for piece in pieces
        if (stored := read_result(piece.path, whole)) is not None
    }
    missing = order([piece for piece in pieces if piece.path not in done])
    if done:
        console.print(f"{len(done)} of {len(pieces)} {name} are there already", highlight=False)
    failed = 0
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ]
    with (
        Progress(*columns, console=console) as progress,
        closing(run_all(work, missing, workers)) as finished,
    ):
        bar = progress.add_task("starting", total=len(missing))
        for piece, result in finished:
            if "error" in result:
                failed += 1
                progress.console.print(
                    f"[red]failed[/] {escape(called(piece))}: {escape(result['error'])}",
                    highlight=False,
                )
            else:
                write_json(piece.path, result)
                done[piece.path] = result
            progress.update(bar, advance=1, description=escape((shown or called)(piece)))
    return done, failed

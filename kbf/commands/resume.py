"""Work in pieces, each kept as a file as soon as it is done: a killed command goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kbf.commands.common import console
from kbf.commands.pool import run_all
from kbf.files import write_json


@runtime_checkable
class Kept(Protocol):
    """A piece of work, and the file for its result."""

    @property
    def path(self) -> Path:
        """The file."""
        ...


Piece = TypeVar("Piece", bound=Kept)


def finish_all(
    work: Callable[[Piece], dict[str, Any]],
    pieces: list[Piece],
    workers: int,
    *,
    name: str,
    called: Callable[[Piece], str],
    shown: Callable[[Piece], str] | None = None,
    order: Callable[[list[Piece]], list[Piece]] = list,
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
    """
    done = {piece.path: json.loads(piece.path.read_text(encoding="utf-8")) for piece in pieces if piece.path.exists()}
    missing = order([piece for piece in pieces if piece.path not in done])
    if done:
        console.print(f"{len(done)} of {len(pieces)} {name} are there already", highlight=False)
    failed = 0
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console) as progress, closing(run_all(work, missing, workers)) as finished:
        bar = progress.add_task("starting", total=len(missing))
        for piece, result in finished:
            if "error" in result:
                failed += 1
                progress.console.print(f"[red]failed[/] {escape(called(piece))}: {escape(result['error'])}", highlight=False)
            else:
                write_json(piece.path, result)
                done[piece.path] = result
            progress.update(bar, advance=1, description=escape((shown or called)(piece)))
    return done, failed

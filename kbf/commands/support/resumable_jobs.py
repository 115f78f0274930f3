"""Jobs whose results are files: a command that was killed continues with the missing ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from rich.markup import escape

from kbf.commands.support.console import console, progress_bar
from kbf.commands.support.worker_pool import run_all
from kbf.runtime.atomic_files import write_json


@runtime_checkable
class ResumableJob(Protocol):
    """A job with a file for its result."""

    @property
    def path(self) -> Path:
        """The file."""
        ...


Job = TypeVar("Job", bound=ResumableJob)


def read_result(
    path: Path, complete: Callable[[dict[str, Any]], bool] = bool
) -> dict[str, Any] | None:
    """Read the result of a job; None if there is none, or the file is damaged or incomplete."""
    if not path.exists():
        return None
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(result, dict) and complete(result):
            return result
    except (ValueError, RecursionError):
        pass
    text = f"[yellow]{escape(str(path))} is damaged[/]: it is computed again"
    console.print(text, highlight=False, soft_wrap=True)
    return None


def finish_all(
    work: Callable[[Job], dict[str, Any]],
    jobs: list[Job],
    workers: int,
    *,
    name: str,
    label: Callable[[Job], str],
    short_label: Callable[[Job], str] | None = None,
    order: Callable[[list[Job]], list[Job]] = list,
    complete: Callable[[dict[str, Any]], bool] = bool,
) -> tuple[dict[Path, dict[str, Any]], int]:
    """Run the jobs without a result; return all results by file, and the number of failed jobs.

    Args:
        work: a function at the top level of a module.
        jobs: all of them.
        workers: number of processes.
        name: what the jobs are called in messages.
        label: returns what one job is called where it failed.
        short_label: returns what it is called next to the progress bar; None for ``label``.
        order: returns the missing jobs in the order in which they start.
        complete: returns whether a stored result has all that is needed.
    """
    stored = {job.path: read_result(job.path, complete) for job in jobs}
    done = {path: result for path, result in stored.items() if result is not None}
    missing = order([job for job in jobs if job.path not in done])
    if done:
        console.print(f"{len(done)} of {len(jobs)} {name} are finished already", highlight=False)
    failed = 0
    with (
        progress_bar("{task.description}") as progress,
        closing(run_all(work, missing, workers)) as finished,
    ):
        bar = progress.add_task("starting", total=len(missing))
        for job, result in finished:
            if "error" in result:
                failed += 1
                text = f"[red]failed[/] {escape(label(job))}: {escape(result['error'])}"
                progress.console.print(text, highlight=False)
            else:
                write_json(job.path, result)
                done[job.path] = result
            progress.update(bar, advance=1, description=escape((short_label or label)(job)))
    return done, failed

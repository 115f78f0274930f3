"""Independent jobs in worker processes, whose results are files.

A command that was killed continues with the missing ones, and one job may fail or die without
stopping the others. `concurrent.futures.ProcessPoolExecutor` breaks as a whole when one process is
killed. Here the jobs that were running then are run again, one at a time, and only the one that
dies twice is lost.
"""

import json
import logging
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Generator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from rich.markup import escape

from kbf.commands.support.console import console
from kbf.runtime.atomic_files import write_json
from kbf.runtime.progress import shown_progress

log: logging.Logger = logging.getLogger(__name__)

Job = TypeVar("Job")


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
    console.print(
        f"[yellow]{escape(str(path))} is damaged[/]: it is computed again",
        highlight=False,
        soft_wrap=True,
    )
    return None


def finish_all(
    work: Callable[[Any], dict[str, Any]],
    jobs: list[Any],
    workers: int,
    *,
    name: str,
    label: Callable[[Any], str],
    short_label: Callable[[Any], str] | None = None,
    order: Callable[[list[Any]], list[Any]] = list,
    complete: Callable[[dict[str, Any]], bool] = bool,
) -> tuple[dict[Path, dict[str, Any]], int]:
    """Run the jobs without a result; return all results by file, and the number of failed jobs.

    Args:
        work: a function at the top level of a module.
        jobs: all of them, each with the ``path`` of its result.
        workers: number of processes.
        name: what the jobs are called in messages.
        label: returns what one job is called where it failed.
        short_label: returns what it is called in messages about progress; None for ``label``.
        order: returns the missing jobs in the order in which they start.
        complete: returns whether a stored result has all that is needed.
    """
    done = {
        job.path: result for job in jobs if (result := read_result(job.path, complete)) is not None
    }
    missing = order([job for job in jobs if job.path not in done])
    if done:
        console.print(f"{len(done)} of {len(jobs)} {name} are finished already", highlight=False)
    failed, count, names = 0, 0, short_label or label
    running: list[Any] = []

    def report() -> None:
        rest = f"; running {', '.join(map(names, running))}" if running else ""
        log.info("%d of %d finished%s", count, len(missing), rest)

    def started(job: Any) -> None:
        if job not in running:  # one whose process died starts again
            running.append(job)
            report()

    with (
        shown_progress(name),
        closing(run_all(work, missing, workers, on_start=started)) as finished,
    ):
        for job, result in finished:
            count += 1
            running.remove(job)
            if "error" in result:
                failed += 1
                log.warning("failed %s: %s", label(job), result["error"])
            else:
                write_json(job.path, result)
                done[job.path] = result
            report()
    return done, failed


def run_all(
    work: Callable[[Job], dict[str, Any]],
    jobs: list[Job],
    workers: int,
    start: Callable[[], None] | None = None,
    on_start: Callable[[Job], None] | None = None,
) -> Generator[tuple[Job, dict[str, Any]]]:
    """Run all jobs and yield each with its result as it finishes.

    The result of a job that failed has the key ``error``.

    Args:
        work: a function at the top level of a module.
        jobs: arguments of ``work``, in the order in which they start.
        workers: number of processes; 0 runs the jobs in this process.
        start: called first in each process; None for `start_worker`.
        on_start: called with each job that starts.
    """
    on_start = on_start or (lambda job: None)
    if workers == 0:
        for job in jobs:
            on_start(job)
            yield job, attempt(work, job)
        return
    waiting: list[Job] = list(jobs)
    suspects: list[Job] = []  # were running when a process died
    while waiting or suspects:
        alone = bool(suspects)
        queue = [suspects.pop(0)] if alone else waiting
        running: dict[Future[dict[str, Any]], Job] = {}
        pool = ProcessPoolExecutor(
            min(workers, len(queue)), multiprocessing.get_context("spawn"), start or start_worker
        )
        try:
            while queue or running:
                while queue and len(running) < workers:
                    on_start(queue[0])
                    future = pool.submit(attempt, work, queue[0])
                    running[future] = queue.pop(0)
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    result = future.result()
                    yield running.pop(future), result
        except BrokenProcessPool:
            # A worker was killed, perhaps for its memory. Which job it ran is not known.
            if alone:
                for job in running.values():
                    yield job, {"error": "its process died twice; was there enough memory?"}
            else:
                suspects = list(running.values())
        except BaseException:
            for child in multiprocessing.active_children():
                child.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def attempt(work: Callable[[Job], dict[str, Any]], job: Job) -> dict[str, Any]:
    """Return the result of a job, or its error as a dictionary."""
    try:
        return work(job)
    except Exception as error:
        return {
            "error": f"{type(error).__name__}: {' '.join(str(error).split())}",
            "traceback": traceback.format_exc(),
        }


def start_worker() -> None:
    """Set up a worker process.

    It uses one thread and fast small steps, and exits on Ctrl-C or when its parent has ended.
    """
    from kbf.runtime.threads import tune_process

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    tune_process(threads=1)
    threading.Thread(target=follow_parent, daemon=True).start()


def follow_parent() -> None:
    """Exit when the parent process has ended, so that no worker outlives a killed command."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)

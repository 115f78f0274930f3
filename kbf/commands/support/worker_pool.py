"""Worker processes: independent jobs, of which one may fail or die without stopping the others.

`concurrent.futures.ProcessPoolExecutor` breaks as a whole when one process is killed. Here the jobs
that were running then are run again, one at a time, and only the one that dies twice is lost.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Generator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

Job = TypeVar("Job")


def run_all(
    work: Callable[[Job], dict[str, Any]],
    jobs: list[Job],
    workers: int,
    start: Callable[[], None] | None = None,
) -> Generator[tuple[Job, dict[str, Any]]]:
    """Run all jobs and yield each with its result as it finishes.

    The result of a job that failed has the key ``error``.

    Args:
        work: a function at the top level of a module.
        jobs: arguments of ``work``, in the order in which they start.
        workers: number of processes; 0 runs the jobs in this process.
        start: called first in each process; None for `start_worker`.
    """
    if workers == 0:
        for job in jobs:
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
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)

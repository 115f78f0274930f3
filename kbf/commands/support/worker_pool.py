"""Runs independent jobs in worker processes; a job that fails, or whose process dies, does not stop the others."""

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
    """Run all jobs and yield each with its result as it is done; a failed one has the key ``error`` instead.

    Args:
        work: a function at the top level of a module.
        jobs: what to give it, in this order.
        workers: processes; 0 runs in this process.
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
        except (
            BrokenProcessPool
        ):  # a worker was killed, perhaps for its memory: nobody knows which job was in it
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
    """The result of a job, or its error."""
    try:
        return work(job)
    except Exception as error:
        return {
            "error": f"{type(error).__name__}: {' '.join(str(error).split())}",
            "traceback": traceback.format_exc(),
        }


def start_worker() -> None:
    """Set up a worker: one thread, fast small steps, and an exit when the parent is gone or Ctrl-C is pressed."""
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

"""Jobs for worker processes, in a file of their own that imports nothing heavy."""

import os
import signal
import time


def die_or_double(job: int) -> dict:
    if job == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if job == 2:
        time.sleep(1)  # still at work when its neighbour dies
    if job == 4:
        raise ValueError("no fours")
    return {"value": 2 * job}


def nothing() -> None:
    pass

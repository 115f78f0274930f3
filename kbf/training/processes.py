"""Training in several processes (DDP): shares of a batch, and one line where a process dies."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import Popen
from typing import Any, Protocol, runtime_checkable

import lightning
import torch
from jaxtyping import Float
from torch import Tensor, distributed, nn

# Time between two looks whether the other processes still run.
SECONDS_BETWEEN_LOOKS = 0.1
# Time in which an error of the connection is explained by a process that has died, and in which
# the main thread has to leave a fit of which a process has died.
SECONDS_TO_EXPLAIN = 5.0


@runtime_checkable
class CoupledLoss(Protocol):
    """A `kbf.filters.protocols.LossModel` whose loss may be no mean over the windows of a batch.

    Several processes cannot share the windows of a batch then. ``coupling`` is the reason, and what
    to do about it; None where the loss is a mean.
    """

    @property
    def coupling(self) -> str | None:
        """The reason."""
        ...


def rank_and_world() -> tuple[int, int]:
    """Return the number of this process, and how many there are."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def gathered(mine: Float[Tensor, "m p"], n: int) -> Float[Tensor, "n p"]:
    """Return the rows of all processes, with gradients; this process has rows rank, rank + world...

    Every process computes the same loss of all n rows. The mean over processes of the gradients,
    which DDP computes, is then the gradient in one process.
    """
    rank, world = rank_and_world()
    if world == 1:
        return mine
    from torch.distributed.nn.functional import all_reduce

    places = torch.arange(rank, n, world, device=mine.device)
    return all_reduce(mine.new_zeros(n, mine.shape[1]).index_copy(0, places, mine))


def check_not_coupled(model: nn.Module, world: int) -> None:
    """Check that several processes may share the samples of a batch.

    Raises:
        ValueError: the model's loss couples the samples of a batch.
    """
    if world == 1:
        return
    reason = model.coupling if isinstance(model, CoupledLoss) else None
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            reason = (
                "batch normalisation uses statistics of the whole batch (encoders with norm=group "
                "or norm=none have none)"
            )
    if reason is not None:
        raise ValueError(
            f"{world} processes cannot share a batch of {type(model).__name__}: {reason}. Use one "
            "process (trainer=cpu or trainer=gpu)"
        )


@contextmanager
def watched(trainer: lightning.Trainer) -> Iterator[None]:
    """Context of a fit that ends with one line where another process of it dies.

    The process that starts the others watches them, and ends them with itself. They watch it.

    Raises:
        ValueError: a process that this one has started has died.
    """
    if trainer.world_size == 1:
        yield
        return
    watch = Watch(trainer)
    watch.start()
    try:
        yield
    except RuntimeError as error:
        if watch.found.wait(SECONDS_TO_EXPLAIN) and trainer.global_rank == 0:
            raise ValueError(watch.line) from error
        watch.end_others()
        raise
    except BaseException as error:
        watch.end_others()
        if isinstance(error, KeyboardInterrupt | SystemExit) and trainer.global_rank > 0:
            os._exit(1)  # the main process prints the line
        raise
    finally:
        watch.left.set()


class Watch(threading.Thread):
    """A thread that watches the other processes of a fit on this machine.

    Attributes:
        found: set when one has died.
        left: set when the main thread has left the fit.
        line: names the process that has died.
    """

    # Processes that this one has started, by rank; those of a second fit are those of the first.
    started: dict[int, "Popen[Any]"] = {}  # noqa: RUF012

    def __init__(self, trainer: lightning.Trainer) -> None:
        super().__init__(daemon=True, name="kbf-processes")
        self.launcher: Any = trainer.strategy.launcher
        self.rank: int = trainer.global_rank
        self.local_rank: int = trainer.local_rank
        self.world: int = trainer.world_size
        self.parent: int = os.getppid()
        self.found: threading.Event = threading.Event()
        self.left: threading.Event = threading.Event()
        self.line: str = ""

    def run(self) -> None:
        """Look until a process has died or the fit has ended."""
        while not self.left.wait(SECONDS_BETWEEN_LOOKS):
            if self.dead():
                break
        else:
            return
        self.end_others()
        self.found.set()
        if self.local_rank == 0 and self.left.wait(SECONDS_TO_EXPLAIN):
            return
        if self.local_rank < 2:  # of several that have lost their parent, one prints the line
            print(f"kbf train: {self.line}", file=sys.stderr, flush=True)
        os._exit(2)  # the main thread waits for the process that has died

    def dead(self) -> bool:
        """Whether a process has died; sets ``line``."""
        if self.local_rank > 0:
            self.line = f"rank 0 of {self.world} processes was killed; {CONTINUE}"
            return os.getppid() != self.parent
        self.take()
        for rank, process in self.started.items():
            if code := process.poll():
                how = (
                    f"was killed by {signal.Signals(-code).name}, as the system does where memory "
                    "runs out"
                    if code < 0
                    else f"ended with exit code {code} (its message, if any, is above)"
                )
                self.line = f"rank {rank} of {self.world} processes {how}; {CONTINUE}"
                return True
        return False

    def take(self) -> None:
        """Take the processes from Lightning, which would kill this process without a line."""
        processes = getattr(self.launcher, "procs", [])
        self.started.update({self.rank + k: each for k, each in enumerate(processes, 1)})
        processes.clear()

    def end_others(self) -> None:
        """End the processes that this one has started."""
        self.take()
        for process in self.started.values():
            process.kill()


# What to do about a process that has died.
CONTINUE = "kbf train ckpt_path=RUN/checkpoints/last.ckpt continues the run"

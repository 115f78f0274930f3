"""Progress of long work: one status line in a terminal, a printed line now and then elsewhere.

Functions that take long log what they do to the logger ``kbf``, at the level INFO: which candidate,
fold or epoch, of how many. `shown_progress` displays these messages.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.markup import escape

# Seconds between two lines in a log or a notebook: 120 lines an hour.
SECONDS_BETWEEN_LINES = 30.0
# Seconds between two updates of the elapsed time in a terminal.
SECONDS_BETWEEN_UPDATES = 1.0
# Columns of a terminal that the line leaves free: those of the spinner.
SPINNER_WIDTH = 4


class ProgressHandler(logging.Handler):
    """Displays the last message that the package has logged, and the time since the start.

    Warnings are printed, and stay.
    """

    def __init__(self, title: str, console: Console) -> None:
        """``title`` is in front of each message."""
        super().__init__(logging.INFO)
        self.console: Console = console
        self.title: str = title
        self.message: str = ""
        self.status = console.status(escape(title))
        self.began: float = time.monotonic()
        self.ended: threading.Event = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        """Take a message."""
        if record.levelno > logging.INFO:
            self.console.print(f"[yellow]{escape(record.getMessage())}[/]", highlight=False)
        else:
            self.message = f"; {record.getMessage()}"
            self.status.update(escape(self.line()))

    def line(self) -> str:
        """Return title, message and elapsed time, in a terminal cut to its width."""
        minutes, seconds = divmod(int(time.monotonic() - self.began), 60)
        text, elapsed = self.title + self.message, f" ({minutes}:{seconds:02})"
        width = self.console.width - SPINNER_WIDTH - len(elapsed)
        return (text[:width] if self.console.is_terminal else text) + elapsed

    def repeat(self) -> None:
        """Update the line of a terminal, elsewhere print one, until `ended` is set."""
        if self.console.is_terminal:
            while not self.ended.wait(SECONDS_BETWEEN_UPDATES):
                self.status.update(escape(self.line()))
        while not self.ended.wait(SECONDS_BETWEEN_LINES):
            self.console.print(escape(self.line()), highlight=False, soft_wrap=True)


@contextmanager
def shown_progress(title: str, shown: bool = True) -> Iterator[None]:
    """Show on standard error what the package logs in this context, with the elapsed time.

    In a terminal the messages take turns on one line. In a log and in a notebook the last one is
    printed every `SECONDS_BETWEEN_LINES`, so that short work prints nothing. Where INFO messages
    were enabled before, they are propagated as before.

    Args:
        title: in front of each message.
        shown: False shows nothing.
    """
    if not shown:
        yield
        return
    logger = logging.getLogger("kbf")
    level, propagate = logger.level, logger.propagate
    handler = ProgressHandler(title, Console(stderr=True))
    thread = threading.Thread(target=handler.repeat, daemon=True)
    logger.propagate = logger.isEnabledFor(logging.INFO)
    logger.setLevel(min(logging.INFO, logger.getEffectiveLevel()))
    logger.addHandler(handler)
    thread.start()
    try:
        with handler.status if handler.console.is_terminal else nullcontext():
            yield
    finally:
        handler.ended.set()
        thread.join()
        logger.removeHandler(handler)
        logger.propagate = propagate
        logger.setLevel(level)

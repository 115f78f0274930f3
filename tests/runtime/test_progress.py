"""Progress: one line in a terminal, lines from time to time in a log, nothing if not wanted."""

import io
import logging
import time

import pytest
from rich.console import Console

from kbf.runtime import progress

LOG = logging.getLogger("kbf.densities.selection")


def console(monkeypatch, **settings):
    shown = io.StringIO()
    made = Console(file=shown, width=60, **settings)
    monkeypatch.setattr(progress, "Console", lambda **_: made)
    return shown


def test_messages_take_each_others_place_and_warnings_stay(monkeypatch):
    shown = console(monkeypatch, force_terminal=True)
    logger = logging.getLogger("kbf")
    before = logger.level, logger.propagate, list(logger.handlers)
    with progress.shown_progress("fitting [x]"):
        (handler,) = [h for h in logger.handlers if isinstance(h, progress.ProgressHandler)]
        LOG.info("held out: the law %s", "student")
        assert str(handler.status.status) == r"fitting \[x]; held out: the law student (0:00)"
        LOG.info("y" * 200)
        assert len(str(handler.status.status)) < 60
        LOG.warning("three columns are constant")
    assert "three columns are constant" in shown.getvalue()
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


@pytest.mark.parametrize("terminal", [True, False])
def test_the_elapsed_time_goes_on_without_messages(terminal, monkeypatch):
    shown = console(monkeypatch, force_terminal=terminal)
    for name in ("SECONDS_BETWEEN_LINES", "SECONDS_BETWEEN_UPDATES"):
        monkeypatch.setattr(progress, name, 0.02)
    began = time.monotonic() - 61
    monkeypatch.setattr(progress.time, "monotonic", lambda: began + 125)
    with progress.shown_progress("fitting"):
        LOG.info("fold 1 of [5]")
        monkeypatch.setattr(progress.time, "monotonic", lambda: began + 200)
        time.sleep(0.3)
    assert "fitting; fold 1 of [5] (1:15)" in shown.getvalue()


def test_short_work_and_hidden_work_print_nothing(monkeypatch):
    shown = console(monkeypatch)
    with progress.shown_progress("fitting"):
        LOG.info("fold 1 of 5")
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.02)
    with progress.shown_progress("fitting", shown=False):
        LOG.info("fold 1 of 5")
        time.sleep(0.1)
    assert shown.getvalue() == ""

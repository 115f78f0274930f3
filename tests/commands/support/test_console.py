"""The line that shows what a fit does now."""

from __future__ import annotations

import io
import logging

from rich.console import Console

from kbf.commands.support import console


def test_messages_take_each_others_place_and_warnings_stay(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(console, "console", Console(file=shown, force_terminal=True, width=60))
    logger, log = logging.getLogger("kbf"), logging.getLogger("kbf.densities.selection")
    before = logger.level, logger.propagate, list(logger.handlers)
    with console.fit_status("fitting [x]") as status:
        log.info("held out: the law %s", "student")
        assert str(status.status) == r"fitting \[x]; held out: the law student"
        log.info("y" * 200)
        assert len(str(status.status)) < 60
        log.warning("three columns are constant")
    assert "three columns are constant" in shown.getvalue()
    assert (logger.level, logger.propagate, list(logger.handlers)) == before

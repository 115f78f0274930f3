"""The short form of ``make stress``: a few cases of each section, at most seconds of each."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from studies.stress import bad_inputs, damage, kills, run
from studies.stress.cases import refused
from studies.stress.run import page


@pytest.mark.slow
def test_nothing_falls():
    """In a process of its own: one that has threads already cannot be forked in good health."""
    done = subprocess.run(
        [sys.executable, "-m", "studies", "stress", "0.03"],
        capture_output=True,
        text=True,
        cwd=run.ROOT,
    )
    counts = re.search(r"\*\*all\*\* \| \*\*(\d+)\*\* \| \*\*\d+\*\* \| \*\*0\*\*", done.stdout)
    assert done.returncode == 0 and counts and int(counts[1]) > 40, done.stdout + done.stderr


def test_the_table_is_as_long_as_is_said():
    assert (
        len(list(bad_inputs.table())) >= 500
        and sum(victim.kills for victim in kills.VICTIMS.values()) >= 200
    )


def test_every_victim_is_killed():
    killed = [
        name
        for section in run.SECTIONS.values()
        for name in getattr(section, "keywords", {}).get("names", [])
    ]
    assert sorted(killed) == sorted(kills.VICTIMS)


def test_what_is_not_refused_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused(["--version"]) == "exit code 0"
    assert refused(["train", "n_train=x"]) == ""
    assert "1 | 0 | 1" in page([damage.Outcome("a", "b", "it fell")], 60.0) and os.getcwd() == str(
        tmp_path
    )

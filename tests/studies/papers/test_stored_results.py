"""Stored results of the papers' experiments: the verdicts follow from the stored rows, and small
pieces have the stored digits again.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
import check_tables

FOLDER = check_tables.RESULTS / "reproduce"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/verdict.json"))
FORMER = {
    "abc_comparison",
    "camera_rotation",
    "ckme_gaussian",
    "ckme_nonlinear",
    "fukumizu_filtering",
    "low_dim_filtering",
}
"""Of a former version: without rows, or with findings that have changed since."""


def typed(text: str) -> Any:
    """A cell of a table as the value that was written."""
    if text == "":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def rows_of(name: str) -> list[dict[str, Any]]:
    rows = check_tables.stored(FOLDER / name, "reproduce")
    return [{key: typed(value) for key, value in row.items()} for row in rows]


def about(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name / "about.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in FORMER])
def test_stored_verdicts_follow_from_stored_rows(name):
    """Each stored finding: the same numbers and answer from the rows, by the present judge."""
    experiment = importlib.import_module(f"studies.papers.{name}")
    now = {v.finding: v for v in experiment.judge(rows_of(name))}
    kept = json.loads((FOLDER / name / "verdict.json").read_text(encoding="utf-8"))["verdicts"]
    assert kept
    for verdict in kept:
        mine = now[verdict["finding"]]
        assert (mine.ours, mine.reproduced) == (verdict["ours"], verdict["reproduced"])


@pytest.mark.parametrize("name", sorted(FORMER))
def test_those_of_a_former_version_are_still_to_be_run_again(name):
    """Results of the present version name the hash of their code: then the name leaves FORMER."""
    assert "code" not in about(name)


@pytest.mark.parametrize(
    ("name", "pick"),
    [
        ("posterior_mean", lambda job: job["run"] < 2 and job["d"] in (2, 16)),
        ("kde_comparison", lambda job: job["run"] == 0 and job["d"] == 2),
        ("consistency", lambda job: job["run"] == 0 and job["n"] == 100),
    ],
)
def test_small_pieces_have_the_stored_digits(name, pick):
    experiment = importlib.import_module(f"studies.papers.{name}")
    jobs = [job for job in experiment.jobs({**experiment.PRESETS["full"], "seed": 0}) if pick(job)]
    made = [
        {key: "" if value is None else str(value) for key, value in row.items()}
        for job in jobs
        for row in experiment.work(job)
    ]
    kept = check_tables.stored(FOLDER / name, "reproduce")
    found = check_tables.compared_rows(name, kept, made)
    assert found["same"] == found["runs"] > 0, found

"""The heading of an agent that turns in a maze, from first-person views (Xu et al., figure 5)."""

from __future__ import annotations

from typing import Any

from kbf.plots.charts import Figure
from studies.papers import images
from studies.papers.base import Job, Row, Settings, Verdict
from studies.papers.images import ADDED, LSTM, NEURAL, ORIGINAL, PUBLISHED, WEIGHTED

PRESETS: dict[str, dict[str, Any]] = {
    "full": {
        "runs": 10,
        "sizes": [100, 300, 700],
        "n_test": 200,
        "epochs": None,
        "points": None,
        "frames": None,
    },
    "quick": {
        "runs": 3,
        "sizes": [100],
        "n_test": 200,
        "epochs": None,
        "points": None,
        "frames": None,
    },
    "smoke": {"runs": 1, "sizes": [20], "n_test": 5, "epochs": 1, "points": 50, "frames": None},
}
PROBLEM = images.Problem("dmlab")
NOTES = f"""{images.NOTES} frames=FILE takes views of DeepMind Lab itself; without it they are those
of an embedded ray caster over a maze with DeepMind Lab's textures, which are not DeepMind Lab's
views. "Similar" is read as an error within 25 %."""


def jobs(settings: Settings) -> list[Job]:
    """One for each training length, run and group of methods."""
    return images.jobs(settings)


def work(job: Job) -> list[Row]:
    """The errors of some methods."""
    return images.work(PROBLEM, images.load(PROBLEM, job), job)


def judge(rows: list[Row]) -> list[Verdict]:
    """Which of the paper's four statements come out."""
    rule, similar = images.contests(rows, WEIGHTED, ORIGINAL), images.contests(rows, LSTM, WEIGHTED)
    beaten = [
        contest
        for method in PUBLISHED
        if method != NEURAL
        for contest in images.contests(rows, NEURAL, method)
    ]
    gaps = "; ".join(f"{100 * (c.first / c.second - 1):+.0f} % at n = {c.n}" for c in similar)
    strong = images.ranking(rows, ADDED)
    return [
        Verdict(
            "IW does better than the original rule at all lengths",
            f"lower at {images.summary(rule)}. Images: {rows[0]['images']}",
            all(c.won for c in rule),
        ),
        Verdict(
            "the LSTM performs similarly to IW",
            f"its error over IW's: {gaps}",
            all(0.8 < c.first / c.second < 1.25 for c in similar),
        ),
        Verdict(
            "IW(NN) outperforms the other methods",
            f"{images.ranking(rows, PUBLISHED)}. Not in the paper: {strong}",
            all(c.won for c in beaten),
        ),
        images.unstable(rows),
    ]


def tests(rows: list[Row]) -> list[Row]:
    """Wilcoxon signed-rank tests between all methods, at each training length."""
    return images.tests(rows)


def draw(rows: list[Row]) -> Figure:
    """Figure 5."""
    return images.draw(rows)

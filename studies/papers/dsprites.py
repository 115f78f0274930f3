"""Position of a heart that moves like the oscillatory point, from noisy images.

Xu et al., figure 6.
"""

from __future__ import annotations

from typing import Any

from kbf.plots.charts import Figure
from studies.papers import images
from studies.papers.base import Job, Row, Settings, Verdict
from studies.papers.images import ADDED, LSTM, NEURAL, ORIGINAL, PARTICLES, PUBLISHED, WEIGHTED

PRESETS: dict[str, dict[str, Any]] = {
    "full": {"runs": 10, "sizes": [100, 300, 900], "n_test": 200, "epochs": None, "points": None},
    "quick": {"runs": 3, "sizes": [100], "n_test": 200, "epochs": None, "points": None},
    "smoke": {"runs": 1, "sizes": [20], "n_test": 5, "epochs": 1, "points": 50},
}
for preset in PRESETS.values():
    preset["frames"] = None
PROBLEM = images.Problem("dsprites", frames="data.images")
NOTES = f"""{images.NOTES} The hearts are drawn here, from the outlines of dSprites; frames=FILE
takes the images of the published file, frames=download downloads it. The paper states both that the
LSTM is the worst and that the particle filter is worse than the methods with neural networks: the
first is read as "of those that know nothing of the model"."""


def jobs(settings: Settings) -> list[Job]:
    """One for each training length, run and group of methods."""
    return images.jobs(settings)


def work(job: Job) -> list[Row]:
    """The errors of some methods."""
    return images.work(PROBLEM, images.load(PROBLEM, job), job)


def judge(rows: list[Row]) -> list[Verdict]:
    """Which of the paper's three statements come out."""
    learned = tuple(method for method in PUBLISHED if method != PARTICLES)
    last = [
        contest
        for method in learned
        if method != LSTM
        for contest in images.contests(rows, method, LSTM)
    ]
    rules = {method: images.contests(rows, method, ORIGINAL) for method in (WEIGHTED, NEURAL)}
    better = ". ".join(
        f"{method}: lower at {images.summary(held)}" for method, held in rules.items()
    )
    strong = images.ranking(rows, ADDED)
    return [
        Verdict(
            "the LSTM performs the worst (of those that know nothing of the model)",
            f"{images.ranking(rows, learned)}. Not in the paper: {strong}",
            all(c.won for c in last),
        ),
        Verdict(
            "IW and IW(NN) are significantly better than the original rule",
            better,
            images.significant(rows, [contest for held in rules.values() for contest in held]),
        ),
        images.unstable(rows),
    ]


def tests(rows: list[Row]) -> list[Row]:
    """Wilcoxon signed-rank tests between all methods, at each training length."""
    return images.tests(rows)


def draw(rows: list[Row]) -> Figure:
    """Figure 6."""
    return images.draw(rows)

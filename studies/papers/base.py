"""What the files of this folder share: the parts of an experiment, and tables of means.

A file ``NAME.py`` holds one experiment as

- ``PRESETS``: settings by name, each with ``runs``: "full" (the paper's; fewer runs where these
take hours), "quick" and "smoke"; - ``jobs(settings) -> list[Job]``: the independent pieces of work,
each a dict of plain values, everything that its rows depend on; - ``work(job) -> list[Row]``: the
rows of one piece, with the job's own keys in them where the other parts need these;
- ``judge(rows) -> list[Verdict]``: the paper's findings against ours, and questions of ours;
- ``tests(rows) -> list[Row]``: the paper's significance tests (none: an empty list);
- ``draw(rows) -> Figure``: the paper's picture;
- ``NOTES``: what the paper leaves open, and what was chosen.

`studies.papers.command` runs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from kbf.evaluation.metrics import mean_and_error, wilcoxon_pairs
from kbf.plots.charts import Figure

Job = dict[str, Any]
Row = dict[str, Any]
Settings = dict[str, Any]


class Verdict(NamedTuple):
    """A finding, the result here in numbers, and whether it was reproduced (None: undecided).

    ``asked``: the finding is none of the paper's, but a question of ours, and the answer is yes or
    no.
    """

    finding: str
    ours: str
    reproduced: bool | None
    asked: bool = False

    @property
    def text(self) -> str:
        """The finding, and whose it is."""
        return f"asked here: {self.finding}" if self.asked else self.finding

    @property
    def answer(self) -> str:
        """The verdict in a word."""
        yes, no = ("yes", "no") if self.asked else ("reproduced", "not reproduced")
        return {True: yes, False: no, None: "undecided"}[self.reproduced]


def counted(verdicts: Sequence[Verdict]) -> str:
    """How many findings came out, those of the paper and ours by themselves.

    >>> c = Verdict("c", "", False, asked=True)
    >>> counted([Verdict("a", "", True), Verdict("b", "", None), c])
    'findings of the paper: 1 reproduced, 0 not, 1 undecided; asked here: 0 yes, 1 no, 0 undecided'
    """
    parts = []
    for asked, name, (yes, no) in (
        (False, "findings of the paper", ("reproduced", "not")),
        (True, "asked here", ("yes", "no")),
    ):
        mine = [v.reproduced for v in verdicts if v.asked == asked]
        if mine:
            parts.append(
                f"{name}: {mine.count(True)} {yes}, {mine.count(False)} {no}, {mine.count(None)} "
                "undecided"
            )
    return "; ".join(parts)


SLIGHT_INCREASE = 0.25
"""What "slightly" means in the verdicts: by less than a quarter, at the largest size."""


def significantly_better(won: bool, p_value: float) -> bool | None:
    """Whether something is better with significance.

    None if it is better, but not by enough to be sure.
    """
    return False if not won else True if p_value < 0.05 else None


def all_of(answers: Sequence[bool | None]) -> bool | None:
    """True if all are, False if one is, else None."""
    return False if False in answers else None if None in answers else True


def every(won: Sequence[bool]) -> bool | None:
    """Whether a statement holds at every point (True), at none (False), or at some (None)."""
    return None if 0 < sum(won) < len(won) else all(won)


@runtime_checkable
class Experiment(Protocol):
    """The parts of an experiment's module."""

    PRESETS: Mapping[str, Settings]
    NOTES: str

    def jobs(self, settings: Settings) -> list[Job]:
        """The pieces of work."""
        ...

    def work(self, job: Job) -> list[Row]:
        """The rows of one piece."""
        ...

    def judge(self, rows: list[Row]) -> list[Verdict]:
        """The verdicts."""
        ...

    def tests(self, rows: list[Row]) -> list[Row]:
        """The significance tests."""
        ...

    def draw(self, rows: list[Row]) -> Figure:
        """The picture."""
        ...


def means(rows: Sequence[Mapping[str, Any]], by: Sequence[str], *values: str) -> list[Row]:
    """Mean and standard error of columns over the rows that agree in ``by``.

    The errors are ``NAME_se``; ``runs`` is the number of rows.

    >>> means([{"n": 1, "mse": 2.0}, {"n": 1, "mse": 4.0}], ["n"], "mse")
    [{'n': 1, 'mse': 3.0, 'mse_se': 1.0, 'runs': 2}]
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in by), []).append(row)
    table = []
    for key, members in groups.items():
        mean_row: Row = dict(zip(by, key, strict=True))
        for value in values:
            mean_row[value], mean_row[f"{value}_se"] = mean_and_error(
                [row[value] for row in members]
            )
        table.append({**mean_row, "runs": len(members)})
    return table


def column(rows: Sequence[Mapping[str, Any]], value: str, **fixed: Any) -> list[float]:
    """A column of the rows with the given values, in their order."""
    return [row[value] for row in rows if all(row[key] == wanted for key, wanted in fixed.items())]


def wilcoxon(
    rows: Sequence[Mapping[str, Any]],
    value: str,
    by: Sequence[str],
    *,
    method: str = "method",
    run: str = "run",
) -> list[Row]:
    """Wilcoxon signed-rank tests of ``value`` between all pairs of methods, over runs.

    One set of tests for each combination of ``by``.
    """
    tests: list[Row] = []
    for key in dict.fromkeys(tuple(row[name] for name in by) for row in rows):
        fixed = dict(zip(by, key, strict=True))
        mine = [row for row in rows if all(row[name] == wanted for name, wanted in fixed.items())]
        errors: dict[str, dict[int, float]] = {}
        for row in mine:
            errors.setdefault(row[method], {})[row[run]] = row[value]
        tests += [fixed | pair for pair in wilcoxon_pairs(errors)]
    return tests


def p_values(tests: Sequence[Row], by: str) -> dict[tuple[Any, frozenset[str]], float]:
    """The p-values of tests by the value of a column and the two methods, in any order."""
    return {
        (test[by], frozenset((test["first"], test["second"]))): test["p_value"] for test in tests
    }

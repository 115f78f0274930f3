"""Words of the project: the number of words with a standard replacement is bounded."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPLACED = (
    *("told", "tells", "says", "anew", "begun", "hindsight", "foresight", "net_under", "imagined"),
    *("beside", "surely", "heard", "stretch", "stretches", "somebody", "passed over"),
)
"""Words with a standard replacement in the literature; ``told_means`` counts as told."""
MAX_USES = 5
"""Largest number of uses in all files together."""
ALLOWED = ("stretch_width",)  # a sizing mode of Bokeh
"""Names that contain such a word and are given by other packages."""
WORD = re.compile(
    r"(?<![A-Za-z])(" + "|".join(REPLACED).replace(" ", r"[\s_]+") + r")(?![A-Za-z])", re.IGNORECASE
)
"""Whole words, also as parts of names with underscores."""


def uses(text: str) -> list[tuple[int, str]]:
    """Line numbers and words of the uses in a text."""
    for name in ALLOWED:
        text = text.replace(name, "")
    return [(1 + text.count("\n", 0, found.start()), found[0]) for found in WORD.finditer(text)]


def test_whole_words_are_found_in_names_strings_and_prose():
    text = "as_told(x)  # TELLS\n'passed\nover' beside\nstretched, retold, told_means, net_under"
    words = [(1, "told"), (1, "TELLS"), (2, "passed\nover"), (3, "beside"), (4, "told")]
    assert uses(text) == [*words, (4, "net_under")]
    assert uses("stretch_width, stretch") == [(1, "stretch")]


def test_the_words_of_the_field_are_used():
    files = [
        *(ROOT / "kbf").rglob("*.py"),
        *(ROOT / "kbf").rglob("*.pyi"),
        *(ROOT / "studies").rglob("*.py"),
        *(path for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", ".py")),
        ROOT / "README.md",
    ]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in sorted(files)
        for line, word in uses(path.read_text(encoding="utf-8"))
    ]
    assert len(found) <= MAX_USES, "\n".join([f"{len(found)} uses, at most {MAX_USES}:", *found])

"""Pieces of a reproduction are named by the code that their rows depend on."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from studies.papers import EXPERIMENTS, dependencies
from studies.papers.command import hashed
from studies.papers.dependencies import (
    CONFIGS,
    ROOT,
    code_hash,
    file_of,
    files,
    imported,
    parsed,
    reached,
)


def forget() -> None:
    """Read the files anew."""
    for cached in (parsed, files, code_hash):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def fresh_caches():
    """Each test reads the files anew."""
    forget()
    yield
    forget()


EXPERIMENT = """\
SIZE, LIMIT = 3, 0.1
NOTES = "what the paper leaves open"
def step(x):
    return SIZE * rules.f(x) + g
def jobs(settings):
    return []
def work(job):
    return [step(1)]
def mean(rows):
    return sum(rows) / 2
def judge(rows):
    return mean(rows) < LIMIT
"""


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A repository with one experiment, a library of two files, and configuration files."""
    for name, text in {
        "studies/papers/one.py": "from kbf import rules\nfrom kbf.other import g\n" + EXPERIMENT,
        "kbf/__init__.py": "",
        "kbf/rules.py": 'def f():\n    """Text."""\n    return 1  # comment\n',
        "kbf/other.py": "g = 2\n",
        "kbf/unused.py": "h = 3\n",
        "kbf/plots/__init__.py": "",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(dependencies, "ROOT", tmp_path)
    monkeypatch.setattr(dependencies, "CONFIGS", tmp_path / "configs")
    return tmp_path


def changed(root: Path, name: str, old: str, new: str) -> bool:
    """Whether the hash of the small experiment differs after a replacement in one file."""
    before = code_hash("studies.papers.one")
    path = root / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    forget()
    return code_hash("studies.papers.one") != before


def test_code_counts_and_prose_does_not(small):
    assert changed(small, "kbf/rules.py", "return 1", "return 2")
    assert changed(small, "kbf/other.py", "g = 2", "g = 3")
    assert changed(small, "studies/papers/one.py", "import g", "import g as b")
    assert not changed(small, "kbf/rules.py", "Text", "Another text")
    assert not changed(small, "kbf/rules.py", "# comment", "# another one")
    assert not changed(small, "kbf/unused.py", "h = 3", "h = 4")


def test_a_file_that_only_an_import_of_an_import_names_counts(small):
    (small / "kbf/other.py").write_text("from kbf.unused import h as g\n")
    parsed.cache_clear()
    assert changed(small, "kbf/unused.py", "h = 3", "h = 4")


def test_pictures_change_no_row(small):
    (small / "kbf/plots/charts.py").write_text("colour = 1\n")
    (small / "studies/papers/one.py").write_text("from kbf.plots.charts import colour\n")
    parsed.cache_clear()
    assert not changed(small, "kbf/plots/charts.py", "1", "2")


@pytest.mark.parametrize(
    ("old", "new", "of_rows"),
    [
        ("return []", "return [1]", True),  # jobs
        ("step(1)", "step(2)", True),  # work
        ("SIZE *", "SIZE +", True),  # a function that work calls
        ("3, 0.1", "4, 0.1", True),  # a constant of that function
        ("/ 2", "/ 3", False),  # a function of the verdicts alone
        ("< LIMIT", "> LIMIT", False),
        ("leaves open", "does not say", False),
        ("import g", "import g, h", False),  # not used
        ("import g", "import h as g", True),
    ],
)
def test_of_an_experiment_only_what_makes_its_rows_counts(small, old, new, of_rows):
    assert changed(small, "studies/papers/one.py", old, new) == of_rows


def test_what_another_experiment_lends_counts_by_its_names(small):
    """The definitions that are used, and what these use in turn; nothing else of the file."""
    (small / "studies/papers/two.py").write_text(
        "A = 1\ndef lent():\n    return A\ndef judge(rows):\n    return 5\n"
    )
    path = small / "studies/papers/one.py"
    path.write_text(f"from studies.papers.two import lent\n{EXPERIMENT}")
    forget()
    assert not changed(small, "studies/papers/two.py", "A = 1", "A = 2")  # imported, not used
    path.write_text(path.read_text().replace("step(1)", "step(lent())"))
    forget()
    assert changed(small, "studies/papers/two.py", "A = 2", "A = 3")
    assert not changed(small, "studies/papers/two.py", "5", "6")


def test_verdicts_notes_and_pictures_of_the_papers_change_no_row():
    """On the experiments as they are: which definitions count, and which do not."""
    for name in EXPERIMENTS:
        paths = files(f"studies.papers.{name}")
        used = reached(paths)
        assert not {"judge", "draw", "NOTES"} & used, name
        assert {"jobs", "work"} <= used


def test_configurations_count_where_they_are_composed(small):
    (small / "kbf/config").mkdir()
    (small / "kbf/config/prepare.py").write_text("def configure(): ...\n")
    (small / "kbf/config/__init__.py").write_text("")
    (small / "configs/model").mkdir(parents=True)
    (small / "configs/model/a.yaml").write_text("net:\n  _target_: kbf.unused\n")
    assert not changed(small, "configs/model/a.yaml", "net", "net2")
    (small / "studies/papers/one.py").write_text("from kbf.config.prepare import configure\n")
    forget()
    assert changed(small, "configs/model/a.yaml", "net", "net3")
    assert changed(small, "kbf/unused.py", "h = 3", "h = 4")  # named by a configuration file


def test_an_unknown_module_is_refused():
    with pytest.raises(ValueError, match=r"no module studies\.papers\.nothing"):
        files("studies.papers.nothing")


def test_every_file_that_is_loaded_is_found():
    """Python's own list of loaded modules, without drawings, and the statements that were read."""
    for name in ("posterior_mean", "fukumizu_filtering"):
        module = f"studies.papers.{name}"
        code = (
            "import sys; from unittest.mock import MagicMock\n"
            "sys.modules |= {f'kbf.plots{m}': MagicMock() for m in ('', '.charts')}\n"
            f"import {module}\n"
            "print(*[m for m in sys.modules if m.split('.')[0] in ('kbf', 'studies')])"
        )
        loaded = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout.split()
        skipped = {m for m in loaded if m in dependencies.LISTS or m.startswith("kbf.plots")}
        found = set(files(module))
        assert skipped and {file_of(m) for m in loaded if m not in skipped} <= found, name


def test_models_that_configurations_name_are_found():
    found = {path.relative_to(ROOT).as_posix() for path in files("studies.papers.dsprites")}
    assert {
        "kbf/filters/kernel/kbf.py",
        "kbf/filters/particle/learned.py",
        "configs/model/kbf_paper.yaml",
    } <= found
    assert CONFIGS.is_dir()


def test_public_names_stand_for_their_modules(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("from kbf import KBF, ratios\nfrom torch import nn\nimport kbf.ssm\n")
    assert imported(path) >= {"kbf.filters.kernel.kbf", "kbf.ssm"}
    path.write_text("from kbf.rkhs import ratios\n")
    parsed.cache_clear()
    assert imported(path) == {"kbf.rkhs.ratios"}


def test_a_piece_is_named_by_its_code(monkeypatch):
    experiment = importlib.import_module("studies.papers.posterior_mean")
    job = experiment.jobs({**experiment.PRESETS["smoke"], "seed": 0})[0]
    before = hashed("posterior_mean", job)
    assert before == hashed("posterior_mean", dict(job))
    monkeypatch.setattr("studies.papers.command.code_hash", lambda module: "other code")
    assert hashed("posterior_mean", job) != before
    assert len({code_hash(f"studies.papers.{name}") for name in EXPERIMENTS}) == len(EXPERIMENTS)

"""`scripts/mutants.py`: what it mutates, in which order it runs tests, and what it reports."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = '''\
def f(a: int | None, b: float = 2.0) -> int | None:
    """Three plus 4."""
    if a is None:
        raise ValueError(f"no {a + 1}")
    return (a - b) / 3
'''


@pytest.fixture
def mutants(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "scripts" / "mutants.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mutants", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "EQUIVALENT", tmp_path / "equivalent.txt")
    (tmp_path / "equivalent.txt").write_text("# a comment\n")
    return module


def row(mutants, verdict: str, path: str = "kbf/rkhs/a.py", after: str = "b"):
    return mutants.Mutant(path, 1, 0, "Op", 0, "f", "a", after)._asdict() | {"verdict": verdict}


def test_annotations_and_messages_are_left_out(mutants):
    hidden = mutants.excluded(SOURCE)
    texts = [SOURCE.splitlines()[a[0] - 1][a[1] : b[1]] for a, b in hidden]
    assert texts[:3] == ["int | None", "float", "int | None"]
    assert "raise" in texts[3] and all("a - b" not in text for text in texts)


def test_the_star_of_a_signature_is_no_product(mutants, monkeypatch, tmp_path):
    pytest.importorskip("cosmic_ray")
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    path = tmp_path / "a.py"
    path.write_text("def f(a, *, b, c):\n    return a * b\n")
    found = [mutant for _, mutant in mutants.candidates(path) if "Binary" in mutant.operator]
    assert {(mutant.line, mutant.column) for mutant in found} == {(2, 13)}


def test_the_file_s_own_test_comes_first(mutants):
    tests = mutants.tests_for("kbf/rkhs/ratios.py", "rkhs")
    assert tests[0] == "tests/rkhs/test_ratios.py" and len(tests) > 4
    assert sorted(tests) == sorted(set(tests))


def test_equivalent_mutants_do_not_count(mutants):
    rows = [row(mutants, "failed"), row(mutants, "timeout"), row(mutants, "passed", after="same")]
    assert mutants.report(rows)[1] == pytest.approx(2 / 3)
    mutants.EQUIVALENT.write_text("kbf/rkhs/a.py :: same :: a factor of one\n")
    text, share = mutants.report(rows)
    assert share == 1 and "a factor of one" in text and "| rkhs | 3 | 2 | 1 | 0 |" in text


def test_an_equivalent_mutant_needs_a_reason(mutants):
    mutants.EQUIVALENT.write_text("kbf/rkhs/a.py :: same\n")
    with pytest.raises(ValueError, match="FILE :: LINE :: REASON"):
        mutants.report([])


def test_the_kept_reasons_can_be_read(mutants, monkeypatch):
    monkeypatch.setattr(mutants, "EQUIVALENT", ROOT / "studies" / "mutants_equivalent.txt")
    assert all((ROOT / path).exists() for path, _ in mutants.equivalents())


def test_mutants_of_a_file(mutants, monkeypatch, tmp_path):
    """Each changes one line of the computation; the places of one draw are those of the next."""
    pytest.importorskip("cosmic_ray")
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "FOLDERS", ("rkhs",))
    (tmp_path / "kbf" / "rkhs").mkdir(parents=True)
    (tmp_path / "kbf" / "rkhs" / "a.py").write_text(SOURCE)
    drawn = mutants.sample(100, 0)
    assert {mutant.line for mutant in drawn} == {1, 3, 5} and len(drawn) > 4
    assert all(mutant.before != mutant.after for mutant in drawn)
    assert mutants.sample(2, 0) == drawn[:2]


def test_short_tests_come_first(mutants, tmp_path):
    """In the second run; the first one measures them."""
    file, path = tmp_path / "test_a.py", tmp_path / "durations.json"
    file.write_text(
        "import time\ndef test_long(): time.sleep(0.6)\ndef test_short(): pass\n"
        "def test_other(): pass\n"
    )
    words = [str(file), "-q", "-n", "0", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    for expected in (["long", "short", "other"], ["short", "other", "long"]):
        plugin = mutants.ShortFirst(path)
        assert pytest.main(words, plugins=[plugin]) == 0
        assert [name.split("test_")[-1] for name in plugin.found] == expected
        assert plugin.found.keys() == json.loads(path.read_text()).keys()

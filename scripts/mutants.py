#!/usr/bin/env python
"""Mutation tests: which small changes of the core do the tests of the same folder notice?

    .venv/bin/python scripts/mutants.py 200 --seed 0      # make mutants MUTANTS=200

Draws places of `FOLDERS` at random, mutates each by an operator of cosmic-ray (an arithmetic or
comparison operator, a number, a truth value, a loop) or drops a transpose, and runs the tests of
the mirrored folder until the first fails, short ones first and those marked slow last. Annotations,
messages and raised errors are left out. Each process works on a copy, runs/mutants/tree*. Results
are kept in data/results/mutants.jsonl, and the same command resumes: a mutant runs again only if
its file changed, one that survived without a reason also if the tests of its folder changed.

Writes runs/mutants/survivors.md. A survivor that computes the same as the original belongs into
studies/mutants_equivalent.txt with the reason. Returns 1 below `MIN_NOTICED`.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "runs" / "mutants"
TREE = OUT / "tree0"
RESULTS = ROOT / "data" / "results" / "mutants.jsonl"
EQUIVALENT = ROOT / "studies" / "mutants_equivalent.txt"
FOLDERS = (
    "rkhs",
    "densities",
    "filters/kernel",
    "filters/kernel_monte_carlo",
    "filters/gaussian",
    "filters/particle",
    "evaluation",
)
"""Folders of kbf/ that are mutated, and of tests/ whose tests are run."""
MIN_NOTICED = 0.95
"""Share of the mutants, without equivalent ones, that the tests must notice."""
TIMEOUT_FACTOR = 10
"""A mutant whose tests take this many times the time of the unchanged code counts as noticed."""
MIN_TIMEOUT = 60
"""Seconds that a mutant has at least: short test runs vary by the load of the machine."""
SHORT = 0.5
"""Seconds: tests that took less without a mutation run before the others."""
REPLACED = (
    {"Add", "Sub", "Mul", "Div", "Pow"},
    {"BitAnd", "BitOr", "BitXor"},
    {"Lt", "LtE", "Gt", "GtE", "Eq", "NotEq"},
    {"Is", "IsNot"},
)
"""An operator is replaced by those of the same set (nothing by a power): others raise at once."""
LEFT_OUT = {"VariableReplacer", "VariableInserter", "RemoveDecorator", "NoOp", "ExceptionReplacer"}
"""Operators of cosmic-ray that need settings, or that change no computation."""
MESSAGES = {"warn", "warning", "info", "debug"}
"""Calls whose arguments are messages."""
MARKED = ("not slow", "slow")
"""Expressions of pytest's -m: tests that run at first, and then on what these do not notice."""
PRELOADED = ("torch", "numpy", "scipy.linalg", "scipy.stats", "beartype", "matplotlib")
"""Packages that every test run needs: imported once, then inherited by the forked processes."""


class Mutant(NamedTuple):
    """A mutation of one place.

    Attributes:
        path: the file, relative to the repository. line, column: the place, from 1 and 0.
        operator: its name. occurrence: which of the places of this operator in the file.
        definition: the function or class. before, after: the source lines that differ.
    """

    path: str
    line: int
    column: int
    operator: str
    occurrence: int
    definition: str
    before: str
    after: str

    @property
    def folder(self) -> str:
        """The entry of `FOLDERS` that contains the file."""
        return next(each for each in FOLDERS if self.path.startswith(f"kbf/{each}/"))

    @property
    def name(self) -> str:
        """File, line, change."""
        return f"{self.path}:{self.line} {self.operator}: {self.before} -> {self.after}"


def digest(*parts: object) -> str:
    """Return a hash of the parts; it orders places at random, the same in every run."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


def hash_of(paths: Iterable[Path]) -> str:
    """Return a hash of the contents of files."""
    return digest(*(path.read_bytes() for path in sorted(paths)))


@functools.cache
def operators() -> dict[str, Any]:
    """Return the operators by name: `DropTranspose`, and those of cosmic-ray for numerical code."""
    from cosmic_ray import plugins

    found = {"DropTranspose": DropTranspose()}
    for full in plugins.operator_names():
        name = full.partition("/")[2]
        kind, *sides = name.split("_")
        replaces = kind in ("ReplaceBinaryOperator", "ReplaceComparisonOperator")
        fits = sides[-1:] != ["Pow"] and any(kinds.issuperset(sides) for kinds in REPLACED)
        if kind not in LEFT_OUT and (fits or not replaces):
            found[name] = plugins.get_operator(full)()
    return found


class DropTranspose:
    """Replaces ``a.mT`` and ``a.T`` by ``a``; has the methods of an operator of cosmic-ray."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """Yield the position of the node if it is a transpose."""
        if node.type == "trailer" and node.get_code().strip() in (".mT", ".T"):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> None:
        """Delete the node."""


def is_message(node: ast.AST) -> bool:
    """Return whether a node logs or warns."""
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") in MESSAGES


def excluded(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the places, as (line, column) of start and end, that no mutant changes.

    >>> excluded("def f(a: int | None):\\n    raise ValueError(3 + a)")
    [((1, 9), (1, 19)), ((2, 4), (2, 27))]
    """
    nodes: list[Any] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg | ast.AnnAssign):
            nodes.append(node.annotation)
        elif isinstance(node, ast.FunctionDef):
            nodes.append(node.returns)
        elif isinstance(node, ast.Raise | ast.JoinedStr) or is_message(node):
            nodes.append(node)
    ranges = [
        ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        for node in nodes
        if node is not None
    ]
    return sorted(ranges)


def candidates(path: Path) -> Iterator[tuple[tuple[Any, ...], Mutant]]:
    """Yield the mutants of a file, each with its place: file, position and kind of operator."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.ast.ast_query import ASTQuery

    source, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
    hidden, nodes = excluded(source), list(ast_nodes(get_ast(source)))
    lines = source.splitlines()
    for operator_name, operator in operators().items():
        occurrence = -1
        for node in nodes:
            for start, _ in operator.mutation_positions(node):
                occurrence += 1
                line = lines[start[0] - 1]
                separator = line[start[1] :].startswith("*,")  # of parameters
                if separator or any(low <= tuple(start) < high for low, high in hidden):
                    continue
                definition = ASTQuery(node).get_definition_name() or ""
                before = line.strip()
                mutant = Mutant(name, *start, operator_name, occurrence, definition, before, "")
                kind = operator_name.split("_")[0]
                yield (name, definition, before, start[1], kind), mutant


def mutated(mutant: Mutant, source: str) -> str:
    """Return the source with the mutation.

    Raises:
        ValueError: the source has no such place.
    """
    from cosmic_ray.mutating import mutate_code

    code = mutate_code(source, operators()[mutant.operator], mutant.occurrence)
    if code is None:
        raise ValueError(f"{mutant.path} has no place {mutant.occurrence} of {mutant.operator}")
    return code


def sample(count: int, seed: int) -> list[Mutant]:
    """Return mutants of places drawn at random, one of each.

    The draw orders places by a hash, so that an edit changes the draw of the edited lines only.
    """
    places: dict[tuple[Any, ...], list[Mutant]] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / "kbf" / folder).rglob("*.py")):
            for place, mutant in candidates(path):
                places.setdefault(place, []).append(mutant)
    drawn = sorted(places, key=lambda place: digest(seed, *place))[:count]
    chosen = [
        min(places[place], key=lambda mutant: digest(seed, mutant.operator, mutant.column))
        for place in drawn
    ]
    return [with_change(mutant) for mutant in chosen]


def with_change(mutant: Mutant) -> Mutant:
    """Return the mutant with the first line that it changes, before and after."""
    source = (ROOT / mutant.path).read_text(encoding="utf-8")
    old, new = source.splitlines(), mutated(mutant, source).splitlines()
    row = next(k for k, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1])
    return mutant._replace(before=old[row].strip(), after=new[row].strip())


def tests_for(mutant_path: str, folder: str) -> list[str]:
    """Return the test files of a folder: first that of the file's name, then those that name it."""
    module = mutant_path.removesuffix(".py").replace("/", ".")
    stem = Path(mutant_path).stem

    def rank(test: Path) -> tuple[bool, bool, str]:
        text = test.read_text(encoding="utf-8")
        return test.name != f"test_{stem}.py", not re.search(rf"\b{module}\b", text), test.name

    tests = sorted((ROOT / "tests" / folder).rglob("test_*.py"), key=rank)
    return [test.relative_to(ROOT).as_posix() for test in tests]


class ShortFirst:
    """A plugin of pytest: tests that were short in an earlier run come first.

    Attributes:
        path: a file with the seconds of each test; it is written if it does not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
        self.found: dict[str, float] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Move the long tests to the end; the order is otherwise kept."""
        items.sort(key=lambda item: self.known.get(item.nodeid, 0.0) > SHORT)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add the seconds of set-up, call and tear-down."""
        self.found[report.nodeid] = self.found.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        """Write the seconds if no earlier run did."""
        if not self.path.exists():
            self.path.write_text(json.dumps(self.found), encoding="utf-8")


def make_tree(started: Any) -> None:
    """Copy what the tests need to a `TREE` of this process; ``started``: a number of processes."""
    global TREE
    with started.get_lock():
        TREE = OUT / f"tree{started.value}"
        started.value += 1
    shutil.rmtree(TREE, ignore_errors=True)
    skip = shutil.ignore_patterns("__pycache__")
    for name in ("kbf", "configs", "tests", "studies"):
        shutil.copytree(ROOT / name, TREE / name, ignore=skip)
    shutil.copy(ROOT / "pyproject.toml", TREE)


def run_tests(tests: list[str], timeout: float, durations: Path, marked: str) -> tuple[str, float]:
    """Run tests of `TREE` until one fails; returns the verdict and the seconds.

    Args:
        tests: the files. timeout: in seconds. durations: see `ShortFirst`.
        marked: one of `MARKED`.

    Verdicts: "passed", "failed", "timeout", and "broken" if pytest could not run the tests.
    """
    start, output = time.monotonic(), TREE / "output.txt"
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.setpgid(0, 0)
            with output.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.chdir(TREE)
            sys.dont_write_bytecode = True
            os.environ["PYTHONPATH"] = str(TREE)
            sys.path[:0] = [str(TREE)]
            import pytest

            words = ["-x", "-q", "-n", "0", "-m", marked, "-p", "no:cacheprovider"]
            code = int(pytest.main([*words, *tests], plugins=[ShortFirst(durations)]))
            if not str(getattr(sys.modules.get("kbf"), "__file__", TREE)).startswith(str(TREE)):
                code = 98  # the tests ran another kbf
        finally:
            os._exit(code)
    done = 0
    try:
        while time.monotonic() - start < timeout:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                # 1: a test failed; 2: a file could not be imported; 5: there are no tests
                verdicts = {0: "passed", 1: "failed", 2: "failed", 5: "passed"}
                code = os.waitstatus_to_exitcode(status)
                verdict = "failed" if code < 0 else verdicts.get(code, "broken")
                return verdict, time.monotonic() - start
            time.sleep(0.05)
        return "timeout", time.monotonic() - start
    finally:
        if not done:  # too slow, or interrupted
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test(mutant: Mutant) -> tuple[Mutant, str, float]:
    """Run the tests with the mutant in `TREE`, which is as before afterwards.

    Raises:
        ValueError: pytest broke off.
    """
    path, tests = TREE / mutant.path, tests_for(mutant.path, mutant.folder)
    source, stat = path.read_text(encoding="utf-8"), path.stat()
    verdict, total = "passed", 0.0
    for marked in MARKED:
        seconds, durations = baseline(mutant.folder, marked)
        limit = max(TIMEOUT_FACTOR * seconds, MIN_TIMEOUT)
        try:
            path.write_text(mutated(mutant, source), encoding="utf-8")
            verdict, seconds = run_tests(tests, limit, durations, marked)
        finally:
            path.write_text(source, encoding="utf-8")
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        total += seconds
        if verdict != "passed":
            break
    if verdict == "broken":
        raise ValueError(f"pytest broke off at {mutant.name}, see {TREE}/output.txt")
    return mutant, verdict, total


def read_results() -> dict[str, dict[str, Any]]:
    """Return what earlier runs found, by key; the last of each."""
    if not RESULTS.exists():
        return {}
    rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    return {row["key"]: row for row in rows}


def keep(row: dict[str, Any]) -> dict[str, Any]:
    """Append a row to the results; returns it."""
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    return row


def equivalents() -> dict[tuple[str, str], str]:
    """Return the reasons of `EQUIVALENT` by file and mutated line.

    Raises:
        ValueError: a line that does not have three parts.
    """
    found = {}
    for line in EQUIVALENT.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            parts = [part.strip() for part in line.split(" :: ")]
            if len(parts) != 3 or not all(parts):
                raise ValueError(f"{EQUIVALENT.name}: not FILE :: LINE :: REASON: {line}")
            found[parts[0], parts[1]] = parts[2]
    return found


def baseline(folder: str, marked: str) -> tuple[float, Path]:
    """Return the seconds of some tests of a folder on the unchanged code, and of each; kept.

    Raises:
        ValueError: one of them fails.
    """
    files = [*(ROOT / "kbf").rglob("*.py"), *(ROOT / "tests" / folder).rglob("*.py")]
    key = digest("baseline", folder, marked, hash_of(files))
    durations, known = OUT / f"durations_{key[:16]}.json", read_results()
    if key not in known or not durations.exists():
        verdict, seconds = run_tests(tests_for("", folder), 3600, durations, marked)
        if verdict != "passed":
            durations.unlink(missing_ok=True)
            raise ValueError(f"tests/{folder}: {verdict} without a mutation, see {TREE}/output.txt")
        print(f"{folder}, {marked}: {seconds:.0f} s without a mutation", flush=True)
        known[key] = keep({"key": key, "seconds": seconds})
    return known[key]["seconds"], durations


def run(mutants: list[Mutant], jobs: int) -> list[dict[str, Any]]:
    """Run the mutants that no earlier run did, in processes; returns a row of each.

    Raises:
        ValueError: tests that fail without a mutation, or a run of pytest that broke off.
    """
    known, rows, pending, reasons = read_results(), {}, {}, equivalents()
    for mutant in mutants:
        source = hash_of([ROOT / mutant.path])
        tests = hash_of((ROOT / "tests" / mutant.folder).rglob("*.py"))
        key = digest(source, mutant.path, mutant.operator, mutant.occurrence)
        row = known.get(key)
        equal = (mutant.path, mutant.after) in reasons
        if row is None or (row["verdict"] == "passed" and row["tests"] != tests and not equal):
            pending[mutant] = {"key": key, "tests": tests}
        else:
            rows[mutant] = row | mutant._asdict()
    context = multiprocessing.get_context("fork")
    with context.Pool(jobs, make_tree, (context.Value("i", 0),)) as pool:
        folders = sorted({mutant.folder for mutant in pending}, key=FOLDERS.index)
        pool.starmap(baseline, itertools.product(folders, MARKED), chunksize=1)
        for mutant, verdict, seconds in pool.imap_unordered(test, pending):
            found = {"verdict": verdict, "seconds": round(seconds, 1)}
            rows[mutant] = keep(pending[mutant] | found | mutant._asdict())
            word = "SURVIVED" if verdict == "passed" else "noticed"
            count = f"{len(rows)}/{len(mutants)}"
            print(f"{count} {word} {seconds:.1f} s {mutant.name}", flush=True)
    return [rows[mutant] for mutant in mutants]


def report(rows: list[dict[str, Any]]) -> tuple[str, float]:
    """Return the table of survivors as Markdown, and the share of mutants that was noticed."""
    reasons = equivalents()
    survivors = [row for row in rows if row["verdict"] == "passed"]
    same = [row for row in survivors if (row["path"], row["after"]) in reasons]
    share = 1 - (len(survivors) - len(same)) / max(len(rows) - len(same), 1)
    lines = [
        f"{len(rows)} mutants, {len(rows) - len(survivors)} noticed, {len(same)} equivalent, "
        f"{len(survivors) - len(same)} survived: {share:.1%} noticed.",
        "",
        "| folder | mutants | noticed | equivalent | survived |",
        "|---|---|---|---|---|",
    ]
    for folder in FOLDERS:
        mine = [row for row in rows if row["path"].startswith(f"kbf/{folder}/")]
        left, equal = ([row for row in some if row in mine] for some in (survivors, same))
        counts = len(mine), len(mine) - len(left), len(equal), len(left) - len(equal)
        lines.append(f"| {folder} | {' | '.join(map(str, counts))} |")
    lines += ["", "| place | operator | before | after | reason |", "|---|---|---|---|---|"]
    for row in survivors:
        before, after = (row[side].replace("|", "\\|") for side in ("before", "after"))
        reason = reasons.get((row["path"], row["after"]), "")
        place = f"{row['path']}:{row['line']}"
        lines.append(f"| {place} | {row['operator']} | `{before}` | `{after}` | {reason} |")
    return "\n".join([*lines, ""]), share


def main(words: list[str]) -> int:
    """Draw, run, report; returns 1 if too few mutants were noticed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("count", nargs="?", type=int, default=200, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other places")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args(words)
    OUT.mkdir(parents=True, exist_ok=True)
    mutants = sample(options.count, options.seed)
    os.environ |= {"OMP_NUM_THREADS": "1"}
    for name in PRELOADED:
        __import__(name)
    text, share = report(run(mutants, options.jobs))
    (OUT / "survivors.md").write_text(text, encoding="utf-8")
    print(f"{text}\nin {OUT / 'survivors.md'}")
    return int(share < MIN_NOTICED)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        sys.exit(str(error))

"""A hash of the code that the rows of an experiment depend on: its file and all that it imports.

The files are found by reading import statements, without running them. Where the configurations of
``kbf train`` are composed, the files of ``configs/`` count too, with the classes that they name.
What changes no row does not count: comments and docstrings, drawings (`kbf.plots`), lists of names,
and in `studies.papers` the verdicts, tests, pictures and notes, that is, all that ``jobs`` and
``work`` do not refer to.
"""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import kbf

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
PACKAGES = ("kbf", "studies")
PUBLIC: dict[str, str] = vars(kbf)["_HOME"]
"""The modules of the public names of kbf."""
DRAWINGS = "kbf.plots"
FOLDER = "studies/papers"
"""The folder in whose files only definitions count that the rows depend on."""
ROWS = {"jobs", "work"}
"""The functions of an experiment that make its rows."""
LISTS = ("kbf", "studies", "studies.papers")
"""Packages whose own file lists public names, and changes no row."""
COMPOSES = "kbf.config.prepare"
"""The module whose import brings the configuration files with it."""


def file_of(module: str) -> Path | None:
    """The file of a module of this repository; None for what is no module of it.

    >>> file_of("kbf.rkhs.rules").name, file_of("torch")
    ('rules.py', None)
    """
    if module.split(".")[0] not in PACKAGES:
        return None
    path = ROOT / Path(*module.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def imported(path: Path) -> set[str]:
    """The modules of this repository that a file imports, anywhere in it.

    A public name of ``kbf``, which is loaded at first use, stands for the module that defines it.
    """
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if file_of(full) else home(full) or node.module)
    return {module for module in found if file_of(module)}


def home(name: str) -> str | None:
    """The module of a public name ``kbf.NAME``; None for other names.

    >>> home("kbf.KBF"), home("kbf.rkhs.rules.original")
    ('kbf.filters.kernel.kbf', None)
    """
    return PUBLIC.get(name.removeprefix("kbf."))


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file, without docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [line for line in node.body if not is_text(line)] or [ast.Pass()]
    return tree


def is_text(line: ast.stmt) -> bool:
    """Whether a statement is a string by itself, as docstrings are."""
    return isinstance(line, ast.Expr) and isinstance(getattr(line.value, "value", None), str)


@functools.cache
def files(module: str) -> tuple[Path, ...]:
    """The files that a module depends on, itself among them, sorted.

    Raises:
        ValueError: no module of this repository.
    """
    if file_of(module) is None:
        raise ValueError(f"there is no module {module} in {ROOT}")
    waiting, seen, others = [module], set(), set()
    while waiting:
        name = waiting.pop()
        if name in seen or name in LISTS or name.startswith(DRAWINGS):
            continue
        seen.add(name)
        path = file_of(name)
        assert path is not None
        more = imported(path)
        if name == COMPOSES:
            others = set(CONFIGS.rglob("*.yaml"))
            more |= {named for file in others for named in targets(file)}
        parents = {name.rsplit(".", k)[0] for k in range(1, name.count(".") + 1)}
        waiting += sorted(more | parents)
    return tuple(sorted({file for name in seen if (file := file_of(name))} | others))


def targets(path: Path) -> set[str]:
    """The modules of the classes that a configuration file names.

    >>> targets(CONFIGS / "model" / "kbf_paper.yaml")
    {'kbf.filters.kernel.kbf'}
    """
    names = re.findall(r"\bkbf(?:\.\w+)+", path.read_text(encoding="utf-8"))
    modules = {home(name) or (name if file_of(name) else None) for name in names}
    return {module for module in modules if module}


@functools.cache
def code_hash(module: str) -> str:
    """A hash of the code that the rows of a module depend on.

    A process computes it once: changes to files that it has loaded have no effect on it either.
    """
    digest = hashlib.sha256()
    used = reached(files(module))
    for path in files(module):
        if path.suffix != ".py":
            text = path.read_text(encoding="utf-8")
        elif of_experiments(path):
            text = "".join(map(ast.dump, lines_of(path, used)))
        else:
            text = ast.dump(parsed(path))
        digest.update(f"{path.relative_to(ROOT)}\0{text}\0".encode())
    return digest.hexdigest()


def lines_of(path: Path, names: set[str]) -> Iterator[ast.stmt]:
    """The statements of a file that `counts` names; of an import only what is among the names."""
    for line in parsed(path).body:
        if isinstance(line, ast.Import | ast.ImportFrom):
            line = copy.copy(line)
            line.names = [alias for alias in line.names if bound_by(alias) in names]
        if counts(line, names):
            yield line


def of_experiments(path: Path) -> bool:
    """Whether a file lies in the folder of the experiments."""
    return path.parent == ROOT / FOLDER


def reached(paths: Sequence[Path]) -> set[str]:
    """``jobs``, ``work``, and the names that their definitions refer to, directly or not.

    The names are those of all files of the experiments together. A name that two of them define
    stands for both, so that the set is at most too large.
    """
    lines = [line for path in paths if of_experiments(path) for line in parsed(path).body]
    names, before = set(ROWS), 0
    while before < len(names):
        before = len(names)
        for line in lines:
            if counts(line, names):
                names |= {node.id for node in ast.walk(line) if isinstance(node, ast.Name)}
                names |= {node.attr for node in ast.walk(line) if isinstance(node, ast.Attribute)}
    return names


def counts(line: ast.stmt, names: set[str]) -> bool:
    """Whether a statement defines or imports one of the names, or is of another kind.

    >>> line = ast.parse("from kbf.ssm import rotation as r").body[0]
    >>> counts(line, {"r"}), counts(line, {"rotation"})
    (True, False)
    """
    defined = bound(line)
    return defined is None or not defined.isdisjoint(names)


def bound(line: ast.stmt) -> set[str] | None:
    """The names that a statement defines or imports; None for statements of other kinds.

    >>> sorted(bound(ast.parse("A, B = 1, 2").body[0]))
    ['A', 'B']
    """
    if isinstance(line, ast.FunctionDef | ast.ClassDef):
        return {line.name}
    if isinstance(line, ast.Import | ast.ImportFrom):
        return {bound_by(alias) for alias in line.names}
    if isinstance(line, ast.Assign | ast.AnnAssign):
        targets = line.targets if isinstance(line, ast.Assign) else [line.target]
        stored = (node for target in targets for node in ast.walk(target))
        return {node.id for node in stored if isinstance(node, ast.Name)}
    return None


def bound_by(alias: ast.alias) -> str:
    """The name that an import binds."""
    return (alias.asname or alias.name).split(".")[0]

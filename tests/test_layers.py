"""The architecture, read from the imports: folders are layers, nothing is imported upwards, and
files import in no circle.
"""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "kbf").rglob("*.py"))
LAYERS = [
    *("runtime", "recording", "rkhs", "ssm", "manifolds", "data", "densities", "filters", "images"),
    *("layers", "evaluation", "plots", "export", "fitted", "training", "config", "model_choice"),
    *("fitting", "cross_validation", "sklearn", "serving", "commands", "cli", "__main__"),
]
"""Folders and files of kbf/, from the ground up.

A file imports from its own folder and from lower layers.
"""
ONLY_IN = {
    "hydra": ("kbf.cli", "kbf.config"),
    "lightning": ("kbf.training",),
    "matplotlib": ("kbf.plots",),
    "sklearn": ("kbf.sklearn", "kbf.filters.regression.boosting"),
}
"""Frameworks, and the folders or files that know them."""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    """Full names of the modules that a file imports, anywhere in it."""
    modules = {module_name(p) for p in FILES}
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else str(node.module) for name in names}
    return found


def layer(module: str) -> int:
    """The number of the layer; that of the package itself, which only loads names when they are
    used, is below all.
    """
    if module == "kbf":
        return -1
    name = module.split(".")[1]
    assert name in LAYERS, f"{module} is in no layer: add it to LAYERS in {Path(__file__).name}"
    return LAYERS.index(name)


def circle(arrows: dict[str, set[str]]) -> list[str] | None:
    """A chain of files that ends where it began, if there is one."""
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return None


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_go_down(path):
    module = module_name(path)
    wrong = {t for t in imports(path) if t.split(".")[0] == "kbf" and layer(t) > layer(module)}
    assert not wrong, f"{module} (layer {layer(module)}) imports {sorted(wrong)}"


@pytest.mark.slow
def test_no_file_imports_itself_in_a_circle():
    names = {module_name(path) for path in FILES}
    arrows = {
        module_name(path): {t for t in imports(path) if t in names - {module_name(path), "kbf"}}
        for path in FILES
    }
    assert circle(arrows) is None


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_frameworks_stay_where_they_belong(path):
    module = module_name(path)
    for framework, homes in ONLY_IN.items():
        if any(t.split(".")[0] == framework for t in imports(path)):
            assert module.startswith(homes), f"{module} imports {framework}"


def test_the_rules_can_fail():
    assert (
        layer("kbf.rkhs.rules")
        < layer("kbf.filters.kernel.operators")
        < layer("kbf.training.fit")
        < layer("kbf.cli")
    )
    with pytest.raises(AssertionError, match="in no layer"):
        layer("kbf.attic")
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert circle({"a": {"b", "c"}, "b": {"c"}}) is None
    assert imports(ROOT / "kbf" / "training" / "fit.py") >= {
        "lightning",
        "torch",
        "kbf.runtime.instantiate",
    }


def test_help_imports_nothing_heavy():
    code = (
        "import sys, kbf.cli; kbf.cli.main(['--help']); print([m for m in ('torch', 'lightning', "
        "'hydra') if m in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip().endswith("[]")


def test_checking_a_file_imports_no_trainer():
    code = "import sys, kbf; kbf.check; print('lightning' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


FAMILIES = [
    *("gaussian", "particle", "kernel", "kernel_monte_carlo", "regression", "neural", "selection"),
]
"""Families of filters. Each imports from the ones before it and from the files of kbf/filters."""
MAX_ENTRIES_OF_FILTERS = 18
MAX_LINES = 420


@pytest.mark.parametrize("path", [p for p in FILES if "filters" in p.parts], ids=module_name)
def test_families_of_filters_import_from_earlier_ones(path):
    parts = module_name(path).split(".")
    own = FAMILIES.index(parts[2]) if len(parts) > 3 else None
    for imported in imports(path):
        words = imported.split(".")
        if words[:2] == ["kbf", "filters"] and len(words) > 3:
            assert own is not None and FAMILIES.index(words[2]) <= own, f"{path} imports {imported}"


def test_folders_and_files_stay_small():
    entries = {p.name for p in (ROOT / "kbf" / "filters").iterdir() if not p.name.startswith("__")}
    assert len(entries) <= MAX_ENTRIES_OF_FILTERS, sorted(entries)
    long = [path for path in FILES if len(path.read_text().splitlines()) > MAX_LINES]
    assert not long, f"files with more than {MAX_LINES} lines: {long}"


def test_the_workshop_is_not_part_of_the_library():
    users = {
        module_name(path) for path in FILES if "studies" in {t.split(".")[0] for t in imports(path)}
    }
    assert not users, f"{users} import from studies, which is not installed"

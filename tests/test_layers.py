"""The architecture, read from the imports: a file imports only files of a lower layer, and a few named neighbours."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "kbf").rglob("*.py"))
LAYERS = [
    ["kbf", "kbf.files", "kbf.build", "kbf.sequence", "kbf.linalg", "kbf.distributed", "kbf.process"],
    ["kbf.kernels", "kbf.features", "kbf.metrics", "kbf.ssm", "kbf.manifolds", "kbf.render"],
    ["kbf.embeddings", "kbf.cme", "kbf.ratios", "kbf.rules"],
    ["kbf.filters"],
    [
        "kbf.selection",
        "kbf.smoothing",
        "kbf.uncertainty",
        "kbf.reliability",
        "kbf.monitor",
        "kbf.plots",
        "kbf.frame_plots",
        "kbf.charts",
        "kbf.nn",
        "kbf.data",
    ],
    [
        "kbf.module",
        "kbf.checkpoint",
        "kbf.training",
        "kbf.pretraining",
        "kbf.pictures",
        "kbf.evaluation",
        "kbf.held_out",
        "kbf.export_ops",
        "kbf.export",
        "kbf.memory",
        "kbf.sklearn",
    ],
    ["kbf.experiments", "kbf.bench"],
    ["kbf.commands", "kbf.cli"],
]
NEIGHBOURS = {  # who may import whom inside one layer
    "kbf.sequence": {"kbf.linalg"},
    "kbf.features": {"kbf.kernels"},
    "kbf.manifolds": {"kbf.ssm"},
    "kbf.render": {"kbf.render"},
    "kbf.filters": {"kbf.filters"},
    "kbf.charts": {"kbf.plots"},
    "kbf.reliability": {"kbf.uncertainty"},
    "kbf.plots": {"kbf.reliability"},
    "kbf.frame_plots": {"kbf.plots"},
    "kbf.nn": {"kbf.nn", "kbf.selection"},
    "kbf.data": {"kbf.data"},
    "kbf.module": {"kbf.pretraining", "kbf.pictures"},
    "kbf.checkpoint": {"kbf.module"},
    "kbf.training": {"kbf.module", "kbf.checkpoint", "kbf.pretraining"},
    "kbf.pretraining": {"kbf.pictures"},
    "kbf.held_out": {"kbf.checkpoint", "kbf.training", "kbf.evaluation"},
    "kbf.memory": {"kbf.module", "kbf.checkpoint", "kbf.training", "kbf.held_out"},
    "kbf.experiments": {"kbf.experiments"},
    "kbf.bench": {"kbf.bench", "kbf.experiments"},
    "kbf.export": {"kbf.export_ops"},
    "kbf.commands": {"kbf.commands"},
}
ONLY_IN = {
    "hydra": {"kbf.cli"},
    "lightning": {"kbf.module", "kbf.training", "kbf.pretraining", "kbf.data.module"},
    "matplotlib": {"kbf.plots", "kbf.frame_plots", "kbf.charts"},
    "sklearn": {"kbf.sklearn"},
}


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


def part(module: str) -> str:
    """The file or folder that the table of layers names."""
    named = [name for names in LAYERS for name in names]
    fitting = [name for name in named if module == name or (module.startswith(name + ".") and name != "kbf")]
    assert fitting, f"{module} is in no layer: add it to the table in {Path(__file__).name}"
    return fitting[0]


def layer(module: str) -> int:
    return next(k for k, names in enumerate(LAYERS) if part(module) in names)


def allowed(module: str, target: str) -> bool:
    return layer(target) < layer(module) or part(target) in NEIGHBOURS.get(part(module), set())


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_go_down(path):
    module = module_name(path)
    wrong = {t for t in imports(path) if t.split(".")[0] == "kbf" and t != module and not allowed(module, t)}
    assert not wrong, f"{module} (layer {layer(module)}) imports {sorted(wrong)}"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_frameworks_stay_where_they_belong(path):
    module = module_name(path)
    for framework, homes in ONLY_IN.items():
        if any(t.split(".")[0] == framework for t in imports(path)):
            assert module in homes, f"{module} imports {framework}"


def test_the_rule_can_fail():
    assert not allowed("kbf.kernels", "kbf.rules")
    assert not allowed("kbf.ratios", "kbf.rules")
    assert not allowed("kbf.filters.ekf", "kbf.training")
    assert allowed("kbf.filters.ekf", "kbf.filters.gaussian")
    assert imports(ROOT / "kbf" / "training.py") >= {"lightning", "torch", "kbf.build"}


def test_help_imports_nothing_heavy():
    code = "import sys, kbf.cli; kbf.cli.main(['--help']); print([m for m in ('torch', 'lightning', 'hydra') if m in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip().endswith("[]")

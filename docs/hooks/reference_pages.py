"""Pages of the API reference: one for each public name, and those of modules for developers."""

from __future__ import annotations

import ast
import re
from itertools import takewhile
from pathlib import Path

import kbf
from kbf import layers, sklearn

GROUPS = {
    "Data": ("kbf.recording", "kbf.data", "kbf.ssm"),
    "Filters": ("kbf.filters",),
    "Images": ("kbf.images",),
    "Scores, checkpoints, training": ("kbf.evaluation", "kbf.fitted", "kbf.training"),
    "State and threads": ("kbf.filters.online", "kbf.runtime"),
}
"""Groups of names, and the modules of each; the longest name of a module decides."""
DOCUMENTED = (ast.ClassDef, ast.FunctionDef)


def public_groups() -> dict[str, dict[str, str]]:
    """The public names by group: full name, as it is imported, and its module."""
    front = dict(takewhile(lambda pair: pair[0] != "rollout", kbf._HOME.items()))
    front.pop("Recording")
    found = {"The front door": {f"kbf.{name}": home for name, home in front.items()}}
    found |= {group: {} for group in GROUPS}
    for name, home in sorted(kbf._HOME.items(), key=lambda pair: pair[0].lower()):
        if name not in front:
            found[group_of(home)][f"kbf.{name}"] = home
    found["Layers"] = {f"kbf.layers.{name}": home for name, home in layers._HOME.items()}
    found["scikit-learn"] = {f"kbf.sklearn.{name}": home for name, home in sklearn._HOME.items()}
    return found


def group_of(module: str) -> str:
    """The group of a module.

    Raises:
        ValueError: a module without a group.
    """
    fitting = {
        start: group
        for group, starts in GROUPS.items()
        for start in starts
        if module == start or module.startswith(f"{start}.")
    }
    if not fitting:
        raise ValueError(f"add {module} to the groups of docs/hooks/reference_pages.py")
    return fitting[max(fitting, key=len)]


def public_names() -> dict[str, str]:
    """All public names and their modules."""
    return {name: home for names in public_groups().values() for name, home in names.items()}


def navigation() -> list[dict[str, object]]:
    """The reference in the navigation: the list of names, then a section for each group."""
    sections: list[dict[str, object]] = [{"Public names": "reference/index.md"}]
    for group, names in public_groups().items():
        sections.append({group: [{name: f"reference/{name}.md"} for name in names]})
    return sections


def public_page(name: str, home: str) -> str:
    """The page of a public name: a function, or a class with its members."""
    path = f"{home}.{name.rpartition('.')[2]}"
    options = {"heading": name, "toc_label": name, "inherited_members": "true"}
    lines = [f"      {key}: {value}" for key, value in options.items()]
    return "\n".join([f"::: {path}", "    options:", *lines, ""])


def module_page(name: str) -> str:
    """The page of a module, for developers: what it has besides public names; not searched."""
    public = {full: home for full, home in public_names().items() if home == name}
    links = ", ".join(f"[`{full}`]({full}.md)" for full in public)
    lines = ["---", "search:", "  exclude: true", "---", "", f"::: {name}"]
    if public:
        hidden = ", ".join(f'"!^{full.rpartition(".")[2]}$"' for full in public)
        lines += [
            "    options:",
            f'      filters: ["!^_", {hidden}]',
            "",
            f"Public names: {links}.",
        ]
    return "\n".join([*lines, ""])


def index(paths: dict[str, Path]) -> str:
    """The page of all public names with the first sentence of their docstrings."""
    lines = [
        "# Public names\n",
        "All public names, by group. `import kbf` is sufficient: each name is imported when it is "
        "used. Other modules are for developers of kbf ([architecture](../architecture.md#files)); "
        "their names can change.",
    ]
    about = {
        "The front door": "From recordings to estimates in your columns and units "
        "([Getting started](../tutorials/getting_started.md)).",
        "Filters": "Models and filters without columns "
        "([In Python](../library.md#models-without-columns)).",
        "Layers": "Layers for a network of one's own ([guide](../layers.md)).",
        "scikit-learn": "Estimators for scikit-learn ([guide](../library.md#scikit-learn)).",
    }
    for group, names in public_groups().items():
        lines += [f"\n## {group}\n", *([f"{about[group]}\n"] if group in about else [])]
        lines += ["| name | purpose |", "|---|---|"]
        lines += [
            f"| [`{name}`]({name}.md) | {first_sentence(docstring(paths[home], name))} |"
            for name, home in names.items()
        ]
    short = ", ".join(f"[`kbf.{name}`]({module}.md)" for name, module in kbf._SHORT.items())
    lines += [f"\n## Modules with a short name\n\n{short}."]
    return "\n".join(lines) + "\n"


def docstring(path: Path, name: str) -> str:
    """The docstring of a class or function of a file; empty if there is none."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    short = name.rpartition(".")[2]
    for node in tree.body:
        if isinstance(node, DOCUMENTED) and node.name == short:
            return ast.get_docstring(node) or ""
    return ""


def first_sentence(doc: str) -> str:
    """The first sentence on one line, escaped for a table."""
    return (
        re.split(r"(?<=[.:])\s", " ".join(doc.split()), maxsplit=1)[0]
        .rstrip(":")
        .replace("|", "\\|")
    )

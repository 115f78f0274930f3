"""Pages that are made when the documentation is built: the front page, the gallery, the architecture, and the reference."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "data" / "results"
TABLE = runpy.run_path(str(ROOT / "tests" / "test_layers.py"))
NAMES: list[str] = sorted(map(TABLE["module_name"], TABLE["FILES"]))


def on_config(config: Any) -> Any:
    """Add the reference to the navigation, a section for each package."""
    sections: dict[str, list[Any]] = {}
    for name in NAMES:
        parent = name.rpartition(".")[0] if (ROOT / f"{name.replace('.', '/')}.py").exists() else name
        sections.setdefault(parent or "kbf", []).append({name.removeprefix("kbf.") or name: f"reference/{name}.md"})
    config.nav.append({"Reference": [{name: pages} for name, pages in sections.items()]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Make the pages, and take the pictures of data/results along."""

    def add(path: str, content: str | bytes) -> None:
        files.append(File.generated(config, path, content=content))

    add("index.md", linked((ROOT / "README.md").read_text(encoding="utf-8")))
    add("changelog.md", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    add("architecture.md", architecture())
    add("data.md", linked((ROOT / "data" / "README.md").read_text(encoding="utf-8")))
    results = sorted(path for path in RESULTS.rglob("*") if path.suffix in (".png", ".csv", ".json", ".md"))
    for path in results:
        add(f"results/{path.relative_to(RESULTS).as_posix()}", path.read_bytes())
    add("gallery.md", gallery([path for path in results if path.suffix == ".png"]))
    for name in NAMES:
        add(f"reference/{name}.md", f"::: {name}\n")
    return files


def linked(text: str) -> str:
    """A text of the repository, its links to files turned into links to pages; a file that has none keeps its name alone."""

    def replace(match: re.Match[str]) -> str:
        label, target = match.groups()
        if target.startswith(("http", "#")):
            return match[0]
        if target.startswith("kbf/") and target.endswith(".py"):
            return f"[{label}](reference/{target.removesuffix('.py').replace('/', '.')}.md)"
        if target in ("data/README.md", "data/results", "data/results/", "data/results/bench"):
            return f"[{label}]({'data' if target.endswith('.md') else 'gallery'}.md)"
        return f"[{label}]({target.removeprefix('data/')})" if target.startswith("data/results/") else label

    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", replace, text)


def architecture() -> str:
    """The layers of the test as a diagram, the highest on top, with the first sentence that each file says of itself."""
    docs = {TABLE["module_name"](p): ast.get_docstring(ast.parse(p.read_text(encoding="utf-8"))) or "" for p in TABLE["FILES"]}
    boxes, rows = [], []
    for number, names in reversed(list(enumerate(TABLE["LAYERS"]))):
        boxes.append(f'    L{number}["{"<br>".join(", ".join(names[k : k + 6]) for k in range(0, len(names), 6))}"]')
        rows += [f"| {number} | [`{name}`](reference/{name}.md) | {first_sentence(docs[name])} |" for name in names if name in docs]
    arrows = [f"    L{number + 1} --> L{number}" for number in reversed(range(len(TABLE["LAYERS"]) - 1))]
    page = (Path(__file__).parent / "architecture.md").read_text(encoding="utf-8")
    diagram = "\n".join(["```mermaid", "flowchart TD", *boxes, *arrows, "```"])
    return f"{page}\n{diagram}\n\n| layer | file | |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def first_sentence(doc: str) -> str:
    """Up to the first full stop, on one line, safe in a table."""
    return re.split(r"(?<=[.:])\s", " ".join(doc.split()), maxsplit=1)[0].rstrip(":").replace("|", "\\|")


def gallery(pictures: list[Path]) -> str:
    """Every picture of data/results under the heading of its folder, with its verdict or claims beside it."""
    lines = [(Path(__file__).parent / "gallery.md").read_text(encoding="utf-8")]
    section = None
    for path in pictures:
        parts = path.relative_to(RESULTS).parts
        kind = {"bench": "Speed", "reproduce": "The papers' experiments"}.get(parts[0], "Comparisons")
        if kind != section:
            section = kind
            lines.append(f"## {section}\n")
        lines.append(f"### {' / '.join(parts[:-1])}\n")
        lines.append(f"![{' / '.join(parts[:-1])}](results/{'/'.join(parts)})\n")
        beside = [path.with_name(name) for name in ("verdict.md", "claims.md", "results.csv", "about.json")]
        links = [f"[{file.name}](results/{file.relative_to(RESULTS).as_posix()})" for file in beside if file.exists()]
        lines.append(" · ".join(links) + "\n")
    return "\n".join(lines)

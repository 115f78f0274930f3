"""Generated pages: home, commands, reference, architecture, figures; links and equations."""

from __future__ import annotations

import ast
import html
import posixpath
import re
import runpy
import sys
from importlib import resources
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
import command_pages  # noqa: E402  # pyright: ignore
import reference_pages  # noqa: E402  # pyright: ignore
import tutorials  # noqa: E402  # pyright: ignore
from reference_pages import first_sentence  # noqa: E402  # pyright: ignore

from kbf.cli import COMMANDS  # noqa: E402

RESULTS = ROOT / "data" / "results"
LAYER_TEST = runpy.run_path(str(ROOT / "tests" / "test_layers.py"))
PATHS: dict[str, Path] = {LAYER_TEST["module_name"](path): path for path in LAYER_TEST["FILES"]}
NAMES = sorted(PATHS)
PAGE_OF = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "data/README.md": "data.md",
    "data/results": "figures.md",
    "data/results/bench": "figures.md",
}
"""Files and folders of the repository whose page has a different name."""


def on_config(config: Any) -> Any:
    """Adds the commands and the reference to the navigation."""
    commands = [{f"kbf {name}": f"commands/{page_name(name)}.md"} for name in COMMANDS]
    commands = [{"All commands": "commands/index.md"}, *commands]
    for entry in config.nav:
        if entry.get("Reference") == []:
            names, *groups = reference_pages.navigation()
            entry["Reference"] = [names, {"Commands": commands}, *groups]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Generates the pages and adds the figures and tables of data/results."""

    def add(path: str, content: str | bytes) -> None:
        if (old := files.get_file_from_path(path)) is not None:
            files.remove(old)
        files.append(File.generated(config, path, content=content))

    for source, page in PAGE_OF.items():
        if source.endswith(".md"):
            add(
                page,
                with_links(
                    (ROOT / source).read_text(encoding="utf-8"), posixpath.dirname(source), page
                ),
            )
    add("index.md", with_links(home(), "", "index.md"))
    add("architecture.md", architecture())
    results = sorted(
        path
        for path in RESULTS.rglob("*")
        if path.suffix in (".png", ".csv", ".json", ".jsonl", ".md")
    )
    for path in results:
        add(f"results/{path.relative_to(RESULTS).as_posix()}", path.read_bytes())
    made = {name: tutorials.pages(name) for name in tutorials.NAMES}
    for each in made.values():
        for path, content in each.items():
            add(f"tutorials/{path}", content)
    add("gallery.md", gallery(made))
    add("figures.md", figures([path for path in results if path.suffix == ".png"]))
    add("commands/index.md", commands_table())
    for name in COMMANDS:
        add(f"commands/{page_name(name)}.md", command_pages.command_page(name))
    add(
        "assets/math.ttf",
        (resources.files("ziamath") / "fonts" / "STIXTwoMath-Regular.ttf").read_bytes(),
    )  # SIL Open Font License
    add("reference/index.md", reference_pages.index(PATHS))
    for name, module in reference_pages.public_names().items():
        add(f"reference/{name}.md", reference_pages.public_page(name, module))
    for name in NAMES:
        add(f"reference/{name}.md", reference_pages.module_page(name))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replaces links to files of the repository by links to pages."""
    written = (
        page.file.abs_src_path is not None and Path(page.file.abs_src_path).parent == ROOT / "docs"
    )
    return with_links(markdown, "docs", page.file.src_uri) if written else markdown


def on_page_content(content: str, **_: Any) -> str:
    r"""Converts equations, \(...\) and \[...\], to MathML, which needs no script."""

    def equation(match: re.Match[str]) -> str:
        tex = html.unescape(match["tex"]).strip()
        return convert(tex[2:-2], display="block" if tex.startswith("\\[") else "inline")

    return re.sub(
        r'<(?P<tag>span|div) class="arithmatex">(?P<tex>.*?)</(?P=tag)>',
        equation,
        content,
        flags=re.DOTALL,
    )


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Loads the script of the offline search from docs/assets/ instead of the network."""
    here = posixpath.relpath("assets/iframe-worker.js", posixpath.dirname(page.url) or ".")
    return output.replace("https://unpkg.com/iframe-worker/shim", here)


def with_links(text: str, folder: str, page: str) -> str:
    """Replaces links to files, relative to ``folder``, by links to pages, or by the label."""

    def replace(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        path, hash_, anchor = target.partition("#")
        if "://" in target or not path:
            return match[0]
        goal = page_of(posixpath.normpath(posixpath.join(folder, path)))
        if goal is None:
            return label
        goal = posixpath.relpath(goal, posixpath.dirname(page) or ".")
        return f"{mark}[{label}]({goal}{hash_}{anchor})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", replace, text)


def page_of(path: str) -> str | None:
    """Page of a file or folder of the repository; None without a page."""
    if path in PAGE_OF:
        return PAGE_OF[path]
    if path.startswith("docs/tutorials/"):
        return path.removeprefix("docs/").replace(".py", ".md")
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("data/results/"):
        below = path.removeprefix("data/")
        return below if (ROOT / path).is_file() else "figures.md"
    if path.startswith("kbf/") and path.endswith(".py"):
        name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        return f"reference/{name}.md" if name in PATHS else None
    return None


def home() -> str:
    """The README in the whole width, with the animation instead of the still image."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = text.replace("docs/pictures/filter.png", "docs/pictures/filter.gif")
    return f"---\nhide: [navigation]\n---\n\n{text}"


def page_name(command: str) -> str:
    """The name of a command's page."""
    return command.replace(" ", "_")


def commands_table() -> str:
    """Table of all commands."""
    rows = [
        f"| [`kbf {name}`]({page_name(name)}.md) | {entry[0]} |" for name, entry in COMMANDS.items()
    ]
    return (
        "# Commands\n\n| command | purpose |\n|---|---|\n"
        + "\n".join(rows)
        + "\n\nRecipes: [cheat sheet](../cheatsheet.md).\n"
    )


def architecture() -> str:
    """Diagram of the layers, the highest on top; the first sentence of each module docstring."""
    layers: list[str] = LAYER_TEST["LAYERS"]
    rows = []
    for layer in reversed(layers):
        inside = [
            name for name in NAMES if name == f"kbf.{layer}" or name.startswith(f"kbf.{layer}.")
        ]
        docs = {
            name: ast.get_docstring(ast.parse(PATHS[name].read_text(encoding="utf-8"))) or ""
            for name in inside
        }
        rows += [
            f"| `{layer}` | [`{name}`](reference/{name}.md) | {first_sentence(docs[name])} |"
            for name in inside
            if docs[name]
        ]
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return (
        f"{page}\n{diagram(layers)}\n\n| layer | file | content |\n|---|---|---|\n"
        + "\n".join(rows)
        + "\n"
    )


def diagram(layers: list[str]) -> str:
    """Layers as boxes, three in a row; a layer imports from those to its left and below."""
    rows = [layers[k : k + 3] for k in range(0, len(layers), 3)]
    boxes = []
    for line, row in enumerate(reversed(rows)):
        for column, name in enumerate(row):
            x, y = 10 + 230 * column, 10 + 50 * line
            boxes.append(
                f'<rect x="{x}" y="{y}" width="220" height="40" rx="6" fill="none" '
                'stroke="currentColor"/>'
            )
            boxes.append(
                f'<text x="{x + 110}" y="{y + 26}" text-anchor="middle" '
                f'fill="currentColor">{name}</text>'
            )
    height = 10 + 50 * len(rows)
    return (
        f'<svg class="layers" viewBox="0 0 710 {height}" font-family="monospace" font-size="16">'
        f"{''.join(boxes)}</svg>"
    )


def gallery(made: dict[str, dict[str, str | bytes]]) -> str:
    """The figures of the tutorials, each a link to the page whose cells draw it."""
    lines = [(ROOT / "docs" / "gallery.md").read_text(encoding="utf-8"), '<div class="gallery">']
    for name, files in made.items():
        text = str(files[f"{name}.md"])
        for path in filter(lambda each: each.endswith(".png"), files):
            headings = re.findall(r"^##? (.*)$", text.partition(f"]({path})")[0], re.MULTILINE)
            label = html.escape(": ".join(dict.fromkeys([headings[0], headings[-1]])))
            lines.append(
                f'<a href="tutorials/{name}.html"><img src="tutorials/{path}" alt="{label}">'
                f"<span>{label}</span></a>"
            )
    return "\n".join([*lines, "</div>", ""])


def figures(pictures: list[Path]) -> str:
    """Every figure of data/results under the heading of its folder, with links to its data."""
    lines = [(ROOT / "docs" / "figures.md").read_text(encoding="utf-8")]
    section = None
    for path in pictures:
        parts = path.relative_to(RESULTS).parts
        kind = {"bench": "Speed", "reproduce": "The papers' experiments"}.get(
            parts[0], "Comparisons"
        )
        if kind != section:
            section = kind
            lines.append(f"## {section}\n")
        lines.append(f"### {' / '.join(parts[:-1])}\n")
        lines.append(f"![{' / '.join(parts[:-1])}](results/{'/'.join(parts)})\n")
        companions = [
            path.with_name(name)
            for name in ("verdict.md", "claims.md", "results.csv", "about.json")
        ]
        links = [
            f"[{file.name}](results/{file.relative_to(RESULTS).as_posix()})"
            for file in companions
            if file.exists()
        ]
        lines.append(" · ".join(links) + "\n")
    return "\n".join(lines)

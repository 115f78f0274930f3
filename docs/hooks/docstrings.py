"""Docstrings as Markdown: code blocks, links for full names, one argument a line."""

from __future__ import annotations

import re
from typing import Any

import griffe

RULE = r"=+(?: +=+)+$"
TABLE = re.compile(
    rf"^( *){RULE}\n(?:.*\S.*\n)+?\1{RULE}(?:\n(?:.*\S.*\n)+?\1{RULE})?", re.MULTILINE
)
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n.*\S.*)*", re.MULTILINE)
NAME = re.compile(r"(?<!`)`(kbf(?:\.\w+)+)`(?!`)")
SEVERAL = re.compile(r"^( {4}\w+(?:, \w+)+): ", re.MULTILINE)


class Markdown(griffe.Extension):
    """Rewrites every docstring of the package as Markdown."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Rewrites all docstrings of the package."""
        self.rewrite(pkg, pkg)

    def rewrite(self, thing: Any, package: griffe.Module) -> None:
        """Rewrites one docstring, and those of the members."""
        if thing.docstring is not None:
            names = [parameter.name for parameter in thing.parameters] if thing.is_function else []
            thing.docstring.value = markdown(one_a_line(thing.docstring.value, names), package)
        for member in getattr(thing, "members", {}).values():
            if not member.is_alias:
                self.rewrite(member, package)


def one_a_line(text: str, names: list[str]) -> str:
    """Puts each argument of ``x: ``n q``. z: ``n d``.`` on a line; ``a, b: ...`` stays one name."""
    head, args, rest = text.partition("\nArgs:\n")
    if args and names:
        rest = re.sub(rf"(?<=[.;]) ({'|'.join(map(re.escape, names))}): ", r"\n    \1: ", rest)
    return SEVERAL.sub(lambda match: f"{match[1].replace(', ', ',')}: ", head + args + rest)


def markdown(text: str, package: griffe.Module) -> str:
    """The text of a docstring as Markdown for the reference."""

    def link(match: re.Match[str]) -> str:
        try:
            target = package[match[1].split(".", 1)[1]]
            # The reference contains documented objects only: constants may have no docstring.
            return f"[`{match[1]}`][{target.canonical_path}]" if target.has_docstring else match[0]
        except (KeyError, griffe.AliasResolutionError):
            return match[0]

    def code(match: re.Match[str], language: str) -> str:
        return f"{match[1]}```{language}\n{match[0]}\n{match[1]}```"

    text = TABLE.sub(lambda match: code(match, "text"), text)
    return NAME.sub(link, EXAMPLE.sub(lambda match: code(match, "pycon"), text))

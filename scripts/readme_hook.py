"""The README for a package index: links to files of the repository become links to its address
(`project.urls.Source`).
"""

import posixpath
import re

from hatchling.metadata.plugin.interface import MetadataHookInterface


def absolute(text, source, tag):
    """Relative links of Markdown, in full."""

    def replace(match):
        mark, label, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match[0]
        kind = "raw" if mark else "blob"
        return f"{mark}[{label}]({source}/{kind}/{tag}/{posixpath.normpath(target)})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", replace, text)


class ReadmeHook(MetadataHookInterface):
    def update(self, metadata):
        with open(posixpath.join(self.root, "README.md"), encoding="utf-8") as file:
            text = absolute(file.read(), metadata["urls"]["Source"], f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}

# SPDX-License-Identifier: Apache-2.0
"""The directive ``supported-versions``: a table of the integrations' own ``SUPPORTED`` constants.

They are read by ast: no integration, and nothing that it needs, is imported.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

INTEGRATIONS = Path(__file__).resolve().parents[2] / "integrations"


def supported() -> dict[str, str]:
    """Return {integration: versions}.

    Raises:
        ValueError: an integration does not say what it supports.
    """
    found = {}
    for path in sorted(INTEGRATIONS.iterdir()):
        file = path / "__init__.py" if path.is_dir() else path
        if file.suffix != ".py" or path.name == "__init__.py" or not file.exists():
            continue
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SUPPORTED":
                found[path.stem] = str(ast.literal_eval(node.value))
                break
        else:
            raise ValueError(f"{file} has no SUPPORTED")
    return found


class SupportedVersions(SphinxDirective):
    """The table."""

    def run(self) -> list[nodes.Node]:
        """Return the table as nodes."""
        for path in INTEGRATIONS.rglob("*.py"):
            self.env.note_dependency(str(path))
        group = nodes.tgroup("", nodes.colspec(colwidth=20), nodes.colspec(colwidth=80), cols=2)
        rows = [("integration", "versions"), *supported().items()]
        parts = [
            nodes.row("", *(nodes.entry("", nodes.paragraph(text=cell)) for cell in row))
            for row in rows
        ]
        group += nodes.thead("", parts[0])
        group += nodes.tbody("", *parts[1:])
        return [nodes.table("", group)]


def setup(app: Any) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("supported-versions", SupportedVersions)
    return {"parallel_read_safe": True}

# SPDX-License-Identifier: Apache-2.0
"""Sphinx: ``nox -s docs`` builds the site with warnings as errors."""

from __future__ import annotations

import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "docs" / "_ext"))

project = "rl-insight-hooks"
author = copyright = "rl-insight-hooks contributors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "supported_versions"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "rl-insight-hooks"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_use_rtype = False
nitpicky = False

# SPDX-License-Identifier: Apache-2.0
"""PageData -> one HTML file that opens without a network."""

from __future__ import annotations

import base64
import html
import importlib.util
import zlib
from importlib import resources
from pathlib import Path

import msgspec

from rl_insight_hooks._version import __version__
from rl_insight_hooks.atomic import write_atomic
from rl_insight_hooks.errors import MissingDependencyError, UsageError
from rl_insight_hooks.report.page.data import PageData

DEFAULT_NAME = "moe_load.html"


def render(page: PageData) -> bytes:
    """Return the bytes of the page.

    Raises:
        MissingDependencyError: plotly, whose package carries the chart library, is not installed.
    """
    parts = {
        "title": html.escape(page.head["title"]),
        "style": _asset("page.css"),
        "head": _script_safe(msgspec.json.encode({**page.head, "version": __version__}).decode()),
        "counts": page.counts,
        "plotly": base64.b64encode(zlib.compress(_plotly(), 9)).decode(),
        "script": _asset("page.js"),
    }
    out = _asset("page.html")
    pieces = []
    # in the order of the template; what was put in is not looked at again
    for name, text in parts.items():
        before, mark, out = out.partition("{{" + name + "}}")
        if not mark:
            raise AssertionError(f"page.html has no {name} after the parts before it")
        pieces += [before, text]
    return "".join([*pieces, out]).encode()


def write(page: PageData, output: Path) -> Path:
    """Write the page; return the path. A folder gets ``moe_load.html``.

    Raises:
        UsageError: ``output`` has another ending, or cannot be written.
        MissingDependencyError: as :func:`render`.
    """
    if output.is_dir() or not output.suffix:
        output = output / DEFAULT_NAME
    if output.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"-o {output}: write a name that ends in .html, or a folder")
    data = render(page)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(output, data)
    except OSError as error:
        raise UsageError(
            f"-o {output}: cannot be written ({error.strerror}); choose another place"
        ) from error
    return output


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _script_safe(text: str) -> str:
    """Escape what could end a script element; JSON strings may hold it as an escape."""
    return text.replace("<", "\\u003c")


def _plotly() -> bytes:
    """Return the chart library out of the plotly package, which is not imported: that takes a second."""
    spec = importlib.util.find_spec("plotly")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        script = Path(folder, "package_data", "plotly.min.js")
        if script.is_file():
            return script.read_bytes()
    raise MissingDependencyError("html needs plotly: pip install 'rl-insight-hooks[html]'")

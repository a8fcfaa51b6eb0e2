# SPDX-License-Identifier: Apache-2.0
"""Write a LoadTable for other tools: csv, json, parquet, or an msprobe tree. Format from the name, or given."""

from __future__ import annotations

import os
from pathlib import Path

from rl_insight_hooks.errors import UsageError
from rl_insight_hooks.report import export_flat, export_msprobe
from rl_insight_hooks.report.table import LoadTable

FORMATS = ("csv", "json", "parquet", "msprobe")


def format_of(path: str | os.PathLike[str]) -> str:
    """Return the format that a name asks for: its ending; without one it is a folder, an msprobe tree.

    Raises:
        UsageError: the name asks for none of them.
    """
    suffix = Path(path).suffix.lower().lstrip(".")
    if suffix in ("csv", "json", "parquet"):
        return suffix
    if not suffix or Path(path).is_dir():
        return "msprobe"
    raise UsageError(
        f"{os.fspath(path)}: no export format has this ending; use .csv, .json or .parquet, a name without "
        f"ending for an msprobe tree, or give --format {'|'.join(FORMATS)}"
    )


def export(
    table: LoadTable,
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    overwrite: bool = False,
) -> list[str]:
    """Write ``table`` to ``path``; return what had to be said differently there, in sentences.

    csv and parquet hold one line per expert (step, role, rank, layer, phase, expert, tokens), json
    one object per row; experts that a rank does not hold are left out. An msprobe tree holds the
    forward counts only.

    Raises:
        UsageError: the format is unknown, or the target exists and ``overwrite`` is not set.
        MissingDependencyError: parquet without pyarrow.
        OSError: the target cannot be written; nothing is left of it.
    """
    kind = format if format is not None else format_of(path)
    if kind not in FORMATS:
        raise UsageError(f"export format {kind!r} is unknown; choose one of {', '.join(FORMATS)}")
    target = Path(path)
    taken = any(target.iterdir()) if target.is_dir() else target.exists()
    if taken and not overwrite:
        raise UsageError(f"{target} exists; give another name, or --force to replace it")
    if kind != "msprobe" and target.is_dir():
        raise UsageError(f"{target} is a folder; name a file for {kind}")
    if kind == "msprobe":
        return export_msprobe.write_tree(table, target)
    writer = {
        "csv": export_flat.write_csv,
        "json": export_flat.write_json,
        "parquet": export_flat.write_parquet,
    }[kind]
    target.parent.mkdir(parents=True, exist_ok=True)
    with export_flat.replacing(target) as stream:
        writer(table, stream)
    return []

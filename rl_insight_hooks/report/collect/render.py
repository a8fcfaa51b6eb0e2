# SPDX-License-Identifier: Apache-2.0
"""The outcome of ``collect`` in words. Pure."""

from __future__ import annotations

from rl_insight_hooks.report.collect.model import Report, SourceResult

_MAX_LISTED = 10


def outcome_lines(report: Report) -> list[str]:
    """Return the table of the sources and a last line that says what changed at home."""
    lines = _table(report.sources)
    if report.shared_folder is not None:
        return [
            *lines,
            f"nothing to do: shared storage, all the data is here in {report.shared_folder}",
        ]
    parts = [
        f"{report.num_new} new",
        f"{report.num_updated} updated",
        f"{report.num_identical} identical",
    ]
    if report.older:
        parts.append(f"{len(report.older)} older than ours and left")
    if report.conflicts:
        parts.append(f"{len(report.conflicts)} in conflict and kept apart")
    return [*lines, f"{report.folder}: {', '.join(parts)}"]


def trouble_lines(report: Report) -> list[str]:
    """Return a line for each thing that is wrong, long lists cut."""
    lines = []
    for result in report.sources:
        if result.is_lost:
            lines.append(f"error: {result.name}: {result.message}. {result.fix}".rstrip())
        for path, broken in list(result.broken.items())[:_MAX_LISTED]:
            lines.append(f"error: {result.name}: {path}: {broken}; not copied")
        if len(result.broken) > _MAX_LISTED:
            lines.append(f"error: {result.name}: {len(result.broken)} broken files in all")
    for conflict in report.conflicts[:_MAX_LISTED]:
        kept = "; ".join(f"{source}'s as {path}" for source, path in conflict.kept_as.items())
        lines.append(f"error: {conflict.path} differs between sources, kept apart: {kept}")
    if len(report.conflicts) > _MAX_LISTED:
        lines.append(f"error: {len(report.conflicts)} conflicts in all (--json lists them)")
    for path in report.older[:_MAX_LISTED]:
        lines.append(f"note: {path}: the copy here is newer, left as it is")
    return lines


def _table(sources: list[SourceResult]) -> list[str]:
    rows = [("source", "status", "files", "copied", "bytes", "")]
    rows += [
        (
            result.name,
            result.status,
            str(result.num_files),
            str(result.num_copied),
            size_text(result.num_bytes),
            result.message,
        )
        for result in sources
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return [
        f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  "
        f"{row[3]:>{widths[3]}}  {row[4]:>{widths[4]}}  {row[5]}".rstrip()
        for row in rows
    ]


def size_text(num_bytes: int) -> str:
    """Return a size as a person writes it: "1.5 MB" (powers of 1000)."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError("unreachable")

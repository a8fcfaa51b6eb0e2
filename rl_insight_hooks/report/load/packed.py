# SPDX-License-Identifier: Apache-2.0
"""Reader of packed steps (:mod:`rl_insight_hooks.packfile`): readers see no difference to JSON."""

from __future__ import annotations

from typing import Any

import numpy as np

from rl_insight_hooks.errors import DataError
from rl_insight_hooks.packfile import NewerPackError, read_pack_arrays
from rl_insight_hooks.report.load.context import ReadContext, read_bytes
from rl_insight_hooks.report.load.native import block_of, version_text
from rl_insight_hooks.report.load.sink import Block, Sink
from rl_insight_hooks.report.table import NO_STEP
from rl_insight_hooks.schema import SCHEMA_VERSION


def read_packed(paths: list[str], sink: Sink, context: ReadContext) -> None:
    """Put every step of every pack into ``sink`` that is not there already.

    Call it after the JSON files were read: a step that is both counts once, and the JSON wins. Of
    two packs that hold a step, the one that ended later wins.
    """
    best: dict[tuple[int, str, int], float] = {}
    if len(paths) > 1:
        best = _latest(paths)
    for path in paths:
        for load_file, counts in _steps(path, context):
            step = NO_STEP if load_file.step is None else load_file.step
            key = (step, load_file.role, load_file.rank)
            context.roles_seen.add(load_file.role)
            if not context.selection.wants(load_file.step, load_file.role, load_file.rank):
                continue
            if sink.has(*key) or load_file.ended_unix_s < best.get(key, load_file.ended_unix_s):
                continue
            block = _block(load_file, counts, path, context)
            if block is not None:
                sink.add(block)
        context.done()


def _latest(paths: list[str]) -> dict[tuple[int, str, int], float]:
    """Return the latest end of each (step, role, rank) over all packs; packs that cannot be read have none."""
    latest: dict[tuple[int, str, int], float] = {}
    for path in paths:
        try:
            files, _, _ = read_pack_arrays(read_bytes(path), path)
        except (OSError, DataError):
            continue
        for load_file in files:
            step = NO_STEP if load_file.step is None else load_file.step
            key = (step, load_file.role, load_file.rank)
            latest[key] = max(latest.get(key, load_file.ended_unix_s), load_file.ended_unix_s)
    return latest


def _steps(path: str, context: ReadContext) -> list[tuple[Any, list[Any]]]:
    try:
        files, flat, starts = read_pack_arrays(read_bytes(path), path)
    except OSError as error:
        context.problem("unreadable-file", path, str(error), "Give read permission, or copy it.")
        return []
    except NewerPackError as error:
        what = str(error).removeprefix(f"{path}: ")
        context.problem("newer-schema", path, what, "Upgrade: pip install -U rl-insight-hooks.")
        return []
    except DataError as error:
        what = str(error).removeprefix(f"{path}: ")
        context.problem("torn-pack", path, what, "Copy it again; its steps are missing.")
        return []
    out = []
    at = 0
    for load_file in files:
        rows = []
        for _ in load_file.records:
            rows.append(flat[starts[at] : starts[at + 1]])
            at += 1
        at += len(load_file.calls or ())
        out.append((load_file, rows))
    return out


def _block(load_file: Any, counts: list[Any], path: str, context: ReadContext) -> Block | None:
    where = f"{path} (step {load_file.step})"
    if not 1 <= load_file.schema_version <= SCHEMA_VERSION:
        what = version_text(load_file.schema_version)
        context.problem("newer-schema", where, what, "Upgrade: pip install -U rl-insight-hooks.")
        return None
    try:
        width = max((row.size for row in counts), default=0)
        counts_ne = np.zeros((len(counts), width), dtype=np.int64)
        for number, row in enumerate(counts):
            counts_ne[number, : row.size] = row
        return block_of(load_file, where, counts_ne, context)
    except (ValueError, OverflowError) as error:
        context.problem("bad-counts", where, str(error), "The file contradicts itself.")
        return None

# SPDX-License-Identifier: Apache-2.0
"""Which ranks are in a folder of gathered files, told from the paths and one file of each role."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from rl_insight_hooks.report.load.completeness import Key, Seen, missing
from rl_insight_hooks.report.select import Selection
from rl_insight_hooks.report.table import NO_STEP, Problem

_STEP_FILE = re.compile(r"step_[^/]+/(?P<role>[^/]+)/rank(?P<rank>\d+)/group_list\.json")
_PACK = re.compile(r"packed/(?P<role>[^/]+)/rank(?P<rank>\d+)/pack_[^/]+\.npz")


class _Head(msgspec.Struct):
    """The few fields of our file that say how many ranks there are."""

    world_size: int
    tokens_layout: str = ""


def missing_ranks(folder: Path, paths: Iterable[str]) -> list[Problem]:
    """Return, per role, the ranks of the run of which no file is among ``paths`` (below ``folder``)."""
    ranks_of: dict[str, set[int]] = {}
    example: dict[str, str] = {}
    for path in paths:
        step_file = _STEP_FILE.fullmatch(path)
        match = step_file or _PACK.fullmatch(path)
        if match is None:
            continue
        ranks_of.setdefault(match["role"], set()).add(int(match["rank"]))
        if step_file:
            example[match["role"]] = path
    seen: dict[Key, Seen] = {}
    for role, ranks in ranks_of.items():
        head = _read_head(folder / example[role]) if role in example else None
        for rank in ranks:
            seen[NO_STEP, role, rank] = Seen(
                source="",
                layers=frozenset(),
                num_experts=None,
                world_size=head.world_size if head else None,
                is_replica=bool(head and head.tokens_layout == "replicated"),
            )
    return missing(seen, Selection())


def _read_head(path: Path) -> _Head | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Head)
    except (OSError, msgspec.MsgspecError):
        return None

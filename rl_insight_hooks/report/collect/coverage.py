# SPDX-License-Identifier: Apache-2.0
"""Which ranks are in a folder of gathered files, told from the paths and one file of each role."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rl_insight_hooks.errors import DataError
from rl_insight_hooks.packfile import read_pack
from rl_insight_hooks.report.load.completeness import Key, Seen, missing
from rl_insight_hooks.report.select import Selection
from rl_insight_hooks.report.table import NO_STEP, Problem
from rl_insight_hooks.schema import COLLECTS_PREFIX, LoadFile, decode_load_file

_STEP_FILE = re.compile(r"step_[^/]+/(?P<role>[^/]+)/rank(?P<rank>\d+)/group_list\.json")
_PACK = re.compile(r"packed/(?P<role>[^/]+)/rank(?P<rank>\d+)/pack_[^/]+\.npz")
_COLLECTS = re.compile(rf"(?:.*/)?{COLLECTS_PREFIX}(?P<rank>\d+)\.json")


@dataclass(frozen=True, slots=True)
class Coverage:
    """Which ranks of the run are there."""

    problems: tuple[Problem, ...]  # ranks that are known to be missing, per role
    is_proven: bool  # the files say how many ranks there are, and all of them are there


def coverage(folder: Path, paths: Iterable[str]) -> Coverage:
    """Return what of the run is among ``paths`` (below ``folder``).

    Files of other tools and collects do not say how many ranks there are: nothing is proven of those. Collects
    that the recorder wrote lie beside its step files, which do.
    """
    ranks_of: dict[str, set[int]] = {}
    example: dict[str, str] = {}
    of_collects: set[int] = set()
    is_all_known = True
    for path in paths:
        match = _STEP_FILE.fullmatch(path) or _PACK.fullmatch(path)
        if match is not None:
            ranks_of.setdefault(match["role"], set()).add(int(match["rank"]))
            if example.get(match["role"], "").endswith(".json"):
                continue  # smaller than a pack
            example[match["role"]] = path
        elif collects := _COLLECTS.fullmatch(path):
            of_collects.add(int(collects["rank"]))
        else:
            is_all_known = False
    seen: dict[Key, Seen] = {}
    for role, ranks in ranks_of.items():
        head = _read(folder / example[role])
        is_all_known &= head is not None
        for rank in ranks:
            seen[NO_STEP, role, rank] = Seen(
                source="",
                layers=frozenset(),
                num_experts=None,
                world_size=head.world_size if head else None,
                is_replica=bool(head and head.tokens_layout == "replicated"),
                is_picked=bool(head and "ranks" in head.stamps),
            )
    if of_collects:
        is_all_known &= any(of_collects <= ranks for ranks in ranks_of.values())
    problems = tuple(missing(seen, Selection()))
    return Coverage(problems, is_proven=is_all_known and bool(ranks_of) and not problems)


def _read(path: Path) -> LoadFile | None:
    try:
        data = path.read_bytes()
        return read_pack(data, path)[-1] if path.suffix == ".npz" else decode_load_file(data)
    except (OSError, msgspec.MsgspecError, DataError):
        return None

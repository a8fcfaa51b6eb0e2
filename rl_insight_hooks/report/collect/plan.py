# SPDX-License-Identifier: Apache-2.0
"""What to copy, from whom, and where it goes. Pure.

The rules: equal content of a path comes once; different content of a path from different sources is kept apart
under ``conflicts/<source>/``; a file at home is replaced only by a newer, whole one of the same source.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from rl_insight_hooks.report.collect.model import Survey

CONFLICTS_DIR = "conflicts"

# A file that changed this shortly before a listing began may differ between two listings of one folder.
SETTLED_S = 5.0

Version = tuple[str, str]  # path, sha256


def is_safe(path: str) -> bool:
    """Return True if ``path`` stays below the folder that it is joined to, on every file system."""
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and ".." not in parts and "\0" not in path


def is_same_folder(one: Survey, other: Survey) -> bool:
    """Return True if both listings are of one folder on storage that both sources see.

    Every settled file must have the same path, inode, size and mtime to the nanosecond: two disks never agree
    on these. Files that changed while we looked are left out of the comparison.
    """
    if not (one.is_clock_fine and other.is_clock_fine):
        return False
    settled_ns = int((min(one.listed_unix_s, other.listed_unix_s) - SETTLED_S) * 1e9)
    first = {file for file in one.files if file.mtime_ns <= settled_ns}
    return bool(first) and first == {file for file in other.files if file.mtime_ns <= settled_ns}


def group_by_folder(surveys: Mapping[str, Survey]) -> list[list[str]]:
    """Return the names of the sources, those that see one folder together."""
    groups: list[list[str]] = []
    for name, survey in surveys.items():
        for group in groups:
            if is_same_folder(surveys[group[0]], survey):
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


def assign(
    wanted: Iterable[Version], holders: Mapping[Version, list[str]], alive: Iterable[str]
) -> dict[str, list[str]]:
    """Return which source is asked for which paths: each version once, from the first living holder."""
    living = set(alive)
    asked: dict[str, list[str]] = {}
    for version in wanted:
        holder = next((name for name in holders[version] if name in living), None)
        if holder is not None:
            asked.setdefault(holder, []).append(version[0])
    return asked


@dataclass(frozen=True, slots=True)
class Offer:
    """A whole file that came, or that is known from an earlier collect."""

    path: str
    sha256: str
    mtime_ns: int
    source: str


@dataclass(frozen=True, slots=True)
class Kept:
    """A file at home; ``source`` is None where no collect of ours put it there."""

    sha256: str
    mtime_ns: int
    source: str | None
    is_broken: bool = False


@dataclass(slots=True)
class Placement:
    """Where the offers go."""

    put: list[tuple[Offer, str]] = field(default_factory=list)  # new files: offer, path at home
    replace: list[tuple[Offer, str]] = field(default_factory=list)
    older: list[str] = field(default_factory=list)  # paths at home that stay: theirs is older
    conflicts: dict[str, dict[str, str]] = field(default_factory=dict)  # path -> source -> at home


def place(offers: Iterable[Offer], home: Mapping[str, Kept]) -> Placement:
    """Return where each offer goes, given what is at home (path -> file; with the ``conflicts/`` paths)."""
    placement = Placement()
    by_path: dict[str, dict[str, list[Offer]]] = {}
    for offer in offers:
        by_path.setdefault(offer.path, {}).setdefault(offer.sha256, []).append(offer)
    for path in sorted(by_path):
        there = home.get(path)
        origin = there.source if there is not None else None
        versions = [
            next((offer for offer in same if offer.source == origin), same[0])
            for same in by_path[path].values()
        ]
        _place_path(path, versions, home, placement)
    return placement


def _place_path(
    path: str, offers: list[Offer], home: Mapping[str, Kept], placement: Placement
) -> None:
    there = home.get(path)
    apart: dict[str, str] = {}
    for offer in offers:
        own = conflict_path(offer.source, path)
        is_alone = len(offers) == 1
        if there is not None and there.sha256 == offer.sha256:
            apart[offer.source] = path
        elif own in home:
            _refresh(offer, own, home[own], placement)
            apart[offer.source] = own
        elif there is None and is_alone:
            placement.put.append((offer, path))
        elif there is not None and (
            there.is_broken or there.source == offer.source or (there.source is None and is_alone)
        ):
            _refresh(offer, path, there, placement)
            apart[offer.source] = path
        else:
            placement.put.append((offer, own))
            apart[offer.source] = own
    if there is not None and path not in apart.values():
        apart[there.source or "already here"] = path
    if len(set(apart.values())) > 1:
        placement.conflicts[path] = apart


def _refresh(offer: Offer, target: str, there: Kept, placement: Placement) -> None:
    """The same source's file at another time: the newer one stays."""
    if there.sha256 == offer.sha256:
        return
    same_moment = offer.mtime_ns == there.mtime_ns and there.source == offer.source
    if there.is_broken or offer.mtime_ns > there.mtime_ns or same_moment:
        placement.replace.append((offer, target))
    else:
        placement.older.append(target)


def conflict_path(source: str, path: str) -> str:
    """Return where a source's own version of ``path`` is kept; no two sources share a place."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", source).strip("._") or "source"
    if name != source:
        name += "-" + hashlib.sha256(source.encode()).hexdigest()[:6]
    return f"{CONFLICTS_DIR}/{name}/{path}"

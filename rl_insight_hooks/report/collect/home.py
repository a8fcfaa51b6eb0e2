# SPDX-License-Identifier: Apache-2.0
"""The folder at home: what is in it, what came from where, and putting files there whole."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from rl_insight_hooks.atomic import fsync_dir, write_atomic
from rl_insight_hooks.errors import DataError, UsageError
from rl_insight_hooks.report.collect.model import FileStat, Survey
from rl_insight_hooks.report.collect.node import INCLUDE, list_files, what_is_broken
from rl_insight_hooks.report.collect.plan import CONFLICTS_DIR, Kept, Offer, Placement

_log = logging.getLogger(__name__)

MANIFEST_NAME = ".rl_insight_collect"  # no ".json": existing tools read every JSON of the folder
_STAGING_PREFIX = ".collect-"


class Origin(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Where a file at home came from; size and mtime are the same there and here."""

    source: str
    sha256: str
    size: int
    mtime_ns: int


class _Manifest(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    files: dict[str, Origin]


class Home:
    """One folder that files are gathered in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._origins: dict[str, Origin] = {}

    def open(self) -> None:
        """Make the folder, read what is known of it, and remove what a killed collect left.

        Raises:
            UsageError: it is no folder, or cannot be written.
            DataError: the list of origins cannot be read.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"--output {self.folder}: no folder can be made there ({error.strerror or error}); "
                "choose another"
            ) from None
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise UsageError(f"--output {self.folder}: not writable; choose another folder")
        manifest = self.folder / MANIFEST_NAME
        try:
            read = msgspec.json.decode(manifest.read_bytes(), type=_Manifest)
        except FileNotFoundError:
            return
        except msgspec.MsgspecError as error:
            raise DataError(
                f"{manifest}: cannot be read ({error}); remove it, then files that differ from the nodes' "
                "are replaced only by newer ones"
            ) from None
        self._origins = read.files

    def new_staging(self) -> Path:
        """Return an empty folder beside the files, so that they can be renamed into place."""
        for left in self.folder.glob(f"{_STAGING_PREFIX}*.tmp"):
            if time.time() - left.stat().st_mtime > 86_400:
                shutil.rmtree(left, ignore_errors=True)
        staging = self.folder / f"{_STAGING_PREFIX}{os.getpid()}-{time.time_ns()}.tmp"
        staging.mkdir()
        return staging

    def came_as(self, paths: Iterable[str], source: str, stat: FileStat) -> Origin | None:
        """Return what came earlier from ``source`` under one of ``paths``, if the source still has just that.

        As rsync's quick check: size and mtime are the same there, here and then.
        """
        for path in paths:
            origin = self._origins.get(path)
            if (
                origin is not None
                and origin.source == source
                and (origin.size, origin.mtime_ns) == (stat.size, stat.mtime_ns)
                and self._is_untouched(path, origin)
            ):
                return origin
        return None

    def _is_untouched(self, path: str, origin: Origin) -> bool:
        try:
            here = (self.folder / path).stat()
        except OSError:
            return False
        return (here.st_size, here.st_mtime_ns) == (origin.size, origin.mtime_ns)

    def look_up(self, paths: Iterable[str]) -> dict[str, Kept]:
        """Return what is at home under ``paths``; those without a file are left out."""
        found = {}
        for path in paths:
            origin = self._origins.get(path)
            if origin is not None and self._is_untouched(path, origin):
                found[path] = Kept(origin.sha256, origin.mtime_ns, origin.source)
                continue
            full = self.folder / path
            try:
                data = full.read_bytes()
                mtime_ns = full.stat().st_mtime_ns
            except OSError:
                continue
            digest = hashlib.sha256(data).hexdigest()
            is_ours = origin is not None and origin.sha256 == digest
            found[path] = Kept(
                sha256=digest,
                mtime_ns=mtime_ns,
                source=origin.source if is_ours and origin is not None else None,
                is_broken=what_is_broken(path, data) is not None,
            )
        return found

    def apply(self, placement: Placement, staged: dict[tuple[str, str], Path]) -> None:
        """Move staged files (by path and sha256) into place; a reader never sees half a file.

        Raises:
            DataError: a file appeared under a name that was free a moment ago.
        """
        for offer, target in placement.put:
            self._move(offer, target, staged[offer.path, offer.sha256], is_new=True)
        for offer, target in placement.replace:
            self._move(offer, target, staged[offer.path, offer.sha256], is_new=False)

    def _move(self, offer: Offer, target: str, staged: Path, *, is_new: bool) -> None:
        full = self.folder / target
        full.parent.mkdir(parents=True, exist_ok=True)
        os.utime(staged, ns=(offer.mtime_ns, offer.mtime_ns))
        size = staged.stat().st_size
        if is_new:
            if full.exists():
                raise DataError(f"{full}: appeared while we collected; is another collect running?")
        else:
            # What it replaces is gone for good: it must be on the disk before.
            fd = os.open(staged, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        os.replace(staged, full)
        if not is_new:
            fsync_dir(full.parent)
        self._origins[target] = Origin(
            source=offer.source, sha256=offer.sha256, size=size, mtime_ns=offer.mtime_ns
        )

    def save(self) -> None:
        """Write down where every file came from."""
        files = dict(sorted(self._origins.items()))
        data = msgspec.json.encode(_Manifest(version=1, files=files)) + b"\n"
        write_atomic(self.folder / MANIFEST_NAME, data)


def survey_here(folder: str, include: tuple[str, ...]) -> Survey | None:
    """Return the listing of ``folder`` on this machine; None if there is none."""
    started = time.time()
    try:
        where, stats = list_files(folder, include)
    except OSError:
        return None
    files = tuple(FileStat(*stat) for stat in stats)
    return Survey(folder=where, files=files, listed_unix_s=started)


def list_home(folder: Path) -> list[str]:
    """Return the paths of the files in ``folder`` that are no version kept apart."""
    return [
        path
        for path, *_ in list_files(str(folder), INCLUDE)[1]
        if not path.startswith(f"{CONFLICTS_DIR}/")
    ]

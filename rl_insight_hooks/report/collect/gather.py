# SPDX-License-Identifier: Apache-2.0
"""``collect``: survey every source, copy what home lacks, put it into place, say what became of each."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from rl_insight_hooks.errors import UsageError
from rl_insight_hooks.report.collect.home import Home, survey_here
from rl_insight_hooks.report.collect.model import (
    STATUS_EMPTY,
    STATUS_FAILED,
    STATUS_PARTIAL,
    STATUS_SHARED,
    Conflict,
    FileStat,
    Received,
    Report,
    Source,
    SourceError,
    SourceResult,
    Survey,
)
from rl_insight_hooks.report.collect.node import INCLUDE
from rl_insight_hooks.report.collect.plan import (
    Kept,
    Offer,
    Version,
    assign,
    conflict_path,
    group_by_folder,
    is_safe,
    is_same_folder,
    place,
)

Progress = Callable[[int, int], None]  # files that came, files in all
_T = TypeVar("_T")

DEFAULT_PARALLEL = 16


def gather(
    sources: Sequence[Source],
    folder: Path,
    *,
    include: tuple[str, ...] = INCLUDE,
    parallel: int = DEFAULT_PARALLEL,
    checksum: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Bring the load files of ``sources`` into ``folder``.

    A source that fails costs its own files only; the report names it.

    Args:
        sources: nodes or hosts, names all different.
        folder: where the files go; made if it is not there.
        include: name patterns of the files (those that ``sources`` list).
        parallel: number of sources that are spoken to at a time.
        checksum: compare the content even of files that came earlier and have the same size and mtime.
        progress: called with (files that came, files in all), from any thread.

    Raises:
        UsageError: ``folder`` cannot be used, or two sources have one name.
    """
    run = _Run(sources, Home(folder), parallel, checksum, progress)
    surveys = run.survey()
    report = Report(folder=str(folder), sources=list(run.results.values()))
    report.shared_folder = _folder_here(surveys, folder, include)
    if report.shared_folder is not None:
        return report
    run.home.open()
    staging = run.home.new_staging()
    try:
        run.copy(surveys, staging)
        run.put_in_place(report)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return report


def _folder_here(surveys: dict[str, Survey], folder: Path, include: tuple[str, ...]) -> str | None:
    """Return the folder on this machine that is the one folder that all sources with files see, or None."""
    filled = {name: survey for name, survey in surveys.items() if survey.files}
    if not filled or len(group_by_folder(filled)) > 1:
        return None
    survey = next(iter(filled.values()))
    for candidate in (survey.folder, str(folder)):
        here = survey_here(candidate, include)
        if here is not None and is_same_folder(survey, here):
            return candidate
    return None


class _Run:
    """State of one gather."""

    def __init__(
        self,
        sources: Sequence[Source],
        home: Home,
        parallel: int,
        checksum: bool,
        progress: Progress | None,
    ) -> None:
        self.sources = {source.name: source for source in sources}
        if len(self.sources) < len(sources):
            names = [source.name for source in sources]
            twice = next(name for name in names if names.count(name) > 1)
            raise UsageError(f"{twice} is given twice; give each source once")
        self.home = home
        self.results = {name: SourceResult(name=name) for name in self.sources}
        self._parallel = max(1, min(parallel, len(sources) or 1))
        self._checksum = checksum
        self._progress = progress
        self._lock = threading.Lock()
        self._offers: list[Offer] = []
        self._staged: dict[tuple[str, str], Path] = {}  # (path, sha256) -> file
        self._came: dict[str, set[str]] = {name: set() for name in self.sources}
        self._num_identical = 0
        self._num_expected = 0

    def survey(self) -> dict[str, Survey]:
        """Return the listing of every source that answers; note what each has."""
        surveys = self._on_all(self.sources, lambda name: self.sources[name].survey())
        for name, survey in surveys.items():
            result = self.results[name]
            for file in survey.files:
                if not is_safe(file.path):
                    result.broken[file.path] = "its name leads out of the folder: not copied"
            result.num_files = len(survey.files)
            if not survey.files:
                result.status = STATUS_EMPTY
                result.message = f"no load files in {survey.folder}"
        return surveys

    def copy(self, surveys: dict[str, Survey], staging: Path) -> None:
        """Bring every version of every path that home lacks into ``staging``."""
        folders = {name: staging / str(number) for number, name in enumerate(surveys)}
        holders = self._find_versions(surveys)
        pending = list(holders)
        self._num_expected = len(pending)
        self._tell()
        # Each round either brings all that was asked for or loses a source, so this ends.
        while pending:
            alive = [name for name in surveys if self._is_alive(name)]
            asked = assign(pending, holders, alive)
            if not asked:
                break
            self._on_all(asked, partial(self._fetch, asked, folders))
            pending = [
                version
                for version in pending
                if not any(version[0] in self._came[name] for name in holders[version])
            ]

    def put_in_place(self, report: Report) -> None:
        """Move what came to where it belongs, and complete ``report``."""
        for name, result in self.results.items():
            if result.status == STATUS_FAILED and self._came[name]:
                result.status = STATUS_PARTIAL
                result.message += f"; {len(self._came[name])} of {result.num_files} files had come"
        home = self.home.look_up(
            path
            for offer in self._offers
            for path in (offer.path, conflict_path(offer.source, offer.path))
        )
        placement = place(self._offers, home)
        self.home.apply(placement, self._staged)
        self.home.save()
        report.num_new = len(placement.put)
        report.num_updated = len(placement.replace)
        report.num_identical = self._num_identical
        report.older = placement.older
        report.conflicts = [
            Conflict(path=path, kept_as=kept_as) for path, kept_as in placement.conflicts.items()
        ]

    # -- who has what ------------------------------------------------------------------------------------

    def _find_versions(self, surveys: dict[str, Survey]) -> dict[Version, list[str]]:
        """Return who holds each version that home lacks; sources that see one folder count as one."""
        groups = group_by_folder({name: s for name, s in surveys.items() if s.files})
        files_of: dict[str, dict[str, FileStat]] = {}
        num_with: dict[str, int] = {}
        for group in groups:
            lead = group[0]
            files_of[lead] = {file.path: file for file in surveys[lead].files if is_safe(file.path)}
            for path in files_of[lead]:
                num_with[path] = num_with.get(path, 0) + 1
            for other in group[1:]:
                self.results[other].status = STATUS_SHARED
                self.results[other].message = f"sees the same folder as {lead} (shared storage)"
        members = {group[0]: group for group in groups}
        fresh: dict[str, list[str]] = {}
        homes: dict[str, dict[str, Kept]] = {}
        for lead, files in files_of.items():
            fresh[lead] = self._not_yet_here(lead, files)
            owns = [conflict_path(lead, path) for path in fresh[lead]]
            homes[lead] = self.home.look_up([*fresh[lead], *owns])
        # What only one source has, and home has not, is wanted whatever is in it: no need to read it twice.
        to_hash = {
            lead: [
                path
                for path in paths
                if num_with[path] > 1
                or path in homes[lead]
                or conflict_path(lead, path) in homes[lead]
            ]
            for lead, paths in fresh.items()
        }
        hashed = self._on_all(
            [lead for lead, paths in to_hash.items() if paths],
            lambda lead: self._digests(members[lead], to_hash[lead]),
        )
        holders: dict[Version, list[str]] = {}
        for lead, paths in fresh.items():
            for path in paths:
                digest = hashed.get(lead, {}).get(path)
                own = conflict_path(lead, path)
                here = [homes[lead][name] for name in (path, own) if name in homes[lead]]
                if any(kept.sha256 == digest for kept in here) and digest is not None:
                    self._note_identical(lead, path, digest, files_of[lead][path])
                    continue
                version = (path, digest or f"unread at {lead}")
                self._num_identical += version in holders
                holders.setdefault(version, []).extend(members[lead])
        return holders

    def _not_yet_here(self, lead: str, files: dict[str, FileStat]) -> list[str]:
        """Return the paths of ``files`` that did not come earlier just as they are."""
        fresh = []
        for path, stat in files.items():
            names = (path, conflict_path(lead, path))
            origin = None if self._checksum else self.home.came_as(names, lead, stat)
            if origin is None:
                fresh.append(path)
            else:
                self._note_identical(lead, path, origin.sha256, stat)
        return fresh

    def _note_identical(self, lead: str, path: str, digest: str, stat: FileStat) -> None:
        self._offers.append(Offer(path, digest, stat.mtime_ns, lead))
        self._num_identical += 1

    def _digests(self, members: list[str], paths: list[str]) -> dict[str, str]:
        """Return sha256 by path from the first of ``members`` that answers; each sees the same folder."""
        for name in members:
            try:
                return self.sources[name].digests(paths)
            except SourceError as error:
                self._fail(name, error)
        return {}

    # -- speaking to sources -----------------------------------------------------------------------------

    def _fetch(self, asked: dict[str, list[str]], folders: dict[str, Path], name: str) -> None:
        folder = folders[name]
        folder.mkdir(exist_ok=True)
        result = self.results[name]

        def take(got: Received) -> None:
            with self._lock:
                self._came[name].add(got.path)
                if got.broken is not None:
                    result.broken[got.path] = got.broken
                else:
                    staged = folder / got.path
                    result.num_copied += 1
                    result.num_bytes += staged.stat().st_size
                    self._staged.setdefault((got.path, got.sha256), staged)
                    self._offers.append(Offer(got.path, got.sha256, got.mtime_ns, name))
                self._tell()

        self.sources[name].fetch(asked[name], folder, take)

    def _on_all(self, names: Iterable[str], call: Callable[[str], _T]) -> dict[str, _T]:
        """Return what ``call`` gives for each source, in parallel; one that fails is noted and left out."""
        listed = list(names)
        answers: dict[str, _T] = {}
        pool = ThreadPoolExecutor(self._parallel, thread_name_prefix="rl_insight_collect")
        try:
            futures = {name: pool.submit(partial(call, name)) for name in listed}
            for name, future in futures.items():
                try:
                    answers[name] = future.result()
                except SourceError as error:
                    self._fail(name, error)
        except BaseException:
            for source in self.sources.values():
                source.stop()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        pool.shutdown(wait=True)
        return answers

    def _fail(self, name: str, error: SourceError) -> None:
        result = self.results[name]
        result.status, result.message, result.fix = STATUS_FAILED, error.what, error.fix

    def _is_alive(self, name: str) -> bool:
        return self.results[name].status != STATUS_FAILED

    def _tell(self) -> None:
        if self._progress is not None:
            num_came = sum(map(len, self._came.values()))
            self._progress(num_came, max(num_came, self._num_expected))

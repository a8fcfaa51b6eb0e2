# SPDX-License-Identifier: Apache-2.0
"""What the parts of ``collect`` hand to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

STATUS_OK = "ok"
STATUS_EMPTY = "empty"  # reachable, but no load file there
STATUS_SHARED = "shared"  # sees the same folder as another source
STATUS_PARTIAL = "partial"  # part of its files came
STATUS_FAILED = "failed"  # nothing came


class SourceError(Exception):
    """A node or host cannot deliver; ``what`` went wrong, and what to do about it."""

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix


@dataclass(frozen=True, slots=True)
class FileStat:
    """One file on a source."""

    path: str  # below the source's folder, "/" between parts
    inode: int
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The load files of one source, not yet read."""

    folder: str
    files: tuple[FileStat, ...]
    is_clock_fine: bool = True  # mtimes are good to the nanosecond
    listed_unix_s: float = 0.0  # when the listing began


@dataclass(frozen=True, slots=True)
class Received:
    """One file that came; its data lies in the staging folder unless it is broken."""

    path: str
    sha256: str
    mtime_ns: int
    broken: str | None = None


OnFile = Callable[[Received], None]


class Source(Protocol):
    """A node or host that has files."""

    name: str

    def survey(self) -> Survey:
        """Return what is there.

        Raises:
            SourceError: the source cannot be reached, or the folder is not there.
        """

    def digests(self, paths: Sequence[str]) -> dict[str, str]:
        """Return sha256 by path; files that went meanwhile are left out.

        Raises:
            SourceError: the source cannot be reached.
        """

    def fetch(self, paths: Sequence[str], staging: Path, on_file: OnFile) -> None:
        """Put the files below ``staging``, checksum and wholeness tested, and report each by ``on_file``.

        Every path is reported: a file that went meanwhile as a broken one.

        Raises:
            SourceError: the source failed; what was reported until then is good.
        """

    def stop(self) -> None:
        """Make whatever is under way on other threads end soon (the user pressed Ctrl-C)."""


@dataclass(slots=True, kw_only=True)
class SourceResult:
    """What became of one source."""

    name: str
    status: str = STATUS_OK
    message: str = ""
    fix: str = ""
    num_files: int = 0  # listed there
    num_copied: int = 0
    num_bytes: int = 0
    broken: dict[str, str] = field(default_factory=dict)  # path -> what is broken

    @property
    def is_lost(self) -> bool:
        """True if the source failed, wholly or in the middle."""
        return self.status in (STATUS_PARTIAL, STATUS_FAILED)

    @property
    def is_good(self) -> bool:
        """True if all that the source has came, whole."""
        return not self.is_lost and not self.broken


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """One path that several sources have with different content."""

    path: str
    kept_as: dict[str, str]  # source -> path at home


@dataclass(slots=True, kw_only=True)
class Report:
    """The outcome of one ``collect``."""

    folder: str
    sources: list[SourceResult] = field(default_factory=list)
    num_new: int = 0
    num_updated: int = 0
    num_identical: int = 0  # copies that were at home already, or came from another source
    older: list[str] = field(default_factory=list)  # home has a newer one: left alone
    conflicts: list[Conflict] = field(default_factory=list)
    shared_folder: str | None = None  # the data is here already: nothing was done

    @property
    def is_complete(self) -> bool:
        """True if every source gave all that it has, whole and without contradiction."""
        return all(source.is_good for source in self.sources) and not self.conflicts

# SPDX-License-Identifier: Apache-2.0
"""What every reader is given: what is wanted, and where to say what is wrong."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rl_insight_hooks.errors import DataError
from rl_insight_hooks.report.select import Selection
from rl_insight_hooks.report.table import Problem

Progress = Callable[[int, int], None]

SEVERITY_ERROR = "error"  # something is lost: exit code 4
SEVERITY_WARNING = "warning"  # all is there, but look at it
SEVERITY_NOTE = "note"

# One rule is listed this often; the rest is counted in one line, so that 100,000 torn files stay readable.
MAX_LISTED_PER_RULE = 20

# Larger than any file of the formats here; what is larger is named, not read into memory.
MAX_FILE_BYTES = 4 << 30


@dataclass(kw_only=True)
class ReadContext:
    """State of one :func:`load`: selection in; problems, assumptions and role names out."""

    selection: Selection = field(default_factory=Selection)
    strict: bool = False
    gmm_per_layer: int | None = None
    num_moe_layers: int | None = None
    ep_size: int | None = None
    aggregate: str = "auto"
    progress: Progress | None = None
    problems: list[Problem] = field(default_factory=list)
    assumptions: dict[str, None] = field(default_factory=dict)
    roles_seen: set[str] = field(default_factory=set)
    num_files: int = 0
    _num_done: int = 0

    def problem(
        self,
        rule: str,
        where: str | os.PathLike[str],
        what: str,
        fix: str,
        severity: str = SEVERITY_ERROR,
    ) -> None:
        """Note one thing that is wrong.

        Raises:
            DataError: ``strict`` is set and the problem loses data.
        """
        self.add(Problem(rule=rule, where=os.fspath(where), what=what, fix=fix, severity=severity))

    def add(self, found: Problem) -> None:
        """Note a problem.

        Raises:
            DataError: ``strict`` is set and the problem loses data.
        """
        if self.strict and found.severity == SEVERITY_ERROR:
            raise DataError(f"{found.where}: {found.what}. {found.fix} [{found.rule}]")
        self.problems.append(found)

    def problems_at(self, where: str) -> list[Problem]:
        """Return the problems noted for ``where``."""
        return [found for found in self.problems if found.where == where]

    def assume(self, sentence: str) -> None:
        """Note, once, something that the data does not say and that a reader had to assume."""
        self.assumptions.setdefault(printable(sentence))

    def place_of_experts(self, rank: int, num_local: int, source: str) -> tuple[int, int]:
        """Return (first expert, experts in all) of a rank, for formats that do not say.

        Without ``ep_size`` every rank is taken to hold all experts, and that is said.
        """
        if self.ep_size is None:
            if rank > 0:
                self.assume(
                    f"{source}: no file says which experts and layers a rank holds; every rank is taken "
                    "to hold all of them (give ep_size where experts are spread over ranks)"
                )
            return 0, num_local
        return (rank % self.ep_size) * num_local, self.ep_size * num_local

    def done(self, num_files: int = 1) -> None:
        """Tell the progress display that files were read."""
        self._num_done += num_files
        if self.progress is not None:
            self.progress(self._num_done, self.num_files)

    def listed_problems(self) -> tuple[Problem, ...]:
        """Return the problems, worst first, long lists of one rule cut with a line that counts the rest."""
        return listed(self.problems)


def printable(text: str) -> str:
    """Return ``text`` on one line that every terminal and JSON can hold: names of files can be anything."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def listed(problems: list[Problem]) -> tuple[Problem, ...]:
    """Return ``problems``, worst first; of each rule ``MAX_LISTED_PER_RULE``, and a count of the rest.

    ``problems`` may have been listed before: the rest of then is counted on.
    """
    order = {SEVERITY_ERROR: 0, SEVERITY_WARNING: 1, SEVERITY_NOTE: 2}
    num_listed: dict[tuple[str, str], int] = {}
    num_unlisted: dict[tuple[str, str], int] = {}
    kept: list[Problem] = []
    for found in sorted(problems, key=lambda problem: order.get(problem.severity, 0)):
        key = (found.rule, found.severity)
        if found.num_unlisted or num_listed.get(key, 0) == MAX_LISTED_PER_RULE:
            num_unlisted[key] = num_unlisted.get(key, 0) + found.num
            continue
        num_listed[key] = num_listed.get(key, 0) + 1
        kept.append(replace(found, where=printable(found.where), what=printable(found.what)))
    for (rule, severity), num in num_unlisted.items():
        num_in_all = num + num_listed.get((rule, severity), 0)
        kept.append(
            Problem(
                rule=rule,
                where=f"{num} more",
                what=f"{num_in_all} problems of this kind in all; the first {MAX_LISTED_PER_RULE} are listed",
                fix="See those that are listed.",
                severity=severity,
                num_unlisted=num,
            )
        )
    return tuple(kept)


# Without O_NONBLOCK a named pipe would be waited for.
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)


def read_bytes(path: str, guess: int = 1 << 16) -> bytes:
    """Return the content of the file at ``path`` (plain os calls: a third of the cost of ``open``).

    A file shorter than ``guess`` takes one read.

    Raises:
        OSError: it cannot be read.
    """
    fd = os.open(path, _OPEN_FLAGS)
    try:
        data = os.read(fd, guess)
        if len(data) < guess:
            return data
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError("not a regular file")
        chunks = [data]
        while chunks[-1]:
            if sum(map(len, chunks)) > MAX_FILE_BYTES:
                raise OSError(f"larger than {MAX_FILE_BYTES} bytes")
            chunks.append(os.read(fd, 1 << 24))
        return b"".join(chunks)
    finally:
        os.close(fd)

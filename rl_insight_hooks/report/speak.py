# SPDX-License-Identifier: Apache-2.0
"""What commands say besides their data: findings and progress on stderr, the exit for lost data."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rl_insight_hooks.errors import IncompleteDataError
from rl_insight_hooks.report.table import Problem

_PROGRESS_AFTER_S = 0.5
_PROGRESS_EVERY_S = 0.1
_BAR_WIDTH = 24


def finding_lines(problems: Sequence[Problem], assumptions: Sequence[str]) -> list[str]:
    """Return one line per problem and assumption, as every command prints them."""
    lines = [
        f"{problem.severity}: {problem.where}: {problem.what}. {problem.fix} [{problem.rule}]"
        for problem in problems
    ]
    return [*lines, *(f"assumed: {sentence}" for sentence in assumptions)]


def say_findings(problems: Sequence[Problem], assumptions: Sequence[str]) -> None:
    """Print problems and assumptions on stderr."""
    for line in finding_lines(problems, assumptions):
        print(line, file=sys.stderr)


def fail_if_incomplete(problems: Sequence[Problem]) -> None:
    """End a command that did its work on part of the data.

    Raises:
        IncompleteDataError: a problem loses data; exit code 4.
    """
    num = sum(problem.severity == "error" for problem in problems)
    if num:
        raise IncompleteDataError(
            f"{num} problems lose data; what is shown is the rest (see the errors above)"
        )


def write_json_line(value: Any) -> None:
    """Print one JSON object on stdout."""
    import msgspec

    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def progress_on_terminal(
    what: str, unit: str = "files"
) -> Iterator[Callable[[int, int], None] | None]:
    """Give a function that shows "what [###...] 12/40 files" on stderr; None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    started = shown = time.monotonic()
    width = 0

    def show(done: int, total: int) -> None:
        nonlocal shown, width
        now = time.monotonic()
        if now - started < _PROGRESS_AFTER_S or now - shown < _PROGRESS_EVERY_S:
            return
        shown = now
        filled = _BAR_WIDTH * done // max(total, 1)
        bar = "#" * filled + "." * (_BAR_WIDTH - filled)
        text = f"{what} [{bar}] {done}/{total} {unit}"
        width = max(width, len(text))
        sys.stderr.write("\r" + text.ljust(width))
        sys.stderr.flush()

    try:
        yield show
    finally:
        if width:
            sys.stderr.write("\r" + " " * width + "\r")
            sys.stderr.flush()

# SPDX-License-Identifier: Apache-2.0
"""What commands say besides their data: findings and progress on stderr, the exit for lost data."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rl_insight_hooks.errors import IncompleteDataError, UsageError

if TYPE_CHECKING:  # numpy: --help needs none
    from rl_insight_hooks.report.table import LoadTable, Problem

_PROGRESS_AFTER_S = 0.5
_PROGRESS_EVERY_S = 0.1
_BAR_WIDTH = 24

_num_json_objects = 0


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


def fail_if_none_left(table: LoadTable, **filters: str | None) -> None:
    """End a command whose filters (``step="7"``: ``--step 7``) let no row of the data through.

    Where files could not be read nothing is said: that is the reason then, not the filters.

    Raises:
        UsageError: names the filters.
    """
    given = " ".join(f"--{name} {value}" for name, value in filters.items() if value)
    if given and not table.num_rows and not any(p.severity == "error" for p in table.problems):
        raise UsageError(f"no counts are left by {given}; run without to see what there is")


def need_rows(table: LoadTable, **filters: str | None) -> None:
    """End a command that can do nothing without counts, with the findings that say why there are none.

    Raises:
        UsageError: the filters let no row through.
        IncompleteDataError: files could not be read.
    """
    fail_if_none_left(table, **filters)
    if not table.num_rows:
        say_findings(table.problems, table.assumptions)
        fail_if_incomplete(table.problems)


def fail_if_incomplete(problems: Sequence[Problem]) -> None:
    """End a command that did its work on part of the data.

    Raises:
        IncompleteDataError: a problem loses data; exit code 4.
    """
    num = sum(problem.num for problem in problems if problem.severity == "error")
    if num:
        raise IncompleteDataError(
            f"{'1 problem loses' if num == 1 else f'{num} problems lose'} data; "
            "what is shown is the rest (see the errors above)"
        )


def write_json_line(value: Any) -> None:
    """Print one JSON object on stdout; bytes of a path that are no UTF-8 come as ``\\udcXX`` escapes."""
    import msgspec

    try:
        line = msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        import json

        line = json.dumps(msgspec.to_builtins(value))
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
    global _num_json_objects
    _num_json_objects += 1


def wrote_json() -> bool:
    """Return True if this command printed a JSON object: an error after it needs none of its own."""
    return _num_json_objects > 0


def forget_json() -> None:
    """Begin a command, which has printed no JSON yet."""
    global _num_json_objects
    _num_json_objects = 0


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

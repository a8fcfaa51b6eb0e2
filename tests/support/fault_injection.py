# SPDX-License-Identifier: Apache-2.0
"""Exceptions of our own, thrown at every line of ours that a host runs.

Nothing is listed by hand but the functions that a host calls: a trace function notes each line of ours during a run,
then the run is repeated once for each of them with an exception raised there.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

Site = tuple[str, int]  # file, line

# What our closures call the host's function, or its object.
_HOST_NAMES = ("original", "bound", "self._host")


class InjectedError(Exception):
    """Ours, thrown by the tests."""


class Entries:
    """The functions that a host calls directly, by file: they guard themselves.

    Their lines outside a guarded block are no sites; :meth:`unguarded_calls` says what is called there.
    """

    def __init__(self, names_of_file: Mapping[Path, Collection[str]]) -> None:
        self._names_of_file = {Path(path).resolve(): set(n) for path, n in names_of_file.items()}
        self.unguarded: set[Site] = set()
        for path, function in self._functions():
            every = set(range(function.lineno, (function.end_lineno or 0) + 1))
            self.unguarded |= {(str(path), line) for line in every - _guarded_lines(function)}

    def _functions(self) -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for path, names in self._names_of_file.items():
            tree = ast.parse(path.read_text())
            kinds = ast.FunctionDef | ast.AsyncFunctionDef
            found = [n for n in ast.walk(tree) if isinstance(n, kinds) and n.name in names]
            assert {f.name for f in found} == names, (path, names - {f.name for f in found})
            yield from ((path, function) for function in found)

    def unguarded_calls(self) -> set[str]:
        """Return the names of what the entries call outside their guarded blocks."""
        called = set()
        for path, function in self._functions():
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and (str(path), node.lineno) in self.unguarded:
                    name = node.func
                    called.add(name.attr if isinstance(name, ast.Attribute) else ast.unparse(name))
        return called


def _guarded_lines(function: ast.AST) -> set[int]:
    """Lines in the body of a ``try`` that counts failures, or of a failsafe, that do not call the host."""
    lines: set[int] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Try):
            counts = any(_calls(handler, ("guard.failed",)) for handler in node.handlers)
            if not counts or _calls(ast.Module(node.body, []), _HOST_NAMES):
                continue
        elif not (isinstance(node, ast.With) and "failsafe(" in ast.unparse(node.items[0])):
            continue
        lines |= set(range(node.body[0].lineno, (node.body[-1].end_lineno or 0) + 1))
    return lines


def _calls(node: ast.AST, names: tuple[str, ...]) -> bool:
    calls = (part for part in ast.walk(node) if isinstance(part, ast.Call))
    return any(ast.unparse(call.func).startswith(names) for call in calls)


class Tracer:
    """Notes the lines of ``files`` that run within its ``with``; raises at one of them, if told so."""

    def __init__(
        self,
        files: Collection[Path | str],
        entries: Entries,
        target: Site | None = None,
        occurrence: int = 1,
    ) -> None:
        self._files = {str(Path(path).resolve()) for path in files}
        self._unguarded = entries.unguarded
        self._target, self._left = target, occurrence
        self.seen: dict[Site, int] = {}
        self.raised = False

    def _call(self, frame: Any, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename in self._files else None

    def _line(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            site = (frame.f_code.co_filename, frame.f_lineno)
            if site not in self._unguarded:
                self.seen[site] = self.seen.get(site, 0) + 1
                if site == self._target:
                    self._left -= 1
                    if self._left == 0:
                        self.raised = True
                        raise InjectedError(f"at {site}")
        return self._line

    def __enter__(self) -> Tracer:
        self._old = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._old)


def break_every_line(
    files: Collection[Path | str], entries: Entries, run: Callable[[Tracer], None]
) -> list[Site]:
    """Call ``run`` with a tracer that only notes, then once for each line noted; return the lines broken.

    ``run`` enters the tracer around what the host does and asserts what must hold: the host's results, and that
    ``tracer.raised`` failures were counted.
    """
    first = Tracer(files, entries)
    run(first)
    steady = Tracer(files, entries)  # what only the first run of a process comes by is no site
    run(steady)
    broken = []
    for site in sorted(steady.seen):
        tracer = Tracer(files, entries, site)
        try:
            run(tracer)
        except BaseException as error:
            error.add_note(f"with an exception at {site}") if sys.version_info >= (3, 11) else None
            raise
        if tracer.raised:
            broken.append(site)
    return broken

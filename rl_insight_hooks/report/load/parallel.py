# SPDX-License-Identifier: Apache-2.0
"""Read step files in several processes. Pays from some thousand files on; the result is the same as with one.

Workers decode; the parent folds. Blocks come back in file order, counts as narrow as they fit, so
that the pipes are not the bottleneck.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rl_insight_hooks.report.load.context import ReadContext
from rl_insight_hooks.report.load.native import read_native
from rl_insight_hooks.report.load.sink import Block, Sink
from rl_insight_hooks.report.select import Selection
from rl_insight_hooks.report.table import LoadTable, Problem

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

# Fewer files than this are read faster by one process than workers start.
MIN_FILES = 1024
_FILES_PER_TASK = 128


@dataclass(slots=True)
class _Read:
    """What one task brings back."""

    num_files: int
    blocks: list[Block] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    roles_seen: set[str] = field(default_factory=set)


class _Collector:
    """A sink that only keeps."""

    def __init__(self, blocks: list[Block]) -> None:
        self._blocks = blocks

    def add(self, block: Block) -> None:
        block.counts_ne = _narrow(block.counts_ne)
        self._blocks.append(block)

    def has(self, step: int, role: str, rank: int) -> bool:
        return False

    def table(self) -> LoadTable:
        raise NotImplementedError("a collector has no table")


def read_native_in_processes(
    paths: list[str], sink: Sink, context: ReadContext, jobs: int, min_files: int = MIN_FILES
) -> None:
    """As :func:`~rl_insight_hooks.report.load.native.read_native`, with ``jobs`` processes."""
    if jobs == 1 or len(paths) < min_files:
        read_native(paths, sink, context)
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    tasks = [paths[at : at + _FILES_PER_TASK] for at in range(0, len(paths), _FILES_PER_TASK)]
    spawn = multiprocessing.get_context("spawn")  # safe where the caller has threads
    with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=spawn) as pool:
        for read in _in_order(pool, tasks, context.selection, 2 * jobs):
            context.roles_seen |= read.roles_seen
            for problem in read.problems:
                context.add(problem)
            for block in read.blocks:
                block.counts_ne = block.counts_ne.astype(np.int64)
                sink.add(block)
            context.done(read.num_files)


def _in_order(
    pool: ProcessPoolExecutor, tasks: list[list[str]], selection: Selection, ahead: int
) -> Iterator[_Read]:
    """Yield results in the order of ``tasks``, with at most ``ahead`` of them waiting: memory stays flat."""
    waiting = [pool.submit(_read_task, task, selection) for task in tasks[:ahead]]
    for task in [*tasks[ahead:], *[None] * len(waiting)]:
        yield waiting.pop(0).result()
        if task is not None:
            waiting.append(pool.submit(_read_task, task, selection))


def _read_task(paths: list[str], selection: Selection) -> _Read:
    context = ReadContext(selection=selection)
    read = _Read(num_files=len(paths))
    read_native(paths, _Collector(read.blocks), context)
    read.problems, read.roles_seen = context.problems, context.roles_seen
    return read


def _narrow(
    counts: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return ``counts`` in 32 bits where they fit (the parent widens them again)."""
    if counts.size and int(counts.max()) < 1 << 31:
        return counts.astype(np.int32)
    return counts

# SPDX-License-Identifier: Apache-2.0
"""``summarize --ray``: each node adds up its own ranks, and only the merged counts travel.

A node folds its files into one :class:`Block` per (step, role, layers, range of experts, replica group),
whatever the number of its ranks. Home adds the blocks of all nodes as a reader would: replicas once, experts
at their global places, missing ranks and experts named. A rank that two nodes have is counted once: the later
node folds again without it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from rl_insight_hooks.report import select
from rl_insight_hooks.report.collect.model import SourceError, Survey
from rl_insight_hooks.report.collect.plan import group_by_folder
from rl_insight_hooks.report.load import read_found, sniff
from rl_insight_hooks.report.load.completeness import Key, Seen, missing, step_text
from rl_insight_hooks.report.load.context import SEVERITY_NOTE, ReadContext
from rl_insight_hooks.report.load.sink import Block, FoldSink
from rl_insight_hooks.report.table import ALL_RANKS, LoadTable, Problem

AGGREGATES = ("auto", "sum", "max")  # "one-rank" needs to know all ranks before any is read
BLOCKS_PER_BATCH = 64

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldRequest:
    """What a node is to fold."""

    folder: str
    selection: select.Selection
    aggregate: str = "auto"
    without: frozenset[Key] = frozenset()  # (step, role, rank) that another node has given


@dataclass(slots=True, kw_only=True)
class NodeHead:
    """What a node says before it sends its blocks."""

    seen: dict[Key, Seen]
    digests: dict[Key, bytes]
    problems: list[Problem]
    assumptions: list[str]
    roles_seen: set[str]
    num_files: int


class NodeSink(FoldSink):
    """Adds up the blocks of one node; replica groups stay apart, since another node may have the same."""

    def __init__(self, context: ReadContext, without: frozenset[Key]) -> None:
        super().__init__(context)
        self.digests: dict[Key, bytes] = {}
        self._without = without
        self._folded: dict[tuple[Any, ...], Block] = {}

    def add(self, block: Block) -> None:
        """Fold one block in, unless another node has given its rank."""
        key = (block.step, block.role, block.rank)
        if not block.layer_n.size or key in self._without or not self.accept(block):
            return
        self.digests[key] = _digest(block)
        how = self.context.aggregate
        replica = block.replica if how == "auto" else None
        group = (
            block.step,
            block.role,
            replica,
            block.first,
            block.counts_ne.shape[1],
            block.layer_n.tobytes(),
            block.phases,
        )
        have = self._folded.get(group)
        if have is None:
            counts = block.counts_ne.astype(np.int64)
            self._folded[group] = replace(
                block, rank=ALL_RANKS, counts_ne=counts, replica=replica, source=""
            )
        elif replica is None:
            _merge(have, block, how)

    def blocks(self) -> list[Block]:
        """Return what was folded, counts as narrow as they may be."""
        return [
            replace(block, counts_ne=block.counts_ne.astype(np.int32))
            if block.counts_ne.size and int(block.counts_ne.max()) <= _INT32_MAX
            else block
            for block in self._folded.values()
        ]


def _merge(have: Block, block: Block, how: str) -> None:
    """Add ``block`` to ``have``: same rows, same columns."""
    if how == "max":
        np.maximum(have.counts_ne, block.counts_ne, out=have.counts_ne)
    else:
        have.counts_ne += block.counts_ne
    if have.num_passes_n is not None and block.num_passes_n is not None:
        have.num_passes_n = np.maximum(have.num_passes_n, block.num_passes_n)
    if have.num_tokens_n is not None and block.num_tokens_n is not None:
        known = (have.num_tokens_n >= 0) & (block.num_tokens_n >= 0)
        have.num_tokens_n = np.where(known, have.num_tokens_n + block.num_tokens_n, -1)
    else:
        have.num_tokens_n = None
    have.num_experts = max(have.num_experts or 0, block.num_experts or 0) or None
    have.world_size = max(have.world_size or 0, block.world_size or 0) or None
    have.layer_names = have.layer_names | block.layer_names
    have.layer_sources = have.layer_sources | block.layer_sources


def _digest(block: Block) -> bytes:
    digest = hashlib.sha256(repr((block.first, block.phases)).encode())
    digest.update(block.layer_n.tobytes())
    digest.update(block.counts_ne.tobytes())
    return digest.digest()


def fold_node(request: FoldRequest) -> Iterator[NodeHead | list[Block]]:
    """Run on a node: yield the head, then the folded blocks in batches."""
    context = ReadContext(selection=request.selection, aggregate=request.aggregate)
    found = sniff.find([request.folder], context)
    context.num_files = found.num_files
    sink = NodeSink(context, request.without)
    read_found(found, sink, context)
    yield NodeHead(
        seen=sink.seen,
        digests=sink.digests,
        problems=list(context.problems),
        assumptions=list(context.assumptions),
        roles_seen=set(context.roles_seen),
        num_files=found.num_files,
    )
    blocks = sink.blocks()
    for start in range(0, len(blocks), BLOCKS_PER_BATCH):
        yield blocks[start : start + BLOCKS_PER_BATCH]


class FoldSource(Protocol):
    """A node that can fold."""

    name: str

    def survey(self) -> Survey:
        """Return what is there; see :class:`~rl_insight_hooks.report.collect.model.Source`."""

    def fold(self, request: FoldRequest) -> Iterator[NodeHead | list[Block]]:
        """Run :func:`fold_node` there.

        Raises:
            SourceError: the node failed.
        """


@dataclass(slots=True)
class _Answer:
    head: NodeHead
    blocks: list[Block] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(block.counts_ne.nbytes for block in self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """The merged table, and what it took."""

    table: LoadTable
    num_files: int
    num_bytes: int  # of counts that travelled
    failed: tuple[str, ...]


def fold_sources(
    sources: Sequence[FoldSource],
    *,
    selection: select.Selection,
    aggregate: str = "auto",
    parallel: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> Folded:
    """Return one table over all nodes, ``rank_N`` = ALL_RANKS; a node that fails is a problem of the table.

    ``progress`` is called with (nodes done, nodes in all).
    """
    fold = _Fold(sources, selection, aggregate)
    with ThreadPoolExecutor(max(1, parallel)) as pool:
        surveys = fold.surveys(pool)
        groups = group_by_folder(surveys)
        futures = [pool.submit(fold.ask, group, surveys[group[0]]) for group in groups]
        for number, (group, future) in enumerate(zip(groups, futures, strict=True), start=1):
            answer = future.result()
            if answer is not None:
                fold.take(group, surveys[group[0]], answer)
            if progress is not None:
                progress(number, len(groups))
    return fold.finish()


class _Fold:
    """State of one ``summarize``."""

    def __init__(
        self, sources: Sequence[FoldSource], selection: select.Selection, aggregate: str
    ) -> None:
        self._sources = {source.name: source for source in sources}
        self._selection = selection
        self._context = ReadContext(selection=selection, aggregate=aggregate)
        self._sink = FoldSink(self._context, check_files=False)
        self._seen: dict[Key, Seen] = {}
        self._owner: dict[Key, tuple[str, bytes]] = {}
        self._failed: list[str] = []
        self._num_files = 0
        self._num_bytes = 0

    def surveys(self, pool: ThreadPoolExecutor) -> dict[str, Survey]:
        """Return the listings of the nodes that have files."""
        futures = {name: pool.submit(source.survey) for name, source in self._sources.items()}
        found = {}
        for name, future in futures.items():
            try:
                survey = future.result()
            except SourceError as error:
                self._fail(name, error)
                continue
            if survey.files:
                found[name] = survey
        return found

    def ask(
        self, group: list[str], survey: Survey, without: frozenset[Key] = frozenset()
    ) -> _Answer | None:
        """Return the answer of the first node of ``group`` that gives one; all see the same folder."""
        request = FoldRequest(
            folder=survey.folder,
            selection=self._selection,
            aggregate=self._context.aggregate,
            without=without,
        )
        for name in group:
            try:
                return _gather_answer(self._sources[name].fold(request))
            except SourceError as error:
                self._fail(name, error)
        return None

    def take(self, group: list[str], survey: Survey, answer: _Answer) -> None:
        """Add the answer; ranks that an earlier node has given are left out, by asking again."""
        name = group[0]
        twice = frozenset(key for key in answer.head.digests if key in self._owner)
        if twice:
            self._name_twice(name, twice, answer.head.digests)
            again = self.ask(group, survey, twice)
            if again is None:
                return
            answer = again
        head = answer.head
        for key, digest in head.digests.items():
            self._owner[key] = (name, digest)
        self._seen.update(head.seen)
        self._context.roles_seen |= head.roles_seen
        self._context.problems += [
            replace(problem, where=f"{name}: {problem.where}") for problem in head.problems
        ]
        for sentence in head.assumptions:
            self._context.assume(sentence)
        self._num_files += head.num_files
        self._num_bytes += answer.nbytes
        for block in answer.blocks:
            block.source = name
            self._sink.add(block)

    def finish(self) -> Folded:
        """Return the merged table."""
        self._context.problems += missing(self._seen, self._selection)
        table = self._sink.table()
        select.check_names(
            self._selection.roles, self._context.roles_seen | set(table.roles), "role"
        )
        return Folded(
            table=select.apply(table, self._selection),
            num_files=self._num_files,
            num_bytes=self._num_bytes,
            failed=tuple(self._failed),
        )

    def _fail(self, name: str, error: SourceError) -> None:
        self._failed.append(name)
        self._context.problem("node-failed", name, error.what, error.fix or "Run it again.")

    def _name_twice(self, name: str, twice: Iterable[Key], digests: Mapping[Key, bytes]) -> None:
        for step, role, rank in sorted(twice):
            owner, digest = self._owner[step, role, rank]
            what = f"{step_text(step)}, role {role}, rank {rank} is also on {owner}"
            if digest == digests[step, role, rank]:
                self._context.problem(
                    "copy-on-two-nodes",
                    name,
                    f"{what}, with the same counts; counted once",
                    "Nothing to do.",
                    SEVERITY_NOTE,
                )
            else:
                self._context.problem(
                    "duplicate-rank",
                    name,
                    f"{what}, with other counts; only those of {owner} are counted",
                    "Is it another run's? Bring both home by `collect`, which keeps them apart.",
                )


def _gather_answer(items: Iterator[NodeHead | list[Block]]) -> _Answer:
    """Return the whole answer: half of a node's counts would be worse than none."""
    head = next(items)
    assert isinstance(head, NodeHead)
    answer = _Answer(head)
    for item in items:
        assert not isinstance(item, NodeHead)
        answer.blocks += item
    return answer

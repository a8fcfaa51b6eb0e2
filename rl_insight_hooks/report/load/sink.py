# SPDX-License-Identifier: Apache-2.0
"""Where readers put what they read: kept row by row, or folded over ranks as it comes.

A :class:`Block` is what one file says of one step, role and rank. :class:`RowSink` keeps every block;
:class:`FoldSink` adds blocks into one array per (step, role) and drops them, so memory stays flat however many
ranks there are. Both end in a :class:`~rl_insight_hooks.report.table.LoadTable`.

Shape letters: n rows of a block, e its experts; N rows, E experts of the table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rl_insight_hooks.report.load.completeness import Key, Seen, missing, step_text
from rl_insight_hooks.report.load.context import (
    SEVERITY_WARNING,
    ReadContext,
)
from rl_insight_hooks.report.table import ALL_RANKS, NO_STEP, IntArray, LoadTable
from rl_insight_hooks.schema import ID_LOGICAL, PHASES

AGGREGATES = ("auto", "sum", "max", "one-rank")

# Beyond this a file's expert ids are taken for garbage: the largest model known has under 1,000 experts.
MAX_EXPERTS = 1 << 14
MAX_LAYERS = 1 << 20
# No run routes so many tokens; 1,024 such counts still add up in 64 bits.
MAX_COUNT = 1 << 53
MAX_RANKS = 1 << 20
MAX_TABLE_CELLS = 1 << 30


@dataclass(kw_only=True, slots=True)
class Block:
    """Load of one step, role and rank; columns are experts ``first .. first + e``."""

    source: str  # path, for messages
    format: str
    step: int  # NO_STEP where there is none
    role: str
    rank: int
    layer_n: IntArray
    phases: tuple[str, ...]  # [n]
    counts_ne: npt.NDArray[np.int64]
    first: int = 0
    num_passes_n: IntArray | None = None
    num_tokens_n: IntArray | None = None
    num_experts: int | None = None  # E over all ranks, where the file knows it
    replica: str | None = None  # blocks of one (step, role) with this name saw the same tokens
    is_picked: bool = False  # the recorder was told to write some ranks only
    id_space: str = ID_LOGICAL
    top_k: int | None = None
    world_size: int | None = None
    layer_names: dict[int, str] = field(default_factory=dict)
    layer_sources: frozenset[str] = frozenset()


class Sink(Protocol):
    """Takes blocks; gives the table."""

    def add(self, block: Block) -> None:
        """Take one block."""

    def has(self, step: int, role: str, rank: int) -> bool:
        """Return True if a block of this step, role and rank was taken."""

    def table(self) -> LoadTable:
        """Return all that was taken."""


class _Common:
    """What both sinks keep track of: names, sizes, and that nothing comes twice."""

    def __init__(self, context: ReadContext, check_files: bool = True) -> None:
        self.context = context
        self._check_files = check_files
        self.roles: dict[str, int] = {}
        self.phases: dict[str, int] = {}
        self.layer_names: dict[int, str] = {}
        self.layer_sources: set[str] = set()
        self.formats: dict[str, None] = {}
        self.id_spaces: set[str] = set()
        self.top_ks: set[int] = set()
        self.world_sizes: set[int] = set()
        self.seen: dict[Key, Seen] = {}
        self._layer_sets: dict[bytes, frozenset[int]] = {}
        self.num_experts = 0
        self._phase_ids: dict[tuple[str, ...], IntArray] = {}

    def accept(self, block: Block) -> bool:
        """Note the block's names and sizes; return False if it must be left out (and why is noted)."""
        last = block.first + block.counts_ne.shape[1]
        num_experts, top_k = block.num_experts or 0, block.top_k if block.top_k is not None else 1
        if (
            min(block.first, num_experts) < 0
            or max(last, num_experts, top_k) > MAX_EXPERTS
            or top_k < 1
        ):
            self.context.problem(
                "expert-out-of-range",
                block.source,
                f"experts {block.first} to {last - 1} of {block.num_experts}, top-{top_k}: "
                "there is no such model",
                "The file is damaged, or is not of this format; leave it out.",
            )
            return False
        if not ALL_RANKS <= block.rank < MAX_RANKS or not NO_STEP <= block.step < 1 << 62:
            self.context.problem(
                "rank-outside",
                block.source,
                f"step {block.step}, rank {block.rank}: no run has that many",
                "The file is damaged or misnamed; leave it out.",
            )
            return False
        contradiction = _contradiction(block)
        if contradiction is not None:
            self.context.problem(
                "bad-counts", block.source, contradiction, "Leave the file out, or record again."
            )
            return False
        key = (block.step, block.role, block.rank)
        earlier = self.seen.get(key)
        if earlier is not None and self._check_files:
            self.context.problem(
                "duplicate-rank",
                block.source,
                f"{step_text(block.step)}, role {block.role}, rank {block.rank} is also in {earlier.source}; "
                "only the first is counted",
                "Give one run at a time, or remove the copy.",
            )
            return False
        self.seen[key] = Seen(
            source=block.source,
            layers=self._layers(block),
            num_experts=block.num_experts,
            world_size=block.world_size,
            is_replica=block.replica is not None,
            is_picked=block.is_picked,
        )
        self.num_experts = max(self.num_experts, last, block.num_experts or 0)
        self.layer_names.update(block.layer_names)
        self.layer_sources |= block.layer_sources
        self.formats.setdefault(block.format)
        self.id_spaces.add(block.id_space)
        if block.top_k is not None:
            self.top_ks.add(block.top_k)
        if block.world_size is not None:
            self.world_sizes.add(block.world_size)
        return True

    def _layers(self, block: Block) -> frozenset[int]:
        key = block.layer_n.tobytes()
        found = self._layer_sets.get(key)
        if found is None:
            found = self._layer_sets[key] = frozenset(block.layer_n.tolist())
        return found

    def has(self, step: int, role: str, rank: int) -> bool:
        """Return True if a block of this step, role and rank was taken."""
        return (step, role, rank) in self.seen

    def role_id(self, role: str) -> int:
        return self.roles.setdefault(role, len(self.roles))

    def phase_ids(self, phases: tuple[str, ...]) -> IntArray:
        found = self._phase_ids.get(phases)
        if found is None:
            ids = [self.phases.setdefault(phase, len(self.phases)) for phase in phases]
            found = self._phase_ids[phases] = np.asarray(ids, dtype=np.int64)
        return found

    def finish(
        self,
        columns: dict[str, IntArray],
        counts_NE: npt.NDArray[np.int64],
    ) -> LoadTable:
        """Return the sorted table; role and phase ids are renumbered to a stable order of their names."""
        if self._check_files:
            for found in missing(self.seen, self.context.selection):
                self.context.add(found)
        if len(self.id_spaces) > 1:
            self.context.problem(
                "mixed-id-space",
                ", ".join(self.formats),
                "some rows count logical experts, some physical slots",
                "Load them apart, or select one role.",
                SEVERITY_WARNING,
            )
        roles, role_N = _renumber(self.roles, columns["role"], sorted(self.roles))
        known = [phase for phase in PHASES if phase in self.phases]
        others = sorted(phase for phase in self.phases if phase not in PHASES)
        phases, phase_N = _renumber(self.phases, columns["phase"], known + others)
        order = np.lexsort((phase_N, columns["layer"], columns["rank"], columns["step"], role_N))
        replica_N = columns["replica"][order]
        return LoadTable(
            step_N=columns["step"][order],
            role_N=role_N[order],
            rank_N=columns["rank"][order],
            layer_N=columns["layer"][order],
            phase_N=phase_N[order],
            counts_NE=counts_NE if _is_identity(order) else counts_NE[order],
            first_N=columns["first"][order],
            held_N=columns["held"][order],
            num_passes_N=columns["passes"][order],
            num_tokens_N=columns["tokens"][order],
            replica_N=replica_N if (replica_N >= 0).any() else None,
            roles=roles,
            phases=phases,
            layer_names=dict(sorted(self.layer_names.items())),
            layer_sources=tuple(sorted(self.layer_sources)),
            id_space="mixed" if len(self.id_spaces) > 1 else next(iter(self.id_spaces), ID_LOGICAL),
            top_k=next(iter(self.top_ks)) if len(self.top_ks) == 1 else None,
            world_size=max(self.world_sizes) if self.world_sizes else None,
            sources=tuple(self.formats),
            assumptions=tuple(self.context.assumptions),
            problems=self.context.listed_problems(),
        )


def _contradiction(block: Block) -> str | None:
    """Return what is wrong with the counts of ``block``, or None."""
    if not block.layer_n.size:
        return None
    if not block.counts_ne.shape[1]:
        return "its layers have no experts"
    largest = int(block.counts_ne.max())
    return f"a count of {largest}: no run has that many tokens" if largest >= MAX_COUNT else None


def _renumber(
    ids: dict[str, int], column: IntArray, order: Iterable[str]
) -> tuple[tuple[str, ...], IntArray]:
    names = tuple(order)
    new_of_old = np.zeros(len(ids), dtype=np.int64)
    for new, name in enumerate(names):
        new_of_old[ids[name]] = new
    return names, new_of_old[column]


def _is_identity(order: npt.NDArray[np.int64]) -> bool:
    return bool((order == np.arange(order.size)).all())


class RowSink(_Common):
    """Keeps every row."""

    def __init__(self, context: ReadContext) -> None:
        super().__init__(context)
        self._blocks: list[Block] = []
        self._num_rows = 0

    def add(self, block: Block) -> None:
        """Take one block; a second one of the same step, role and rank is named and left out."""
        if self.accept(block) and block.layer_n.size:
            self._blocks.append(block)
            self._num_rows += block.layer_n.size

    def table(self) -> LoadTable:
        """Return all rows, one per (step, role, rank, layer, phase)."""
        num_rows, num_experts = self._num_rows, self.num_experts
        if num_rows * num_experts > MAX_TABLE_CELLS:
            self.context.problem(
                "too-large",
                ", ".join(self.formats),
                f"{num_rows} rows x {num_experts} experts do not fit into memory; nothing was kept",
                "Select steps, roles or ranks, or merge over ranks (merge_ranks=True, --rank merged).",
            )
            self._blocks, num_rows = [], 0
        counts_NE = np.zeros((num_rows, num_experts), dtype=np.int64)
        names = (
            "step",
            "role",
            "rank",
            "layer",
            "phase",
            "first",
            "held",
            "passes",
            "tokens",
            "replica",
        )
        columns = {name: np.full(num_rows, -1, dtype=np.int64) for name in names}
        replicas: dict[tuple[int, str, str], int] = {}
        start = 0
        for block in self._blocks:
            rows = slice(start, start + block.layer_n.size)
            start = rows.stop
            width = block.counts_ne.shape[1]
            counts_NE[rows, block.first : block.first + width] = block.counts_ne
            columns["step"][rows] = block.step
            columns["role"][rows] = self.role_id(block.role)
            columns["rank"][rows] = block.rank
            columns["layer"][rows] = block.layer_n
            columns["phase"][rows] = self.phase_ids(block.phases)
            columns["first"][rows] = block.first
            columns["held"][rows] = width
            columns["passes"][rows] = 1 if block.num_passes_n is None else block.num_passes_n
            if block.num_tokens_n is not None:
                columns["tokens"][rows] = block.num_tokens_n
            if block.replica is not None:
                key = (block.step, block.role, block.replica)
                columns["replica"][rows] = replicas.setdefault(key, len(replicas))
        return self.finish(columns, counts_NE)


@dataclass(slots=True)
class _Rows:
    """Rows of the fold that one shape of block adds to, and the column ranges that were added."""

    numbers: npt.NDArray[np.int64]
    index: slice | npt.NDArray[np.int64]  # a slice where the rows follow one another: no copies
    ranges: set[tuple[int, int]] = field(default_factory=set)


def _make_rows(numbers: list[int]) -> _Rows:
    array = np.asarray(numbers, dtype=np.int64)
    first = numbers[0]
    if numbers == list(range(first, first + len(numbers))):
        return _Rows(array, slice(first, first + len(numbers)))
    return _Rows(array, array)


class FoldSink(_Common):
    """Adds up over ranks as blocks come: global expert ids, replicas once. Memory does not grow with ranks."""

    def __init__(self, context: ReadContext, check_files: bool = True) -> None:
        super().__init__(context, check_files)
        self._row_of: dict[tuple[int, int, int, int], int] = {}  # (step, role, layer, phase) -> row
        self._rows_of: dict[tuple[int, str, bytes, tuple[str, ...]], _Rows] = {}
        self._counts_ME = np.zeros((0, 0), dtype=np.int64)
        self._passes_M = np.zeros(0, dtype=np.int64)
        self._tokens_M = np.zeros(0, dtype=np.int64)
        self._width_of_role: dict[str, int] = {}
        self._replica_seen: dict[tuple[int, str, str], str] = {}
        self._one_rank: dict[tuple[int, str], int] = {}

    def add(self, block: Block) -> None:
        """Fold one block in."""
        if not self.accept(block) or not block.layer_n.size or self._is_copy(block):
            return
        rows = self._rows(block)
        end = block.first + block.counts_ne.shape[1]
        self._width_of_role[block.role] = max(
            self._width_of_role.get(block.role, 0), end, block.num_experts or 0
        )
        self._grow(len(self._row_of), self.num_experts)
        at = rows.index
        target = self._counts_ME[:, block.first : end]
        if self.context.aggregate == "max":
            target[at] = np.maximum(target[at], block.counts_ne)
        else:
            target[at] += block.counts_ne
        rows.ranges.add((block.first, end))
        passes = 1 if block.num_passes_n is None else block.num_passes_n
        self._passes_M[at] = np.maximum(self._passes_M[at], passes)
        if block.num_tokens_n is None:
            self._tokens_M[at] = -1
        else:
            known = (self._tokens_M[at] >= 0) & (block.num_tokens_n >= 0)
            self._tokens_M[at] = np.where(known, self._tokens_M[at] + block.num_tokens_n, -1)

    def _is_copy(self, block: Block) -> bool:
        """Return True if the tokens of ``block`` are already in."""
        how = self.context.aggregate
        if how == "one-rank":
            return self._one_rank.setdefault((block.step, block.role), block.rank) != block.rank
        if how != "auto" or block.replica is None:
            return False
        key = (block.step, block.role, block.replica)
        if key in self._replica_seen:
            return True
        self._replica_seen[key] = block.source
        return False

    def _rows(self, block: Block) -> _Rows:
        key = (block.step, block.role, block.layer_n.tobytes(), block.phases)
        rows = self._rows_of.get(key)
        if rows is None:
            role = self.role_id(block.role)
            phase_n = self.phase_ids(block.phases)
            numbers = [
                self._row_of.setdefault((block.step, role, layer, phase), len(self._row_of))
                for layer, phase in zip(block.layer_n.tolist(), phase_n.tolist(), strict=True)
            ]
            rows = self._rows_of[key] = _make_rows(numbers)
        return rows

    def _grow(self, num_rows: int, num_experts: int) -> None:
        have_rows, have_experts = self._counts_ME.shape
        if num_rows <= have_rows and num_experts <= have_experts:
            return
        new_rows = max(num_rows, have_rows if num_rows <= have_rows else 2 * have_rows)
        counts = np.zeros((new_rows, max(num_experts, have_experts)), dtype=np.int64)
        counts[:have_rows, :have_experts] = self._counts_ME
        self._counts_ME = counts
        self._passes_M = np.concatenate([self._passes_M, np.zeros(new_rows - have_rows, np.int64)])
        self._tokens_M = np.concatenate([self._tokens_M, np.zeros(new_rows - have_rows, np.int64)])

    def table(self) -> LoadTable:
        """Return one row per (step, role, layer, phase), with ``rank_N`` = ALL_RANKS."""
        num_rows = len(self._row_of)
        keys = np.asarray(list(self._row_of), dtype=np.int64).reshape(num_rows, 4)
        width_of_id = np.zeros(len(self.roles), dtype=np.int64)
        for role, width in self._width_of_role.items():
            width_of_id[self.roles[role]] = width
        self._check_coverage(keys, width_of_id)
        columns = {
            "step": keys[:, 0],
            "role": keys[:, 1],
            "rank": np.full(num_rows, ALL_RANKS, dtype=np.int64),
            "layer": keys[:, 2],
            "phase": keys[:, 3],
            "first": np.zeros(num_rows, dtype=np.int64),
            "held": width_of_id[keys[:, 1]],
            "passes": self._passes_M[:num_rows],
            "tokens": self._tokens_M[:num_rows],
            "replica": np.full(num_rows, -1, dtype=np.int64),
        }
        return self.finish(columns, self._counts_ME[:num_rows])

    def _check_coverage(self, keys_M4: IntArray, width_of_role: IntArray) -> None:
        """Name experts that no rank reported (a rank of the expert-parallel group is missing)."""
        ranges_of_row: dict[int, set[tuple[int, int]]] = {}
        for rows in self._rows_of.values():
            for row in rows.numbers.tolist():
                ranges_of_row.setdefault(row, set()).update(rows.ranges)
        gaps: dict[tuple[int, int, str], int] = {}
        for row, ranges in ranges_of_row.items():
            step, role = int(keys_M4[row, 0]), int(keys_M4[row, 1])
            gap = _gap_text(ranges, int(width_of_role[role]))
            if gap:
                gaps[(step, role, gap)] = gaps.get((step, role, gap), 0) + 1
        names = list(self.roles)
        for (step, role, gap), num_rows in gaps.items():
            self.context.problem(
                "missing-experts",
                f"{step_text(step)}, role {names[role]}",
                f"no rank reported experts {gap} in {num_rows} of its rows; they read as 0",
                "Bring the files of the missing ranks, or read the ranks that you have unmerged.",
            )


def _gap_text(ranges: set[tuple[int, int]], width: int) -> str:
    gaps, covered = [], 0
    for low, high in sorted(ranges):
        if low > covered:
            gaps.append((covered, low - 1))
        covered = max(covered, high)
    if covered < width:
        gaps.append((covered, width - 1))
    return ", ".join(f"{low}-{high}" if high > low else str(low) for low, high in gaps)

# SPDX-License-Identifier: Apache-2.0
"""LoadTable: expert loads as arrays, the one thing that every reader makes and every view takes.

Shape letters: N rows, E experts (columns; global logical ids unless ``id_space`` says physical).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

NO_STEP = -1  # row of a role without steps
ALL_RANKS = -1  # row merged over ranks
UNKNOWN_LAYER = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong with the input, as `check` and every command name it."""

    rule: str  # stable id, e.g. "torn-file"
    where: str  # path, or step/role/rank/layer
    what: str  # the bad value, in words
    fix: str
    severity: str = "error"  # "error": something is lost (exit 4); "warning"; "note"
    num_unlisted: int = (
        0  # above 0: a line that stands for so many of its rule, which are not listed
    )

    @property
    def num(self) -> int:
        """How many problems this line stands for."""
        return max(1, self.num_unlisted)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTable:
    """Expert load, one row per (step, role, rank, layer, phase).

    Rows are sorted by (role, step, rank, layer, phase). ``counts_NE`` are token-to-expert assignments. A row
    of a rank that holds only part of the experts is zero outside ``[first_N, first_N + held_N)``.
    """

    step_N: IntArray  # NO_STEP where the role has no steps
    role_N: IntArray  # index into roles
    rank_N: IntArray  # ALL_RANKS after merge_ranks
    layer_N: IntArray  # decoder layer number, or order among MoE layers (see layer_sources)
    phase_N: IntArray  # index into phases
    counts_NE: IntArray
    first_N: IntArray  # first expert that the row's rank holds
    held_N: IntArray  # number of experts that the row's rank holds
    num_passes_N: IntArray
    num_tokens_N: IntArray  # -1 where unknown
    replica_N: IntArray | None = (
        None  # rows with the same id >= 0 saw the same tokens; -1: its own tokens
    )
    roles: tuple[str, ...]
    phases: tuple[str, ...]
    layer_names: dict[int, str] = field(default_factory=dict)
    layer_sources: tuple[str, ...] = ()  # what the layer numbers are: "module", "call_order", ...
    id_space: str = "logical"
    top_k: int | None = None
    world_size: int | None = None
    sources: tuple[str, ...] = ()  # formats that the rows came from
    assumptions: tuple[str, ...] = ()  # what a reader had to assume, in words
    problems: tuple[Problem, ...] = ()

    def __post_init__(self) -> None:
        num_rows = self.counts_NE.shape[0]
        for name in _ROW_FIELDS:
            column = getattr(self, name)
            if column is not None and column.shape[0] != num_rows:
                raise ValueError(f"LoadTable.{name} has {column.shape[0]} rows, not {num_rows}")

    @property
    def num_rows(self) -> int:
        """Number of rows N."""
        return int(self.counts_NE.shape[0])

    @property
    def num_experts(self) -> int:
        """Number of columns E."""
        return int(self.counts_NE.shape[1])

    @property
    def is_held(self) -> npt.NDArray[np.bool_]:
        """Which experts the rank of each row holds, bool [N, E]."""
        columns = np.arange(self.num_experts)
        end_N = self.first_N + self.held_N
        held: npt.NDArray[np.bool_] = (columns >= self.first_N[:, None]) & (
            columns < end_N[:, None]
        )
        return held

    def take(self, rows: npt.NDArray[np.bool_] | IntArray) -> LoadTable:
        """Return the table of the given rows (bool mask [N], or row numbers)."""
        columns: dict[str, Any] = {
            name: None if column is None else column[rows]
            for name, column in ((name, getattr(self, name)) for name in _ROW_FIELDS)
        }
        return dataclasses.replace(self, **columns)

    @property
    def is_incomplete(self) -> bool:
        """True if a problem of severity "error" is known: part of the data is lost (exit code 4)."""
        return any(problem.severity == "error" for problem in self.problems)

    def role_of(self, row: int) -> str:
        """Return the role's name of one row."""
        return self.roles[int(self.role_N[row])]

    def phase_of(self, row: int) -> str:
        """Return the phase's name of one row."""
        return self.phases[int(self.phase_N[row])]

    def layer_label(self, layer: int) -> str:
        """Return what to call a layer in words: its name where it is known, else its number."""
        if layer == UNKNOWN_LAYER:
            return "unknown"
        return self.layer_names.get(layer, str(layer))


_ROW_FIELDS = (
    "step_N",
    "role_N",
    "rank_N",
    "layer_N",
    "phase_N",
    "counts_NE",
    "first_N",
    "held_N",
    "num_passes_N",
    "num_tokens_N",
    "replica_N",
)

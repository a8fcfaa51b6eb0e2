# SPDX-License-Identifier: Apache-2.0
"""Ranks -> global counts, for a table already loaded; :func:`load` does the same while reading."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from rl_insight_hooks.errors import UsageError
from rl_insight_hooks.report.load.context import ReadContext, listed
from rl_insight_hooks.report.load.sink import AGGREGATES, Block, FoldSink
from rl_insight_hooks.report.table import ALL_RANKS, LoadTable


def merge_ranks(table: LoadTable, aggregate: str = "auto") -> LoadTable:
    """Return ``table`` added up over ranks, one row per (step, role, layer, phase), ``rank_N`` = ALL_RANKS.

    Columns are global expert ids already, so ranks that hold different experts fall into place;
    pipeline stages have different layers and stay apart. Rows with one ``replica_N`` saw the same
    tokens and count once. Passes are those of the rank with most; tokens are added up, unknown (-1)
    if any rank's are.

    Args:
        table: rows per rank; rows that are merged already are passed through.
        aggregate: ``"auto"`` (replicas once, others added), ``"sum"`` (all added), ``"max"``
        (largest count of each
            expert) or ``"one-rank"`` (the lowest rank of each step and role).

    Raises:
        UsageError: ``aggregate`` is none of these.
    """
    if aggregate not in AGGREGATES:
        raise UsageError(
            f"aggregate {aggregate!r} is unknown; choose one of {', '.join(AGGREGATES)}"
        )
    if (table.rank_N == ALL_RANKS).all():
        return table
    context = ReadContext(aggregate=aggregate)
    sink = FoldSink(context, check_files=False)
    keys = np.stack([table.role_N, table.step_N, table.rank_N], axis=1)
    starts = np.flatnonzero(np.any(keys[1:] != keys[:-1], axis=1)) + 1
    bounds = [0, *starts.tolist(), table.num_rows]
    for begin, end in itertools.pairwise(bounds):
        for block in _blocks(table, begin, end):
            sink.add(block)
    merged = sink.table()
    return dataclasses.replace(
        merged,
        layer_names=table.layer_names,
        layer_sources=table.layer_sources,
        id_space=table.id_space,
        top_k=table.top_k,
        world_size=table.world_size,
        sources=table.sources,
        assumptions=table.assumptions,
        problems=listed([*table.problems, *context.problems]),
    )


def _blocks(table: LoadTable, begin: int, end: int) -> list[Block]:
    """Return rows ``begin:end`` (one step, role and rank) as a block for each range of experts held."""
    held = np.stack([table.first_N[begin:end], table.held_N[begin:end]], axis=1)
    blocks = []
    for first, width in np.unique(held, axis=0).tolist():
        rows = begin + np.flatnonzero((held == (first, width)).all(axis=1))
        replica = -1 if table.replica_N is None else int(table.replica_N[rows[0]])
        blocks.append(
            Block(
                source=f"rank {int(table.rank_N[begin])}",
                format=table.sources[0] if table.sources else "table",
                step=int(table.step_N[begin]),
                role=table.role_of(begin),
                rank=int(table.rank_N[begin]),
                layer_n=table.layer_N[rows],
                phases=tuple(table.phase_of(int(row)) for row in rows),
                counts_ne=table.counts_NE[rows, first : first + width],
                first=first,
                num_passes_n=table.num_passes_N[rows],
                num_tokens_n=table.num_tokens_N[rows],
                num_experts=table.num_experts if len(table.roles) == 1 else None,
                replica=None if replica < 0 else str(replica),
                id_space=table.id_space,
            )
        )
    return blocks

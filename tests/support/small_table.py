# SPDX-License-Identifier: Apache-2.0
"""LoadTables of known content."""

from __future__ import annotations

import numpy as np

from rl_insight_hooks.report.table import ALL_RANKS, LoadTable


def table(rows, *, roles=("train",), phases=("forward",), held=None):
    """Make a table of (step, role, rank, layer, phase, counts) rows; role and phase by name."""
    counts = np.array([r[5] for r in rows], dtype=np.int64)
    num_rows, num_experts = counts.shape
    first, num_held = (0, num_experts) if held is None else (held[0], held[1])

    def column(values):
        return np.array(list(values), dtype=np.int64)

    return LoadTable(
        step_N=column(r[0] for r in rows),
        role_N=column(roles.index(r[1]) for r in rows),
        rank_N=column(ALL_RANKS if r[2] is None else r[2] for r in rows),
        layer_N=column(r[3] for r in rows),
        phase_N=column(phases.index(r[4]) for r in rows),
        counts_NE=counts,
        first_N=np.full(num_rows, first),
        held_N=np.full(num_rows, num_held),
        num_passes_N=np.ones(num_rows, dtype=np.int64),
        num_tokens_N=np.full(num_rows, -1),
        roles=tuple(roles),
        phases=tuple(phases),
    )

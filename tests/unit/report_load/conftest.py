# SPDX-License-Identifier: Apache-2.0
"""Builders of input files; truth is kept by the tests as plain Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def golden() -> Path:
    return REPO / "tests" / "golden" / "load"


@pytest.fixture(scope="session")
def shared() -> Path:
    folder = REPO.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no shared data at {folder}")
    return folder


def rows_of(table):
    """Return the rows of a table as plain lists, as expected.json has them."""
    out = []
    for row in range(table.num_rows):
        step, rank = int(table.step_N[row]), int(table.rank_N[row])
        first = int(table.first_N[row])
        held = table.counts_NE[row, first : first + int(table.held_N[row])].tolist()
        outside = table.counts_NE[row].sum() - sum(held)
        assert outside == 0
        out.append(
            [
                None if step == -1 else step,
                table.role_of(row),
                None if rank == -1 else rank,
                int(table.layer_N[row]),
                table.phase_of(row),
                first,
                held,
            ]
        )
    return out


@pytest.fixture(name="rows_of")
def _rows_of():
    return rows_of


@pytest.fixture
def step_file():
    """Return a maker of group_list.json texts, by hand: no writer of ours takes part."""

    def make(step, role, rank, loads, *, first=0, phase="forward", drop=(), **fields):
        records = []
        for layer, counts in loads.items():
            layer_number, its_phase = layer if isinstance(layer, tuple) else (layer, phase)
            records.append(
                {
                    "layer": layer_number,
                    "layer_name": None,
                    "layer_source": "call_order",
                    "phase": its_phase,
                    "seam": "npu_grouped_matmul",
                    "num_calls": 3,
                    "num_passes": 1,
                    "num_assignments": sum(counts),
                    "num_rows": None,
                    "num_tokens": None,
                    "counts": counts,
                }
            )
        value = {
            "schema_version": 1,
            "producer": {"name": "rl_insight_hooks", "version": "0.1.0"},
            "run_id": "run",
            "writer": "host-1-1",
            "step": step,
            "step_source": "given",
            "role": role,
            "rank": rank,
            "world_size": 1,
            "parallel": {},
            "num_experts": None,
            "top_k": None,
            "first_expert": first,
            "id_space": "logical",
            "tokens_layout": "disjoint",
            "num_regions": 1,
            "started_unix_s": 1.0,
            "ended_unix_s": 2.0,
            "records": records,
        }
        value.update(fields)
        for name in drop:
            del value[name]
        return json.dumps(value)

    return make


@pytest.fixture
def write_step(step_file):
    """Return a function that writes a step file where it belongs and returns its path."""

    def write(root, step, role, rank, loads, **fields):
        step_dir = "step_none" if step is None else f"step_{step}"
        folder = Path(root) / step_dir / role / f"rank{rank}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "group_list.json"
        path.write_text(step_file(step, role, rank, loads, **fields))
        return path

    return write


@pytest.fixture
def by_rule():
    """Return problems grouped by rule."""

    def group(table):
        out = {}
        for problem in table.problems:
            out.setdefault(problem.rule, []).append(problem)
        return out

    return group

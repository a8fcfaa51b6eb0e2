# SPDX-License-Identifier: Apache-2.0
"""Flat exports: csv and parquet with one line per expert, json with one object per row.

Rows without a step, and rows merged over ranks, have an empty cell (csv) or null (json, parquet) there.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from rl_insight_hooks.atomic import temp_name
from rl_insight_hooks.errors import MissingDependencyError
from rl_insight_hooks.report.table import ALL_RANKS, NO_STEP, LoadTable

COLUMNS = ("step", "role", "rank", "layer", "phase", "expert", "tokens")
JSON_SCHEMA = "rl-insight-hooks/load-table/1"


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """Open a stream whose content replaces ``target`` when all went well; else nothing is left of it."""
    temp = target.with_name(temp_name(target.name))
    try:
        with temp.open("xb") as stream:
            yield stream
        os.replace(temp, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temp.unlink()
        raise


def write_csv(table: LoadTable, stream: BinaryIO) -> None:
    """Write the header and one line per expert that the row's rank holds."""
    text = io.TextIOWrapper(stream, encoding="utf-8", newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in range(table.num_rows):
        first = int(table.first_N[row])
        counts = table.counts_NE[row, first : first + int(table.held_N[row])].tolist()
        key = [_cell(value) for value in _key(table, row)]
        writer.writerows(
            [*key, expert, tokens] for expert, tokens in enumerate(counts, start=first)
        )
    text.flush()
    text.detach()


def write_json(table: LoadTable, stream: BinaryIO) -> None:
    """Write one JSON object: what the table is, its rows, its problems and assumptions. Keys are stable."""
    head = {
        "schema": JSON_SCHEMA,
        "num_experts": table.num_experts,
        "id_space": table.id_space,
        "top_k": table.top_k,
        "world_size": table.world_size,
        "sources": table.sources,
        "layer_sources": table.layer_sources,
        "layer_names": {str(layer): name for layer, name in table.layer_names.items()},
        "assumptions": table.assumptions,
        "problems": [problem_dict(problem) for problem in table.problems],
    }
    encode = msgspec.json.encode
    stream.write(encode(head)[:-1] + b',"rows":[')
    for row in range(table.num_rows):
        stream.write((b",\n" if row else b"\n") + encode(row_dict(table, row)))
    stream.write(b"\n]}\n")


def row_dict(table: LoadTable, row: int) -> dict[str, Any]:
    """Return one row as a JSON object; ``tokens[i]`` belongs to expert ``first_expert + i``."""
    first = int(table.first_N[row])
    step, role, rank, layer, phase = _key(table, row)
    num_tokens = int(table.num_tokens_N[row])
    return {
        "step": step,
        "role": role,
        "rank": rank,
        "layer": layer,
        "phase": phase,
        "first_expert": first,
        "num_passes": int(table.num_passes_N[row]),
        "num_tokens": None if num_tokens < 0 else num_tokens,
        "tokens": table.counts_NE[row, first : first + int(table.held_N[row])].tolist(),
    }


def problem_dict(problem: Any) -> dict[str, str]:
    """Return a problem as a JSON object."""
    return {name: getattr(problem, name) for name in ("rule", "severity", "where", "what", "fix")}


def write_parquet(table: LoadTable, stream: BinaryIO) -> None:
    """Write the flat table as parquet, one row group per block of rows.

    Raises:
        MissingDependencyError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise MissingDependencyError(
            "parquet needs pyarrow: pip install 'rl-insight-hooks[parquet]'; csv and json need nothing"
        ) from None
    kinds = (pa.int64(), pa.string(), pa.int64(), pa.int64(), pa.string(), pa.int64(), pa.int64())
    schema = pa.schema(list(zip(COLUMNS, kinds, strict=True)))
    rows_per_group = max(1, (1 << 20) // max(1, table.num_experts))
    with pq.ParquetWriter(stream, schema, compression="zstd") as writer:
        for begin in range(0, max(table.num_rows, 1), rows_per_group):
            columns = _flat_columns(table, begin, min(begin + rows_per_group, table.num_rows))
            arrays = [
                pa.array(columns[name], kind) for name, kind in zip(COLUMNS, kinds, strict=True)
            ]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def _flat_columns(table: LoadTable, begin: int, end: int) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for row in range(begin, end):
        first, held = int(table.first_N[row]), int(table.held_N[row])
        for name, value in zip(COLUMNS, _key(table, row), strict=False):
            columns[name] += [value] * held
        columns["expert"] += range(first, first + held)
        columns["tokens"] += table.counts_NE[row, first : first + held].tolist()
    return columns


def _key(table: LoadTable, row: int) -> tuple[int | None, str, int | None, int, str]:
    step, rank = int(table.step_N[row]), int(table.rank_N[row])
    return (
        None if step == NO_STEP else step,
        table.role_of(row),
        None if rank == ALL_RANKS else rank,
        int(table.layer_N[row]),
        table.phase_of(row),
    )


def _cell(value: Any) -> Any:
    return "" if value is None else value

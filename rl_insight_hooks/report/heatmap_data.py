# SPDX-License-Identifier: Apache-2.0
"""LoadTable -> what a heatmap shows: blocks of rows, labels, hottest cells. Pure.

Shape letters: R rows of the picture, C columns, N rows of the table, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rl_insight_hooks.errors import UsageError
from rl_insight_hooks.loadstats import HEADLINE_PHASES, headline_phase
from rl_insight_hooks.report import metrics
from rl_insight_hooks.report.table import ALL_RANKS, NO_STEP, UNKNOWN_LAYER, IntArray, LoadTable

FloatArray = npt.NDArray[np.float64]

VIEWS = ("layers", "ranks", "steps", "experts")
NORMALIZE = ("none", "row", "layer")


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive rows with one label; ``group`` picks the colour of its band."""

    label: str
    group: str
    first_row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class HotCell:
    """One of the hottest cells."""

    row: int
    column: int
    tokens: int
    over_mean: float
    label: str


@dataclass(frozen=True, slots=True)
class Heatmap:
    """One picture. ``value_RC`` is NaN where a rank does not hold the expert."""

    value_RC: FloatArray
    imbalance_R: FloatArray  # max/mean over the held experts of the row
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    blocks: tuple[Block, ...]
    hottest: tuple[HotCell, ...]
    row_name: str
    column_name: str
    unit: str
    num_rows_per_pixel_row: int = 1  # rows that one drawn row stands for (max-pooled)


@dataclass(frozen=True, slots=True)
class _Axis:
    """How a view splits the table: keys of a block and the key of a row."""

    block_fields: tuple[str, ...]
    row_field: str


_AXES = {
    "layers": _Axis(("step_N", "role_N", "rank_N", "phase_N"), "layer_N"),
    "ranks": _Axis(("step_N", "role_N", "layer_N", "phase_N"), "rank_N"),
    "steps": _Axis(("role_N", "layer_N", "rank_N", "phase_N"), "step_N"),
}
_ROW_NAMES = {"layer_N": "layer", "rank_N": "rank", "step_N": "step"}


def headline_only(table: LoadTable) -> LoadTable:
    """Return the rows of each role's headline phase: forward, else eval, else compiled."""
    keep = np.zeros(table.num_rows, dtype=bool)
    for role in range(len(table.roles)):
        mine = table.role_N == role
        phase = headline_phase({table.phases[p] for p in np.unique(table.phase_N[mine])})
        if phase is not None:
            keep |= mine & (table.phase_N == table.phases.index(phase))
    return table.take(keep)


def build(
    table: LoadTable,
    *,
    view: str = "layers",
    normalize: str = "none",
    sort: str = "expert",
    num_hottest: int = 5,
) -> Heatmap:
    """Return the picture of ``table``.

    Args:
        table: what to show; a row of the table is one row of the picture.
        view: "layers": a block for each step, role and rank; "ranks": for each step, role and layer; "steps":
            for each role and layer; "experts": as "layers", turned: experts down, layers across.
        normalize: "none": tokens; "row": tokens over the row's mean; "layer": tokens over the largest cell of
            the same layer.
        sort: "expert": columns by expert id; "load": by their sum, most loaded first.
        num_hottest: cells to name.

    Raises:
        UsageError: an unknown view, normalize or sort; or nothing to show.
    """
    for name, value, known in (
        ("view", view, VIEWS),
        ("normalize", normalize, NORMALIZE),
        ("sort", sort, ("expert", "load")),
    ):
        if value not in known:
            raise UsageError(f"--{name} {value} is unknown; choose one of {', '.join(known)}")
    if table.num_rows == 0:
        raise UsageError(
            "nothing to draw: there are no forward, eval or compiled counts; give --phase"
        )
    axis = _AXES["layers" if view == "experts" else view]
    order = np.lexsort([getattr(table, f) for f in (axis.row_field, *reversed(axis.block_fields))])
    table = table.take(order)
    counts_RC = table.counts_NE.astype(np.float64)
    columns = np.arange(table.num_experts)
    held_RC = table.is_held
    counts_RC[~held_RC] = np.nan
    used = held_RC.any(0)
    counts_RC, columns = counts_RC[:, used], columns[used]
    if sort == "load":
        by_load = np.argsort(-np.nansum(counts_RC, axis=0), kind="stable")
        counts_RC, columns = counts_RC[:, by_load], columns[by_load]
    blocks = _blocks(table, axis, headline_phases=phases_are_headline(table))
    row_labels = tuple(_row_label(table, axis.row_field, n) for n in range(table.num_rows))
    picture = Heatmap(
        value_RC=_normalized(counts_RC, table.layer_N, normalize),
        imbalance_R=_imbalance(counts_RC),
        row_labels=row_labels,
        column_labels=tuple(str(c) for c in columns.tolist()),
        blocks=blocks,
        hottest=_hottest(
            counts_RC, columns, row_labels, blocks, num_hottest, _ROW_NAMES[axis.row_field]
        ),
        row_name=_ROW_NAMES[axis.row_field],
        column_name="expert" if table.id_space == "logical" else f"expert ({table.id_space})",
        unit={"none": "tokens", "row": "tokens / row mean", "layer": "tokens / layer's largest"}[
            normalize
        ],
    )
    return _turned(picture) if view == "experts" else picture


def phases_are_headline(table: LoadTable) -> bool:
    """Return True when every role shows one phase and it is its headline: then labels need not say it."""
    return {table.phases[p] for p in np.unique(table.phase_N)} <= {HEADLINE_PHASES[0]}


def pooled(picture: Heatmap, max_rows: int) -> Heatmap:
    """Return ``picture`` with at most about ``max_rows`` rows: each drawn row is the maximum of several.

    Blocks are pooled one by one, so that no drawn row mixes two blocks. No hot row is lost.
    """
    num_rows = picture.value_RC.shape[0]
    if num_rows <= max_rows:
        return picture
    factor = -(-num_rows // max_rows)
    values, imbalance, labels, blocks, new_row = [], [], [], [], np.zeros(num_rows, dtype=np.int64)
    row = 0
    for block in picture.blocks:
        start = row
        for first in range(block.first_row, block.first_row + block.num_rows, factor):
            last = min(first + factor, block.first_row + block.num_rows)
            values.append(_nanmax(picture.value_RC[first:last], 0))
            imbalance.append(_nanmax(picture.imbalance_R[first:last], 0))
            low, high = picture.row_labels[first], picture.row_labels[last - 1]
            labels.append(low if low == high else f"{low}-{high}")
            new_row[first:last] = row
            row += 1
        blocks.append(replace(block, first_row=start, num_rows=row - start))
    return replace(
        picture,
        value_RC=np.array(values),
        imbalance_R=np.array(imbalance),
        row_labels=tuple(labels),
        blocks=tuple(blocks),
        hottest=tuple(replace(h, row=int(new_row[h.row])) for h in picture.hottest),
        num_rows_per_pixel_row=factor,
    )


def pages(picture: Heatmap, max_rows: int) -> list[Heatmap]:
    """Return ``picture`` cut between blocks into pages of at most ``max_rows`` rows (one block at least)."""
    groups: list[list[Block]] = [[]]
    size = 0
    for block in picture.blocks:
        if groups[-1] and size + block.num_rows > max_rows:
            groups.append([])
            size = 0
        groups[-1].append(block)
        size += block.num_rows
    if len(groups) == 1:
        return [picture]
    return [_page(picture, group) for group in groups]


def _page(picture: Heatmap, blocks: list[Block]) -> Heatmap:
    first = blocks[0].first_row
    end = blocks[-1].first_row + blocks[-1].num_rows
    return replace(
        picture,
        value_RC=picture.value_RC[first:end],
        imbalance_R=picture.imbalance_R[first:end],
        row_labels=picture.row_labels[first:end],
        blocks=tuple(replace(b, first_row=b.first_row - first) for b in blocks),
        hottest=tuple(
            replace(h, row=h.row - first) for h in picture.hottest if first <= h.row < end
        ),
    )


def _blocks(table: LoadTable, axis: _Axis, *, headline_phases: bool) -> tuple[Block, ...]:
    keys = np.stack([getattr(table, f) for f in axis.block_fields], axis=1)
    starts = np.flatnonzero(np.r_[True, (keys[1:] != keys[:-1]).any(1)])
    ends = np.r_[starts[1:], keys.shape[0]]
    return tuple(
        Block(
            label=_block_label(table, axis, int(start), headline_phases),
            group=table.role_of(int(start)),
            first_row=int(start),
            num_rows=int(end - start),
        )
        for start, end in zip(starts, ends, strict=True)
    )


def _block_label(table: LoadTable, axis: _Axis, n: int, headline_phases: bool) -> str:
    parts = []
    for field in axis.block_fields:
        value = int(getattr(table, field)[n])
        if field == "step_N" and value != NO_STEP:
            parts.append(f"step {value}")
        elif field == "role_N":
            parts.append(table.role_of(n))
        elif field == "rank_N" and value != ALL_RANKS:
            parts.append(f"rank {value}")
        elif field == "layer_N":
            parts.append(f"layer {_layer_text(value)}")
        elif field == "phase_N" and not headline_phases:
            parts.append(table.phase_of(n))
    return " | ".join(parts)


def _row_label(table: LoadTable, field: str, n: int) -> str:
    value = int(getattr(table, field)[n])
    if field == "layer_N":
        return _layer_text(value)
    if (field == "rank_N" and value == ALL_RANKS) or (field == "step_N" and value == NO_STEP):
        return "all"
    return str(value)


def _layer_text(layer: int) -> str:
    return "?" if layer == UNKNOWN_LAYER else str(layer)


def _normalized(counts_RC: FloatArray, layer_R: IntArray, normalize: str) -> FloatArray:
    if normalize == "none":
        return counts_RC
    if normalize == "row":
        base_R = np.nansum(counts_RC, axis=1) / np.maximum((~np.isnan(counts_RC)).sum(1), 1)
    else:
        top_R = _nanmax(counts_RC, 1)
        base_R = np.array([np.nanmax(top_R[layer_R == layer]) for layer in layer_R])
    result: FloatArray = counts_RC / np.where(base_R > 0, base_R, np.nan)[:, None]
    result[(base_R == 0)[:, None] & ~np.isnan(counts_RC)] = 0.0
    return result


def _imbalance(counts_RC: FloatArray) -> FloatArray:
    """max/mean of each row over the experts that its rank holds; NaN where it holds none."""
    held = [row[~np.isnan(row)] for row in counts_RC]
    return np.array([float(metrics.max_over_mean(row)) if row.size else np.nan for row in held])


def _hottest(
    counts_RC: FloatArray,
    columns: IntArray,
    row_labels: tuple[str, ...],
    blocks: tuple[Block, ...],
    num: int,
    row_name: str,
) -> tuple[HotCell, ...]:
    if not np.nansum(counts_RC):
        return ()
    flat = np.where(np.isnan(counts_RC), -1.0, counts_RC).ravel()
    num = min(num, flat.size)
    top = np.argpartition(-flat, num - 1)[:num]
    top = top[np.argsort(-flat[top], kind="stable")]
    cells = []
    for index in top.tolist():
        row, column = divmod(index, counts_RC.shape[1])
        if flat[index] <= 0:
            continue
        block = next(b for b in blocks if b.first_row <= row < b.first_row + b.num_rows)
        over = float(flat[index] / np.nanmean(counts_RC[row]))
        name = f"{row_name} {row_labels[row]} expert {columns[column]}"
        label = f"{block.label} | {name}" if block.label else name
        cells.append(HotCell(row, column, int(flat[index]), over, label))
    return tuple(cells)


def _turned(picture: Heatmap) -> Heatmap:
    """Experts down, layers across: blocks stay above one another, a layer that one lacks is NaN there."""
    layer_labels = sorted(
        set(picture.row_labels), key=lambda label: int(label) if label.isdecimal() else -1
    )
    column_of = {label: column for column, label in enumerate(layer_labels)}
    num_experts = picture.value_RC.shape[1]
    values: list[FloatArray] = []
    blocks: list[Block] = []
    labels: list[str] = []
    hottest: list[HotCell] = []
    for i, block in enumerate(picture.blocks):
        rows = range(block.first_row, block.first_row + block.num_rows)
        columns = [column_of[picture.row_labels[row]] for row in rows]
        part = np.full((num_experts, len(layer_labels)), np.nan)
        part[:, columns] = picture.value_RC[rows.start : rows.stop].T
        values.append(part)
        blocks.append(replace(block, first_row=i * num_experts, num_rows=num_experts))
        labels += picture.column_labels
        hottest += [
            replace(h, row=i * num_experts + h.column, column=columns[h.row - rows.start])
            for h in picture.hottest
            if h.row in rows
        ]
    value_RC = np.concatenate(values)
    return replace(
        picture,
        value_RC=value_RC,
        imbalance_R=_imbalance(value_RC),
        row_labels=tuple(labels),
        column_labels=tuple(layer_labels),
        blocks=tuple(blocks),
        hottest=tuple(sorted(hottest, key=lambda h: -h.tokens)),
        row_name="expert",
        column_name="layer",
    )


def _nanmax(values: FloatArray, axis: int) -> FloatArray:
    """Largest value, NaN only where all are NaN; without numpy's warning."""
    top = np.where(np.isnan(values), -np.inf, values).max(axis)
    result: FloatArray = np.where(np.isneginf(top), np.nan, top)
    return result

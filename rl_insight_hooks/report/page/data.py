# SPDX-License-Identifier: Apache-2.0
"""LoadTable -> what the page holds: exact counts of every row, their labels, the verdict in words. Pure.

Shape letters: N rows, E experts, H held cells (the counts of all rows, one after another), S slots.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_insight_hooks.report.merge import merge_ranks
from rl_insight_hooks.report.speak import finding_lines
from rl_insight_hooks.report.summary import Devices, summarize
from rl_insight_hooks.report.summary_text import trend_line, verdict_line
from rl_insight_hooks.report.table import ALL_RANKS, NO_STEP, UNKNOWN_LAYER, IntArray, LoadTable

PAGE_VERSION = 1  # of the keys in the page, see docs/commands/html.md

MAX_RANK_CELLS = (
    4_000_000  # more counts of single ranks than this are left out: the page shows merged ranks
)
_MAX_FINDINGS = 50
_MAX_EXACT = 2**53  # a browser's number


@dataclass(frozen=True, slots=True)
class PageData:
    """What the page holds.

    Attributes:
        head: JSON-able: labels, verdict, findings, devices, and the columns of the rows.
        counts: all held counts as byte planes (lowest bytes of all cells first), zlib-compressed, base64.
    """

    head: dict[str, Any]
    counts: str


def build(
    table: LoadTable, *, title: str, devices: Devices | None = None, aggregate: str = "auto"
) -> PageData:
    """Return the page of ``table``, whose rows are of single ranks or merged already.

    Args:
        table: rows of the phases to show.
        title: heading of the page.
        devices: where experts sit; without it, ranks that hold different experts are the devices.
        aggregate: how ranks are merged, as in :func:`merge_ranks`.
    """
    merged = merge_ranks(table, aggregate)
    devices = devices or Devices(num_devices=devices_of_ranks(table))
    summary = summarize(merged, devices)
    notes = list(finding_lines(merged.problems, merged.assumptions))
    if len(notes) > _MAX_FINDINGS:
        notes = [*notes[:_MAX_FINDINGS], f"{len(notes) - _MAX_FINDINGS} more: see `check`"]
    single = table.take(table.rank_N != ALL_RANKS)
    num_cells = int(single.held_N.sum())
    if num_cells > MAX_RANK_CELLS:
        notes.insert(
            0,
            f"ranks are shown merged: {num_cells:,} counts of single ranks are too many for a page "
            f"(at most {MAX_RANK_CELLS:,}); choose some with --rank, --step, --role or --layer",
        )
        single = single.take(np.zeros(single.num_rows, dtype=bool))
    parts = (merged, single)
    layers = np.unique(merged.layer_N)
    steps = np.unique(merged.step_N)
    held = np.concatenate([part.counts_NE[part.is_held] for part in parts])
    if held.size and int(held.max()) > _MAX_EXACT:
        notes.insert(0, "counts above 2^53 are rounded by the browser")
    num_planes = max(1, -(-int(held.max(initial=0)).bit_length() // 8))
    head = {
        "page_version": PAGE_VERSION,
        "title": title,
        "roles": list(merged.roles),
        "phases": list(merged.phases),
        "steps": [None if s == NO_STEP else s for s in steps.tolist()],
        "ranks": [
            None if r == ALL_RANKS else r
            for r in np.unique(np.concatenate([part.rank_N for part in parts])).tolist()
        ],
        "layers": [None if la == UNKNOWN_LAYER else la for la in layers.tolist()],
        "layer_names": [merged.layer_label(la) for la in layers.tolist()],
        "id_space": merged.id_space,
        "num_experts": merged.num_experts,
        "verdict": [
            {
                "role": role.role,
                "phase": role.phase,
                "text": verdict_line(role),
                "trend": trend_line(role) if role.trend is not None else None,
                "hottest": [
                    {
                        "layer": h.layer,
                        "expert": h.expert,
                        "tokens": h.tokens,
                        "over_mean": h.over_mean,
                    }
                    for h in role.hottest
                ],
            }
            for role in summary.roles
        ],
        "notes": notes,
        "devices": _devices(devices),
        "rows": {
            "step": _indexed(parts, "step_N", steps),
            "role": _column(parts, "role_N").tolist(),
            "rank": _column(parts, "rank_N").tolist(),
            "layer": _indexed(parts, "layer_N", layers),
            "phase": _column(parts, "phase_N").tolist(),
            "first": _column(parts, "first_N").tolist(),
            "held": _column(parts, "held_N").tolist(),
        },
        "num_cells": int(held.size),
        "num_planes": num_planes,
    }
    return PageData(head, _packed(held, num_planes))


def devices_of_ranks(table: LoadTable) -> int | None:
    """Return the number of devices where ranks hold equal, different parts of the experts, else None."""
    held = np.unique(table.held_N[table.rank_N != ALL_RANKS])
    if held.size != 1 or not 0 < held[0] < table.num_experts or table.num_experts % held[0]:
        return None
    end_N = table.first_N + table.held_N
    if any(
        end_N[table.role_N == role].max() < table.num_experts for role in np.unique(table.role_N)
    ):
        return None  # a role with fewer experts
    return int(table.num_experts // held[0])


def _column(parts: tuple[LoadTable, ...], name: str) -> IntArray:
    values: IntArray = np.concatenate([getattr(part, name) for part in parts])
    return values


def _indexed(parts: tuple[LoadTable, ...], name: str, known: IntArray) -> list[int]:
    indices: list[int] = np.searchsorted(known, _column(parts, name)).tolist()
    return indices


def _devices(devices: Devices) -> dict[str, Any] | None:
    if devices.placement is not None:
        return {
            "num": int(devices.placement.per_device.shape[1]),
            "slots": devices.placement.physical_to_logical.tolist(),  # [L][S], device-major
            "source": "the expert map",
        }
    if devices.num_devices is None:
        return None
    return {"num": devices.num_devices, "slots": None, "source": "experts in a row"}


def _packed(held_H: IntArray, num_planes: int) -> str:
    planes = held_H.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :num_planes]
    return base64.b64encode(zlib.compress(np.ascontiguousarray(planes.T).tobytes(), 6)).decode()

# SPDX-License-Identifier: Apache-2.0
"""What ``rebalance`` says, as lines of text and as JSON objects. No arithmetic on loads here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rl_insight_hooks.rebalance.assess import Assessment, SweepRow
from rl_insight_hooks.rebalance.incremental import Move
from rl_insight_hooks.rebalance.placement import Placement
from rl_insight_hooks.rebalance.score import Score

SCHEMA = "rl-insight-hooks/rebalance/1"
SWEEP_SCHEMA = "rl-insight-hooks/rebalance-sweep/1"
MOVES_SCHEMA = "rl-insight-hooks/expert-moves/1"
_MOST_MOVES_SHOWN = 20


def shape_line(placement: Placement) -> str:
    """Return the sizes in words."""
    shape = placement.shape
    where = (
        f"{shape.num_groups} groups kept on {shape.num_nodes} nodes"
        if shape.hierarchical
        else "any expert on any device"
    )
    return (
        f"placement: {placement.num_layers} MoE layers, {shape.num_experts} experts in {shape.num_replicas} "
        f"slots on {shape.num_devices} devices ({shape.slots_per_device} each), {where}"
    )


def layer_table(placement: Placement, result: Assessment, before_name: str) -> list[str]:
    """Return one line per layer, then mean and worst, and what the columns mean."""
    held = result.held_out
    lines = ["layer   before    after    bound   over bound" + ("   held out" if held else "")]
    bound_L = result.bound_L
    for row, layer in enumerate(placement.layer_ids):
        after, bound = result.after.max_over_mean_L[row], bound_L[row]
        line = f"{layer:>5} {result.before.max_over_mean_L[row]:8.4f} {after:8.4f} {bound:8.4f}"
        line += f" {after / bound - 1:11.2%}"
        lines.append(line + (f" {held.held_out.max_over_mean_L[row]:10.4f}" if held else ""))
    for name in ("mean", "worst"):
        before, after = getattr(result.before, name), getattr(result.after, name)
        bound = float(bound_L.mean() if name == "mean" else bound_L.max())
        line = f"{name:>5} {before:8.4f} {after:8.4f} {bound:8.4f} {after / bound - 1:11.2%}"
        lines.append(line + (f" {getattr(held.held_out, name):10.4f}" if held else ""))
    ids = placement.layer_ids
    lines += [
        "max/mean of tokens per device: 1 is perfect, "
        f"{placement.num_devices} is all on one; bound: no placement of these sizes is better.",
        f"before: {before_name}. worst layer: before {ids[result.before.worst_row]}, "
        f"after {ids[result.after.worst_row]}.",
    ]
    return lines


def forecast_lines(result: Assessment) -> list[str]:
    """Return the held-out forecast with the fitted figure beside it, or say that there is none."""
    held = result.held_out
    if held is None:
        return [
            f"forecast: none (no history of steps); fitted to the data itself: {_words(result.after)}"
        ]
    return [
        f"forecast, held out (planned on {held.num_planned} steps, scored on the {held.num_scored} "
        f"after them): {_words(held.held_out)}; without the plan: {_words(held.before)}",
        f"fitted (that plan on its own {held.num_planned} steps): {_words(held.fitted)}; "
        f"loads of both parts differ by {held.total_variation_L.mean():.3f} (total variation, mean "
        f"over layers)",
    ]


def _words(score: Score) -> str:
    return f"{score.mean:.4f} mean, {score.worst:.4f} worst"


def evaluation_line(name: str, before: Score, after: Score, distance: float) -> str:
    """Return how the plan does on other data."""
    return (
        f"evaluated on {name}: {_words(after)}; without the plan: {_words(before)}; loads differ "
        f"from those planned on by {distance:.3f} (total variation)"
    )


def move_lines(moves: Sequence[Move], num_slots: int, expert_size_bytes: int | None) -> list[str]:
    """Return the transfers: how many, and the first of them."""
    from rl_insight_hooks.report.volume import size_text

    share = len(moves) / num_slots if num_slots else 0.0
    head = f"transfers: {len(moves)} of {num_slots} slots ({share:.1%})"
    if expert_size_bytes is not None:
        head += f", {size_text(len(moves) * expert_size_bytes)}"
    lines = [head]
    for move in moves[:_MOST_MOVES_SHOWN]:
        lines.append(
            f"  layer {move.layer_id}: expert {move.expert}, device {move.from_device} -> {move.to_device} "
            f"(slot {move.to_slot}, in place of expert {move.replaces})"
        )
    if len(moves) > _MOST_MOVES_SHOWN:
        lines.append(f"  ... and {len(moves) - _MOST_MOVES_SHOWN} more")
    return lines


def moves_dict(moves: Sequence[Move], expert_size_bytes: int | None) -> dict[str, Any]:
    """Return the transfer plan as a JSON object."""
    return {
        "schema": MOVES_SCHEMA,
        "num_moves": len(moves),
        "expert_size_bytes": expert_size_bytes,
        "bytes": None if expert_size_bytes is None else len(moves) * expert_size_bytes,
        "moves": [asdict(move) for move in moves],
    }


def assessment_dict(placement: Placement, result: Assessment) -> dict[str, Any]:
    """Return an assessment as a JSON object."""
    held = result.held_out
    return {
        "num_layers": placement.num_layers,
        "layer_ids": list(placement.layer_ids),
        **asdict(placement.shape),
        "hierarchical": placement.shape.hierarchical,
        "before": score_dict(result.before, placement.layer_ids),
        "after": score_dict(result.after, placement.layer_ids),
        "bound": result.bound_L.tolist(),
        "over_bound": result.gap,
        "gain": result.gain,
        "forecast": None
        if held is None
        else {
            "num_planned": held.num_planned,
            "num_scored": held.num_scored,
            "held_out": score_dict(held.held_out, placement.layer_ids),
            "fitted": score_dict(held.fitted, placement.layer_ids),
            "before": score_dict(held.before, placement.layer_ids),
            "total_variation": held.total_variation_L.tolist(),
        },
    }


def score_dict(score: Score, layer_ids: Sequence[int]) -> dict[str, Any]:
    """Return a score as a JSON object."""
    return {
        "mean": score.mean,
        "worst": score.worst,
        "worst_layer": layer_ids[score.worst_row],
        "max_over_mean": score.max_over_mean_L.tolist(),
    }


def sweep_lines(rows: Sequence[SweepRow]) -> list[str]:
    """Return the table of balance against memory."""
    from rl_insight_hooks.report.volume import size_text

    held = any(row.held_out is not None for row in rows)
    title = "replicas  slots/device  fitted mean   worst    bound"
    lines = [title + ("   held out mean   worst" if held else "") + "   extra slots   extra bytes"]
    for row in rows:
        line = f"{row.num_replicas:>8} {row.slots_per_device:>13} {row.fitted.mean:12.4f} "
        line += f"{row.fitted.worst:7.4f} {row.bound:8.4f}"
        if row.held_out is not None:
            line += f" {row.held_out.mean:15.4f} {row.held_out.worst:7.4f}"
        size = "-" if row.extra_bytes is None else size_text(row.extra_bytes)
        lines.append(f"{line} {row.extra_slots:>13} {size:>13}")
    lines.append(
        "max/mean of tokens per device, mean over layers; extra: on each device, per layer and in all layers."
    )
    return lines


def sweep_dict(rows: Sequence[SweepRow], layer_ids: Sequence[int]) -> list[dict[str, Any]]:
    """Return the table of balance against memory as JSON objects."""
    return [
        {
            "num_replicas": row.num_replicas,
            "slots_per_device": row.slots_per_device,
            "fitted": score_dict(row.fitted, layer_ids),
            "held_out": None if row.held_out is None else score_dict(row.held_out, layer_ids),
            "bound": row.bound,
            "extra_slots": row.extra_slots,
            "extra_bytes": row.extra_bytes,
        }
        for row in rows
    ]

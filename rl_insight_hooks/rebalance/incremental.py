# SPDX-License-Identifier: Apache-2.0
"""A better placement at the price of few expert transfers.

Each layer is improved step by step; a step is a swap of two experts between devices (two transfers) or a
replica replaced by one of another expert (one transfer). Beside its steps a layer may also take the full
plan, renumbered to match (many transfers). What each layer gets is then chosen over all layers by gain per
transfer.

Shape letters: L layers, E experts, P slots, D devices, S slots of one device, C candidate steps.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rl_insight_hooks.errors import UsageError
from rl_insight_hooks.rebalance.align import align, keep_slots
from rl_insight_hooks.rebalance.history import as_history, forecast
from rl_insight_hooks.rebalance.placement import (
    FloatArray,
    IntArray,
    Placement,
    make_placement,
    replica_count_of,
)
from rl_insight_hooks.rebalance.planner import place
from rl_insight_hooks.rebalance.rules import broken_rules
from rl_insight_hooks.rebalance.score import max_over_mean
from rl_insight_hooks.rebalance.steps import Point, improve_stepwise


@dataclass(frozen=True, slots=True)
class Move:
    """One transfer: the slot gets an expert's weights from a device that held it before."""

    layer_id: int
    expert: int
    from_device: int
    to_device: int
    to_slot: int  # physical slot, over all devices
    replaces: int  # the expert that the slot held


def replan(
    old: Placement,
    load: npt.ArrayLike,
    max_moves: float | None = None,
    *,
    half_life: float | None = None,
) -> tuple[Placement, list[Move]]:
    """Return a placement near ``old`` that balances ``load`` better, and the transfers to get there.

    Args:
        old: the placement that is in use. Twins in it (an expert twice on one device, as other planners make
            them) are parted first, one transfer each, whatever ``max_moves`` is.
        load: tokens [L, E] or a history [W, L, E], as in :func:`~rl_insight_hooks.rebalance.planner.plan`.
        max_moves: most transfers over all layers; below 1 it is a share of all slots; None is no limit.
        half_life: as in :func:`~rl_insight_hooks.rebalance.planner.plan`.

    Returns:
        The placement, whose slots hold the same expert as before wherever no transfer goes, and the transfers,
        by layer and slot.

    Raises:
        UsageError: the sizes do not fit, ``max_moves`` is negative, or ``old`` splits a group over nodes.
    """
    history_WLE = as_history(load)
    if history_WLE.shape[1:] != (old.num_layers, old.num_experts):
        raise UsageError(
            f"the load has {history_WLE.shape[1]} layers and {history_WLE.shape[2]} experts, the old map "
            f"{old.num_layers} and {old.num_experts}; use the map of the same model and layers"
        )
    weight_LE = forecast(history_WLE, half_life=half_life).mean_LE
    base_LDS, num_parted = _part_twins(old, weight_LE)
    base = _like(old, base_LDS)
    for broken in broken_rules(base):
        raise UsageError(f"the old map cannot be improved, only replaced by a new plan: {broken}")
    budget = max(moves_allowed(max_moves, old.physical_to_logical.size) - num_parted, 0)
    full_LDS = align(place(weight_LE, old.shape), base_LDS, old.shape)
    paths = improve_stepwise(base_LDS, weight_LE, old.shape, budget)
    now_LDS = keep_slots(_choose(base_LDS, full_LDS, paths, weight_LE, budget), base_LDS)
    placement = _like(old, now_LDS)
    return placement, moves_between(old, placement)


def _like(old: Placement, held_LDS: IntArray) -> Placement:
    return make_placement(
        held_LDS.reshape(old.num_layers, -1),
        num_experts=old.num_experts,
        num_devices=old.num_devices,
        num_groups=old.shape.num_groups,
        num_nodes=old.shape.num_nodes,
        layer_ids=old.layer_ids,
    )


def _part_twins(old: Placement, weight_LE: FloatArray) -> tuple[IntArray, int]:
    """Return experts int [L, D, S] in which second copies on a device gave way, and how many did.

    The slot gets a copy of the expert with the heaviest replicas that the device (its node, where groups
    stay there) may still take.
    """
    held_LDS = old.per_device.copy()
    size = old.num_devices // old.shape.num_domains
    same = held_LDS[..., :, None] == held_LDS[..., None, :]
    second = np.tril(same, -1).any(axis=3)
    count_LE = old.replica_count.copy()
    found = np.argwhere(second).tolist()
    for row, device, slot in found:
        node = device // size
        allowed = np.zeros(old.num_experts, dtype=bool)
        allowed[held_LDS[row, node * size : (node + 1) * size].ravel()] = True
        allowed[held_LDS[row, device]] = False
        count_LE[row, held_LDS[row, device, slot]] -= 1
        each_E = np.where(allowed, weight_LE[row] / count_LE[row], -1.0)
        expert = int(each_E.argmax())
        held_LDS[row, device, slot] = expert
        count_LE[row, expert] += 1
    return held_LDS, len(found)


def moves_allowed(max_moves: float | None, num_slots: int) -> int:
    """Return a limit as a number of transfers: a float in [0, 1) is a share of all slots, None is all of them.

    Raises:
        UsageError: it is negative, not finite, or a broken number of 1 or more.
    """
    if max_moves is None:
        return num_slots
    if not 0 <= max_moves < math.inf or (max_moves >= 1 and max_moves != int(max_moves)):
        raise UsageError(
            f"max_moves is {max_moves}; give a whole number of transfers, or a share of the slots below 1"
        )
    return int(max_moves * num_slots) if max_moves < 1 else int(max_moves)


def _choose(
    old_LDS: IntArray,
    full_LDS: IntArray,
    paths: list[list[Point]],
    weight_LE: FloatArray,
    budget: int,
) -> IntArray:
    """Return the state of each layer, int [L, D, S]: most gain of max/mean over all layers within
    the budget.
    """
    full_moves_L = _num_moves(old_LDS, full_LDS)
    full_ratio_L = max_over_mean(_loads(full_LDS, weight_LE))
    ladders: list[list[Point]] = []
    for row, path in enumerate(paths):
        full = Point(int(full_moves_L[row]), float(full_ratio_L[row]), full_LDS[row])
        ladders.append(_convex([*path, full]))
    rungs = sorted(
        (-(low.max_over_mean - high.max_over_mean) / (high.num_moves - low.num_moves), row, rung)
        for row, ladder in enumerate(ladders)
        for rung, (low, high) in enumerate(itertools.pairwise(ladder))
    )
    level = [0] * len(ladders)
    left = budget
    for _, row, rung in rungs:
        price = ladders[row][rung + 1].num_moves - ladders[row][rung].num_moves
        if level[row] == rung and price <= left:
            level[row], left = rung + 1, left - price
    return np.stack([ladder[at].held_DS for ladder, at in zip(ladders, level, strict=True)])


def _convex(points: list[Point]) -> list[Point]:
    """Return the points, by rising moves, at which max/mean falls, and ever more slowly (lower convex hull)."""
    hull: list[Point] = []
    for point in sorted(points, key=lambda p: (p.num_moves, p.max_over_mean)):
        if hull and point.max_over_mean >= hull[-1].max_over_mean:
            continue
        while len(hull) > 1 and _slope(hull[-2], point) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    return hull


def _slope(low: Point, high: Point) -> float:
    return (high.max_over_mean - low.max_over_mean) / (high.num_moves - low.num_moves)


def _loads(held_LDS: IntArray, weight_LE: FloatArray) -> FloatArray:
    flat_LP = held_LDS.reshape(len(held_LDS), -1)
    each_LE = weight_LE / np.maximum(replica_count_of(flat_LP, weight_LE.shape[1]), 1)
    return np.asarray(
        np.take_along_axis(each_LE, flat_LP, axis=1).reshape(held_LDS.shape).sum(axis=2)
    )


def _num_moves(old_LDS: IntArray, new_LDS: IntArray) -> IntArray:
    """Return how many experts arrive on a device that did not hold them, int [L]."""
    known = (new_LDS[..., :, None] == old_LDS[..., None, :]).any(axis=3)
    return np.asarray((~known).sum(axis=(1, 2)), dtype=np.int64)


def moves_between(old: Placement, new: Placement) -> list[Move]:
    """Return the transfers that turn ``old`` into ``new``; moves between slots of one device are none.

    All are read from the old state. A transfer comes from the holder on the same node, if there is one, that
    has sent least so far in this layer.
    """
    size = (
        old.num_devices // old.shape.num_nodes if old.num_devices % old.shape.num_nodes == 0 else 1
    )
    num_slots = new.shape.slots_per_device
    moves: list[Move] = []
    known = (new.per_device[..., :, None] == old.per_device[..., None, :]).any(axis=3)
    sent: dict[tuple[int, int], int] = {}
    for row, device, slot in np.argwhere(~known).tolist():
        expert = int(new.per_device[row, device, slot])
        slots = old.logical_to_physical[row, expert]
        holders = {int(s) // num_slots for s in slots[slots >= 0]}
        source = min(holders, key=lambda d: (d // size != device // size, sent.get((row, d), 0), d))
        sent[row, source] = sent.get((row, source), 0) + 1
        moves.append(
            Move(
                layer_id=new.layer_ids[row],
                expert=expert,
                from_device=source,
                to_device=device,
                to_slot=device * num_slots + slot,
                replaces=int(old.per_device[row, device, slot]),
            )
        )
    return moves

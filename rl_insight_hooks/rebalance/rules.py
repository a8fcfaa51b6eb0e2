# SPDX-License-Identifier: Apache-2.0
"""Rules that every placement must pass before it is written, by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rl_insight_hooks.errors import DataError
from rl_insight_hooks.rebalance.placement import Placement, replica_count_of

RULES: dict[str, str] = {
    "ids-in-range": "every slot holds an expert 0..E-1",
    "every-expert-placed": "every expert has at least one slot in every layer",
    "no-twins": "no device holds the same expert twice",
    "equal-slots": "all devices hold the same number of experts, in every layer",
    "groups-whole": "where groups are kept on nodes, all replicas of a group lie on one node",
    "nodes-full": "where groups are kept on nodes, every node holds the same number of groups",
    "maps-agree": "logical_to_physical and replica_count say the same as physical_to_logical",
    "layers-ascend": "layer ids ascend, one for each row",
}


@dataclass(frozen=True, slots=True)
class Broken:
    """One broken rule: where, and what was found there."""

    rule: str
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.where}: {self.what} (rule: {RULES.get(self.rule, self.rule)})"


def broken_rules(placement: Placement) -> list[Broken]:
    """Return the first violation of each rule that ``placement`` breaks; empty if it is valid."""
    found: list[Broken] = []
    for check in _CHECKS:
        broken = check(placement)
        if broken is not None:
            found.append(broken)
            if broken.rule in ("equal-slots", "ids-in-range"):
                break  # the other rules need a rectangle of ids
    return found


def validate(placement: Placement) -> None:
    """Raise unless the placement passes every rule of :data:`RULES`.

    Raises:
        DataError: names each broken rule, where, and the bad value.
    """
    found = broken_rules(placement)
    if found:
        raise DataError("placement is not valid: " + "; ".join(str(broken) for broken in found))


def _layer(placement: Placement, row: int) -> str:
    return f"layer {placement.layer_ids[row]}"


def _equal_slots(placement: Placement) -> Broken | None:
    phy_LP, shape = placement.physical_to_logical, placement.shape
    if phy_LP.ndim == 2 and phy_LP.shape[1] == shape.slots_per_device * shape.num_devices:
        return None
    return Broken("equal-slots", "all layers", f"{phy_LP.shape} on {shape.num_devices} devices")


def _ids_in_range(placement: Placement) -> Broken | None:
    phy_LP = placement.physical_to_logical
    bad = np.argwhere((phy_LP < 0) | (phy_LP >= placement.num_experts))
    if not len(bad):
        return None
    row, slot = bad[0].tolist()
    return Broken("ids-in-range", f"{_layer(placement, row)}, slot {slot}", f"{phy_LP[row, slot]}")


def _every_expert(placement: Placement) -> Broken | None:
    bad = np.argwhere(replica_count_of(placement.physical_to_logical, placement.num_experts) == 0)
    if not len(bad):
        return None
    row, expert = bad[0].tolist()
    return Broken("every-expert-placed", _layer(placement, row), f"expert {expert} has no slot")


def _no_twins(placement: Placement) -> Broken | None:
    ordered = np.sort(placement.per_device, axis=2)
    bad = np.argwhere(ordered[:, :, 1:] == ordered[:, :, :-1])
    if not len(bad):
        return None
    row, device, slot = bad[0].tolist()
    where = f"{_layer(placement, row)}, device {device}"
    return Broken("no-twins", where, f"expert {ordered[row, device, slot]} twice")


def _groups_whole(placement: Placement) -> Broken | None:
    shape = placement.shape
    if not shape.hierarchical:
        return None
    nodes_LGN = group_nodes(placement)
    bad = np.argwhere(nodes_LGN.sum(axis=2) > 1)
    if len(bad):
        row, group = bad[0].tolist()
        nodes = np.flatnonzero(nodes_LGN[row, group]).tolist()
        return Broken("groups-whole", _layer(placement, row), f"group {group} on nodes {nodes}")
    uneven = np.argwhere(nodes_LGN.sum(axis=1) != shape.num_groups // shape.num_nodes)
    if len(uneven):
        row, node = uneven[0].tolist()
        held = int(nodes_LGN[row, :, node].sum())
        return Broken("nodes-full", _layer(placement, row), f"node {node} holds {held} groups")
    return None


def group_nodes(placement: Placement) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Return on which nodes each group has a replica, bool [L, G, N]."""
    shape = placement.shape
    group_size = shape.num_experts // shape.num_groups
    node_P = np.arange(shape.num_replicas) // (shape.num_replicas // shape.num_nodes)
    out = np.zeros((placement.num_layers, shape.num_groups, shape.num_nodes), dtype=bool)
    rows = np.arange(placement.num_layers)[:, None]
    out[rows, placement.physical_to_logical // group_size, node_P[None, :]] = True
    return out


def _maps_agree(placement: Placement) -> Broken | None:
    phy_LP, log_LEX = placement.physical_to_logical, placement.logical_to_physical
    count_LE = replica_count_of(phy_LP, placement.num_experts)
    if not np.array_equal(count_LE, placement.replica_count):
        return Broken("maps-agree", "replica_count", "differs from physical_to_logical")
    held_LEX = log_LEX >= 0
    rows = np.arange(placement.num_layers)[:, None, None]
    experts = np.arange(placement.num_experts)[None, :, None]
    right = phy_LP[rows, np.maximum(log_LEX, 0)] == experts
    ordered = np.sort(log_LEX, axis=2)
    repeated = (ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] >= 0)
    if (held_LEX & ~right).any() or repeated.any() or (held_LEX.sum(axis=2) != count_LE).any():
        return Broken("maps-agree", "logical_to_physical", "differs from physical_to_logical")
    return None


def _layers_ascend(placement: Placement) -> Broken | None:
    ids = placement.layer_ids
    ascending = all(b > a for a, b in itertools.pairwise(ids))
    if ascending and len(ids) == placement.num_layers:
        return None
    return Broken("layers-ascend", "layer_ids", f"{list(ids)[:8]} for {placement.num_layers} rows")


_CHECKS: tuple[Callable[[Placement], Broken | None], ...] = (
    _equal_slots,
    _ids_in_range,
    _every_expert,
    _no_twins,
    _groups_whole,
    _maps_agree,
    _layers_ascend,
)

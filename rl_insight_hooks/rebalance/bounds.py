# SPDX-License-Identifier: Apache-2.0
"""Lower bounds of the heaviest device's load, which no placement of the shape can beat.

Replicas of an expert share its load evenly. Shape letters: L layers, E experts, G groups.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rl_insight_hooks.rebalance.groups import enumerable, node_loads
from rl_insight_hooks.rebalance.placement import FloatArray
from rl_insight_hooks.rebalance.replicate import replicate
from rl_insight_hooks.rebalance.shape import Shape, make_shape


def lower_bound(
    load_LE: npt.ArrayLike,
    num_replicas: int,
    num_devices: int,
    num_groups: int = 1,
    num_nodes: int = 1,
) -> FloatArray:
    """Return, for each layer, the largest of three lower bounds of the heaviest device's load, float [L].

    * mean: the load is W, so one of D devices has at least W / D;
    * replication: some device holds the heaviest replica, and no replica counts make ``max_e w_e / n_e``
    smaller
      than D'Hondt's rule does; with it lie S - 1 replicas of other experts, none lighter than if all spare
      slots went to its expert;
    * groups on nodes: N / D of the least possible load of the heaviest node (exact where the ways to give
      groups to nodes can be listed, else the heaviest group).

    Raises:
        UsageError: no placement has these sizes.
    """
    weight_LE = np.asarray(load_LE, dtype=np.float64)
    shape = make_shape(weight_LE.shape[1], num_replicas, num_groups, num_nodes, num_devices)
    return bound_of_shape(weight_LE, shape)


def bound_of_shape(weight_LE: FloatArray, shape: Shape) -> FloatArray:
    """Return :func:`lower_bound` for a checked shape."""
    mean_L = weight_LE.sum(axis=1) / shape.num_devices
    spread_L = np.maximum(mean_L, group_bound(weight_LE, shape))
    return np.asarray(np.maximum(spread_L, replication_bound(weight_LE, shape)))


def replication_bound(weight_LE: FloatArray, shape: Shape) -> FloatArray:
    """Return the least possible load of the device that holds the heaviest replica, float [L]."""
    count_LE = replicate(weight_LE, shape.num_replicas, shape.max_copies)
    heaviest_L = (weight_LE / count_LE).max(axis=1)
    num_others = shape.slots_per_device - 1
    most_copies = min(shape.max_copies, shape.num_replicas - shape.num_experts + 1)
    if not num_others:
        return np.asarray(heaviest_L)
    lightest_LS = np.partition(weight_LE, num_others - 1, axis=1)[:, :num_others]
    return np.asarray(heaviest_L + lightest_LS.sum(axis=1) / most_copies)


def group_bound(weight_LE: FloatArray, shape: Shape) -> FloatArray:
    """Return the bound by groups that stay on a node, float [L]; 0 where they need not."""
    if not shape.hierarchical:
        return np.zeros(len(weight_LE))
    load_LG = weight_LE.reshape(len(weight_LE), shape.num_groups, -1).sum(axis=2)
    if enumerable(shape.num_groups, shape.num_nodes):
        node_L = node_loads(load_LG, shape.num_nodes).max(axis=2).min(axis=1)
    else:
        node_L = load_LG.max(axis=1)
    return np.asarray(node_L * shape.num_nodes / shape.num_devices)

# SPDX-License-Identifier: Apache-2.0
"""plan(): loads in, placement out.

Shape letters: W windows, L layers, E experts, G groups, N nodes (domains), D devices, S slots of one device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rl_insight_hooks.rebalance.bounds import bound_of_shape
from rl_insight_hooks.rebalance.groups import all_ways, best_ways, enumerable, give_groups
from rl_insight_hooks.rebalance.history import Forecast, as_history, forecast
from rl_insight_hooks.rebalance.placement import FloatArray, IntArray, Placement, make_placement
from rl_insight_hooks.rebalance.risk import lower_risk
from rl_insight_hooks.rebalance.shape import Shape, make_shape
from rl_insight_hooks.rebalance.solve import solve_rows

_OTHER_WAYS = 6  # ways to pair groups that are tried where the best one cannot be packed well
_HARD = 1e-2  # this far above the bound, the next best pairings are tried


def plan(
    load: npt.ArrayLike,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_devices: int,
    *,
    layer_ids: Sequence[int] | None = None,
    robust: bool = True,
    half_life: float | None = None,
) -> Placement:
    """Return the placement that balances ``load`` best over the devices, every layer for itself.

    Groups of E / num_groups consecutive experts stay on one node if ``num_groups`` divides by ``num_nodes``
    (as DeepSeek's EPLB decides); else, and with one node, any expert may go to any device. The result
    depends on the arguments only.

    Args:
        load: int or float tokens per expert [L, E], or a history of them, oldest first, [W, L, E].
        num_replicas: physical slots of all devices together.
        num_groups: expert groups of the model (its node-limited routing); 1 for none.
        num_nodes: nodes of the server.
        num_devices: devices of all nodes together.
        layer_ids: decoder layer numbers of the rows; 0..L-1 if not given.
        robust: with a history of two windows or more, also spread the experts whose loads vary together, so
        that
            the next window is balanced and not only the sum of the past ones.
        half_life: a window this many windows old counts half; None counts all tokens alike.

    Raises:
        UsageError: no placement has these sizes, with the reason and the nearest that work; or ``load`` is no
            such array.
    """
    history_WLE = as_history(load)
    shape = make_shape(history_WLE.shape[2], num_replicas, num_groups, num_nodes, num_devices)
    expected = forecast(history_WLE, half_life=half_life)
    held_LDS = place(expected.mean_LE, shape)
    if robust and len(history_WLE) > 1:
        lower_risk(held_LDS, expected, shape)
    return make_placement(
        np.sort(held_LDS, axis=2).reshape(len(held_LDS), -1),
        num_experts=shape.num_experts,
        num_devices=num_devices,
        num_groups=num_groups,
        num_nodes=num_nodes,
        layer_ids=layer_ids,
    )


def place(weight_LE: FloatArray, shape: Shape) -> IntArray:
    """Return the experts of each device, int [L, D, S], for one load per layer."""
    bound_L = bound_of_shape(weight_LE, shape)
    if not shape.hierarchical:
        return solve_rows(weight_LE, shape.num_replicas, shape.num_devices, bound_L)[0]
    load_LG = weight_LE.reshape(len(weight_LE), shape.num_groups, -1).sum(axis=2)
    group_LNG = give_groups(load_LG, shape.num_nodes)
    held_LDS, heaviest_L = _place_on_nodes(weight_LE, group_LNG, shape, bound_L)
    hard_L = np.flatnonzero(heaviest_L > bound_L * (1 + _HARD))
    if len(hard_L) and enumerable(shape.num_groups, shape.num_nodes):
        _try_other_ways(weight_LE, load_LG, shape, bound_L, held_LDS, heaviest_L, hard_L)
    return held_LDS


def _place_on_nodes(
    weight_LE: FloatArray, group_LNG: IntArray, shape: Shape, bound_L: FloatArray
) -> tuple[IntArray, FloatArray]:
    """Return experts int [L, D, S] and the heaviest device [L], with the groups of each node given."""
    num_layers, num_nodes, _ = group_LNG.shape
    size = shape.num_experts // shape.num_groups
    expert_KE = (group_LNG[..., None] * size + np.arange(size)).reshape(num_layers * num_nodes, -1)
    rows_K = np.repeat(np.arange(num_layers), num_nodes)
    held_KDS, load_KD = solve_rows(
        weight_LE[rows_K[:, None], expert_KE],
        shape.num_replicas // num_nodes,
        shape.num_devices // num_nodes,
        np.repeat(bound_L, num_nodes),
    )
    flat = held_KDS.reshape(len(held_KDS), -1)
    held_LDS = np.take_along_axis(expert_KE, flat, axis=1).reshape(
        num_layers, shape.num_devices, -1
    )
    return held_LDS, load_KD.reshape(num_layers, -1).max(axis=1)


def _try_other_ways(
    weight_LE: FloatArray,
    load_LG: FloatArray,
    shape: Shape,
    bound_L: FloatArray,
    held_LDS: IntArray,
    heaviest_L: FloatArray,
    hard_L: IntArray,
) -> None:
    """Try the next best pairings of groups in the layers ``hard_L`` and keep what is better, in place."""
    ways_HC = best_ways(load_LG[hard_L], shape.num_nodes, 1 + _OTHER_WAYS)[:, 1:]
    num_ways = ways_HC.shape[1]
    if not num_ways:
        return
    row_V = np.repeat(hard_L, num_ways)
    group_VNG = all_ways(shape.num_groups, shape.num_nodes)[ways_HC.ravel()]
    node_V = np.take_along_axis(load_LG[row_V], group_VNG.reshape(len(row_V), -1), axis=1)
    node_V = node_V.reshape(group_VNG.shape).sum(axis=2).max(axis=1) * shape.num_nodes
    hopeful = np.flatnonzero(node_V / shape.num_devices < heaviest_L[row_V] * (1 - _HARD))
    if not len(hopeful):
        return
    row_V, group_VNG = row_V[hopeful], group_VNG[hopeful]
    held_VDS, heaviest_V = _place_on_nodes(weight_LE[row_V], group_VNG, shape, bound_L[row_V])
    for candidate in np.argsort(-heaviest_V, kind="stable").tolist():  # the best comes last
        row = row_V[candidate]
        if heaviest_V[candidate] < heaviest_L[row]:
            heaviest_L[row] = heaviest_V[candidate]
            held_LDS[row] = held_VDS[candidate]


__all__ = ["Forecast", "place", "plan"]

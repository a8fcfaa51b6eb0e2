# SPDX-License-Identifier: Apache-2.0
"""Which expert groups share a node.

Shape letters: L layers, G groups, N nodes, C ways to give the groups to the nodes.
"""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np

from rl_insight_hooks.rebalance.pack import pack
from rl_insight_hooks.rebalance.placement import FloatArray, IntArray
from rl_insight_hooks.rebalance.search import improve

_MOST_WAYS = 11_000
_SEARCH_ROUNDS = 64


def num_ways(num_groups: int, num_nodes: int) -> int:
    """Return how many ways there are to give the groups to equal nodes, nodes not told apart."""
    share = num_groups // num_nodes
    same = math.factorial(share) ** num_nodes * math.factorial(num_nodes)
    return math.factorial(num_groups) // int(same)


def enumerable(num_groups: int, num_nodes: int) -> bool:
    """Return True if all ways are tried, so that the pairing is exact."""
    return num_ways(num_groups, num_nodes) <= _MOST_WAYS


@functools.lru_cache(maxsize=16)
def all_ways(num_groups: int, num_nodes: int) -> IntArray:
    """Return all ways to give the groups to the nodes, int [C, N, G/N], each once."""
    share = num_groups // num_nodes
    ways: list[list[tuple[int, ...]]] = []

    def extend(made: list[tuple[int, ...]], left: tuple[int, ...]) -> None:
        if not left:
            ways.append(made)
            return
        for others in _choose(left[1:], share - 1):
            node = (left[0], *others)
            extend([*made, node], tuple(g for g in left if g not in node))

    extend([], tuple(range(num_groups)))
    out = np.array(ways, dtype=np.int64).reshape(len(ways), num_nodes, share)
    out.setflags(write=False)
    return out


def _choose(items: tuple[int, ...], num: int) -> list[tuple[int, ...]]:
    return list(itertools.combinations(items, num))


def node_loads(load_LG: FloatArray, num_nodes: int) -> FloatArray:
    """Return the node loads of every way, float [L, C, N]."""
    ways_CNG = all_ways(load_LG.shape[1], num_nodes)
    return np.asarray(load_LG[:, ways_CNG].sum(axis=3))


def give_groups(load_LG: FloatArray, num_nodes: int) -> IntArray:
    """Return the groups of each node, int [L, N, G/N]: the heaviest node is as light as can be.

    Exact where the ways can be listed (8 groups on 4 nodes: 105), ties to the most even way; else dealt like
    replicas to devices and improved by exchanges.
    """
    num_layers, num_groups = load_LG.shape
    if num_nodes == 1:
        return np.tile(np.arange(num_groups, dtype=np.int64), (num_layers, 1))[:, None]
    if not enumerable(num_groups, num_nodes):
        return _search_groups(load_LG, num_nodes)
    best_L = best_ways(load_LG, num_nodes, 1)[:, 0]
    return all_ways(num_groups, num_nodes)[best_L]


def best_ways(load_LG: FloatArray, num_nodes: int, num: int) -> IntArray:
    """Return the ``num`` best ways of each layer, best first, int [L, num], as indices into :func:`all_ways`.

    Of the ways with the same heaviest node only the most even one counts, as that node decides; where there are
    fewer than ``num`` such ways, the last is repeated.
    """
    load_LCN = node_loads(load_LG, num_nodes)
    total_L1 = np.maximum(load_LG.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    # 1e-12 of the total keeps rounding from telling equal loads apart.
    heaviest_LC = np.round(load_LCN.max(axis=2) / total_L1, 12)
    uneven_LC = ((load_LCN / total_L1[:, :, None]) ** 2).sum(axis=2)
    order_LC = np.lexsort((uneven_LC, heaviest_LC), axis=1)
    if num == 1:
        return order_LC[:, :1]
    sorted_LC = np.take_along_axis(heaviest_LC, order_LC, axis=1)
    place_LC = np.cumsum(np.diff(sorted_LC, axis=1, prepend=sorted_LC[:, :1]) > 0, axis=1)
    first_LN = np.stack([(place_LC >= place).argmax(axis=1) for place in range(num)], axis=1)
    last_L1 = place_LC[:, -1:]
    first_LN = np.where(
        np.arange(num) <= last_L1, first_LN, (place_LC == last_L1).argmax(axis=1)[:, None]
    )
    return np.take_along_axis(order_LC, first_LN, axis=1)


def _search_groups(load_LG: FloatArray, num_nodes: int) -> IntArray:
    held_LNG = pack(load_LG, np.ones(load_LG.shape, dtype=np.int64), num_nodes)
    improve(held_LNG, load_LG, load_LG.sum(axis=1) / num_nodes, _SEARCH_ROUNDS)
    return np.sort(held_LNG, axis=2)

# SPDX-License-Identifier: Apache-2.0
"""Place the experts of independent rows: replicate, pack, exchange; more ways for the rows that are hard.

Shape letters: K rows (a layer, or one node of a layer), E experts of the row, D devices, S slots of one device.
"""

from __future__ import annotations

import numpy as np

from rl_insight_hooks.rebalance.pack import pack
from rl_insight_hooks.rebalance.placement import FloatArray, IntArray
from rl_insight_hooks.rebalance.replicate import replicate
from rl_insight_hooks.rebalance.search import improve

# (exponent of the load, offset) of the replica counts that are tried, the best for most rows first.
_FIRST = (1.0, 0.4)
_OTHERS = ((1.0, 0.0), (1.0, 0.7), (0.9, 0.0), (0.8, 0.0), (0.6, 0.0))

# Replicas more or fewer than D'Hondt gives, tried for each of the two hottest experts.
_HOT_STEPS = (-3, -2, -1, 0, 1, 2)

_CLOSE = 1e-4  # this far above the target is as good as on it
_HARD = 1e-2  # farther than this, other replica counts are tried
_FIRST_ROUNDS, _OTHER_ROUNDS, _LAST_ROUNDS, _HARD_ROUNDS = 5, 4, 3, 32


def solve_rows(
    weight_KE: FloatArray, num_slots: int, num_devices: int, target_K: FloatArray
) -> tuple[IntArray, FloatArray]:
    """Return experts int [K, D, S] and device loads float [K, D] of every row, without twins.

    Work stops for a row once its heaviest device is within 1e-4 of ``target_K`` [K], a lower bound or what
    another row makes unavoidable.
    """
    close_K = target_K * (1 + _CLOSE)
    held_KDS, load_KD = _attempt(weight_KE, num_slots, num_devices, close_K, _FIRST, _FIRST_ROUNDS)
    hard_K = np.flatnonzero(load_KD.max(axis=1) > target_K * (1 + _HARD))
    if num_slots > weight_KE.shape[1] > 2:
        for attempt in (_try_others, _try_hot_counts):
            if len(hard_K):
                attempt(weight_KE, num_slots, close_K, held_KDS, load_KD, hard_K)
                hard_K = np.flatnonzero(load_KD.max(axis=1) > target_K * (1 + _HARD))
    hard_K = load_KD.max(axis=1) > target_K * (1 + _HARD)
    near_K = (load_KD.max(axis=1) > close_K) & ~hard_K
    _polish(weight_KE, close_K, held_KDS, load_KD, np.flatnonzero(near_K), _LAST_ROUNDS)
    # Without replicas to choose, only exchanges are left to find the packing.
    hard_rounds = _HARD_ROUNDS if num_slots == weight_KE.shape[1] else _LAST_ROUNDS
    _polish(weight_KE, close_K, held_KDS, load_KD, np.flatnonzero(hard_K), hard_rounds)
    return held_KDS, load_KD


def _attempt(
    weight_KE: FloatArray,
    num_slots: int,
    num_devices: int,
    close_K: FloatArray,
    way: tuple[float, float],
    num_rounds: int,
) -> tuple[IntArray, FloatArray]:
    exponent, offset = way
    basis_KE = weight_KE if exponent == 1.0 else weight_KE**exponent
    count_KE = replicate(basis_KE, num_slots, num_devices, offset)
    held_KDS = pack(weight_KE, count_KE, num_devices)
    return held_KDS, improve(held_KDS, weight_KE / count_KE, close_K, num_rounds)


def _try_others(
    weight_KE: FloatArray,
    num_slots: int,
    close_K: FloatArray,
    held_KDS: IntArray,
    load_KD: FloatArray,
    hard_K: IntArray,
) -> None:
    """Try other rules for the replica counts of the rows ``hard_K``, and keep the best of each, in place."""
    weight_HE = weight_KE[hard_K]
    basis_VE = np.concatenate([weight_HE**exponent for exponent, _ in _OTHERS])
    offset_V = np.repeat([offset for _, offset in _OTHERS], len(hard_K))
    count_VE = replicate(basis_VE, num_slots, load_KD.shape[1], offset_V)
    _keep_best(weight_KE, close_K, held_KDS, load_KD, np.tile(hard_K, len(_OTHERS)), count_VE)


def _try_hot_counts(
    weight_KE: FloatArray,
    num_slots: int,
    close_K: FloatArray,
    held_KDS: IntArray,
    load_KD: FloatArray,
    hard_K: IntArray,
) -> None:
    """Try numbers of replicas of the two hottest experts of the rows ``hard_K``, in place.

    With few devices the two decide how well the rest can fill up: six copies on six devices and two on the
    other two may do, where seven and three do not.
    """
    num_experts, num_devices = weight_KE.shape[1], load_KD.shape[1]
    hot_H2 = np.argsort(-weight_KE[hard_K], axis=1, kind="stable")[:, :2]
    even_HE = replicate(weight_KE[hard_K], num_slots, num_devices)
    grid_G2 = np.array([(a, b) for a in _HOT_STEPS for b in _HOT_STEPS])
    num_V2 = (np.take_along_axis(even_HE, hot_H2, axis=1)[:, None] + grid_G2).reshape(-1, 2)
    row_V = np.repeat(hard_K, len(grid_G2))
    hot_V2 = np.repeat(hot_H2, len(grid_G2), axis=0)
    rest_V = num_slots - num_V2.sum(axis=1)
    use_V = ((num_V2 >= 1) & (num_V2 <= num_devices)).all(axis=1)
    use_V &= (rest_V >= num_experts - 2) & (rest_V <= (num_experts - 2) * num_devices)
    each_V2 = weight_KE[row_V[:, None], hot_V2] / np.maximum(num_V2, 1)
    use_V &= each_V2.max(axis=1) < load_KD[row_V].max(axis=1)
    row_V, hot_V2, num_V2, rest_V = row_V[use_V], hot_V2[use_V], num_V2[use_V], rest_V[use_V]
    if not len(row_V):
        return
    cold_VE = np.ones((len(row_V), num_experts), dtype=bool)
    np.put_along_axis(cold_VE, hot_V2, False, axis=1)
    cold_weight_VE = weight_KE[row_V][cold_VE].reshape(len(row_V), -1)
    count_VE = np.empty((len(row_V), num_experts), dtype=np.int64)
    count_VE[cold_VE] = replicate(cold_weight_VE, rest_V, num_devices, _FIRST[1]).ravel()
    np.put_along_axis(count_VE, hot_V2, num_V2, axis=1)
    _keep_best(weight_KE, close_K, held_KDS, load_KD, row_V, count_VE)


def _keep_best(
    weight_KE: FloatArray,
    close_K: FloatArray,
    held_KDS: IntArray,
    load_KD: FloatArray,
    row_V: IntArray,
    count_VE: IntArray,
) -> None:
    """Place the rows ``row_V`` with the replica counts ``count_VE``, and keep what is better, in place."""
    weight_VE = weight_KE[row_V]
    held_VDS = pack(weight_VE, count_VE, load_KD.shape[1])
    load_VD = improve(held_VDS, weight_VE / count_VE, close_K[row_V], _OTHER_ROUNDS)
    heaviest_V = load_VD.max(axis=1)
    order_V = np.lexsort((heaviest_V, row_V))
    first_V = order_V[np.diff(row_V[order_V], prepend=-1) > 0]  # the best of each row
    best_V = first_V[heaviest_V[first_V] < load_KD[row_V[first_V]].max(axis=1)]
    load_KD[row_V[best_V]] = load_VD[best_V]
    held_KDS[row_V[best_V]] = held_VDS[best_V]


def _polish(
    weight_KE: FloatArray,
    close_K: FloatArray,
    held_KDS: IntArray,
    load_KD: FloatArray,
    rows: IntArray,
    num_rounds: int,
) -> None:
    """Exchange on in the given rows, in place."""
    if not len(rows):
        return
    better_KDS = held_KDS[rows]
    each_KE = weight_KE[rows] / _counts(better_KDS, weight_KE.shape[1])
    load_KD[rows] = improve(better_KDS, each_KE, close_K[rows], num_rounds)
    held_KDS[rows] = better_KDS


def _counts(held_KDS: IntArray, num_experts: int) -> IntArray:
    num_rows = len(held_KDS)
    flat = held_KDS.reshape(num_rows, -1) + np.arange(num_rows)[:, None] * num_experts
    counts = np.bincount(flat.ravel(), minlength=num_rows * num_experts)
    return counts.reshape(num_rows, num_experts).astype(np.int64)

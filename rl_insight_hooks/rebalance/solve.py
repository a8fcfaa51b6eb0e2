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
    if len(hard_K) and num_slots > weight_KE.shape[1]:
        _try_others(weight_KE, num_slots, close_K, held_KDS, load_KD, hard_K)
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
    """Try other replica counts for the rows ``hard_K`` and keep the best of each, in place."""
    num_devices = load_KD.shape[1]
    weight_HE = weight_KE[hard_K]
    basis_VE = np.concatenate([weight_HE**exponent for exponent, _ in _OTHERS])
    offset_V = np.repeat([offset for _, offset in _OTHERS], len(hard_K))
    count_VE = replicate(basis_VE, num_slots, num_devices, offset_V)
    weight_VE = np.tile(weight_HE, (len(_OTHERS), 1))
    held_VDS = pack(weight_VE, count_VE, num_devices)
    close_V = np.tile(close_K[hard_K], len(_OTHERS))
    load_VD = improve(held_VDS, weight_VE / count_VE, close_V, _OTHER_ROUNDS)
    best_H = load_VD.max(axis=1).reshape(len(_OTHERS), -1).argmin(axis=0)
    from_V = best_H * len(hard_K) + np.arange(len(hard_K))
    better_H = load_VD[from_V].max(axis=1) < load_KD[hard_K].max(axis=1)
    load_KD[hard_K[better_H]] = load_VD[from_V[better_H]]
    held_KDS[hard_K[better_H]] = held_VDS[from_V[better_H]]


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

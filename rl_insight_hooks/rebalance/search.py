# SPDX-License-Identifier: Apache-2.0
"""Local search: pairs of devices exchange replicas until the heaviest device meets a target.

Shape letters: K rows, D devices, S slots of one device, Q pairs of devices, M exchanges, T = 2 S slots of a
pair.
"""

from __future__ import annotations

import numpy as np

from rl_insight_hooks.rebalance.exchange import Exchanges, exchanges
from rl_insight_hooks.rebalance.placement import FloatArray, IntArray
from rl_insight_hooks.rebalance.rows import take_rows

_GAIN = 1 - 1e-9  # an exchange must lower the heavier load by more than rounding


def improve(
    held_KDS: IntArray, each_KE: FloatArray, target_K: FloatArray, num_rounds: int
) -> FloatArray:
    """Lower the heaviest device of each row, in place, and return the device loads float [K, D].

    In a round the devices of a row are sorted by load and paired, heavy with light, shifted a little further
    every round; each pair whose heavy device is over the row's target takes the exchange that evens it out
    best. A pair's larger load only falls, so no row gets worse. Rows that meet their target drop out.

    Args:
        held_KDS: experts of each device, without twins; changed.
        each_KE: weight of one replica of each expert.
        target_K: load that is good enough.
        num_rounds: rounds at most.
    """
    num_rows, num_devices, num_slots = held_KDS.shape
    num_experts = each_KE.shape[1]
    flat_KDS = held_KDS + (np.arange(num_rows) * num_experts)[:, None, None]
    flat_each = np.ascontiguousarray(each_KE).ravel()
    load_KD = flat_each[flat_KDS].sum(axis=2)
    if num_devices == 1:
        return np.asarray(load_KD)
    ways = exchanges(num_slots)
    keep_TM = ways.keep_TM.astype(np.float32)
    held_XS, flat_XS = held_KDS.reshape(-1, num_slots), flat_KDS.reshape(-1, num_slots)
    load_X = load_KD.reshape(-1)  # X: devices of all rows
    active_K = np.flatnonzero(load_KD.max(axis=1) > target_K)
    idle = 0
    for turn in range(num_rounds):
        if not len(active_K) or idle > num_devices // 2:
            break
        heavy_Q, light_Q = _pairs(load_KD[active_K], target_K[active_K], active_K, turn)
        done = _exchange(held_XS, flat_XS, flat_each, load_X, heavy_Q, light_Q, ways, keep_TM)
        idle = 0 if done else idle + 1
        active_K = active_K[load_KD[active_K].max(axis=1) > target_K[active_K]]
    # Sums anew: the running loads carry rounding.
    flat_KDS = held_KDS + (np.arange(num_rows) * num_experts)[:, None, None]
    return np.asarray(flat_each[flat_KDS].sum(axis=2))


def _pairs(
    load_KD: FloatArray, target_K: FloatArray, row_K: IntArray, turn: int
) -> tuple[IntArray, IntArray]:
    """Return the heavy and the light device of each pair, as numbers over all rows' devices."""
    num_devices = load_KD.shape[1]
    order_KD = np.argsort(load_KD, axis=1, kind="stable")
    sorted_KD = take_rows(load_KD, order_KD)
    heavy, light = _ranks(num_devices, turn)
    over_KH = sorted_KD[:, heavy] > target_K[:, None]
    over_KH &= sorted_KD[:, heavy] > sorted_KD[:, light]
    row_Q, pair_Q = np.nonzero(over_KH)
    base_Q = row_K[row_Q] * num_devices
    return (
        order_KD[row_Q, heavy[pair_Q]] + base_Q,
        order_KD[row_Q, light[pair_Q]] + base_Q,
    )


def _ranks(num_devices: int, turn: int) -> tuple[IntArray, IntArray]:
    """Return the ranks by load that meet in a round: heavy half with light half, or as in a tournament.

    In a tournament rank i meets rank (t - i) mod D, so that in D rounds each meets each: the heaviest may
    need the small replicas of the next heaviest.
    """
    half = num_devices // 2
    if turn % 3 != 2:
        heavy = np.arange(num_devices - 1, num_devices - 1 - half, -1)
        return heavy, (np.arange(half) + turn - turn // 3) % half
    rank = np.arange(num_devices)
    other = (2 * num_devices - 3 - turn // 3 - rank) % num_devices
    first = rank > other
    return rank[first], other[first]


def _exchange(
    held_XS: IntArray,
    flat_XS: IntArray,
    flat_each: FloatArray,
    load_X: FloatArray,
    heavy_Q: IntArray,
    light_Q: IntArray,
    ways: Exchanges,
    keep_TM: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
) -> bool:
    """Do the best exchange of each pair where it helps; return True if any did."""
    if not len(heavy_Q):
        return False
    num_slots = held_XS.shape[1]
    slot_QT = _by_weight(flat_XS, flat_each, heavy_Q, light_Q)
    size_QT = flat_each[slot_QT]
    half_Q = (load_X[heavy_Q] + load_X[light_Q]) * 0.5
    # Single precision is enough to choose by; what is chosen is weighed in double.
    off_QM = (size_QT / half_Q[:, None]).astype(np.float32) @ keep_TM
    off_QM -= np.float32(1.0)
    np.abs(off_QM, out=off_QM)
    best_Q = off_QM.argmin(axis=1)
    order_QT = ways.order_MT[best_Q]
    slot_QT, size_QT = take_rows(slot_QT, order_QT), take_rows(size_QT, order_QT)
    first_Q, second_Q = size_QT[:, :num_slots].sum(axis=1), size_QT[:, num_slots:].sum(axis=1)
    good_Q = np.maximum(first_Q, second_Q) < load_X[heavy_Q] * _GAIN
    ordered_QS = np.sort(slot_QT.reshape(-1, num_slots), axis=1)
    twins = (ordered_QS[:, 1:] == ordered_QS[:, :-1]).any(axis=1).reshape(-1, 2).any(axis=1)
    good = np.flatnonzero(good_Q & ~twins)
    if not len(good):
        return False
    row_base = flat_XS[heavy_Q[good], 0] - held_XS[heavy_Q[good], 0]
    for device_Q, slots_QS, load_Q in (
        (heavy_Q, slot_QT[:, :num_slots], first_Q),
        (light_Q, slot_QT[:, num_slots:], second_Q),
    ):
        flat_XS[device_Q[good]] = slots_QS[good]
        held_XS[device_Q[good]] = slots_QS[good] - row_base[:, None]
        load_X[device_Q[good]] = load_Q[good]
    return True


def _by_weight(
    flat_XS: IntArray, flat_each: FloatArray, heavy_Q: IntArray, light_Q: IntArray
) -> IntArray:
    """Return the slots of each pair of devices, each device's by falling weight, int [Q, 2 S]."""
    both_XS = flat_XS[np.stack([heavy_Q, light_Q], axis=1).ravel()]
    order_XS = np.argsort(-flat_each[both_XS], axis=1, kind="stable")
    return take_rows(both_XS, order_XS).reshape(len(heavy_Q), -1)

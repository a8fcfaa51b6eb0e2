# SPDX-License-Identifier: Apache-2.0
"""A first packing of replicas into devices, without an expert twice on one device.

Shape letters: K rows, E experts, D devices, S slots of one device.
"""

from __future__ import annotations

import numpy as np

from rl_insight_hooks.rebalance.placement import FloatArray, IntArray
from rl_insight_hooks.rebalance.rows import take_rows


def pack(weight_KE: FloatArray, count_KE: IntArray, num_devices: int) -> IntArray:
    """Return the experts of each device, int [K, D, S].

    Replicas are sorted, heaviest first, and dealt in S rounds of D: in a round, the heaviest goes to the device
    that has least so far. Every device gets one replica a round, so slots come out equal, and a round costs one
    sort of D loads instead of D steps. Replicas of one expert lie side by side in the order, at most D of them,
    so only an expert that crosses from one round into the next can meet itself: its second part goes to the
    lightest devices that do not hold its first.
    """
    num_rows, num_experts = weight_KE.shape
    each_KE = weight_KE / count_KE
    order_KE = np.argsort(-each_KE, axis=1, kind="stable")
    copies_KE = take_rows(count_KE, order_KE)
    dealt_KSD = np.repeat(order_KE.ravel(), copies_KE.ravel()).reshape(num_rows, -1, num_devices)
    flat = dealt_KSD.reshape(num_rows, -1) + np.arange(num_rows)[:, None] * num_experts
    size_KSD = each_KE.ravel()[flat].reshape(dealt_KSD.shape)
    num_rounds = dealt_KSD.shape[1]
    held_KDS = np.empty((num_rows, num_devices, num_rounds), dtype=np.int64)
    held_KDS[:, :, 0] = dealt_KSD[:, 0]
    load_KD = size_KSD[:, 0].copy()
    base_K = np.arange(num_rows)[:, None] * num_devices
    for turn in range(1, num_rounds):
        device_KD = np.argsort(load_KD, axis=1, kind="stable")
        last_K = dealt_KSD[:, turn - 1, -1]
        crosses_K = last_K == dealt_KSD[:, turn, 0]
        if crosses_K.any():
            device_KD = _holders_later(held_KDS, dealt_KSD, device_KD, crosses_K, turn)
        where = (device_KD + base_K).ravel()
        held_KDS.reshape(-1, num_rounds)[where, turn] = dealt_KSD[:, turn].ravel()
        load_KD.reshape(-1)[where] += size_KSD[:, turn].ravel()
    return held_KDS


def _holders_later(
    held_KDS: IntArray,
    dealt_KSD: IntArray,
    device_KD: IntArray,
    crosses_K: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
    turn: int,
) -> IntArray:
    """Put first, in rows where an expert crosses, as many lightest non-holders as its second part needs."""
    expert_K1 = dealt_KSD[:, turn - 1, -1:]
    needed_K = np.where(crosses_K, (dealt_KSD[:, turn] == expert_K1).sum(axis=1), 0)
    holds_KD = held_KDS[:, :, turn - 1] == expert_K1
    free_KD = ~np.take_along_axis(holds_KD, device_KD, axis=1)
    first_KD = free_KD & (np.cumsum(free_KD, axis=1) <= needed_K[:, None])
    return np.take_along_axis(device_KD, np.argsort(~first_KD, axis=1, kind="stable"), axis=1)

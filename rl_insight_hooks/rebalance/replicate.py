# SPDX-License-Identifier: Apache-2.0
"""How many replicas each expert gets.

Shape letters: K rows (a layer, or one node of a layer), E experts of the row.
"""

from __future__ import annotations

import numpy as np

from rl_insight_hooks.rebalance.placement import FloatArray, IntArray

_NO_WEIGHT = 1e-30  # of the row's heaviest expert; lighter ones get what is left over


def replicate(
    weight_KE: FloatArray, num_slots: int, max_copies: int, offset: float = 0.0
) -> IntArray:
    """Return replica counts int [K, E]: each row sums to ``num_slots``, each count is in 1..``max_copies``.

    The same result as giving slots one by one to the expert with the largest ``w / (n - offset)``, ties to the
    lower index. ``offset`` 0 is D'Hondt's rule, the one of DeepSeek's EPLB: it makes the largest weight of one
    replica, ``max w / n``, as small as it can be. An offset in (0, 1) favours the second and third replica of
    less hot experts, which leaves slots of more different sizes and so packs better.

    It is not done one by one but by the divisor method of apportionment: bisection for a quota T at which
    ``sum floor(w / T + offset)`` meets the number of spare slots, all rows at once. Cost: K x E x log.
    """
    num_rows, num_experts = weight_KE.shape
    num_spare = num_slots - num_experts
    if num_spare == 0 or num_rows == 0:
        return np.ones(weight_KE.shape, dtype=np.int64)
    limit = max_copies - 1
    heaviest_K = weight_KE.max(axis=1)
    # Rows without load: all weights equal, spare slots go to the first experts.
    weight_KE = np.where(heaviest_K[:, None] > 0, weight_KE, 1.0)
    heaviest_K = np.where(heaviest_K > 0, heaviest_K, 1.0)

    def spare_at(quota_K: FloatArray) -> FloatArray:
        picks = np.floor(weight_KE / quota_K[:, None] + offset)
        return np.minimum(picks, limit, out=picks)

    high_K = heaviest_K * ((1 + 1e-9) / (1.0 - offset))
    low_K = weight_KE.sum(axis=1) / (2.0 * num_slots)
    at_low_KE = spare_at(low_K)
    short_K = at_low_KE.sum(axis=1) < num_spare
    while short_K.any() and (low_K[short_K] > heaviest_K[short_K] * _NO_WEIGHT).any():
        low_K = np.where(short_K, low_K * 0.125, low_K)
        at_low_KE = spare_at(low_K)
        short_K = at_low_KE.sum(axis=1) < num_spare
    at_high_KE = np.zeros_like(weight_KE)
    for _ in range(200):
        if ((at_low_KE - at_high_KE) <= 1).all():
            break
        middle_K = np.sqrt(low_K) * np.sqrt(high_K)
        middle_KE = spare_at(middle_K)
        enough_K = middle_KE.sum(axis=1) >= num_spare
        low_K = np.where(enough_K, middle_K, low_K)
        high_K = np.where(enough_K, high_K, middle_K)
        at_low_KE = np.where(enough_K[:, None], middle_KE, at_low_KE)
        at_high_KE = np.where(enough_K[:, None], at_high_KE, middle_KE)
    count_KE = at_high_KE.astype(np.int64) + 1
    return _hand_out_rest(weight_KE, count_KE, num_slots, max_copies, offset)


def _hand_out_rest(
    weight_KE: FloatArray, count_KE: IntArray, num_slots: int, max_copies: int, offset: float
) -> IntArray:
    """Give the last slots of each row, at most one to an expert at a time, to the largest ``w / (n
    - offset)``.
    """
    rest_K = num_slots - count_KE.sum(axis=1)
    while (rest_K > 0).any():
        next_KE = np.where(count_KE < max_copies, weight_KE / (count_KE - offset), -1.0)
        order_KE = np.argsort(-next_KE, axis=1, kind="stable")
        num_open_K = (next_KE >= 0).sum(axis=1)
        taken_KE = np.arange(count_KE.shape[1]) < np.minimum(rest_K, num_open_K)[:, None]
        more_KE = np.zeros_like(count_KE)
        np.put_along_axis(more_KE, order_KE, taken_KE.astype(np.int64), axis=1)
        count_KE = count_KE + more_KE
        rest_K = num_slots - count_KE.sum(axis=1)
    return count_KE

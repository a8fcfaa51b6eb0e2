# SPDX-License-Identifier: Apache-2.0
"""How many replicas each expert gets.

Shape letters: K rows (a layer, or one node of a layer), E experts of the row.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rl_insight_hooks.rebalance.placement import FloatArray, IntArray

_NO_WEIGHT = 1e-30  # of the row's heaviest expert; lighter ones get what is left over


def replicate(
    weight_KE: FloatArray,
    num_slots_K: IntArray | int,
    max_copies: int,
    offset_K: FloatArray | float = 0.0,
) -> IntArray:
    """Return replica counts int [K, E]: a row sums to its ``num_slots_K``, each count is in 1..``max_copies``.

    The same result as giving slots one by one to the expert with the largest ``w / (n - offset)``, ties to the
    lower index. Offset 0 is D'Hondt's rule, the one of DeepSeek's EPLB: it makes the largest weight of one
    replica, ``max w / n``, as small as it can be. An offset in (0, 1) favours the second and third replica of
    less hot experts, which leaves slots of more different sizes and so packs better.

    It is not done one by one but by the divisor method of apportionment: bisection for a quota T at which
    ``sum floor(w / T + offset)`` meets the number of spare slots, all rows at once. Cost: K x E x log.
    """
    num_rows, num_experts = weight_KE.shape
    num_slots_K = np.broadcast_to(np.asarray(num_slots_K, dtype=np.int64), (num_rows,))
    spare_K = num_slots_K - num_experts
    if not spare_K.any():
        return np.ones(weight_KE.shape, dtype=np.int64)
    limit = max_copies - 1
    offset_K = np.broadcast_to(np.asarray(offset_K, dtype=np.float64), (num_rows,))
    offset_K1 = offset_K[:, None]
    heaviest_K = weight_KE.max(axis=1)
    # Rows without load: all weights equal, spare slots go to the first experts.
    weight_KE = np.where(heaviest_K[:, None] > 0, weight_KE, 1.0)
    heaviest_K = np.where(heaviest_K > 0, heaviest_K, 1.0)

    def spare_at(quota_K: FloatArray) -> FloatArray:
        picks = np.floor(weight_KE / quota_K[:, None] + offset_K1)
        return np.minimum(picks, limit, out=picks)

    high_K = heaviest_K * ((1 + 1e-9) / (1.0 - offset_K))
    low_K = weight_KE.sum(axis=1) / (2.0 * num_slots_K)
    at_low_KE = spare_at(low_K)
    short_K = at_low_KE.sum(axis=1) < spare_K
    while short_K.any() and (low_K[short_K] > heaviest_K[short_K] * _NO_WEIGHT).any():
        low_K = np.where(short_K, low_K * 0.125, low_K)
        at_low_KE = spare_at(low_K)
        short_K = at_low_KE.sum(axis=1) < spare_K
    at_high_KE = np.zeros_like(weight_KE)
    for _ in range(200):
        if ((at_low_KE - at_high_KE) <= 1).all():
            break
        middle_K = np.sqrt(low_K) * np.sqrt(high_K)
        middle_KE = spare_at(middle_K)
        enough_K = middle_KE.sum(axis=1) >= spare_K
        low_K = np.where(enough_K, middle_K, low_K)
        high_K = np.where(enough_K, high_K, middle_K)
        at_low_KE = np.where(enough_K[:, None], middle_KE, at_low_KE)
        at_high_KE = np.where(enough_K[:, None], at_high_KE, middle_KE)
    count_KE = at_high_KE.astype(np.int64) + 1
    rest_K = num_slots_K - count_KE.sum(axis=1)
    _hand_out(weight_KE / (count_KE - offset_K1), at_low_KE > at_high_KE, count_KE, rest_K)
    while (num_slots_K > count_KE.sum(axis=1)).any():  # only where weights are (nearly) 0
        rest_K = num_slots_K - count_KE.sum(axis=1)
        _hand_out(weight_KE / (count_KE - offset_K1), count_KE < max_copies, count_KE, rest_K)
    return count_KE


def _hand_out(
    value_KE: FloatArray, open_KE: npt.NDArray[np.bool_], count_KE: IntArray, rest_K: IntArray
) -> None:
    """Add one replica to the ``rest_K`` open experts of each row with the largest value, in place."""
    row, expert = np.nonzero(open_KE)
    order = np.lexsort((-value_KE[row, expert], row))  # stable: ties to the lower index
    row, expert = row[order], expert[order]
    num_open_K = open_KE.sum(axis=1)
    place = np.arange(len(row)) - np.repeat(np.cumsum(num_open_K) - num_open_K, num_open_K)
    taken = place < rest_K[row]
    count_KE[row[taken], expert[taken]] += 1

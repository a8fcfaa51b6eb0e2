# SPDX-License-Identifier: Apache-2.0
"""Ways in which two devices with S slots each can exchange replicas, as a matrix.

Column m of ``keep_TM`` [2 S, M] is 1 for the slots (first device's, then second's, each by falling weight) that
the first device holds afterwards, so ``slots @ keep_TM`` is its load after each of the M exchanges.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np

from rl_insight_hooks.rebalance.placement import FloatArray, IntArray

_MOST_COLUMNS = 512
_MOST_HALVES = 256
_MOST_SWAPS = 384


@dataclass(frozen=True, slots=True)
class Exchanges:
    """M exchanges between two devices of S slots."""

    keep_TM: FloatArray  # [2 S, M], 0 or 1
    order_MT: IntArray  # [M, 2 S], slots of the first device afterwards, then those of the second


@functools.lru_cache(maxsize=32)
def exchanges(slots_per_device: int) -> Exchanges:
    """Return the exchanges to try: every split of the 2 S slots in halves if there are few, else a choice.

    The choice prefers small changes, since the devices are nearly even when it matters: all swaps of slots that
    have (nearly) the same rank, then swaps of two and three such pairs at once.
    """
    size = slots_per_device
    if math.comb(2 * size, size) // 2 <= _MOST_HALVES:
        # Slot 0 stays: the complement of a split only renames the two devices.
        halves = [(0, *rest) for rest in itertools.combinations(range(1, 2 * size), size - 1)]
    else:
        halves = list(itertools.islice(_small_changes(size), _MOST_COLUMNS))
    keep_TM = np.zeros((2 * size, len(halves)))
    order_MT = np.empty((len(halves), 2 * size), dtype=np.int64)
    for column, half in enumerate(halves):
        keep_TM[list(half), column] = 1.0
        order_MT[column] = [*half, *(slot for slot in range(2 * size) if slot not in set(half))]
    keep_TM.setflags(write=False)
    order_MT.setflags(write=False)
    return Exchanges(keep_TM, order_MT)


def _small_changes(size: int) -> itertools.chain[tuple[int, ...]]:
    def exchanged(out: tuple[int, ...], into: tuple[int, ...]) -> tuple[int, ...]:
        kept = [slot for slot in range(size) if slot not in out]
        return (*kept, *(size + slot for slot in into))

    by_rank_gap = (
        (i, j)
        for gap in range(size)
        for i in range(size)
        for j in ((i - gap, i + gap) if gap else (i,))
        if 0 <= j < size
    )
    singles = (exchanged((i,), (j,)) for i, j in itertools.islice(by_rank_gap, _MOST_SWAPS))
    several = (
        exchanged(ranks, ranks)
        for num in (2, 3)
        for ranks in itertools.combinations(range(size), num)
    )
    return itertools.chain(singles, several)

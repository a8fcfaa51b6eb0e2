# SPDX-License-Identifier: Apache-2.0
"""Every form of ``group_list`` -> tokens per expert. Pure.

Rules of the CANN grouped-matmul family (torch_npu schemas; see docs/truth.md):

==============================  ======================================================
form                            tokens of expert e
==============================  ======================================================
tensor, group_list_type 0       cumulative: g[e] - g[e-1], g[-1] = 0   (the op's default)
tensor, group_list_type 1       g[e]
tensor [E, 2], type 2           sum of g[i, 1] over rows i with g[i, 0] == e
list of ints                    cumulative
None, or group_type -1          rows of x[e]
==============================  ======================================================
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

CUMULATIVE = 0
COUNTS = 1
SPARSE_PAIRS = 2

WEIGHT_GROUP_TYPE = 2  # group_type of a weight gradient (K axis); 0 is forward and dX (M axis)

IntArray = npt.NDArray[np.int64]


def counts_from_cumulative(cumulative_E: npt.ArrayLike) -> IntArray:
    """Return tokens per expert [E] from cumulative counts [..., E].

    Also right for a sum of cumulative lists, since the difference is linear.
    """
    cumulative = np.asarray(cumulative_E, dtype=np.int64)
    counts: IntArray = cumulative.copy()
    counts[..., 1:] -= cumulative[..., :-1]
    return counts


def counts_from_pairs(pairs_E2: npt.ArrayLike, num_experts: int) -> IntArray:
    """Return tokens per expert [E] from (expert, count) rows [E, 2]; unused rows have count 0."""
    pairs = np.asarray(pairs_E2, dtype=np.int64).reshape(-1, 2)
    used = pairs[pairs[:, 1] != 0]
    counts = np.zeros(num_experts, dtype=np.int64)
    if used.size:
        if used[:, 0].min() < 0 or used[:, 0].max() >= num_experts:
            bad = int(used[(used[:, 0] < 0) | (used[:, 0] >= num_experts)][0, 0])
            raise ValueError(
                f"group_list pairs name expert {bad}; experts are 0..{num_experts - 1}"
            )
        np.add.at(counts, used[:, 0], used[:, 1])
    return counts


def counts_of(
    group_list: npt.ArrayLike, group_list_type: int, num_experts: int | None = None
) -> IntArray:
    """Return tokens per expert [E], int64, of one ``group_list``.

    Raises:
        ValueError: ``group_list_type`` is unknown, a value is negative, or a cumulative list decreases.
    """
    values = np.asarray(group_list, dtype=np.int64)
    counts: IntArray
    if group_list_type == COUNTS:
        counts = values.copy()
    elif group_list_type == CUMULATIVE:
        counts = counts_from_cumulative(values)
    elif group_list_type == SPARSE_PAIRS:
        counts = counts_from_pairs(
            values, num_experts if num_experts is not None else values.shape[0]
        )
    else:
        raise ValueError(f"group_list_type {group_list_type} is unknown; known are 0, 1 and 2")
    if counts.size and counts.min() < 0:
        what = "decreases" if group_list_type == CUMULATIVE else "has a negative count"
        raise ValueError(
            f"group_list (type {group_list_type}) {what} at expert {int(counts.argmin())}"
        )
    return counts


def counts_of_rows(num_rows_per_expert: Sequence[int]) -> IntArray:
    """Return tokens per expert [E] of an ungrouped call: the rows of each x."""
    return np.asarray(list(num_rows_per_expert), dtype=np.int64)

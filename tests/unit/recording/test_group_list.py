# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_insight_hooks.group_list import (
    counts_from_cumulative,
    counts_from_pairs,
    counts_of,
    counts_of_rows,
)

counts_lists = st.lists(st.integers(0, 1 << 40), min_size=1, max_size=64)


def running_total(counts):
    total, out = 0, []
    for count in counts:
        total += count
        out.append(total)
    return out


@given(counts_lists)
def test_every_form_gives_the_same_counts(counts):
    pairs = [[expert, count] for expert, count in enumerate(counts) if count]
    pairs += [[0, 0]] * (len(counts) - len(pairs))
    assert counts_of(counts, 1).tolist() == counts
    assert counts_of(running_total(counts), 0).tolist() == counts
    assert counts_of(pairs, 2).tolist() == counts
    assert counts_of_rows(counts).tolist() == counts


@given(st.lists(counts_lists, min_size=2, max_size=4))
def test_sum_of_cumulative_lists_is_the_cumulative_list_of_sums(rows):
    width = min(len(r) for r in rows)
    rows = [r[:width] for r in rows]
    total = np.sum([running_total(r) for r in rows], axis=0)
    assert counts_from_cumulative(total).tolist() == [
        sum(column) for column in zip(*rows, strict=True)
    ]


def test_pairs_add_up_and_unused_rows_may_name_any_expert():
    assert counts_from_pairs([[2, 5], [0, 1], [2, 1], [-1, 0]], 4).tolist() == [1, 0, 6, 0]


def test_bad_lists_are_refused_by_name():
    with pytest.raises(ValueError, match="group_list_type 3 is unknown"):
        counts_of([1, 2], 3)
    with pytest.raises(ValueError, match="decreases at expert 1"):
        counts_of([5, 3], 0)
    with pytest.raises(ValueError, match="negative count at expert 1"):
        counts_of([5, -3], 1)
    with pytest.raises(ValueError, match="expert 9"):
        counts_of([[9, 3], [0, 0]], 2)

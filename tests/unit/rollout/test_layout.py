# SPDX-License-Identifier: Apache-2.0
"""Own rows: over all ranks every real token is somebody's once, whatever the layout."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rl_insight_hooks.integrations.vllm_ascend.layout import Rows, own_rows

sizes = st.lists(st.integers(0, 40), min_size=2, max_size=5)


@given(tokens=sizes, tp_size=st.integers(1, 5), padded=st.booleans())
def test_gathered_rows_are_parted_among_the_ranks(tokens, tp_size, padded):
    """Rows of the gathered batch, laid out by a loop, against the union of the ranks' blocks."""
    layout = []
    for dp_rank, num in enumerate(tokens):
        for i in range(max(tokens) if padded else num):
            layout.append((dp_rank, i) if i < num else None)
    if len(layout) in tokens or sum(tokens) == 0:
        return  # rows of one rank alone look the same as rows of all
    real = [row for row, token in enumerate(layout) if token is not None]
    seen = []
    for dp_rank in range(len(tokens)):
        for tp_rank in range(tp_size):
            rows = own_rows(
                len(layout),
                "ALLGATHER",
                num_tokens=tokens[dp_rank],
                num_tokens_of_dp=tuple(tokens),
                dp_rank=dp_rank,
                tp_rank=tp_rank,
                tp_size=tp_size,
            )
            assert rows.known
            for row in range(rows.start, rows.stop):
                assert layout[row] == (dp_rank, rows.first_token + row - rows.start)
                seen.append(row)
    assert sorted(seen) == real


@given(num_rows=st.integers(0, 50), tp_size=st.integers(1, 9))
def test_tensor_parallel_ranks_part_the_rows(num_rows, tp_size):
    seen = []
    for tp_rank in range(tp_size):
        rows = own_rows(
            num_rows, "ALLGATHER", num_tokens=num_rows, tp_rank=tp_rank, tp_size=tp_size
        )
        seen += range(rows.start, rows.stop)
    assert seen == list(range(num_rows))


@pytest.mark.parametrize("comm", ["MC2", "FUSED_MC2", "MC2_PREFILL"])
def test_masked_layouts_are_the_ranks_own(comm):
    assert own_rows(7, comm, tp_rank=1, tp_size=4) == Rows(0, 7)


@pytest.mark.parametrize("num_tokens", [9, 10, 11, 12])
def test_exchanged_rows_know_their_first_token(num_tokens):
    assert own_rows(3, "ALLTOALL", num_tokens=num_tokens, tp_rank=2, tp_size=4).first_token == 6


def test_an_exchange_of_another_size_has_no_first_token():
    assert own_rows(3, "ALLTOALL", num_tokens=40, tp_rank=2, tp_size=4) == Rows(0, 3, None)


def test_a_micro_batch_has_no_first_token():
    assert own_rows(3, "ALLGATHER", num_tokens=6) == Rows(0, 3, None)


@pytest.mark.parametrize(
    "case",
    [
        {"comm": "ALLGATHER", "pcp_size": 2},
        {"comm": "ALLGATHER", "num_tokens_of_dp": (30, 40)},
        {"comm": "SOMETHING_NEW"},
    ],
    ids=["prefill context parallel", "rows that fit nothing", "a new method"],
)
def test_what_is_not_understood_is_counted_whole_and_marked(case):
    assert own_rows(9, **case) == Rows(0, 9, known=False)


def test_rows_split_before_the_gather():
    assert own_rows(5, "ALLGATHER", num_tokens_of_dp=(9, 20), tp_rank=1, tp_size=2) == Rows(0, 5)

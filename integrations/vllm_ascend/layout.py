# SPDX-License-Identifier: Apache-2.0
"""Which rows of a fused-MoE call are this rank's own tokens, so that each token counts once over all ranks.

Under AllGather every rank of the group sees the tokens of all: the own data-parallel block is cut out, and of
it the own tensor-parallel part. All-to-all and MC2 hand each rank tokens of its own. The arithmetic of the
blocks follows facts of vllm-ascend's prepare step: shards padded to the largest, or not padded.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

# Names of MoECommType (0.11 and later) and FusedMoEState (0.9.1), upper case.
_GATHERED = {"ALLGATHER", "NAIVE_MULTICAST", "ALLGATHEREP", "NAIVEMULTICAST"}
_MASKED = {"MC2", "FUSED_MC2", "MC2_PREFILL"}
_EXCHANGED = {"ALLTOALL", "ALL2ALL", "ALL2ALLSEQ"}


def is_masked(comm: str | None) -> bool:
    """Return True for a communication method whose padding rows a mask tells."""
    return comm in _MASKED


class Rows(NamedTuple):
    """Own rows [start, stop) of a call.

    ``first_token`` is the place of row ``start`` among this data-parallel rank's tokens of the step, None
    where not known. ``known`` is False where the rows could not be told apart: all are counted then.
    """

    start: int
    stop: int
    first_token: int | None = None
    known: bool = True


@functools.lru_cache(maxsize=4096)
def own_rows(
    num_rows: int,
    comm: str | None,
    *,
    num_tokens: int | None = None,
    num_tokens_of_dp: tuple[int, ...] | None = None,
    dp_rank: int = 0,
    tp_rank: int = 0,
    tp_size: int = 1,
    pcp_size: int = 1,
) -> Rows:
    """Return the own rows of a call that sees ``num_rows``.

    Args:
        num_rows: rows of the routed ids.
        comm: name of the communication method, upper case; None where there is none.
        num_tokens: tokens of this rank's forward pass (padded in graph mode), None where not known.
        num_tokens_of_dp: the same of every data-parallel rank; None without data parallelism.
        dp_rank: place among them.
        tp_rank: place in the tensor-parallel group.
        tp_size: its size.
        pcp_size: size of the prefill-context-parallel group, which gathers once more.
    """
    everything = Rows(0, num_rows)
    if comm in _MASKED:
        return everything
    if comm in _EXCHANGED:
        return Rows(0, num_rows, _first_of_shard(num_rows, num_tokens, tp_rank, tp_size))
    if comm is not None and comm not in _GATHERED:
        return Rows(0, num_rows, known=False)
    if pcp_size > 1:
        return Rows(0, num_rows, known=False)
    if num_tokens_of_dp is None or len(num_tokens_of_dp) <= 1:
        # rows of a micro-batch, or of no forward pass that we know: which of the tokens is open
        anchored = num_tokens is None or num_tokens == num_rows
        return _tensor_part(0, num_rows, tp_rank, tp_size, anchored=anchored)
    own = num_tokens_of_dp[dp_rank]
    largest = max(num_tokens_of_dp)
    if num_rows == sum(num_tokens_of_dp):
        start = sum(num_tokens_of_dp[:dp_rank])
        return _tensor_part(start, start + own, tp_rank, tp_size)
    if num_rows == largest * len(num_tokens_of_dp):
        start = dp_rank * largest
        return _tensor_part(start, start + own, tp_rank, tp_size)
    if num_rows == own:
        return _tensor_part(0, num_rows, tp_rank, tp_size)
    if num_rows in (-(-own // tp_size), own // tp_size, -(-largest // tp_size)):
        return everything  # split over the tensor-parallel ranks already
    return Rows(0, num_rows, known=False)


def _tensor_part(
    start: int, stop: int, tp_rank: int, tp_size: int, *, anchored: bool = True
) -> Rows:
    """The part of a block that this tensor-parallel rank counts; its peers see the same block."""
    share = -(-(stop - start) // tp_size)
    first = min(tp_rank * share, stop - start)
    last = min(first + share, stop - start)
    return Rows(start + first, start + last, first if anchored else None)


def _first_of_shard(
    num_rows: int, num_tokens: int | None, tp_rank: int, tp_size: int
) -> int | None:
    if num_tokens is not None and 0 <= num_rows * tp_size - num_tokens < tp_size:
        return tp_rank * num_rows
    return None

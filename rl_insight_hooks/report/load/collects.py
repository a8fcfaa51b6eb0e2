# SPDX-License-Identifier: Apache-2.0
# Paths are plain text here: Path objects cost a third more over 100,000 files.
# ruff: noqa: PTH119, PTH120
"""Reader of MindSpeed-RL's ``eplb_token_collects_<rank>.json`` and ``token_collects_all.json``.

``{"layer": {"expert": tokens}}``: counts of logical experts, summed over the run of one rank; no step, no role.
Ranks that hold equal counts saw the same tokens (all-gather dispatch): they count once in a merge.
"""

from __future__ import annotations

import os
import re

import msgspec
import numpy as np

from rl_insight_hooks.report.load.context import (
    SEVERITY_NOTE,
    SEVERITY_WARNING,
    ReadContext,
    read_bytes,
)
from rl_insight_hooks.report.load.sink import MAX_EXPERTS, Block, Sink
from rl_insight_hooks.report.table import ALL_RANKS, NO_STEP
from rl_insight_hooks.schema import PHASE_FORWARD

FORMAT = "token-collects"
ROLE = "rollout"  # the format says none; MindSpeed-RL collects in generation only

_RANK = re.compile(r"(\d+)\.json$")
_decoder = msgspec.json.Decoder(dict[str, dict[str, int]])


def read_collects(paths: list[str], sink: Sink, context: ReadContext) -> None:
    """Put every file of ``paths`` into ``sink``; equal files are named and marked as copies."""
    if not paths:
        return
    context.roles_seen.add(ROLE)
    import hashlib  # loads OpenSSL: 10 ms that nobody else needs

    first_with: dict[str, int] = {}
    num_equal = 0
    taken: set[int] = set()
    for path in _without_sums(paths, context):
        rank = _rank_of(path, taken, context)
        taken.add(rank)
        block = _read(path, rank, context) if context.selection.wants(None, ROLE, rank) else None
        context.done()
        if block is None:
            continue
        if block.counts_ne.any():
            digest = hashlib.sha256(block.counts_ne.tobytes() + block.layer_n.tobytes()).hexdigest()
            num_equal += digest in first_with
            first_with.setdefault(digest, rank)
            block.replica = digest
        sink.add(block)
    if num_equal:
        context.assume(
            f"{num_equal} token-collects files equal another one: those ranks saw the same tokens "
            f"(all-gather dispatch), so a merge over ranks counts them once (aggregate: {context.aggregate})"
        )


def _without_sums(paths: list[str], context: ReadContext) -> list[str]:
    """Leave ``token_collects_all.json`` out where the files of the ranks lie beside it."""
    kept = []
    folders = {os.path.dirname(path) for path in paths if not _is_sum(path)}
    for path in paths:
        if _is_sum(path) and os.path.dirname(path) in folders:
            context.problem(
                "sum-beside-ranks",
                path,
                "the sum over ranks lies beside the files of the ranks; the ranks are read, the sum is not",
                "Give the file itself to read only the sum.",
                SEVERITY_NOTE,
            )
            context.done()
        else:
            kept.append(path)
    return kept


def _is_sum(path: str) -> bool:
    return os.path.basename(path) == "token_collects_all.json"


def _rank_of(path: str, taken: set[int], context: ReadContext) -> int:
    if _is_sum(path):
        return ALL_RANKS
    match = _RANK.search(os.path.basename(path))
    if match is not None and len(match[1]) < 10:
        return int(match[1])
    rank = 0
    while rank in taken:
        rank += 1
    context.assume(f"{os.path.basename(path)} has no rank in its name: taken for rank {rank}")
    return rank


def _read(path: str, rank: int, context: ReadContext) -> Block | None:
    try:
        data = read_bytes(path)
        loads = _decoder.decode(data)
        if data.count(b":") != len(loads) + sum(map(len, loads.values())):
            raise ValueError("a layer or expert is listed twice")
        block = _block(path, rank, loads)
    except OSError as error:
        context.problem(
            "unreadable-file", path, str(error), "Give read permission, or copy it again."
        )
    except msgspec.ValidationError as error:
        context.problem("bad-schema", path, str(error), 'Expected {"layer": {"expert": tokens}}.')
    except msgspec.DecodeError as error:
        what = (
            "0 bytes"
            if not data
            else f"{error} (the collector rewrites it in place; a kill cuts it off)"
        )
        rule = "torn-file" if data else "empty-file"
        context.problem(rule, path, what, "Collect again; this rank is missing from every sum.")
    except (ValueError, OverflowError, RecursionError) as error:
        context.problem("bad-counts", path, str(error), "Leave the file out, or collect again.")
    else:
        if not block.layer_n.size:
            context.problem(
                "no-layers",
                path,
                "holds no layer",
                "Was the server asked anything?",
                SEVERITY_WARNING,
            )
        return block
    return None


def _block(path: str, rank: int, loads: dict[str, dict[str, int]]) -> Block:
    layers = {_number(layer, "layer"): counts for layer, counts in loads.items()}
    if len(layers) < len(loads):
        raise ValueError("a layer is listed twice")
    order = sorted(layers)
    experts = [
        np.array([_number(expert, "expert") for expert in layers[layer]], dtype=np.int64)
        for layer in order
    ]
    width = 1 + max((int(ids.max()) for ids in experts if ids.size), default=-1)
    counts = np.zeros((len(order), width), dtype=np.int64)
    for row, (layer, ids) in enumerate(zip(order, experts, strict=True)):
        values = np.array(list(layers[layer].values()), dtype=np.int64)
        if values.size and values.min() < 0:
            raise ValueError(f"layer {layer}: negative count {int(values.min())}")
        counts[row, ids] = values
    return Block(
        source=path,
        format=FORMAT,
        step=NO_STEP,
        role=ROLE,
        rank=rank,
        layer_n=np.array(order, dtype=np.int64),
        phases=(PHASE_FORWARD,) * len(order),
        counts_ne=counts,
        num_experts=width,
        layer_sources=frozenset({"call_order"}),
    )


def _number(text: str, what: str) -> int:
    if not text.isdecimal() or len(text) > 9 or int(text) >= MAX_EXPERTS:
        raise ValueError(f"{what} {text[:40]!r} is no {what} number")
    return int(text)

# SPDX-License-Identifier: Apache-2.0
# Paths are plain text here: Path objects cost a third more over 100,000 files.
# ruff: noqa: PTH119
"""Reader of Megatron-Core's ``tokens_per_expert/rank<r>.jsonl``.

One line per iteration and layer: ``{"iter": 3, "block": "decoder", "layer": 1, "tpe": [[...],
...]}``, one list of local experts per micro-batch. The file is appended to, so a restart repeats
iterations (the later line counts) and a kill leaves half a line.
"""

from __future__ import annotations

import os
import re

import msgspec
import numpy as np

from rl_insight_hooks.report.load.context import SEVERITY_WARNING, ReadContext, read_bytes
from rl_insight_hooks.report.load.sink import MAX_LAYERS, Block, Sink
from rl_insight_hooks.schema import PHASE_FORWARD

FORMAT = "megatron-core"
ROLE = "train"  # the format says none
_MAIN_BLOCKS = ("decoder", "0")

_RANK = re.compile(r"(\d{1,9})\.jsonl$")


class _Line(msgspec.Struct):
    iter: int
    layer: int
    tpe: list[list[int]]
    block: str | int | None = None


_decoder = msgspec.json.Decoder(_Line)


def read_megatron(paths: list[str], sink: Sink, context: ReadContext) -> None:
    """Put every file of ``paths`` into ``sink``: micro-batches of one iteration added up."""
    for number, path in enumerate(paths):
        match = _RANK.search(os.path.basename(path))
        rank = int(match[1]) if match is not None else number
        try:
            lines = read_bytes(path).split(b"\n")
        except OSError as error:
            context.problem("unreadable-file", path, str(error), "Give read permission.")
            lines = []
        else:
            if not any(line.strip() for line in lines):
                context.problem("empty-file", path, "no line", "The writer was cut off.")
        loads = _parse(lines, path, context)
        for (step, role), rows in sorted(loads.items()):
            context.roles_seen.add(role)
            if context.selection.wants(step, role, rank):
                sink.add(_block(path, step, role, rank, rows, context))
        context.done()


_Rows = dict[int, list[list[int]]]


def _parse(lines: list[bytes], path: str, context: ReadContext) -> dict[tuple[int, str], _Rows]:
    loads: dict[tuple[int, str], _Rows] = {}
    num_again = num_strange = 0
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            line = _decoder.decode(text)
            _check(line)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            cut = number == len(lines)
            context.problem(
                "torn-line" if cut else "bad-line",
                f"{path}, line {number}",
                f"{error}" + (" (the last line: the writer was cut off)" if cut else ""),
                "This line is left out.",
            )
            continue
        num_strange += text.count(b":") != 3 + (line.block is not None)
        role = ROLE
        if line.block is not None and str(line.block) not in _MAIN_BLOCKS:
            role = f"{ROLE} ({line.block})"
        rows = loads.setdefault((line.iter, role), {})
        num_again += line.layer in rows
        rows[line.layer] = line.tpe
    if lines and lines[-1].strip() and not context.problems_at(f"{path}, line {len(lines)}"):
        context.problem(
            "torn-line",
            f"{path}, line {len(lines)}",
            "the last line has no end: the writer may have been cut off between two lines",
            "Nothing to do if the run ended there.",
            SEVERITY_WARNING,
        )
    if num_strange:
        context.problem(
            "unknown-field",
            path,
            f"{num_strange} lines have other fields than iter, block, layer and tpe; they are not read",
            "Nothing to do if Megatron-Core writes them; else two lines have run into one.",
            SEVERITY_WARNING,
        )
    if num_again:
        context.problem(
            "repeated-line",
            path,
            f"{num_again} lines repeat an iteration and layer (a restart); the later one counts",
            "Nothing to do if the run was resumed.",
            SEVERITY_WARNING,
        )
    return loads


def _check(line: _Line) -> None:
    if not 0 <= line.iter < 1 << 62 or not 0 <= line.layer < MAX_LAYERS:
        raise ValueError(f"iter {line.iter}, layer {line.layer}")
    if any(count < 0 or count >= 1 << 53 for counts in line.tpe for count in counts):
        raise ValueError(f"iter {line.iter}, layer {line.layer}: a count is negative or absurd")
    if len({len(counts) for counts in line.tpe}) > 1:
        raise ValueError(f"iter {line.iter}, layer {line.layer}: micro-batches differ in experts")


def _block(path: str, step: int, role: str, rank: int, rows: _Rows, context: ReadContext) -> Block:
    layers = sorted(rows)
    width = max((len(rows[layer][0]) for layer in layers if rows[layer]), default=0)
    counts = np.zeros((len(layers), width), dtype=np.int64)
    for number, layer in enumerate(layers):
        for micro_batch in rows[layer]:
            counts[number, : len(micro_batch)] += np.array(micro_batch, dtype=np.int64)
    first, num_experts = context.place_of_experts(rank, width, FORMAT)
    return Block(
        source=path,
        format=FORMAT,
        step=step,
        role=role,
        rank=rank,
        layer_n=np.array(layers, dtype=np.int64),
        phases=(PHASE_FORWARD,) * len(layers),
        counts_ne=counts,
        first=first,
        num_passes_n=np.array([len(rows[layer]) for layer in layers], dtype=np.int64),
        num_experts=num_experts,
        layer_sources=frozenset({"module"}),
    )

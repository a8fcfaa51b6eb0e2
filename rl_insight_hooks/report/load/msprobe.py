# SPDX-License-Identifier: Apache-2.0
# Paths are plain text here: Path objects cost a third more over 100,000 files.
# ruff: noqa: PTH100, PTH206
"""Reader of msprobe dump trees: where a dump lies says its step, role and rank; what is in it, the load.

====================  =========================================================================
driver                folder of one dump
====================  =========================================================================
msprobe itself        ``{dump_path}/step{N}/rank{R}`` (or ``proc{PID}``)
verl                  ``{save_path}/step_{N}/{stage}/step0/rank{R}``
MindSpeed-RL          ``{dump_path}/{tag}/step{N}/rank{R}``
flat                  any folder with ``*group_list.pt`` in it
====================  =========================================================================
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import numpy as np

from rl_insight_hooks.report.load.context import SEVERITY_WARNING, ReadContext
from rl_insight_hooks.report.load.msprobe_calls import CallReader
from rl_insight_hooks.report.load.msprobe_layers import (
    Passes,
    layers_of,
    number_of_layers,
    passes_of,
)
from rl_insight_hooks.report.load.sink import Block, Sink
from rl_insight_hooks.report.load.sniff import DumpDir
from rl_insight_hooks.report.table import NO_STEP, UNKNOWN_LAYER
from rl_insight_hooks.schema import LAYER_FROM_CALL_ORDER, PHASE_FORWARD, PHASES

FORMAT = "msprobe"
NO_ROLE = "msprobe"  # a dump of msprobe alone names no role

# MindSpeed-RL's stages (formats: verl's are free).
_TAGS = frozenset(
    {
        "actor_generate_sequences",
        "actor_compute_log_prob",
        "actor_update",
        "actor_image_embeds",
        "reference_compute_log_prob",
        "critic_compute_values",
        "critic_update",
    }
)
_RANK = re.compile(r"rank_?(\d{1,9})")
_PROC = re.compile(r"proc_?(\d{1,9})")
_INNER_STEP = re.compile(r"step(\d{1,18})")
_OUTER_STEP = re.compile(r"step_(\d{1,18})")


@dataclass(frozen=True, slots=True)
class Place:
    """Step, role and rank of one dump."""

    step: int
    role: str
    rank: int
    is_process: bool = False


def place_of(folder: str, roots: list[str]) -> Place:
    """Return the place of the dump in ``folder``, read from the nearest parts of its path.

    Parts above the input paths are looked at only for what the parts below do not say, and only as far as they
    continue the layout, so a run stored below ``rank3/`` or ``step_7/`` is not misread.
    """
    parts = os.path.abspath(folder).split(os.sep)
    num_above = max(
        (_num_parts(root) for root in roots if _is_below(folder, root)),
        default=max(0, len(parts) - 4),
    )
    at = len(parts) - 1
    rank, is_process = 0, False
    match = _RANK.fullmatch(parts[at])
    process = _PROC.fullmatch(parts[at])
    if match is None and process is None:
        return _loose_place(parts, num_above)
    if match is not None:
        rank = int(match[1])
    elif process is not None:
        rank, is_process = int(process[1]), True
    at -= 1
    inner = _INNER_STEP.fullmatch(parts[at]) if at > 0 else None
    if inner is None:
        return _loose_place(parts, num_above)
    step = int(inner[1])
    stage = parts[at - 1] if at > 1 else ""
    outer = _OUTER_STEP.fullmatch(parts[at - 2]) if at > 2 else None
    # verl's inner step is always step0
    if outer is not None and step == 0 and not stage.startswith("step"):
        return Place(int(outer[1]), stage, rank, is_process)
    if stage and (stage in _TAGS or at - 1 >= num_above):
        return Place(step, stage, rank, is_process)
    return Place(step, NO_ROLE, rank, is_process)


def _loose_place(parts: list[str], num_above: int) -> Place:
    """Return the place from parts in any order, nearest first, below the input path only."""
    step, role, rank, is_process = NO_STEP, NO_ROLE, 0, False
    below = parts[num_above:]
    for at, part in enumerate(below):
        if (match := _RANK.fullmatch(part)) is not None:
            rank = int(match[1])
        elif (match := _PROC.fullmatch(part)) is not None:
            rank, is_process = int(match[1]), True
        elif (match := _OUTER_STEP.fullmatch(part)) is not None:
            step = int(match[1])
            following = below[at + 1] if at + 1 < len(below) else ""
            if following and not following.startswith("step") and not _RANK.fullmatch(following):
                role = following
        elif step == NO_STEP and (match := _INNER_STEP.fullmatch(part)) is not None:
            step = int(match[1])
    return Place(step, role, rank, is_process)


def _num_parts(path: str) -> int:
    return len(os.path.abspath(path).split(os.sep))


def _is_below(folder: str, root: str) -> bool:
    inside, outside = os.path.abspath(folder), os.path.abspath(root)
    return inside == outside or inside.startswith(outside.rstrip(os.sep) + os.sep)


def read_msprobe(
    dumps: dict[str, DumpDir], roots: list[str], sink: Sink, context: ReadContext
) -> None:
    """Put every dump into ``sink``; layers are numbered with what all dumps of a rank say together."""
    reader = CallReader(context)
    placed: list[tuple[Place, DumpDir, Passes]] = []
    ranks_of_process: dict[int, int] = {}
    for path in sorted(dumps):
        dump = dumps[path]
        place = place_of(path, roots)
        if place.is_process:
            rank = ranks_of_process.setdefault(place.rank, len(ranks_of_process))
            context.assume(
                f"msprobe dump of proc{place.rank} (torch.distributed not initialised): taken for rank {rank}"
            )
            place = Place(place.step, place.role, rank)
        context.roles_seen.add(place.role)
        step = None if place.step == NO_STEP else place.step
        if not context.selection.wants(step, place.role, place.rank):
            context.done(len(dump.tensor_names))
            continue
        calls = reader.read(dump)
        if calls is None:
            if dump.tensor_names:
                context.problem(
                    "no-calls", path, "no call could be read", "See the problems of its files."
                )
            continue
        passes = passes_of(calls, context.gmm_per_layer)
        for sentence in passes.assumptions:
            context.assume(sentence)
        placed.append((place, dump, passes))
    for rank in sorted({place.rank for place, _, _ in placed}):
        _read_rank([item for item in placed if item[0].rank == rank], sink, context)


def _read_rank(
    placed: list[tuple[Place, DumpDir, Passes]], sink: Sink, context: ReadContext
) -> None:
    num_layers, assumption = number_of_layers(
        [passes for _, _, passes in placed], context.num_moe_layers
    )
    if assumption is not None:
        context.assume(assumption)
    for place, dump, passes in placed:
        layer_p = layers_of(passes, num_layers)
        _check(place, dump, passes, num_layers, layer_p, context)
        sink.add(_block(place, dump, passes, layer_p, context))


def _check(
    place: Place,
    dump: DumpDir,
    passes: Passes,
    num_layers: int,
    layer_p: np.ndarray[tuple[int], np.dtype[np.int64]],
    context: ReadContext,
) -> None:
    """Say what the dump lacks: msprobe loses calls, so a dump is never taken for complete."""
    if passes.odd_passes:
        context.problem(
            "odd-pass",
            dump.path,
            f"{passes.odd_passes} layer passes do not have the usual {passes.gmm_per_layer} calls of one list",
            "Give gmm_per_layer if the model makes another number of calls; else the dump lost calls.",
        )
    if num_layers and passes.num_forward % num_layers:
        context.problem(
            "incomplete-dump",
            dump.path,
            f"{passes.num_forward} forward passes are no multiple of the {num_layers} MoE layers that this "
            "rank's dumps show: calls are missing, and layers after the gap may be off by some",
            "msprobe loses calls under non-reentrant checkpointing; use reentrant, or record with "
            "rl_insight_hooks.",
        )
    if passes.equal_neighbours:
        context.problem(
            "equal-neighbours",
            dump.path,
            f"{passes.equal_neighbours} forward passes have the counts of the pass before: two layers that "
            "route alike, or a recompute whose backward the dump lost",
            "Keep stack.json, which tells them apart.",
            SEVERITY_WARNING,
        )
    forward = sum(phase == PHASE_FORWARD for phase in passes.phase_p)
    for phase in PHASES[1:]:
        num = passes.phase_p.count(phase)
        if num and num < forward:
            context.problem(
                "incomplete-backward",
                dump.path,
                f"{num} {phase} passes for {forward} forward passes",
                "msprobe lost calls, or only part of the model is trained; forward counts stand.",
                SEVERITY_WARNING,
            )
    unknown = int((layer_p == UNKNOWN_LAYER).sum())
    if unknown:
        context.problem(
            "unknown-layer",
            dump.path,
            f"{unknown} recompute or backward passes match no forward pass; they are listed as layer -1",
            "Their forward was not dumped.",
            SEVERITY_WARNING,
        )


def _block(
    place: Place,
    dump: DumpDir,
    passes: Passes,
    layer_p: np.ndarray[tuple[int], np.dtype[np.int64]],
    context: ReadContext,
) -> Block:
    row_of: dict[tuple[int, str], int] = {}
    target_p = np.array(
        [
            row_of.setdefault(key, len(row_of))
            for key in zip(layer_p.tolist(), passes.phase_p, strict=True)
        ],
        dtype=np.int64,
    )
    counts = np.zeros((len(row_of), passes.counts_pe.shape[1]), dtype=np.int64)
    np.add.at(counts, target_p, passes.counts_pe)
    num_local = counts.shape[1]
    first, num_experts = context.place_of_experts(place.rank, num_local, FORMAT)
    return Block(
        source=dump.path,
        format=FORMAT,
        step=place.step,
        role=place.role,
        rank=place.rank,
        layer_n=np.array([layer for layer, _ in row_of], dtype=np.int64),
        phases=tuple(phase for _, phase in row_of),
        counts_ne=counts,
        first=first,
        num_passes_n=np.bincount(target_p, minlength=len(row_of)).astype(np.int64),
        num_experts=num_experts,
        layer_sources=frozenset({LAYER_FROM_CALL_ORDER}),
    )

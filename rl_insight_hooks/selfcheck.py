# SPDX-License-Identifier: Apache-2.0
"""What is odd about a recorded region, in words, with the likely cause. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from rl_insight_hooks.schema import LAYER_UNKNOWN, PHASE_COMPILED, PHASE_FORWARD, LoadFile


@dataclass(kw_only=True, slots=True)
class Facts:
    """What the process knew when the region ended."""

    num_events: int = 0  # calls of any seam during the region
    hooked: list[str] = field(default_factory=list)  # seams in place
    overwritten: list[str] = field(
        default_factory=list
    )  # seams that somebody had overwritten at its begin
    uncovered: list[str] = field(
        default_factory=list
    )  # known paths, loaded here, that no seam can see
    replayed_graphs: bool = False  # an engine that replays graphs runs here
    compiled_unwatched: bool = (
        False  # a compiled graph called a seam for a layer that nobody watches
    )


def notes(load_file: LoadFile, facts: Facts) -> list[str]:
    """Return one sentence for each thing that a reader of the file must know."""
    return [*_zero_calls(load_file, facts), *_conservation(load_file), *_inferred(load_file)]


def _zero_calls(load_file: LoadFile, facts: Facts) -> list[str]:
    if load_file.records:
        return []
    if not facts.hooked:
        cause = "nothing is hooked: no known library was imported in this process"
    elif facts.uncovered:
        cause = (
            f"these paths are in use here and no hook can see them: {', '.join(facts.uncovered)}"
        )
    elif facts.compiled_unwatched:
        cause = "the calls are in a compiled graph; watch(model) before the first step counts them"
    elif facts.replayed_graphs:
        cause = "graphs are replayed that were captured before the hooks were installed; install earlier"
    elif facts.overwritten:
        cause = f"somebody overwrote {', '.join(facts.overwritten)} during the region"
    else:
        cause = (
            "the model ran outside this region or in another process, has no MoE layer, or reaches its experts "
            f"by a path other than {', '.join(facts.hooked)}"
        )
    return [f"zero calls: no MoE layer was seen in this region; {cause}"]


def _conservation(load_file: LoadFile) -> list[str]:
    found = []
    for r in load_file.records:
        where = f"layer {r.layer} {r.phase}"
        if min(r.counts, default=0) < 0:
            found.append(f"conservation: {where} has a negative count ({min(r.counts)})")
        if r.num_rows is not None and r.num_assignments > r.num_rows:
            found.append(
                f"conservation: {where} counts {r.num_assignments} rows of {r.num_rows} given"
            )
        sees_all = load_file.num_experts is not None and len(r.counts) >= load_file.num_experts
        if r.num_tokens is not None and load_file.top_k and sees_all:
            other = sum((r.extra_counts or {}).values())
            expected = r.num_tokens * load_file.top_k
            if r.num_assignments + other != expected:
                found.append(
                    f"conservation: {where} has {r.num_assignments} assignments, not tokens x top-k = "
                    f"{r.num_tokens} x {load_file.top_k} = {expected}"
                )
    return found


def _inferred(load_file: LoadFile) -> list[str]:
    found = []
    forward = [r for r in load_file.records if r.phase == PHASE_FORWARD]
    passes = {r.num_passes for r in forward}
    if len(passes) > 1 and all(r.num_tokens is None for r in forward):
        found.append(
            f"layers were passed unequally often ({min(passes)} to {max(passes)} forward passes)"
        )
    if any(r.layer_source == LAYER_UNKNOWN for r in load_file.records):
        found.append("calls of layer -1 could not be given to a layer; watch(model) does")
    if any(r.phase == PHASE_COMPILED for r in load_file.records):
        found.append("compiled calls: forward, recompute and backward are not told apart there")
    return found

# SPDX-License-Identifier: Apache-2.0
"""What is missing from a set of files, told from the files that are there. Pure.

Compared are the ranks of a role over its steps, with the world size where the files give it, and the layers of
ranks with each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rl_insight_hooks.report.select import Selection
from rl_insight_hooks.report.table import ALL_RANKS, NO_STEP, Problem

Key = tuple[int, str, int]  # step, role, rank


@dataclass(frozen=True, slots=True)
class Seen:
    """What is remembered of one block."""

    source: str
    layers: frozenset[int]
    num_experts: int | None
    world_size: int | None
    is_replica: bool
    is_picked: bool = False  # the recorder was told to write some ranks only


def missing(seen: Mapping[Key, Seen], selection: Selection) -> list[Problem]:
    """Return what is missing, one problem per step and role, or per role where no step has it."""
    ranks_of: dict[tuple[int, str], set[int]] = {}
    for step, role, rank in seen:
        if rank != ALL_RANKS:
            ranks_of.setdefault((step, role), set()).add(rank)
    roles = sorted({role for _, role in ranks_of})
    found: list[Problem] = []
    for role in roles:
        by_step = {step: ranks for (step, name), ranks in ranks_of.items() if name == role}
        found += _missing_ranks(role, by_step, seen, selection)
        found += _uneven_layers(role, by_step, seen)
        found += _uneven_experts(role, seen)
    return found


def _missing_ranks(
    role: str,
    by_step: Mapping[int, set[int]],
    seen: Mapping[Key, Seen],
    selection: Selection,
) -> list[Problem]:
    ever = set().union(*by_step.values())
    found = []
    for step in sorted(by_step):
        absent = ever - by_step[step]
        if absent:
            found.append(
                Problem(
                    rule="missing-rank",
                    where=f"{step_text(step)}, role {role}",
                    what=f"no data of {ranks_text(absent)}, which other steps of the role have",
                    fix="Copy the files of these ranks too, or leave the step out.",
                )
            )
    infos = [info for (_, name, _), info in seen.items() if name == role]
    world = max((info.world_size or 0 for info in infos), default=0)
    if world and not any(info.is_replica or info.is_picked for info in infos):
        absent = {rank for rank in range(world) if rank in selection.ranks} - ever
        if absent:
            found.append(
                Problem(
                    rule="missing-rank",
                    where=f"role {role}",
                    what=f"no data of {ranks_text(absent)} of a world of {world} at any step",
                    fix="Bring the files of all nodes together (rl-insight-report collect), or select the "
                    "ranks that you have.",
                )
            )
    return found


def _uneven_layers(
    role: str, by_step: Mapping[int, set[int]], seen: Mapping[Key, Seen]
) -> list[Problem]:
    """Pipeline stages have different layers; a rank with part of another's layers has lost some."""
    found = []
    for step in sorted(by_step):
        layers_of = {rank: seen[step, role, rank].layers for rank in by_step[step]}
        sets = set(layers_of.values())
        if len(sets) < 2:
            continue
        short = {
            rank: len(layers)
            for rank, layers in sorted(layers_of.items())
            if layers and any(layers < other for other in sets)
        }
        if short:
            rank, num = next(iter(short.items()))
            found.append(
                Problem(
                    rule="short-rank",
                    where=f"{step_text(step)}, role {role}",
                    what=f"{ranks_text(short)} have fewer layers than others "
                    f"(rank {rank}: {num}, others up to {max(map(len, sets))})",
                    fix="Their files are cut short, or the step was still running; record it again.",
                )
            )
    return found


def _uneven_experts(role: str, seen: Mapping[Key, Seen]) -> list[Problem]:
    nums: dict[int, str] = {}
    for (_, name, _), info in seen.items():
        if name == role and info.num_experts is not None:
            nums.setdefault(info.num_experts, info.source)
    if len(nums) < 2:
        return []
    listed = "; ".join(f"{num} in {source}" for num, source in sorted(nums.items())[:3])
    return [
        Problem(
            rule="uneven-experts",
            where=f"role {role}",
            what=f"files disagree on the number of experts: {listed}",
            fix="These are runs of different models, or a damaged file; load them apart.",
        )
    ]


def step_text(step: int) -> str:
    """Return how a message names a step."""
    return "no step" if step == NO_STEP else f"step {step}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks in words, neighbours as a range: "ranks 1-3, 7"."""
    ordered = sorted(ranks)
    parts: list[str] = []
    start = previous = ordered[0]
    for rank in [*ordered[1:], -1]:
        if rank != previous + 1:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
            start = rank
        previous = rank
    shown = parts if len(parts) <= 12 else [*parts[:12], f"... ({len(ordered)} in all)"]
    return ("rank " if len(ordered) == 1 else "ranks ") + ", ".join(shown)

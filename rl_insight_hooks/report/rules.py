# SPDX-License-Identifier: Apache-2.0
"""The rules of ``check``: each has an id, and says what is wrong, where, and how to fix it. Pure.

Rules of reading (torn files, missing ranks, ...) are raised by the readers and listed in
:data:`RULES` too; the ones here look at one step file (:func:`of_file`) or at the whole table
(:func:`of_table`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath

import numpy as np

from rl_insight_hooks.paths import role_dir
from rl_insight_hooks.report.load.completeness import step_text
from rl_insight_hooks.report.table import ALL_RANKS, NO_STEP, UNKNOWN_LAYER, LoadTable, Problem
from rl_insight_hooks.schema import (
    NO_STEP_DIR,
    PHASE_COMPILED,
    PHASE_FORWARD,
    TOKENS_REPLICATED,
    LoadFile,
)

# id -> what it means. Ids are stable: scripts filter by them.
RULES: dict[str, str] = {
    # reading
    "bad-counts": "A file's numbers contradict each other.",
    "bad-line": "A line of a .jsonl file cannot be read.",
    "bad-schema": "A file is JSON, but not of the format that its name says.",
    "bad-tensor-file": "A tensor file is damaged, or is of a form that only unpickling could read.",
    "collects-beside-steps": "Token collects lie beside step files that hold the same counts.",
    "duplicate-call": "A dump has two group_list files of one call.",
    "duplicate-rank": "Two files are of the same step, role and rank.",
    "empty-file": "A file has 0 bytes.",
    "equal-neighbours": "Forward passes of a dump repeat the one before; recompute cannot be ruled out.",
    "expert-out-of-range": "A file names an expert that no model has.",
    "ignored-file": "Files that are no load files.",
    "incomplete-backward": "A dump has fewer recompute or backward passes than forward passes.",
    "incomplete-dump": "A dump lacks calls.",
    "missing-experts": "No rank reported some of the experts.",
    "missing-rank": "The data of a rank is not there.",
    "missing-tensor-file": "dump.json lists calls whose tensor is not there.",
    "mixed-id-space": "Some rows count logical experts, some physical slots.",
    "newer-schema": "A file was written by a newer version.",
    "no-calls": "A dump holds no call of npu_grouped_matmul, or none could be read.",
    "no-layers": "A file holds no layer.",
    "no-meta-info": "TensorRT-LLM's meta_info.json cannot be read.",
    "odd-pass": "Layer passes of a dump do not have the usual number of calls.",
    "other-api": "A dump holds group lists of operators that are not given to layers.",
    "repeated-line": "Lines repeat an iteration and layer.",
    "short-rank": "A rank has part of the layers that another has.",
    "statistics-dump": "A dump of task statistics has no group_list values.",
    "sum-beside-ranks": "token_collects_all.json lies beside the files that it adds up.",
    "temp-file": "A file that is being written, or was left by a killed process.",
    "too-large": "The rows do not fit into memory.",
    "torn-dump-json": "A dump's dump.json is cut off.",
    "torn-file": "A JSON file is cut off.",
    "torn-line": "The last line of a .jsonl file is cut off.",
    "torn-pack": "A packed file is damaged.",
    "torn-stack-json": "A dump's stack.json is cut off.",
    "uneven-experts": "Files of one role disagree on the number of experts.",
    "unknown-field": "A line has fields that are not read.",
    "unknown-format": "A named file is of no known format.",
    "unknown-layer": "Calls could not be given to a layer.",
    "unlisted-call": "A tensor file has no entry in dump.json.",
    "unreadable-file": "A file cannot be opened or read.",
    "unreadable-folder": "A folder cannot be opened.",
    # summarize --ray
    "copy-on-two-nodes": "Two nodes have the same file; it counts once.",
    "node-failed": "A node of the cluster could not be read.",
    # one step file
    "call-count": "A record's calls, passes or tokens are impossible.",
    "compiled": "Calls of a compiled graph: forward and backward are not told apart.",
    "expert-outside": "A record names experts beyond the model's.",
    "masked": "Tokens were left out on purpose (dummy, profile, padding).",
    "misplaced-file": "A file lies in a folder of another step, role or rank than its own.",
    "rank-outside": "A file's rank is not below its world size.",
    "recorder-dropped": "The recorder dropped something.",
    "recorder-failed": "The recorder failed somewhere.",
    "recorder-note": "The recorder noted something odd.",
    "replica-unnamed": "Ranks saw the same tokens, but the file does not say which ranks.",
    "stamp": "Something falsifies or qualifies the load.",
    "two-seams": "Two seams recorded the same layer and phase.",
    "zero-calls": "A region saw no MoE call.",
    # the table
    "conservation": "Assignments are not tokens x top-k.",
    "empty-layer": "A layer got no token.",
    "missing-step": "A role lacks a step that another role has.",
    "replica-differs": "Ranks that are marked as copies have different counts.",
    "replica-unmarked": "Ranks have equal counts, but are not marked as copies.",
    "several-runs": "Files of several runs lie in one folder.",
    "step-gap": "Steps are missing in the middle of a role.",
    "uneven-totals": "Layers of one rank got different numbers of tokens.",
}


def of_file(load_file: LoadFile, where: str) -> list[Problem]:
    """Return what is wrong with one ``group_list.json`` (or packed step) in itself."""
    return [
        *_recorder_says(load_file, where),
        *_records(load_file, where),
        *_place(load_file, where),
    ]


def _recorder_says(load_file: LoadFile, where: str) -> Iterator[Problem]:
    for cause, num in load_file.failed.items():
        yield Problem(
            rule="recorder-failed",
            where=where,
            what=f"{cause}: {num} times",
            fix="See the training log for the first failure; counts may be too low.",
        )
    for cause, num in load_file.dropped.items():
        yield Problem(
            rule="recorder-dropped",
            where=where,
            what=f"{cause}: {num}",
            fix="What was dropped is not in the counts.",
        )
    for cause, num in load_file.masked.items():
        yield _note("masked", where, f"{cause}: {num}", "Nothing: left out on purpose.")
    for name, text in load_file.stamps.items():
        yield _warning("stamp", where, f"{name}: {text}", "Read the load with this in mind.")
    for note in load_file.notes:
        if not note.startswith("zero calls"):
            yield _warning("recorder-note", where, note, "See docs/files.md, notes.")
    if not load_file.records:
        note = next((note for note in load_file.notes if note.startswith("zero calls")), "")
        yield Problem(
            rule="zero-calls",
            where=where,
            what=note or "no record: no MoE layer was seen in this region",
            fix="Run rl-insight-report doctor in the training environment.",
        )


def _records(load_file: LoadFile, where: str) -> Iterator[Problem]:
    seams: dict[tuple[int, str], str] = {}
    for record in load_file.records:
        at = f"{where}: layer {record.layer}, {record.phase}"
        last = load_file.first_expert + len(record.counts)
        if load_file.num_experts is not None and last > load_file.num_experts:
            yield Problem(
                rule="expert-outside",
                where=at,
                what=f"counts of experts up to {last - 1}, but the model has {load_file.num_experts}",
                fix="first_expert or num_experts is wrong; give them in the settings of the run.",
            )
        if min(record.num_calls, record.num_passes) < 0 or record.num_calls < record.num_passes:
            yield Problem(
                rule="call-count",
                where=at,
                what=f"{record.num_calls} calls for {record.num_passes} passes",
                fix="The file was damaged or edited; record the step again.",
            )
        seam = seams.setdefault((record.layer, record.phase), record.seam)
        if seam != record.seam:
            yield _warning(
                "two-seams",
                at,
                f"recorded by {seam} and by {record.seam}; both are added up",
                "If both see the same calls, install only one of the integrations.",
            )
    if any(record.phase == PHASE_COMPILED for record in load_file.records):
        what = "calls in a compiled graph, where forward, recompute and backward are not told apart"
        yield _note("compiled", where, what, "watch(model) before the first step, or run eagerly.")
    if any(record.layer == UNKNOWN_LAYER for record in load_file.records):
        what = "calls of layer -1 could not be given to a layer"
        yield _warning("unknown-layer", where, what, "Call rl_insight_hooks.watch(model).")


def _place(load_file: LoadFile, where: str) -> Iterator[Problem]:
    if not 0 <= load_file.rank < load_file.world_size:
        yield Problem(
            rule="rank-outside",
            where=where,
            what=f"rank {load_file.rank} of a world of {load_file.world_size}",
            fix="Set RANK and WORLD_SIZE in the training process.",
        )
    if load_file.tokens_layout == TOKENS_REPLICATED and load_file.parallel.replica_group is None:
        yield _warning(
            "replica-unnamed",
            where,
            "tokens are replicated, but parallel.replica_group is missing: a merge counts them again",
            "Merge with --aggregate one-rank or max.",
        )
    parts = PurePath(where.split(" (step")[0]).parts
    if len(parts) < 4 or parts[-1] != "group_list.json":
        return
    step = NO_STEP_DIR if load_file.step is None else f"step_{load_file.step}"
    own = (step, role_dir(load_file.role), f"rank{load_file.rank}")
    if parts[-2].startswith("rank") and parts[-4].startswith("step_") and parts[-4:-1] != own:
        yield _warning(
            "misplaced-file",
            where,
            f"the file says {'/'.join(own)}; what it says is used",
            "Move it to its own folder.",
        )


def of_table(table: LoadTable) -> list[Problem]:
    """Return what is wrong with the rows of all files together; ``table`` has a row per rank."""
    return [
        *_conservation(table),
        *_uneven_totals(table),
        *_empty_layers(table),
        *_steps(table),
        *_replicas(table),
    ]


def _is_whole(table: LoadTable) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which rows [N] hold all experts of their role."""
    whole = np.zeros(table.num_rows, dtype=bool)
    for role in range(len(table.roles)):
        mine = table.role_N == role
        if mine.any():
            num = int((table.first_N[mine] + table.held_N[mine]).max())
            whole |= mine & (table.first_N == 0) & (table.held_N == num)
    return whole


def _conservation(table: LoadTable) -> Iterator[Problem]:
    if table.top_k is None:
        return
    sums = table.counts_NE.sum(axis=1)
    expected = table.num_tokens_N * table.top_k
    wrong = np.flatnonzero((table.num_tokens_N >= 0) & _is_whole(table) & (sums != expected))
    for row in wrong.tolist():
        yield _warning(
            "conservation",
            where_of(table, row),
            f"{int(sums[row])} assignments, not tokens x top-k = {int(table.num_tokens_N[row])} x "
            f"{table.top_k} = {int(expected[row])}",
            "Tokens were dropped (capacity), padded, or counted by two seams.",
        )


def _uneven_totals(table: LoadTable) -> Iterator[Problem]:
    """A rank that holds all experts routes every token in every layer: totals are equal."""
    usable = _is_whole(table) & (table.layer_N != UNKNOWN_LAYER) & (table.num_tokens_N < 0)
    sums = table.counts_NE.sum(axis=1)
    rows = np.flatnonzero(usable & (table.phase_N == _forward(table)))
    for group in _groups(table, rows):
        totals, passes = sums[group], table.num_passes_N[group]
        if totals.size > 1 and (passes == passes[0]).all() and (totals != totals[0]).any():
            low, high = group[int(totals.argmin())], group[int(totals.argmax())]
            yield _warning(
                "uneven-totals",
                where_of(table, int(low), with_layer=False),
                f"layer {table.layer_label(int(table.layer_N[low]))} got {int(totals.min())} assignments, "
                f"layer {table.layer_label(int(table.layer_N[high]))} {int(totals.max())}",
                "Expert parallelism without ep_size, tokens dropped by capacity, or lost calls.",
            )


def _empty_layers(table: LoadTable) -> Iterator[Problem]:
    merged_zero = (table.counts_NE.sum(axis=1) == 0) & (table.phase_N == _forward(table))
    for row in np.flatnonzero(merged_zero & _is_whole(table)).tolist():
        what = "no token in the forward pass"
        yield _warning("empty-layer", where_of(table, row), what, "Was the layer run at all?")


def _steps(table: LoadTable) -> Iterator[Problem]:
    steps_of = {
        role: sorted(
            set(table.step_N[(table.role_N == number) & (table.step_N != NO_STEP)].tolist())
        )
        for number, role in enumerate(table.roles)
    }
    every = sorted(set().union(*steps_of.values())) if steps_of else []
    for role, steps in steps_of.items():
        if len(steps) < 2:
            continue
        between = [step for step in every if steps[0] <= step <= steps[-1] and step not in steps]
        if between:
            what = f"no data of {_numbers(between)}, which other roles have"
            yield _warning(
                "missing-step", f"role {role}", what, "Was the role left out on purpose?"
            )
        strides = np.diff(steps)
        stride = int(strides.min())
        if (steps[-1] - steps[0]) // stride > 10 * len(steps):
            continue  # no rhythm to speak of
        gaps = [step for step in range(steps[0], steps[-1], stride) if step not in set(steps)]
        gaps = [step for step in gaps if step not in between]
        if gaps and len(gaps) < len(steps):
            what = f"no data of {_numbers(gaps)}; the other steps come every {stride}"
            yield _warning(
                "step-gap", f"role {role}", what, "Copy these steps too, if they were run."
            )


def _replicas(table: LoadTable) -> Iterator[Problem]:
    keys = np.stack([table.step_N, table.role_N, table.layer_N, table.phase_N], axis=1)
    if table.replica_N is not None:
        first_of: dict[tuple[int, ...], int] = {}
        for row in np.flatnonzero(table.replica_N >= 0).tolist():
            first = first_of.setdefault((int(table.replica_N[row]), *keys[row].tolist()), row)
            if (table.counts_NE[row] != table.counts_NE[first]).any():
                yield Problem(
                    rule="replica-differs",
                    where=where_of(table, row),
                    what=f"differs from rank {int(table.rank_N[first])}, of which it is marked a copy",
                    fix="Merge with --aggregate sum if the ranks saw different tokens.",
                )
        return
    by_content: dict[tuple[int, int, bytes], int] = {}
    said: set[tuple[int, int]] = set()
    rows = np.flatnonzero((table.phase_N == _forward(table)) & (table.rank_N != ALL_RANKS))
    for group in _groups(table, rows):
        step, role = int(table.step_N[group[0]]), int(table.role_N[group[0]])
        counts = table.counts_NE[group]
        if not counts.any() or group.size < 2:
            continue
        content = counts.tobytes() + table.first_N[group].tobytes()
        first = by_content.setdefault((step, role, content), int(table.rank_N[group[0]]))
        rank = int(table.rank_N[group[0]])
        if first != rank and (step, role) not in said:
            said.add((step, role))
            yield _warning(
                "replica-unmarked",
                f"{step_text(step)}, role {table.roles[role]}",
                f"ranks {first} and {rank} have equal counts in all layers, but are not marked as copies",
                "If they saw the same tokens, merge with --aggregate one-rank or max.",
            )


def several_runs(run_ids: Sequence[str], where: str) -> list[Problem]:
    """Return a problem if step files of more than one run lie together."""
    if len(run_ids) < 2:
        return []
    shown = ", ".join(run_ids[:4]) + (", ..." if len(run_ids) > 4 else "")
    what = f"step files of {len(run_ids)} runs: {shown}"
    fix = "Fine after a restart; else give every run a folder of its own."
    return [_warning("several-runs", where, what, fix)]


def _groups(
    table: LoadTable, rows: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> Iterator[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Yield rows of one (step, role, rank) each."""
    keys = np.stack([table.role_N[rows], table.step_N[rows], table.rank_N[rows]], axis=1)
    changes = np.flatnonzero((keys[1:] != keys[:-1]).any(axis=1)) + 1
    for group in np.split(rows, changes):
        if group.size:
            yield group


def _forward(table: LoadTable) -> int:
    return table.phases.index(PHASE_FORWARD) if PHASE_FORWARD in table.phases else -1


def where_of(table: LoadTable, row: int, with_layer: bool = True) -> str:
    """Return a row's place in words: "step 3, role actor_update, rank 0, layer 7, forward"."""
    rank = int(table.rank_N[row])
    parts = [
        step_text(int(table.step_N[row])),
        f"role {table.role_of(row)}",
        "all ranks" if rank == ALL_RANKS else f"rank {rank}",
    ]
    if with_layer:
        parts += [f"layer {int(table.layer_N[row])}", table.phase_of(row)]
    return ", ".join(parts)


def _numbers(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:8])) + (
        f", ... ({len(steps)} in all)" if len(steps) > 8 else ""
    )
    return ("step " if len(steps) == 1 else "steps ") + shown


def _warning(rule: str, where: str, what: str, fix: str) -> Problem:
    return Problem(rule=rule, where=where, what=what, fix=fix, severity="warning")


def _note(rule: str, where: str, what: str, fix: str) -> Problem:
    return Problem(rule=rule, where=where, what=what, fix=fix, severity="note")

# SPDX-License-Identifier: Apache-2.0
# Paths are plain text here: Path objects cost a third more over 100,000 files.
# ruff: noqa: PTH100, PTH120
"""Readers, one file per format, and :func:`load`, which tells the formats apart and runs them."""

from __future__ import annotations

import os
from collections.abc import Iterable

from rl_insight_hooks.errors import DataError, UsageError
from rl_insight_hooks.report import select
from rl_insight_hooks.report.load import sniff
from rl_insight_hooks.report.load.collects import read_collects
from rl_insight_hooks.report.load.context import SEVERITY_NOTE, Progress, ReadContext
from rl_insight_hooks.report.load.megatron import read_megatron
from rl_insight_hooks.report.load.msprobe import read_msprobe
from rl_insight_hooks.report.load.packed import read_packed
from rl_insight_hooks.report.load.parallel import read_native_in_processes
from rl_insight_hooks.report.load.sglang import read_sglang
from rl_insight_hooks.report.load.sink import AGGREGATES, FoldSink, RowSink, Sink
from rl_insight_hooks.report.load.trtllm import read_trtllm
from rl_insight_hooks.report.table import LoadTable

__all__ = ["load"]

PathLike = str | os.PathLike[str]


def load(
    paths: PathLike | Iterable[PathLike],
    *,
    steps: select.NumberSpec = None,
    roles: select.NameSpec = None,
    ranks: select.NumberSpec = None,
    layers: select.NumberSpec = None,
    phases: select.NameSpec = None,
    merge_ranks: bool = False,
    aggregate: str = "auto",
    strict: bool = False,
    jobs: int = 1,
    gmm_per_layer: int | None = None,
    num_moe_layers: int | None = None,
    ep_size: int | None = None,
    progress: Progress | None = None,
) -> LoadTable:
    """Read expert loads of any known format into one :class:`LoadTable`.

    Args:
        paths: a file or folder, or several; a folder is searched to its bottom and may mix formats.
        steps: steps to keep: ``"1,3-7"``, a number, numbers, or None for all. Roles without steps are kept
            only by None.
        roles: role names to keep, ``"a,b"`` or an iterable.
        ranks: as ``steps``.
        layers: as ``steps``.
        phases: phase names to keep, e.g. ``"forward"``.
        merge_ranks: add up over ranks to global expert ids; ``rank_N`` is then ``ALL_RANKS``. Files are
            folded in as they are read, so memory does not grow with the number of ranks.
        aggregate: how ``merge_ranks`` treats ranks: ``"auto"`` counts ranks that saw the same tokens once
            and adds up the others; ``"sum"`` adds up all; ``"max"`` takes the largest count of each expert;
            ``"one-rank"`` takes the lowest rank of each step and role.
        strict: raise at the first problem that loses data, instead of listing it.
        jobs: number of processes that read step files; it pays from some thousand files on.
        gmm_per_layer: msprobe dumps: grouped matmuls of one layer pass, where the dump does not say.
        num_moe_layers: msprobe dumps: MoE layers of one rank, where the dump does not say.
        ep_size: msprobe dumps: size of the expert-parallel groups, which no dump says; rank r then holds
            the experts from ``(r % ep_size) * E_local``.
        progress: called with (files read, files in all).

    Returns:
        The table; what could not be read is in ``problems``, what had to be assumed in ``assumptions``.

    Raises:
        DataError: there is nothing to read at all; or ``strict`` is set and something is wrong.
        UsageError: a filter or option cannot be read, or names a role or phase that is not there.
    """
    if aggregate not in AGGREGATES:
        raise UsageError(
            f"aggregate {aggregate!r} is unknown; choose one of {', '.join(AGGREGATES)}"
        )
    for name, value in (
        ("jobs", jobs),
        ("gmm_per_layer", gmm_per_layer),
        ("ep_size", ep_size),
        ("num_moe_layers", num_moe_layers),
    ):
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}; it must be at least 1")
    selection = select.make_selection(
        steps=steps, roles=roles, ranks=ranks, layers=layers, phases=phases
    )
    context = ReadContext(
        selection=selection,
        strict=strict,
        gmm_per_layer=gmm_per_layer,
        num_moe_layers=num_moe_layers,
        ep_size=ep_size,
        aggregate=aggregate,
        progress=progress,
    )
    found = sniff.find(_as_list(paths), context)
    context.num_files = found.num_files
    sink: Sink = FoldSink(context) if merge_ranks else RowSink(context)
    read_found(found, sink, context, jobs)
    table = sink.table()
    select.check_names(selection.roles, context.roles_seen | set(table.roles), "role")
    if table.num_rows:
        select.check_names(selection.phases, table.phases, "phase")
    return select.apply(table, selection)


def _as_list(paths: PathLike | Iterable[PathLike]) -> list[str]:
    listed = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not listed:
        raise DataError("no input path given")
    return [os.fspath(path) for path in listed]


def read_found(found: sniff.Found, sink: Sink, context: ReadContext, jobs: int = 1) -> None:
    """Put everything that was found into ``sink``; what is wrong goes to ``context``."""
    read_native_in_processes(found.native, sink, context, jobs)
    read_packed(found.packs, sink, context)
    collects = _without_own_collects(found, context)
    read_collects(collects, sink, context)
    read_msprobe(found.dumps, found.roots, sink, context)
    read_megatron(found.megatron, sink, context)
    read_sglang(found.sglang, sink, context)
    read_trtllm(found.safetensors, sink, context)


def _without_own_collects(found: sniff.Found, context: ReadContext) -> list[str]:
    """Leave out collects that lie beside our step files: the same counts, added up over the run."""
    if not found.collects:
        return []
    step_roots = {os.path.abspath(path).rsplit(os.sep, 4)[0] for path in found.native}
    step_roots |= {os.path.abspath(path).rsplit(os.sep, 4)[0] for path in found.packs}
    kept: list[str] = []
    left_out: list[str] = []
    for path in found.collects:
        beside = os.path.dirname(os.path.abspath(path)) in step_roots and path not in found.explicit
        (left_out if beside else kept).append(path)
    if left_out:
        context.problem(
            "collects-beside-steps",
            os.path.dirname(left_out[0]),
            f"{len(left_out)} token-collects files lie beside step files: the same counts, added up over "
            "steps; the steps are read, the sums are not",
            "Give the files themselves to read only them.",
            SEVERITY_NOTE,
        )
        context.done(len(left_out))
    return kept

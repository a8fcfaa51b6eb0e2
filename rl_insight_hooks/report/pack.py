# SPDX-License-Identifier: Apache-2.0
"""Offline packing: fold the finished step files of a folder, and unfold them again. Format: packfile.py."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rl_insight_hooks.atomic import write_atomic
from rl_insight_hooks.errors import DataError
from rl_insight_hooks.packfile import pack_steps, read_pack
from rl_insight_hooks.paths import load_file_path
from rl_insight_hooks.report.load import sniff
from rl_insight_hooks.report.load.context import ReadContext, read_bytes
from rl_insight_hooks.report.table import Problem
from rl_insight_hooks.schema import SCHEMA_VERSION, decode_load_file, encode_load_file

_STEP_DIR = re.compile(r"step_(\d{1,18})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """What :func:`pack_folder` or :func:`unpack_folder` did."""

    paths: tuple[str, ...]  # files written
    num_files: int  # files folded, or unfolded from
    bytes_before: int
    bytes_after: int
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class _StepFile:
    root: str
    role: str
    rank: int
    step: int
    num_bytes: int


def pack_folder(
    folder: str | os.PathLike[str],
    *,
    every: int = 100,
    keep: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Packed:
    """Fold the step files below ``folder`` into packs of at most ``every`` steps for each role and rank.

    The newest ``keep`` steps of each role stay JSON, since a running job may still write them. A
    file that cannot be read, or does not lie in its own folder, stays where it is and is a problem.

    Raises:
        DataError: there is nothing to read, or a pack does not read back as written.
        OSError: a pack cannot be written; all step files are still there.
    """
    context = ReadContext()
    found = sniff.find([os.fspath(folder)], context)
    groups: dict[tuple[str, str, int], list[_StepFile]] = {}
    for path in found.native:
        step_file = _step_file(path, context)
        if step_file is not None:
            key = (step_file.root, step_file.role, step_file.rank)
            groups.setdefault(key, []).append(step_file)
    newest = _newest(groups, keep)
    written: list[str] = []
    num_files = before = after = 0
    for number, ((root, role, rank), step_files) in enumerate(sorted(groups.items()), start=1):
        finished = sorted(
            (one for one in step_files if one.step not in newest[root, role]),
            key=lambda one: one.step,
        )
        for at in range(0, len(finished), every):
            chunk = finished[at : at + every]
            target = pack_steps(root, role, rank, [one.step for one in chunk])
            if target is not None:
                written.append(os.fspath(target))
                num_files += len(chunk)
                before += sum(one.num_bytes for one in chunk)
                after += target.stat().st_size
        if progress is not None:
            progress(number, len(groups))
    return Packed(
        paths=tuple(written),
        num_files=num_files,
        bytes_before=before,
        bytes_after=after,
        problems=context.listed_problems(),
    )


def _newest(
    groups: dict[tuple[str, str, int], list[_StepFile]], keep: int
) -> dict[tuple[str, str], set[int]]:
    steps: dict[tuple[str, str], set[int]] = {}
    for (root, role, _), step_files in groups.items():
        steps.setdefault((root, role), set()).update(one.step for one in step_files)
    return {
        key: set(sorted(found)[len(found) - keep :]) if keep else set()
        for key, found in steps.items()
    }


def _step_file(path: str, context: ReadContext) -> _StepFile | None:
    """Return what is at ``path``, or None if it is not to be packed (a role without steps; a problem)."""
    try:
        data = read_bytes(path)
        load_file = decode_load_file(data)
    except (OSError, msgspec.MsgspecError, RecursionError, OverflowError) as error:
        context.problem("torn-file", path, str(error), "Not packed; it stays as it is.")
        return None
    if load_file.step is None:
        return None
    root = (
        Path(path).absolute().parents[3] if len(Path(path).absolute().parents) > 3 else Path(path)
    )
    own = load_file_path(os.fspath(root), load_file.step, load_file.role, load_file.rank)
    if own != Path(path).absolute():
        context.problem(
            "misplaced-file",
            path,
            f"not packed: it belongs at {own}",
            "Move it there, or leave it as it is.",
            "warning",
        )
        return None
    if not 1 <= load_file.schema_version <= SCHEMA_VERSION:
        what = f"not packed: schema_version {load_file.schema_version}"
        context.problem("newer-schema", path, what, "Upgrade rl-insight-hooks.")
        return None
    return _StepFile(os.fspath(root), load_file.role, load_file.rank, load_file.step, len(data))


def unpack_folder(
    folder: str | os.PathLike[str], *, progress: Callable[[int, int], None] | None = None
) -> Packed:
    """Write the step files of every pack below ``folder`` again, then remove the packs.

    A step file that is there already is left as it is: it is the same, or newer.

    Raises:
        DataError: there is nothing to read.
        OSError: a step file cannot be written; its pack is still there.
    """
    context = ReadContext()
    found = sniff.find([os.fspath(folder)], context)
    written: list[str] = []
    num_packs = before = after = 0
    for number, path in enumerate(found.packs, start=1):
        try:
            data = read_bytes(path)
            files = read_pack(data, path)
        except (OSError, DataError) as error:
            what = str(error).removeprefix(f"{path}: ")
            context.problem("torn-pack", path, what, "It stays as it is.")
            continue
        root = Path(path).absolute().parents[3]
        for load_file in files:
            target = load_file_path(os.fspath(root), load_file.step, load_file.role, load_file.rank)
            if target.exists():
                continue
            encoded = encode_load_file(load_file)
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(target, encoded)
            written.append(os.fspath(target))
            after += len(encoded)
        before += len(data)
        num_packs += 1
        Path(path).unlink()
        if progress is not None:
            progress(number, len(found.packs))
    return Packed(
        paths=tuple(written),
        num_files=num_packs,
        bytes_before=before,
        bytes_after=after,
        problems=context.listed_problems(),
    )

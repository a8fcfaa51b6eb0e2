# SPDX-License-Identifier: Apache-2.0
"""Run all rules over some data: what the readers found, then each step file, then the table."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from rl_insight_hooks.errors import DataError
from rl_insight_hooks.packfile import read_pack
from rl_insight_hooks.report import rules
from rl_insight_hooks.report.load import PathLike, load, sniff
from rl_insight_hooks.report.load.context import ReadContext, listed, read_bytes
from rl_insight_hooks.report.table import LoadTable, Problem
from rl_insight_hooks.schema import LoadFile, decode_load_file


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What ``check`` found; ``problems`` are worst first, long lists of one rule cut with a count."""

    table: LoadTable
    problems: tuple[Problem, ...]
    num_files: int

    @property
    def num_errors(self) -> int:
        """Number of problems that lose data."""
        return sum(problem.num for problem in self.problems if problem.severity == "error")


def check(
    paths: PathLike | Iterable[PathLike],
    *,
    jobs: int = 1,
    gmm_per_layer: int | None = None,
    num_moe_layers: int | None = None,
    ep_size: int | None = None,
) -> CheckResult:
    """Return everything that is wrong with the data at ``paths``.

    Raises:
        DataError: there is nothing to read at all.
    """
    listed_paths = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    table = load(
        listed_paths,
        jobs=jobs,
        gmm_per_layer=gmm_per_layer,
        num_moe_layers=num_moe_layers,
        ep_size=ep_size,
    )
    found = sniff.find([os.fspath(path) for path in listed_paths], ReadContext())
    problems = list(table.problems)
    run_ids: dict[str, None] = {}
    for load_file, where in _step_files(found):
        problems += rules.of_file(load_file, where)
        run_ids.setdefault(load_file.run_id)
    problems += rules.of_table(table)
    problems += rules.several_runs(
        list(run_ids), ", ".join(os.fspath(path) for path in listed_paths)
    )
    return CheckResult(table=table, problems=listed(problems), num_files=found.num_files)


def _step_files(found: sniff.Found) -> Iterator[tuple[LoadFile, str]]:
    """Yield every step file that can be read; what cannot was named by the reader."""
    for path in found.native:
        try:
            yield decode_load_file(read_bytes(path)), path
        except (OSError, msgspec.MsgspecError, RecursionError, OverflowError):
            continue
    for path in found.packs:
        try:
            files = read_pack(read_bytes(path), path)
        except (OSError, DataError):
            continue
        for load_file in files:
            yield load_file, f"{path} (step {load_file.step})"

# SPDX-License-Identifier: Apache-2.0
"""Follow a running job's folder: which step is the newest, its worst layers, the trend, the missing ranks.

A poll reads only what it has not read: step files appear whole, so a step whose files are the same is the same.
Nothing is written and no lock is taken; the job does not notice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rl_insight_hooks.errors import DataError
from rl_insight_hooks.loadstats import headline_phase
from rl_insight_hooks.packfile import PACK_DIR
from rl_insight_hooks.paths import role_dir
from rl_insight_hooks.report import metrics
from rl_insight_hooks.report.load import load
from rl_insight_hooks.report.select import parse_names
from rl_insight_hooks.report.table import NO_STEP, LoadTable
from rl_insight_hooks.schema import COLLECTS_PREFIX, LOAD_FILE_NAME, NO_STEP_DIR

DEFAULT_NUM_STEPS = 30
_STEP_DIR = re.compile(r"step_(\d{1,18})")
_RANK_DIR = re.compile(r"rank(\d{1,9})")

# The trend is a word only where the later half differs from the earlier by this share.
TREND_SHARE = 0.05

# Steps before the newest that are looked at again: ranks finish a step at different times.
_NUM_OPEN_STEPS = 3

_Signature = frozenset[tuple[str, int, int]]  # path, size, mtime in ns


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLoad:
    """Load of one layer in one step, over all ranks; experts are global."""

    layer: int
    label: str
    num_assignments: int
    max_over_mean: float  # max_e c / mean_e c: 1 is even, E is one hot expert
    cv: float  # std_e c / mean_e c
    num_dead: int  # experts without a token
    hottest: int
    hottest_share: float  # of all assignments of the layer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """One role in one step."""

    role: str
    step: int  # NO_STEP: counts since the start of the run
    phase: str
    layers: tuple[LayerLoad, ...]  # worst first
    ranks: frozenset[int]
    world_size: int | None

    @property
    def worst(self) -> float:
        """Largest max/mean over layers."""
        return self.layers[0].max_over_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleView:
    """What there is to say of one role now."""

    shown: StepLoad  # the newest step that all ranks should have written
    missing: tuple[int, ...]  # ranks that have not written ``shown``
    newest_step: int
    newest_missing: tuple[int, ...]  # ranks that have not written the newest step
    steps: tuple[int, ...]
    trend: tuple[float, ...]  # worst max/mean of each of ``steps``
    direction: str  # "rising", "falling", "steady", or "" where there are too few steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of the folder at one poll."""

    folder: str
    roles: tuple[RoleView, ...]
    complete: tuple[StepLoad, ...]  # every step that all ranks have written, oldest first
    problems: tuple[str, ...]

    @property
    def is_complete(self) -> bool:
        """True if no rank is missing from what is shown and every file could be read."""
        return not self.problems and not any(view.missing for view in self.roles)


class Follower:
    """Polls one folder; remembers what it has read."""

    def __init__(
        self, folder: Path, *, role: str | None = None, num_steps: int = DEFAULT_NUM_STEPS
    ) -> None:
        self._folder = folder
        self._role_dirs = {role_dir(name) for name in parse_names(role)}
        self._num_steps = num_steps
        self._read: dict[int, tuple[_Signature, list[StepLoad], list[str]]] = {}

    def poll(self) -> Snapshot:
        """Return what is there now."""
        steps = self._newest_steps()
        open_steps = set(steps[-_NUM_OPEN_STEPS:])
        for step in steps:
            if step not in self._read or step in open_steps:
                self._update(step)
        self._forget(steps)
        known = sorted(self._read)
        loads = [one for step in known for one in self._read[step][1]]
        problems = [text for step in known for text in self._read[step][2]]
        return Snapshot(
            folder=str(self._folder),
            roles=tuple(_views(loads)),
            complete=tuple(_complete(loads)),
            problems=tuple(dict.fromkeys(problems)),
        )

    def _forget(self, steps: list[int]) -> None:
        """Drop steps that are too old, or were deleted; those that were packed are remembered."""
        packs = self._folder / PACK_DIR
        kept = self._read if packs.is_dir() else set(steps)
        newest = set(sorted(set(kept) - {NO_STEP})[-self._num_steps :])
        for step in set(self._read) - newest - ({NO_STEP} & set(steps)):
            del self._read[step]

    def _newest_steps(self) -> list[int]:
        """Return the newest steps, oldest first; NO_STEP stands for what has no step."""
        try:
            names = [entry.name for entry in self._folder.iterdir()]
        except OSError:
            return []
        found = sorted(int(match[1]) for name in names if (match := _STEP_DIR.fullmatch(name)))
        has_collects = any(name.startswith(COLLECTS_PREFIX) for name in names)
        if NO_STEP_DIR in names or (has_collects and not found):
            return [NO_STEP, *found[-self._num_steps :]]
        return found[-self._num_steps :]

    def _update(self, step: int) -> None:
        paths = self._files(step)
        signature = _signature(paths)
        if step in self._read and signature <= self._read[step][0] and self._read[step][1]:
            return  # nothing new; what is gone was packed
        loads: list[StepLoad] = []
        problems: list[str] = []
        if paths:
            try:
                table = load(paths, merge_ranks=True)
            except DataError as error:
                problems.append(str(error))
            else:
                problems += [
                    f"{problem.where}: {problem.what}"
                    for problem in table.problems
                    if problem.severity == "error" and not problem.rule.startswith("missing-")
                ]
                loads = step_loads(table, paths)
        self._read[step] = (signature, loads, problems)

    def _files(self, step: int) -> list[Path]:
        name = NO_STEP_DIR if step == NO_STEP else f"step_{step}"
        files = sorted((self._folder / name).glob(f"*/rank*/{LOAD_FILE_NAME}"))
        if step == NO_STEP and not files:
            return sorted(self._folder.glob(f"{COLLECTS_PREFIX}*.json"))
        if self._role_dirs:
            return [file for file in files if file.parent.parent.name in self._role_dirs]
        return files


def _signature(paths: Iterable[Path]) -> _Signature:
    found = set()
    for path in paths:
        try:
            info = path.stat()
        except OSError:
            continue  # packed meanwhile
        found.add((str(path), info.st_size, info.st_mtime_ns))
    return frozenset(found)


def step_loads(table: LoadTable, paths: Iterable[Path] = ()) -> list[StepLoad]:
    """Return the load of each step and role of a table merged over ranks; ``paths``: the files it came from."""
    files = list(paths)
    found = []
    for step in np.unique(table.step_N).tolist():
        for role_id, role in enumerate(table.roles):
            in_role = (table.role_N == role_id) & (table.step_N == step)
            phases = {table.phases[phase] for phase in np.unique(table.phase_N[in_role])}
            phase = headline_phase(phases)
            if phase is None:
                continue
            rows = np.flatnonzero(in_role & (table.phase_N == table.phases.index(phase)))
            layers = layer_loads(table, rows.tolist())
            if layers:
                found.append(
                    StepLoad(
                        role=role,
                        step=step,
                        phase=phase,
                        layers=layers,
                        ranks=frozenset(_ranks(files, role)),
                        world_size=table.world_size,
                    )
                )
    return found


def _ranks(paths: Iterable[Path], role: str) -> set[int]:
    """Return the ranks whose files of ``role`` are among ``paths``; of collects, all."""
    ranks = set()
    for path in paths:
        in_folder = _RANK_DIR.fullmatch(path.parent.name)
        if path.name == LOAD_FILE_NAME and in_folder and path.parent.parent.name == role_dir(role):
            ranks.add(int(in_folder[1]))
        elif path.name.startswith(COLLECTS_PREFIX):
            number = path.name.removeprefix(COLLECTS_PREFIX).removesuffix(".json")
            if number.isdecimal():
                ranks.add(int(number))
    return ranks


def layer_loads(table: LoadTable, rows: list[int]) -> tuple[LayerLoad, ...]:
    """Return the load of each of ``rows`` (one layer each) that has tokens, worst max/mean first."""
    found = []
    for row in rows:
        first, held = int(table.first_N[row]), int(table.held_N[row])
        counts_E = table.counts_NE[row, first : first + held]
        layer, total = int(table.layer_N[row]), int(counts_E.sum())
        if total == 0:
            continue
        hottest = int(counts_E.argmax())
        found.append(
            LayerLoad(
                layer=layer,
                label=table.layer_label(layer),
                num_assignments=total,
                max_over_mean=float(metrics.max_over_mean(counts_E[None])[0]),
                cv=float(metrics.coefficient_of_variation(counts_E[None])[0]),
                num_dead=int(metrics.num_dead(counts_E[None])[0]),
                hottest=first + hottest,
                hottest_share=float(counts_E[hottest]) / total,
            )
        )
    return tuple(sorted(found, key=lambda one: (-one.max_over_mean, one.layer)))


def _views(loads: list[StepLoad]) -> list[RoleView]:
    views = []
    for role in sorted({one.role for one in loads}):
        steps = [one for one in loads if one.role == role]
        expected = _expected_ranks(steps)
        complete = [one for one in steps if expected <= one.ranks]
        shown = _shown(steps, complete)
        numbered = [one for one in (complete or steps) if one.step != NO_STEP]
        views.append(
            RoleView(
                shown=shown,
                missing=tuple(sorted(expected - shown.ranks)),
                newest_step=steps[-1].step,
                newest_missing=tuple(sorted(expected - steps[-1].ranks)),
                steps=tuple(one.step for one in numbered),
                trend=tuple(one.worst for one in numbered),
                direction=direction([one.worst for one in numbered]),
            )
        )
    return views


def _shown(steps: list[StepLoad], complete: list[StepLoad]) -> StepLoad:
    """Return the newest complete step; the last but one where a rank has fallen behind by more than a step."""
    if len(steps) > 1 and steps[-2] not in complete and steps[-1] not in complete:
        return steps[-2]
    return complete[-1] if complete else steps[-1]


def _complete(loads: list[StepLoad]) -> list[StepLoad]:
    found = []
    for role in sorted({one.role for one in loads}):
        steps = [one for one in loads if one.role == role]
        expected = _expected_ranks(steps)
        found += [one for one in steps if expected <= one.ranks]
    return sorted(found, key=lambda one: (one.step, one.role))


def _expected_ranks(steps: list[StepLoad]) -> frozenset[int]:
    """Return the ranks that a step of the role should have: those that any step has.

    A rank that never wrote is not expected: filters and replicas leave ranks out on purpose, and the view says
    how many ranks of the world there are.
    """
    return frozenset().union(*(one.ranks for one in steps))


def direction(values: list[float]) -> str:
    """Return how the later half of ``values`` compares with the earlier; "" if there are under four."""
    if len(values) < 4:
        return ""
    half = len(values) // 2
    earlier, later = float(np.mean(values[:half])), float(np.mean(values[-half:]))
    if later > earlier * (1 + TREND_SHARE):
        return "rising"
    if later < earlier * (1 - TREND_SHARE):
        return "falling"
    return "steady"

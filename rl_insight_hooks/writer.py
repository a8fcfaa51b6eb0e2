# SPDX-License-Identifier: Apache-2.0
"""The writer thread: folds drained counters and writes the files, off the trainer's path.

The trainer hands over a :class:`RegionResult` and goes on. The queue is bounded in regions and in bytes; what
does not fit is counted and named once. A file that cannot be written is tried again with the next one.
"""

from __future__ import annotations

import logging
import os
import platform
import queue
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rl_insight_hooks import envs, guard, loadstats, selfcheck
from rl_insight_hooks.accumulate import (
    CallCounts,
    Collects,
    LayerNumbers,
    RoleStep,
    build_load_file,
)
from rl_insight_hooks.atomic import sweep_temp_files, write_atomic
from rl_insight_hooks.config import Config
from rl_insight_hooks.counters import FORM_CUMULATIVE, PendingReading, Slot, SlotReading
from rl_insight_hooks.errors import DataError
from rl_insight_hooks.group_list import counts_from_cumulative
from rl_insight_hooks.packfile import Packer
from rl_insight_hooks.paths import collects_path, kept_collects_path, load_file_path
from rl_insight_hooks.schema import LOAD_FILE_NAME, decode_load_file, encode_load_file
from rl_insight_hooks.topology import Place, first_local_expert

_log = logging.getLogger(__name__)

MAX_QUEUED_REGIONS = 1024
MAX_QUEUED_BYTES = 256 << 20
MAX_UNWRITTEN_FILES = 256
_EXIT_WAIT_S = 30.0


@dataclass(slots=True, eq=False)
class RegionResult:
    """What one region, or a part of it, hands to the writer."""

    path: str
    step: int | None
    step_source: str
    role: str
    place: Place
    started_unix_s: float
    ended_unix_s: float
    pending: list[PendingReading]
    call_log: list[tuple[Slot, Any]] | None
    config: Config
    write_empty: bool = True  # False: without a call there is no file
    ended: bool = True  # False: an interim flush of a region that goes on
    error: str | None = None  # name of the exception that left the region
    continues: bool = False  # this region already handed over an interim part
    dropped: dict[str, int] = field(default_factory=dict)
    masked: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    stamps: dict[str, str] = field(default_factory=dict)
    facts: selfcheck.Facts | None = None

    @property
    def nbytes(self) -> int:
        """Host bytes waiting in the queue."""
        return sum(p.nbytes for p in self.pending)


_Accounts = tuple[dict[str, int], dict[str, int], dict[str, int]]


def _accounts(owner: RegionResult | RoleStep) -> _Accounts:
    """What ``owner`` did not count, by cause."""
    return owner.dropped, owner.masked, owner.failed


@dataclass(slots=True)
class _Barrier:
    done: threading.Event


class Writer:
    """Owns the thread and the totals. One a process; made anew in a forked child."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[RegionResult | _Barrier] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._num_queued = 0
        self._queued_bytes = 0
        self._lost: dict[str, int] = {}
        self._untold: _Accounts = ({}, {}, {})  # of regions without a file
        self._named: set[str] = set()  # what was logged: once each
        self._gathered: dict[tuple[str, str], RoleStep] = {}  # the last one of a path and role
        self._open: dict[tuple[str, str, int | None], RoleStep] = {}  # of regions that go on
        self._numbers: dict[str, LayerNumbers] = {}
        self._collects: dict[str, Collects] = {}
        self._settled: set[str] = set()  # paths where an earlier run's collects were dealt with
        self._owned: set[Path] = set()
        self._packers: dict[int, Packer] = {}
        self._unwritten: OrderedDict[Path, bytes] = OrderedDict()
        self._summaries: dict[str, tuple[int | None, dict[str, float]]] = {}
        self._swept: set[str] = set()
        self._started_unix_s = time.time()
        self.writer_id = f"{platform.node()}-{os.getpid()}-{int(self._started_unix_s * 1000)}"
        self._made_run_id = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}"

    # -- the trainer's side ------------------------------------------------------------------------------

    def submit(self, result: RegionResult) -> None:
        """Hand over a region; never blocks. Safe in a signal handler."""
        nbytes = result.nbytes  # first: within += another thread could run
        if self._num_queued >= MAX_QUEUED_REGIONS or self._queued_bytes + nbytes > MAX_QUEUED_BYTES:
            self._lose("region lost: the writer is behind (slow disk)")
            return
        self._num_queued += 1
        self._queued_bytes += nbytes
        self._queue.put(result)
        self._ensure_thread()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything handed over is written; return False on timeout."""
        if threading.current_thread() is self._thread:
            return True
        if self._thread is None and self._queue.empty():
            return True
        barrier = _Barrier(threading.Event())
        self._queue.put(barrier)
        if not self._ensure_thread():
            while not self._queue.empty():
                self._handle(self._queue.get_nowait())
        return barrier.done.wait(timeout_s)

    def summary(self, step: int | None = None) -> dict[str, float]:
        """Return the metrics of the last written step of each role, flat; see ``loadstats``.

        Args:
            step: leave out roles whose last written step is another one; None: take all.
        """
        merged: dict[str, float] = {}
        for of_step, metrics in list(self._summaries.values()):
            if step is None or of_step == step:
                merged.update(metrics)
        return merged

    def _ensure_thread(self) -> bool:
        """Start the thread if need be; False where none can be started, as at exit since Python 3.12."""
        if self._thread is not None and self._thread.is_alive():
            return True
        thread = threading.Thread(target=self._run, name="rl_insight_hooks.writer", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._thread = thread
        return True

    # -- the thread's side -------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._handle(self._queue.get())

    def _handle(self, item: RegionResult | _Barrier) -> None:
        if isinstance(item, _Barrier):
            with guard.failsafe("writer.retry"):
                self._retry_unwritten(all_of_them=True)
            item.done.set()
            return
        nbytes = item.nbytes
        with guard.failsafe("writer.region"):
            self._take(item)
        self._num_queued -= 1
        self._queued_bytes -= nbytes

    def _take(self, result: RegionResult) -> None:
        readings = [r for pending in result.pending for r in pending.resolve()]
        gathered = self._gather(result, readings)
        config, path = result.config, result.path
        if path not in self._swept:
            self._swept.add(path)
            with guard.failsafe("writer.sweep"):
                sweep_temp_files(path)
        if not result.write_empty and not gathered.has_calls:
            if result.ended:
                self._tell_later(gathered)
            return
        self._tell_now(gathered)
        for where, num in guard.take_failures(of_writer=True).items():
            gathered.failed[where] = gathered.failed.get(where, 0) + num
        if config.replicas == "one" and result.place.replica_rank is not None:
            gathered.stamps["replicas"] = (
                "the ranks of an expert-tensor-parallel group hold the same counts: its first alone writes"
            )
            if result.place.replica_rank and not (gathered.failed or gathered.dropped):
                self._name_once(
                    f"rank {result.place.rank} writes no loads: it holds the counts of the first rank of its "
                    "expert-tensor-parallel group (replicas: all makes every rank write)",
                    level=logging.INFO,
                )
                return
        if config.collects and (
            config.collects_roles is None or result.role in config.collects_roles
        ):
            with guard.failsafe("writer.collects"):
                self._write_collects(result, readings, gathered.phase_of_eval)
        run_id = config.run_id or envs.run_id() or self._made_run_id
        numbers = self._numbers.setdefault(result.role, LayerNumbers())
        load_file = build_load_file(
            gathered, numbers, run_id=run_id, writer=self.writer_id, phases=config.phases
        )
        if result.facts is not None:
            load_file.notes = selfcheck.notes(load_file, result.facts) + load_file.notes
        target = self._load_path(result)
        if self._write(target, encode_load_file(load_file)):
            self._pack(result, target)
        self._summaries[result.role] = (load_file.step, loadstats.summary(load_file))

    def _gather(self, result: RegionResult, readings: list[SlotReading]) -> RoleStep:
        key = (result.path, result.role)
        open_key = (result.path, result.role, result.step)
        gathered = self._gathered.get(key)
        if result.continues:  # another step of the role may have come between
            gathered = self._open.get(open_key, gathered)
        elif gathered is not None and result.started_unix_s >= gathered.failed_unix_s:
            gathered = None  # the same step again is more of it, after an error it is a rerun
        if gathered is None or gathered.step != result.step:
            gathered = RoleStep(
                result.step,
                result.step_source,
                result.role,
                result.started_unix_s,
                result.ended_unix_s,
                result.place,
            )
        self._gathered[key] = gathered
        if result.ended:
            self._open.pop(open_key, None)
        else:
            self._open[open_key] = gathered
        gathered.place = result.place
        gathered.ended_unix_s = max(result.ended_unix_s, gathered.started_unix_s)
        gathered.num_regions += not result.continues
        gathered.add(readings)
        if result.call_log is not None:
            gathered.calls = (gathered.calls or []) + [
                _call_counts(s, g) for s, g in result.call_log
            ]
        if result.error is not None:
            gathered.failed_unix_s = result.ended_unix_s
            gathered.notes.append(f"a region was left by {result.error}: its counts may be partial")
        for mine, theirs in zip(_accounts(gathered), _accounts(result), strict=True):
            for cause, num in theirs.items():
                mine[cause] = mine.get(cause, 0) + num
        gathered.dropped.update(
            self._lost
        )  # of the whole process: the file that tells may be lost too
        gathered.stamps.update(result.stamps)
        return gathered

    def _tell_later(self, gathered: RoleStep) -> None:
        """Keep what failed or was left out in a region that has no file, for the next file."""
        for untold, counted in zip(self._untold, _accounts(gathered), strict=True):
            for cause, num in counted.items():
                if cause not in self._lost:  # every file tells those
                    untold[cause] = untold.get(cause, 0) + num
            counted.clear()

    def _tell_now(self, gathered: RoleStep) -> None:
        for untold, counted in zip(self._untold, _accounts(gathered), strict=True):
            for cause, num in untold.items():
                counted[cause] = counted.get(cause, 0) + num
            untold.clear()

    def _write_collects(
        self, result: RegionResult, readings: list[SlotReading], phase_of_eval: str
    ) -> None:
        target = collects_path(result.path, result.place.rank)
        collects = self._collects.setdefault(result.path, Collects())
        widest = max((r.slot.num_experts for r in readings), default=0)
        first_expert = first_local_expert(result.place, widest)
        collects.add(readings, first_expert, phase_of_eval=phase_of_eval)
        if result.path not in self._settled:
            try:
                if target.exists():
                    self._adopt_or_keep(target, collects, resume=result.config.resume)
            except OSError as error:
                self._lose(
                    f"collects not written: {target.name} of an earlier run can be neither read nor "
                    f"moved ({error.strerror or error})"
                )
                return
            self._settled.add(result.path)
        self._write(target, msgspec.json.encode(collects.as_json_dict()) + b"\n")

    def _adopt_or_keep(self, target: Path, collects: Collects, *, resume: bool) -> None:
        """An earlier run left collects here: go on with them if asked to, else keep them out of the way."""
        if resume:
            try:
                raw = msgspec.json.decode(target.read_bytes(), type=dict[str, dict[str, int]])
                collects.resume_from(
                    {int(lay): {int(e): n for e, n in row.items()} for lay, row in raw.items()}
                )
            except (msgspec.DecodeError, msgspec.ValidationError, ValueError) as error:
                _log.warning(
                    "cannot resume from %s (%s): starting from zero, the file is kept",
                    target,
                    error,
                )
            else:
                _log.info("resume: going on with the counts in %s", target)
                return
        kept = kept_collects_path(target)
        os.replace(target, kept)
        _log.warning("%s was left by an earlier run: kept as %s", target, kept.name)

    def _load_path(self, result: RegionResult) -> Path:
        """Return where this region's file goes; beside it if a living process of the same rank owns that."""
        target = load_file_path(result.path, result.step, result.role, result.place.rank)
        if target in self._owned:
            return target
        self._owned.add(target)
        with guard.failsafe("writer.sweep"):
            sweep_temp_files(target.parent)
        if len(self._owned) > 100_000:
            self._owned.clear()
        try:
            there = decode_load_file(target.read_bytes())
        except FileNotFoundError:
            return target
        except (OSError, msgspec.DecodeError, msgspec.ValidationError):
            return target  # torn or foreign: ours replaces it
        if there.writer == self.writer_id or there.ended_unix_s < self._started_unix_s:
            return target
        self._owned.discard(target)
        conflict = target.with_name(f"group_list.conflict-{self.writer_id}.json")
        self._name_once(
            f"two processes of rank {result.place.rank} write to {result.path}: "
            f"{there.writer} and {self.writer_id}; the second writes {conflict.name}"
        )
        return conflict

    def _pack(self, result: RegionResult, written: Path) -> None:
        """Fold finished steps of the role, with ``pack_every``; what cannot be packed stays JSON."""
        every = result.config.pack_every
        if not every or not result.ended or written.name != LOAD_FILE_NAME:
            return
        packer = self._packers.setdefault(every, Packer(every))
        try:
            packer.wrote(result.path, result.role, result.place.rank, result.step)
        except (OSError, DataError) as error:
            self._name_once(
                f"cannot pack steps of {result.role} in {result.path}: {error}; they stay JSON"
            )

    def _write(self, target: Path, data: bytes) -> bool:
        """Write ``data`` now, or keep it for another try and return False."""
        self._retry_unwritten()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(target, data)
            self._unwritten.pop(target, None)
            return True
        except (OSError, ValueError) as error:  # ValueError: no file can have this name
            why = getattr(error, "strerror", None) or error
            self._name_once(
                f"cannot write below {target.parent}: {why}; will try again", key=f"write: {why}"
            )
            self._unwritten[target] = data
            self._unwritten.move_to_end(target)
            while len(self._unwritten) > MAX_UNWRITTEN_FILES:
                self._unwritten.popitem(last=False)
                self._lose("file lost: it could not be written (see the log)")
            return False

    def _retry_unwritten(self, *, all_of_them: bool = False) -> None:
        for target, data in list(self._unwritten.items()):
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(target, data)
            except (OSError, ValueError):
                if all_of_them:
                    continue
                self._unwritten.move_to_end(target)  # this one may never work: others first
                return
            del self._unwritten[target]

    def _lose(self, cause: str) -> None:
        self._lost[cause] = self._lost.get(cause, 0) + 1
        self._name_once(cause)

    def _name_once(
        self, message: str, *, key: str | None = None, level: int = logging.WARNING
    ) -> None:
        key = key or message
        if key not in self._named:
            self._named.add(key)
            _log.log(level, "%s", message)

    @property
    def num_unwritten(self) -> int:
        """Files that wait for another try."""
        return len(self._unwritten)


def exit_wait_s() -> float:
    """Seconds that the interpreter's exit waits for the writer."""
    return _EXIT_WAIT_S


def _call_counts(slot: Slot, group_list: Any) -> CallCounts:
    values = np.asarray(group_list.cpu().numpy(), dtype=np.int64)
    counts_E = counts_from_cumulative(values) if slot.form == FORM_CUMULATIVE else values
    return CallCounts(slot.layer, slot.phase, counts_E)

# SPDX-License-Identifier: Apache-2.0
"""The running recorder of this process: regions, drains, install and uninstall.

One session a process. Regions form a stack: the innermost one gets the counts, the outer one goes on when it
ends. At every change of region the counters are drained into the one that was active.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from rl_insight_hooks import guard, selfcheck, topology
from rl_insight_hooks.config import Config
from rl_insight_hooks.counters import PendingReading, Slot
from rl_insight_hooks.installer import Installer
from rl_insight_hooks.recorder import Recorder
from rl_insight_hooks.state import STATE
from rl_insight_hooks.watching import Watcher
from rl_insight_hooks.writer import RegionResult, Writer, exit_wait_s

_log = logging.getLogger(__name__)

# Parts of a region that may wait in memory before they are handed to the writer.
_MAX_PENDING = 64


class Region:
    """A stretch of the run whose counts belong to one (step, role). May be entered several times."""

    def __init__(
        self, path: str, step: int | None, step_source: str, role: str, config: Config
    ) -> None:
        self.path = path
        self.step = step
        self.step_source = step_source
        self.role = role
        self.config = config
        self.wanted = True
        self.ambient = False
        self.write_empty = True  # False: a file without a single call is not written
        self.started_unix_s = time.time()
        self.pending: list[PendingReading] = []
        self.call_log: list[tuple[Slot, Any]] = []
        self.num_events = 0
        self.handed_over = False
        self.overwritten: list[str] = []
        self.saved_layer: tuple[Any, bool, Any, bool] | None = None


class Session:
    """Everything of this process. All methods are safe to call in any order; none raises into the host."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.recorder = Recorder()
        self.writer = Writer()
        self.watcher = Watcher(self.recorder)
        self.installer = Installer(self)
        self.config = Config()
        self.stack: list[Region] = []
        self.has_ticker = False  # an integration calls tick() at a safe point of its own
        self.replays_graphs = False
        self._last_flush_s = time.monotonic()
        self._timer: threading.Thread | None = None
        self._timer_stop = threading.Event()
        self._before_drain: list[Callable[[], None]] = []
        self._old_sigterm: Any = None
        self._hooked_exit = False
        self._pid = os.getpid()

    # -- regions -----------------------------------------------------------------------------------------

    def new_region(
        self,
        path: str | None,
        step: int | None,
        role: str | None,
        *,
        step_source: str | None = None,
    ) -> Region:
        """Return a region, not yet entered; what is not given comes from the settings and ``set_step``."""
        source = step_source or ("given" if step is not None else STATE.step_source)
        step = STATE.step if step is None else step
        config = self.config
        region = Region(path or config.path, step, source, role or config.role, config)
        region.wanted = config.wants_step(step) and config.wants_role(region.role)
        if region.wanted and config.ranks is not None:
            region.wanted = config.wants_rank(topology.current_place().rank)
        return region

    def enter(self, region: Region) -> None:
        """Make ``region`` the active one."""
        with self.lock:
            self._bind_process()
            self._drain_active()
            if not region.pending and not region.handed_over:
                region.overwritten = self.installer.reassert()
                region.started_unix_s = time.time()
            # a region begun inside a watched layer must not take that layer for its own
            region.saved_layer = (STATE.layer, STATE.armed, STATE.counted, STATE.evaluating)
            STATE.layer, STATE.armed, STATE.counted, STATE.evaluating = None, False, None, False
            self.stack.append(region)
            try:
                self._activate()
            except BaseException:  # nobody will leave a region that was not entered
                self.stack.remove(region)
                raise

    def leave(self, region: Region) -> None:
        """Take ``region`` off the stack, keeping what it gathered; it may be entered again."""
        with self.lock:
            if region not in self.stack:
                return
            try:
                self._drain_active()
            finally:
                self.stack.remove(region)
                if region.saved_layer is not None:
                    STATE.layer, STATE.armed, STATE.counted, STATE.evaluating = region.saved_layer
                self._activate()

    def finish(self, region: Region, error: BaseException | None = None) -> None:
        """Hand what ``region`` gathered to the writer: it is over."""
        with self.lock:
            if region.wanted:
                self._hand_over(
                    region, ended=True, error=None if error is None else type(error).__name__
                )

    def end(self, region: Region, error: BaseException | None = None) -> None:
        """Leave ``region`` and finish it, whatever fails; for integrations, whose regions are entered once."""
        with guard.failsafe("leave"):
            self.leave(region)
        with guard.failsafe("finish"):
            self.finish(region, error)

    def set_step(self, step: int | None, source: str = "given") -> None:
        """Set the step of regions begun from now on; the ambient region, if any, ends and begins anew."""
        with self.lock:
            changed = step != STATE.step
            STATE.step, STATE.step_source = step, source
            ambient = self.ambient
            if ambient is not None and changed:
                self._drain_active()
                index = self.stack.index(ambient)
                self.finish(ambient)
                renewed = self.new_region(ambient.path, step, ambient.role, step_source=source)
                renewed.ambient = True
                renewed.write_empty = ambient.write_empty
                self.stack[index] = renewed
                self._activate()

    @property
    def active(self) -> Region | None:
        """The innermost region."""
        return self.stack[-1] if self.stack else None

    @property
    def ambient(self) -> Region | None:
        """The region that ``enable`` opened for calls outside every other."""
        return next((r for r in self.stack if r.ambient), None)

    def start_ambient(self, role: str | None = None, *, write_empty: bool = True) -> None:
        """Open the ambient region below every other; a second call changes nothing.

        Args:
            role: its role; None: the setting ``role``.
            write_empty: write its file even if no call was seen, with a note that says so.
        """
        with self.lock:
            self._bind_process()
            if self.ambient is not None:
                return
            self._drain_active()
            region = self.new_region(None, None, role)
            region.ambient = True
            region.write_empty = write_empty
            region.overwritten = self.installer.reassert()
            self.stack.insert(0, region)
            self._activate()
            self._start_timer()

    def stop_ambient(self) -> None:
        """Close the ambient region, if any."""
        with self.lock:
            ambient = self.ambient
            if ambient is not None:
                self.end(ambient)

    def _activate(self) -> None:
        region = self.active
        self.recorder.begin()
        wanted = region is not None and region.wanted
        if wanted and region is not None:
            self.recorder.gmm_per_layer = region.config.gmm_per_layer
            self.recorder.detail_calls = region.config.detail == "calls"
        STATE.on = wanted

    # -- draining ----------------------------------------------------------------------------------------

    def before_drain(self, action: Callable[[], None]) -> None:
        """Register what an integration must do before counters are read (e.g. wait for its own stream)."""
        self._before_drain.append(action)

    def _drain_active(self) -> None:
        """Move what the counters hold into the active region; counts of no region are thrown away."""
        recorder = self.recorder
        if not recorder.pool.slots:
            return
        for action in self._before_drain:
            with guard.failsafe("before_drain"):
                action()
        with guard.failsafe("drain"):
            reading = recorder.drain()
            call_log, recorder.call_log = recorder.call_log, []
            region = self.active
            if region is not None and region.wanted:
                region.pending.append(reading)
                region.call_log.extend(call_log)
                region.num_events += recorder.num_events
                if len(region.pending) >= _MAX_PENDING:
                    self._hand_over(region, ended=False)
        recorder.num_events = 0

    def _hand_over(self, region: Region, *, ended: bool, error: str | None = None) -> None:
        recorder = self.recorder
        with guard.failsafe("hand over"):
            result = RegionResult(
                path=region.path,
                step=region.step,
                step_source=region.step_source,
                role=region.role,
                place=topology.current_place(),
                started_unix_s=region.started_unix_s,
                ended_unix_s=time.time(),
                pending=region.pending,
                call_log=region.call_log if region.config.detail == "calls" else None,
                config=region.config,
                ended=ended,
                write_empty=region.write_empty,
                error=error,
                continues=region.handed_over,
                facts=selfcheck.Facts(
                    num_events=region.num_events,
                    hooked=self.installer.hooked(),
                    overwritten=region.overwritten,
                    uncovered=self.installer.uncovered(),
                    replayed_graphs=self.replays_graphs,
                    compiled_unwatched=STATE.compiled_unwatched,
                ),
            )
            result.dropped, recorder.dropped = recorder.dropped, {}
            result.masked, recorder.masked = recorder.masked, {}
            result.failed = guard.take_failures()
            result.stamps = dict(recorder.stamps)
            if region.config.ranks is not None:
                result.stamps["ranks"] = region.config.ranks  # the others are not missing
            self.writer.submit(result)
        region.pending, region.call_log = [], []
        region.num_events = 0
        region.handed_over = True

    def flush_active(self) -> None:
        """Hand over what the regions on the stack gathered so far; they go on."""
        with self.lock:
            self._drain_active()
            for region in self.stack:
                if region.wanted and (region.pending or not region.handed_over):
                    self._hand_over(region, ended=False)
            self._last_flush_s = time.monotonic()

    def tick(self) -> None:
        """Flush if ``flush_interval`` has passed; integrations call it at a step of their engine."""
        if time.monotonic() - self._last_flush_s >= self.config.flush_interval:
            self.flush_active()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Hand over and wait for the files; return False on timeout."""
        self.flush_active()
        return self.writer.flush(timeout_s)

    def _start_timer(self) -> None:
        if self._timer is not None and self._timer.is_alive():
            return
        self._timer_stop = threading.Event()
        self._timer = threading.Thread(
            target=self._run_timer, name="rl_insight_hooks.timer", daemon=True
        )
        self._timer.start()

    def _run_timer(self) -> None:
        stop = self._timer_stop
        while not stop.wait(min(self.config.flush_interval, 3600.0)):
            if self.has_ticker:
                continue
            with guard.failsafe("timer"):
                region = self.active
                if region is not None and region.wanted:
                    self.tick()

    # -- process -----------------------------------------------------------------------------------------

    def _bind_process(self) -> None:
        if self._hooked_exit:
            return
        self._hooked_exit = True
        atexit.register(_at_exit)
        if threading.current_thread() is threading.main_thread():
            with guard.failsafe("sigterm"):
                self._old_sigterm = signal.getsignal(signal.SIGTERM)
                if self._old_sigterm is not None:  # None: set by C code, which we could not call
                    signal.signal(signal.SIGTERM, _on_sigterm)

    def close(self, timeout_s: float) -> None:
        """Write what there is: the process ends."""
        with guard.failsafe("close"):
            for region in list(reversed(self.stack)):
                self._drain_active()
                self.stack.remove(region)
                STATE.on = False
                if region.wanted:
                    error = None if region.ambient else "the end of the process"
                    self._hand_over(region, ended=True, error=error)
            self._timer_stop.set()
            if not self.writer.flush(timeout_s):
                _log.warning(
                    "the writer did not finish within %g s: the last files may be missing",
                    timeout_s,
                )

    def reset_after_fork(self) -> None:
        """In a forked child: it is no rank of the run, so it records nothing until it is told to."""
        guard.reset_after_fork()
        STATE.reset()
        self.lock = threading.RLock()
        self.stack = []
        self.writer = Writer()
        self.recorder.call_log = []
        self._timer = None


_session: Session | None = None
_session_lock = threading.Lock()


def get_session() -> Session:
    """Return the session of this process, made at its first use."""
    global _session
    if _session is None:
        with _session_lock:
            if _session is None:
                _session = Session()
    return _session


def existing_session() -> Session | None:
    """Return the session if there is one."""
    return _session


@contextlib.contextmanager
def fresh_session() -> Iterator[Session]:
    """Use a new session within the block; for tests."""
    global _session
    old, _session = _session, Session()
    try:
        yield _session
    finally:
        _session.watcher.unwatch()
        _session.installer.uninstall()
        STATE.reset()
        _session = old


def _at_exit() -> None:
    if _session is not None and _session._pid == os.getpid():
        _session.close(exit_wait_s())


def _on_sigterm(signum: int, frame: FrameType | None) -> None:
    session = _session
    old: Any = signal.SIG_DFL
    if session is not None:
        old = session._old_sigterm
        if session._pid == os.getpid():
            session.close(min(exit_wait_s(), 10.0))
    if callable(old):
        old(signum, frame)
    elif old == signal.SIG_IGN:
        return
    else:
        # die as the host would have without us: by the signal's default action
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)


def _after_fork_in_child() -> None:
    global _session_lock
    _session_lock = threading.Lock()
    if _session is not None:
        try:
            _session.reset_after_fork()
            _session._pid = os.getpid()
        except Exception:
            STATE.reset()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_after_fork_in_child)

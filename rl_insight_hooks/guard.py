# SPDX-License-Identifier: Apache-2.0
"""Never break the run: our failures are logged once a place, counted, and end there."""

from __future__ import annotations

import logging
import threading
from types import TracebackType

_log = logging.getLogger("rl_insight_hooks")

_lock = threading.Lock()
_num_failed: dict[str, int] = {}


def failed(where: str) -> None:
    """Count the exception that is being handled; log it with its traceback if it is the first at ``where``.

    Call it from an ``except`` block. It never raises.
    """
    try:
        with _lock:
            num = _num_failed[where] = _num_failed.get(where, 0) + 1
        if num == 1:
            _log.warning(
                "rl_insight_hooks failed in %s; training goes on, further failures there are only counted",
                where,
                exc_info=True,
            )
    except Exception:  # logging itself is broken: nothing is left to try
        return


class failsafe:  # noqa: N801 - used like a function
    """Run a block of ours; its exception is counted under ``where`` and swallowed. Not for hot paths."""

    __slots__ = ("_where",)

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        failed(self._where)
        return True


def take_failures(*, of_writer: bool = False) -> dict[str, int]:
    """Return the failures counted since the last call, by place, and start anew.

    Those of the writer thread (places named ``writer...``) are kept apart: it works on older regions.
    """
    with _lock:
        taken = {
            where: num
            for where, num in _num_failed.items()
            if num and where.startswith("writer") == of_writer
        }
        for where in taken:
            _num_failed[where] = 0
    return taken


def reset_after_fork() -> None:
    """Give a forked child a lock of its own and no failures."""
    global _lock
    _lock = threading.Lock()
    _num_failed.clear()

# SPDX-License-Identifier: Apache-2.0
"""A region for every stage of a train worker.

Stages nest in verl (``actor_update`` holds ``train_batch``), and one stage can be announced twice (by our wrap
of the worker's method and by ``trace_state``): the outermost one is the region, what is inside belongs to it.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any

from rl_insight_hooks import guard

from .clock import StepClock

if TYPE_CHECKING:
    from rl_insight_hooks.session import Region, Session

_log = logging.getLogger(__name__)

ACTOR_UPDATE = "actor_update"
ACTOR_LOG_PROB = "actor_compute_log_prob"
REF_LOG_PROB = "ref_compute_log_prob"
COMPUTE_VALUES = "compute_values"
CRITIC_UPDATE = "critic_update"
COMPUTE_RM_SCORE = "compute_rm_score"
ROLLOUT_GENERATE = "rollout_generate"


class Stages:
    """The stage that this process is in, and the step it belongs to."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.clock = StepClock()
        self.engine: weakref.ref[Any] | None = None  # of the stage under way or just over
        self._lock = threading.Lock()
        self._open: Region | None = None

    def begin(self, role: str, engine: Any = None) -> Region | None:
        """Open the region of ``role``; None if a stage is open already, or nothing could be made.

        What is returned wants :meth:`end`, also where it could not be entered: its file tells.
        """
        region = None
        with guard.failsafe("verl.begin"), self._lock:
            if self._open is not None:
                return None
            self.engine = None if engine is None else weakref.ref(engine)
            session = self.session
            made = session.new_region(None, self.clock.step, role, step_source=self.clock.source)
            made.config = dataclasses.replace(
                made.config, collects=_writes_collects(made.config, role)
            )
            region = self._open = made
            session.enter(region)
        return region

    def end(self, region: Region, error: BaseException | None) -> None:
        """Close the region that :meth:`begin` returned."""
        with guard.failsafe("verl.end"), self._lock:
            self._open = None
            self.session.end(region, error)
            if region.role == ACTOR_UPDATE and error is None:
                self.clock.updated()


def _writes_collects(config: Any, role: str) -> bool:
    """Train workers leave ``eplb_token_collects_<rank>.json`` to the rollout, whose ranks have the same
    numbers.

    They write it only for roles that ``collects_roles`` names (docs/adr/0050-collects-of-colocated-workers.md).
    """
    return bool(config.collects and config.collects_roles and role in config.collects_roles)

# SPDX-License-Identifier: Apache-2.0
"""``RLInsightLogger.trace_state``: what every method annotated with ``DistProfiler.annotate`` enters (0.9).

It runs with every profiler off, and so gives the stages of workers that workers.py does not know: subclasses
that override a method, the Tinker worker, a recipe's own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from rl_insight_hooks.patching import Gate

if TYPE_CHECKING:
    from rl_insight_hooks.installer import Context

    from .stages import Stages

# Lane of train workers; rollout servers, which run no model themselves, enter it as "replica_<n>".
_TRAIN_LANE = "rank_"


def install(ctx: Context, stages: Stages, modules: Mapping[str, ModuleType]) -> None:
    """Hook ``trace_state`` where this verl has it."""
    owner = getattr(modules.get("verl.utils.tracking"), "RLInsightLogger", None)
    if owner is not None:
        ctx.patcher.replace(owner, "trace_state", functools.partial(_trace_state, stages, owner))


def _trace_state(stages: Stages, owner: type, original: Any, gate: Gate) -> Any:
    bound = original.__get__(None, owner)  # a classmethod; everybody calls it on the class

    @functools.wraps(bound)
    def trace_state(state_name: str, *args: Any, **kwargs: Any) -> Any:
        host = bound(state_name, *args, **kwargs)
        if gate.live and str(kwargs.get("state_lane_id")).startswith(_TRAIN_LANE):
            return _Stage(host, stages, state_name)
        return host

    return trace_state


class _Stage:
    """The host's context manager with a region inside it."""

    def __init__(self, host: Any, stages: Stages, role: str) -> None:
        self._host = host
        self._stages = stages
        self._role = role
        self._region: Any = None

    def __enter__(self) -> Any:
        entered = self._host.__enter__()
        self._region = self._stages.begin(self._role)
        return entered

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Any:
        if self._region is not None:
            self._stages.end(self._region, error)
        return self._host.__exit__(kind, error, trace)

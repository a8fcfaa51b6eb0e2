# SPDX-License-Identifier: Apache-2.0
"""MindSpeed-RL's workers: a region a stage, named as in its own msprobe tags, with the worker's own step.

The base classes are hooked: every worker's stage passes through one of their methods, also where a Ray actor
class on top overrides it and calls the base.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rl_insight_hooks import guard
from rl_insight_hooks.patching import Gate

from .flags import GENERATE

if TYPE_CHECKING:
    from rl_insight_hooks.installer import Context
    from rl_insight_hooks.session import Region, Session

# module -> (class, {method: role})
_STAGES: dict[str, tuple[str, dict[str, str]]] = {
    "mindspeed_rl.workers.actor_hybrid_worker": (
        "ActorHybridWorkerBase",
        {
            "generate_sequences": GENERATE,
            "compute_log_prob": "actor_compute_log_prob",
            "update": "actor_update",
        },
    ),
    "mindspeed_rl.workers.reference_worker": (
        "ReferenceWorkerBase",
        {"compute_ref_log_prob": "reference_compute_log_prob"},
    ),
    "mindspeed_rl.workers.critic_worker": (
        "CriticWorkerBase",
        {"compute_values": "critic_compute_values", "update": "critic_update"},
    ),
}

_CALLS = "_rl_insight_calls"  # on a worker without an iteration: calls of a stage so far, by role


def install(ctx: Context, modules: Mapping[str, ModuleType]) -> None:
    """Hook the worker classes of the modules that are there."""
    for module_name, (class_name, methods) in _STAGES.items():
        worker = getattr(modules.get(module_name), class_name, None)
        if not isinstance(worker, type):
            continue
        for method, role in methods.items():
            ctx.patcher.replace(worker, method, functools.partial(_stage, ctx.session, role))
        ctx.patcher.replace(
            worker, "_build_model_optimizer", functools.partial(_build, ctx.session)
        )


def _stage(session: Session, role: str, original: Any, gate: Gate) -> Any:
    @functools.wraps(original)
    def stage(self: Any, *args: Any, **kwargs: Any) -> Any:
        region = _begin(session, role, self) if gate.live else None
        error: BaseException | None = None
        try:
            return original(self, *args, **kwargs)
        except BaseException as raised:
            error = raised
            raise
        finally:
            if region is not None:
                session.end(region, error)

    return stage


def _begin(session: Session, role: str, worker: Any) -> Region | None:
    region = None  # what was made is ended, also where it could not be entered: its file tells
    with guard.failsafe("mindspeed_rl.begin"):
        step, source = _step(worker, role)
        made = session.new_region(None, step, role, step_source=source)
        collects = made.config.collects and _collected(made.config.collects_roles, role)
        made.config = dataclasses.replace(made.config, collects=collects)
        region = made
        session.enter(region)
    return region


def _collected(roles: list[str] | None, role: str) -> bool:
    """The collects are the rollout's, as MindSpeed-RL's own; more only where ``collects_roles`` says so."""
    return role == GENERATE if roles is None else role in roles


def _step(worker: Any, role: str) -> tuple[int, str]:
    """The step of the trainer's log, which counts from 1: iterations that are finished, plus this one."""
    iteration = getattr(worker, "iteration", None)
    if isinstance(iteration, int):
        return iteration + 1, "given"
    calls: dict[str, int] = worker.__dict__.setdefault(_CALLS, {})
    calls[role] = calls.get(role, 0) + 1
    return calls[role], "inferred"


def _build(session: Session, original: Any, gate: Gate) -> Any:
    """Megatron and MindSpeed patch while they build: assert every hook again, and watch the model."""

    @functools.wraps(original)
    def build_model_optimizer(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if gate.live:
            with guard.failsafe("mindspeed_rl.build"):
                session.installer.reassert()
                session.watcher.watch(result[0] if isinstance(result, tuple) else result)
        return result

    return build_model_optimizer

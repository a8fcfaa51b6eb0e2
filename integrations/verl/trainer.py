# SPDX-License-Identifier: Apache-2.0
"""The driver: sends the global step along with every batch; puts our numbers into the trainer's metrics."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rl_insight_hooks import guard
from rl_insight_hooks.patching import Gate

from .carry import put_step
from .metrics import merge
from .workers import SUMMARY_METHOD

if TYPE_CHECKING:
    from rl_insight_hooks.installer import Context

    from .stages import Stages

# module -> base class; its subclasses override single methods
_TRAINERS = {
    "verl.trainer.ppo.v1.trainer_base": "PPOTrainer",
    "verl.trainer.ppo.ray_trainer": "RayPPOTrainer",
}
_METHODS = (
    "_compute_old_log_prob",
    "_compute_ref_log_prob",
    "_compute_values",
    "_update_critic",
    "_update_actor",
)
_WORKER_GROUPS = ("actor_rollout_wg", "ref_policy_wg", "critic_wg")

_trainer: weakref.ref[Any] | None = None  # the one whose worker groups answer


def install(ctx: Context, stages: Stages, modules: Mapping[str, ModuleType]) -> None:
    """Hook the trainers and the tracker of the modules that are there."""
    for module_name, class_name in _TRAINERS.items():
        base = getattr(modules.get(module_name), class_name, None)
        if isinstance(base, type):
            for trainer in _with_subclasses(base):
                for method in _METHODS:
                    if method in vars(trainer):
                        ctx.patcher.replace(trainer, method, _send_step)
    tracking = getattr(modules.get("verl.utils.tracking"), "Tracking", None)
    if isinstance(tracking, type):
        ctx.patcher.replace(tracking, "log", _log)


def _with_subclasses(base: type[Any]) -> Iterator[type[Any]]:
    yield base
    for subclass in base.__subclasses__():
        yield from _with_subclasses(subclass)


def _send_step(original: Any, gate: Gate) -> Any:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if gate.live:
            with guard.failsafe("verl.send_step"):
                global _trainer
                if _trainer is None or _trainer() is not self:
                    _trainer = weakref.ref(self)
                put_step(args[0] if args else kwargs.get("batch"), self.global_steps)
        return original(self, *args, **kwargs)

    return method


def _log(original: Any, gate: Gate) -> Any:
    """``Tracking.log(data, step)``: every tracker that verl speaks to gets what this adds to ``data``."""

    @functools.wraps(original)
    def log(self: Any, data: Any, step: Any, *args: Any, **kwargs: Any) -> Any:
        if gate.live:
            with guard.failsafe("verl.metrics"):
                ours = _gather(step)
                if ours:
                    data = {**data, **ours}
        return original(self, data, step, *args, **kwargs)

    return log


def _gather(step: Any) -> dict[str, float]:
    """Ask every rank for its summary of ``step``; a worker group shared by roles is asked once."""
    trainer = None if _trainer is None else _trainer()
    if trainer is None or not isinstance(step, int) or step != trainer.global_steps:
        return {}
    groups = {id(group): group for group in (getattr(trainer, n, None) for n in _WORKER_GROUPS)}
    of_ranks: list[Mapping[str, float]] = []
    for group in groups.values():
        ask = getattr(group, SUMMARY_METHOD, None)
        if ask is not None:
            with guard.failsafe(
                "verl.summary"
            ):  # e.g. its workers run without us: the others' still count
                of_ranks.extend(answer for answer in ask(step) if answer)
    merged: dict[str, float] = merge(of_ranks)
    return merged

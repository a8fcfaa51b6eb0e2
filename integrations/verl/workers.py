# SPDX-License-Identifier: Apache-2.0
"""Train workers: a region a stage, and what tells the step."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rl_insight_hooks import guard
from rl_insight_hooks.patching import Gate

from . import stages as names
from .carry import take_step

if TYPE_CHECKING:
    from rl_insight_hooks.installer import Context

    from .stages import Stages

SUMMARY_METHOD = "rl_insight_summary"

# (worker, data) -> (role, engine)
Rule = Callable[[Any, Any], tuple[str, Any]]


def _of_part(role: str, part: str) -> Rule:
    def rule(worker: Any, data: Any) -> tuple[str, Any]:
        return role, getattr(getattr(worker, part, None), "engine", None)

    return rule


def _actor_log_prob(worker: Any, data: Any) -> tuple[str, Any]:
    # with LoRA the reference is the actor without its adapter
    role = names.REF_LOG_PROB if _has_key(data, "no_lora_adapter") else names.ACTOR_LOG_PROB
    return role, getattr(getattr(worker, "actor", None), "engine", None)


def _of_training_worker(language_model: str, value_model: str) -> Rule:
    def rule(worker: Any, data: Any) -> tuple[str, Any]:
        critic = getattr(worker.config, "model_type", None) == "value_model"
        return value_model if critic else language_model, getattr(worker, "engine", None)

    return rule


def _named(role: str) -> Rule:
    return lambda worker, data: (role, None)


_LEGACY: dict[str, dict[str, Rule]] = {
    "ActorRolloutRefWorker": {
        "update_actor": _named(names.ACTOR_UPDATE),
        "compute_log_prob": _named(names.ACTOR_LOG_PROB),
        "compute_ref_log_prob": _named(names.REF_LOG_PROB),
        "generate_sequences": _named(names.ROLLOUT_GENERATE),
    },
    "CriticWorker": {
        "compute_values": _named(names.COMPUTE_VALUES),
        "update_critic": _named(names.CRITIC_UPDATE),
    },
    "RewardModelWorker": {"compute_rm_score": _named(names.COMPUTE_RM_SCORE)},
}

# module -> class -> method -> whose region it is
_STAGES: dict[str, dict[str, dict[str, Rule]]] = {
    "verl.workers.engine_workers": {
        "ActorRolloutRefWorker": {
            "update_actor": _of_part(names.ACTOR_UPDATE, "actor"),
            "compute_log_prob": _actor_log_prob,
            "compute_ref_log_prob": _of_part(names.REF_LOG_PROB, "ref"),
        },
        "TrainingWorker": {
            "train_mini_batch": _of_training_worker("train_batch", names.CRITIC_UPDATE),
            "train_batch": _of_training_worker("train_batch", names.CRITIC_UPDATE),
            "infer_batch": _of_training_worker("infer_batch", names.COMPUTE_VALUES),
        },
    },
    "verl.workers.fsdp_workers": _LEGACY,
    "verl.workers.megatron_workers": _LEGACY,
}

# modules of legacy workers, built by init_model
_LEGACY_MODELS = (
    "actor_module_fsdp",
    "ref_module_fsdp",
    "actor_module",
    "ref_module",
    "critic_module",
    "reward_module",
)

_added: list[type] = []


def install(ctx: Context, stages: Stages, modules: Mapping[str, ModuleType]) -> None:
    """Hook the worker classes of the modules that are there."""
    for module_name, classes in _STAGES.items():
        module = modules.get(module_name)
        for class_name, methods in classes.items():
            worker = getattr(module, class_name, None)
            if not isinstance(worker, type):
                continue
            for method, rule in methods.items():
                ctx.patcher.replace(worker, method, functools.partial(_stage, stages, rule))
            for method, tell in (("update_weights", _synced), ("save_checkpoint", _saved)):
                ctx.patcher.replace(worker, method, functools.partial(_told, stages, tell))
            if classes is _LEGACY:
                ctx.patcher.replace(worker, "init_model", functools.partial(_init_model, stages))
            else:
                _add_summary(worker)
    profiler = modules.get("verl.utils.profiler.profile")
    if profiler is not None and hasattr(profiler, "DistProfilerExtension"):
        ctx.patcher.replace(
            profiler.DistProfilerExtension,
            "start_profile",
            functools.partial(_told, stages, _profiled),
        )


def uninstall() -> None:
    """Take the added methods away."""
    while _added:
        delattr(_added.pop(), SUMMARY_METHOD)


def _stage(stages: Stages, rule: Rule, original: Any, gate: Gate) -> Any:
    """A worker's method as a region."""

    @functools.wraps(original)
    def stage(self: Any, *args: Any, **kwargs: Any) -> Any:
        entered = _begin(stages, rule, self, args, kwargs) if gate.live else None
        if entered is None:
            return original(self, *args, **kwargs)
        error: BaseException | None = None
        try:
            return original(self, *args, **kwargs)
        except BaseException as raised:
            error = raised
            raise
        finally:
            stages.end(entered, error)

    return stage


def _begin(stages: Stages, rule: Rule, worker: Any, args: Any, kwargs: Any) -> Any:
    with guard.failsafe("verl.stage"):
        data = args[0] if args else next(iter(kwargs.values()), None)
        step = take_step(data)
        if step is not None:
            stages.clock.carried(step)
        role, engine = rule(worker, data)
        return stages.begin(role, engine)
    return None


def _told(stages: Stages, tell: Callable[..., None], original: Any, gate: Gate) -> Any:
    """A method whose arguments tell the step; the clock is set before it runs."""

    def listen(args: Any, kwargs: Any) -> None:
        if gate.live:
            with guard.failsafe("verl.step"):
                tell(stages, *args, **kwargs)

    if inspect.iscoroutinefunction(original):

        @functools.wraps(original)
        async def told_async(self: Any, *args: Any, **kwargs: Any) -> Any:
            listen(args, kwargs)
            return await original(self, *args, **kwargs)

        return told_async

    @functools.wraps(original)
    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        listen(args, kwargs)
        return original(self, *args, **kwargs)

    return told


def _synced(stages: Stages, global_steps: Any = None, *args: Any, **kwargs: Any) -> None:
    if isinstance(global_steps, int):
        stages.clock.synced(global_steps)


def _saved(
    stages: Stages,
    local_path: Any = None,
    hdfs_path: Any = None,
    global_step: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    if isinstance(global_step, int) and global_step > 0:
        stages.clock.saved(global_step)


def _profiled(stages: Stages, *args: Any, **kwargs: Any) -> None:
    step = kwargs.get("profile_step")
    if isinstance(step, (int, str)) and str(step).isdigit():
        stages.clock.profiled(int(step))


def _init_model(stages: Stages, original: Any, gate: Gate) -> Any:
    """Legacy workers build their modules here: watch them, and assert every hook again."""

    @functools.wraps(original)
    def init_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if gate.live:
            with guard.failsafe("verl.init_model"):
                stages.session.installer.reassert()
                for name in _LEGACY_MODELS:
                    module = getattr(self, name, None)
                    if module is not None:
                        stages.session.watcher.watch(module)
        return result

    return init_model


def _add_summary(worker: type) -> None:
    """Give ``worker`` the method that the driver's hook calls on every rank."""
    if SUMMARY_METHOD in vars(worker):
        return
    from verl.single_controller.base.decorator import MAGIC_ATTR, Dispatch, Execute

    attrs = {"dispatch_mode": Dispatch.ONE_TO_ALL, "execute_mode": Execute.ALL, "blocking": True}
    setattr(rl_insight_summary, MAGIC_ATTR, attrs)
    # Ray sends added methods by value where their name does not resolve: then a worker without us still starts
    rl_insight_summary.__module__ = worker.__module__
    setattr(worker, SUMMARY_METHOD, rl_insight_summary)
    _added.append(worker)


def rl_insight_summary(self: Any, step: int) -> Any:
    """Return this rank's summary of ``step``; refers to nothing of this module, see ``_add_summary``."""
    import importlib

    try:
        ours = importlib.import_module("rl_insight_hooks.integrations.verl.summary")
    except Exception:  # e.g. we were uninstalled since
        return {}
    return ours.of_step(step)


def _has_key(data: Any, key: str) -> bool:
    for where in (data, getattr(data, "extra_info", None), getattr(data, "meta_info", None)):
        keys = getattr(where, "keys", None)
        if callable(keys) and key in keys():
            return True
    return False

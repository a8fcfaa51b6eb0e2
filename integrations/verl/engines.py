# SPDX-License-Identifier: Apache-2.0
"""Train engines: after one is built its module is watched, and every hook is asserted again.

Building an engine patches: verl's NPU patches, MindSpeed's ``repatch`` (which throws away wrappers on
Megatron's attributes), msprobe at its first start, which is why a batch asserts again too.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rl_insight_hooks import guard, topology
from rl_insight_hooks.patching import Gate

if TYPE_CHECKING:
    from rl_insight_hooks.installer import Context

    from .stages import Stages

_PROVIDER = "verl"

# module -> classes with an ``initialize`` of their own; MindSpeed's and FSDP-turbo's engines inherit it
_ENGINES = {
    "verl.workers.engine.fsdp.transformer_impl": ("FSDPEngine",),
    "verl.workers.engine.megatron.transformer_impl": ("MegatronEngine",),
    "verl.workers.engine.veomni.transformer_impl": ("VeOmniEngine",),
    "verl.workers.engine.torchtitan.transformer_impl": ("TorchTitanEngine",),
    "verl.workers.engine.automodel.transformer_impl": ("AutomodelEngine",),
}


def install(ctx: Context, stages: Stages, modules: Mapping[str, ModuleType]) -> None:
    """Hook the engines of the modules that are there."""
    for module_name, classes in _ENGINES.items():
        for class_name in classes:
            engine = getattr(modules.get(module_name), class_name, None)
            if isinstance(engine, type):
                ctx.patcher.replace(engine, "initialize", functools.partial(_initialize, stages))
    base = getattr(modules.get("verl.workers.engine.base"), "BaseEngine", None)
    if base is not None:
        for method in ("train_batch", "infer_batch"):
            ctx.patcher.replace(base, method, functools.partial(_batch, stages))
        topology.add_provider(_PROVIDER, functools.partial(_provide, stages))


def uninstall() -> None:
    """Forget the topology provider."""
    topology.remove_provider(_PROVIDER)


def _initialize(stages: Stages, original: Any, gate: Gate) -> Any:
    @functools.wraps(original)
    def initialize(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if gate.live:
            with guard.failsafe("verl.initialize"):
                stages.session.installer.reassert()
                stages.session.watcher.watch(self.module)
        return result

    return initialize


def _batch(stages: Stages, original: Any, gate: Gate) -> Any:
    @functools.wraps(original)
    def batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if gate.live:
            with guard.failsafe("verl.batch"):
                stages.session.installer.reassert()
        return original(self, *args, **kwargs)

    return batch


def _provide(stages: Stages, place: topology.Place) -> None:
    """Fill in what the engine of the stage knows; Megatron's groups come from integrations/megatron.py."""
    engine = None if stages.engine is None else stages.engine()
    if engine is None:
        return
    _provide_model(engine, place)
    parallel = place.parallel
    if hasattr(
        engine, "ulysses_device_mesh"
    ):  # FSDP and what derives from it: no expert parallelism
        parallel.dp_size = engine.get_data_parallel_size()
        parallel.dp_rank = engine.get_data_parallel_rank()
        mesh = engine.ulysses_device_mesh
        if mesh is not None:
            parallel.cp_size = mesh["sp"].size()
            parallel.cp_rank = mesh["sp"].get_local_rank()


def _provide_model(engine: Any, place: topology.Place) -> None:
    config = getattr(getattr(engine, "model_config", None), "hf_config", None)
    config = getattr(config, "text_config", None) or config
    for field, names in (
        ("num_experts", ("num_experts", "n_routed_experts", "num_local_experts")),
        ("top_k", ("num_experts_per_tok", "moe_topk")),
    ):
        for name in names:
            value = getattr(config, name, None)
            if isinstance(value, int) and value > 0:
                setattr(place, field, value)
                break

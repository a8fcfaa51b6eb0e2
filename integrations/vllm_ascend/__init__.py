# SPDX-License-Identifier: Apache-2.0
"""vllm-ascend: the experts that every fused-MoE call routes its tokens to, by logical id.

Target   ``apply`` of every fused-MoE method and quantisation scheme; ``select_experts`` and the routers, where
         the ids are; ``_dummy_run`` and ``execute_model`` of the model runners.
Why      the engine's grouped matmuls see physical experts of this rank, in profile and dummy runs too, and
         some paths have none.
How      capture the ids where they are selected, commit them in the outermost ``apply``, where layer, mask and
         flags are known (docs/seams-rollout.md). Classes are found by the shape of their methods, not by name:
         the versions differ in names and places.
Not covered  models traced by torchair (0.9.1 to 0.11), DBO models of 0.9.1 that bypass ``apply``, the xlite
         graph (C++).
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rl_insight_hooks import topology

from . import capture, runner
from .apply import MoeSeam

if TYPE_CHECKING:
    from rl_insight_hooks.installer import Context
    from rl_insight_hooks.session import Session

SUPPORTED = "0.9.1 to 0.26 and the routers of main (tested with 0.11.0, 0.13.0, 0.18.0)"

_PREFIXES = ("vllm_ascend", "mindspeed_rl")
_SELECTORS = ("select_experts", "torchair_select_experts")
_UPSTREAM_ROUTERS = "vllm.model_executor.layers.fused_moe.router."
_PROVIDER = "vllm_ascend"

_seams: weakref.WeakKeyDictionary[Session, MoeSeam] = weakref.WeakKeyDictionary()
_looked_at: weakref.WeakKeyDictionary[Session, set[str]] = weakref.WeakKeyDictionary()


def install(ctx: Context) -> None:
    """Hook what of vllm-ascend is imported; called again it hooks what has come since."""
    topology.add_provider(_PROVIDER, seam_of(ctx.session).provide)
    refresh(ctx)


def refresh(ctx: Context) -> None:
    """Hook the methods of modules imported since the last time: quantisation schemes come with a model."""
    seam = seam_of(ctx.session)
    runner.install(ctx.patcher, seam.steps, ctx.session.installer.reassert)
    looked_at = _looked_at.setdefault(ctx.session, set())
    for name in set(sys.modules) - looked_at:
        if not name.startswith((*_PREFIXES, _UPSTREAM_ROUTERS)):
            looked_at.add(name)
            continue
        module = sys.modules.get(name)
        if not isinstance(module, ModuleType):
            continue
        # half imported: what is there is hooked, and the next look finds the rest.
        # vars, not getattr: a lazy module's own __getattr__ would import things
        if not getattr(vars(module).get("__spec__"), "_initializing", False):
            looked_at.add(name)
        _hook_module(ctx, seam, module)


def uninstall(ctx: Context) -> None:
    """Find the names bound to a replacement after us, so that they too get the original back."""
    topology.remove_provider(_PROVIDER)
    _seams.pop(ctx.session, None)
    _looked_at.pop(ctx.session, None)
    by_id = {id(p.replacement): p for p in ctx.patcher.patches if p.rebind_prefixes == _PREFIXES}
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or not name.startswith(_PREFIXES):
            continue
        namespace = vars(module)
        for key, value in list(namespace.items()):
            patch = by_id.get(id(value))
            if patch is not None and namespace is not vars(patch.owner):
                patch.rebound.append((namespace, key))


def seam_of(session: Session) -> MoeSeam:
    """Return the seam of ``session``."""
    seam = _seams.get(session)
    if seam is None:
        seam = _seams[session] = MoeSeam(session)
    return seam


def _hook_module(ctx: Context, seam: MoeSeam, module: ModuleType) -> None:
    for name in _SELECTORS:
        function = vars(module).get(name)
        if inspect.isfunction(function) and function.__module__ == module.__name__:
            factory = functools.partial(capture.selector, seam.aside)
            ctx.patcher.replace(module, name, factory, rebind=_PREFIXES)
    for cls in _classes_of(module):
        own = vars(cls)
        if "_compute_routing" in own:
            factory = functools.partial(capture.router, seam.aside)
            ctx.patcher.replace(cls, "_compute_routing", factory)
        if module.__name__.startswith(_UPSTREAM_ROUTERS):
            continue
        if "apply" in own and is_moe_method(own["apply"]):
            hook_method(ctx, seam, cls)
        if "fused_experts" in own and inspect.isfunction(own["fused_experts"]):
            ctx.patcher.replace(cls, "fused_experts", capture.fused_experts)


def hook_method(ctx: Context, seam: MoeSeam, cls: type) -> None:
    """Hook ``cls.apply``."""
    name = f"{cls.__module__.partition('.')[0]}.{cls.__name__}"
    ctx.patcher.replace(cls, "apply", functools.partial(seam.apply, name))
    if "npu_moe_gating_top_k" not in _names_in(vars(cls)["apply"]):
        return
    torch_npu = sys.modules.get("torch_npu")  # 0.9.1 and MindSpeed-RL call it in apply itself
    if torch_npu is not None and hasattr(torch_npu, "npu_moe_gating_top_k"):
        ctx.patcher.replace(torch_npu, "npu_moe_gating_top_k", capture.gating)


def is_moe_method(function: Any) -> bool:
    """Return True for an ``apply`` of a fused-MoE method, of any version."""
    if not inspect.isfunction(function) or getattr(function, "__isabstractmethod__", False):
        return False
    parameters = inspect.signature(function).parameters
    return "layer" in parameters and ("router_logits" in parameters or "topk_ids" in parameters)


def _names_in(function: Any) -> tuple[str, ...]:
    names = getattr(inspect.unwrap(function), "__code__", None)
    return () if names is None else tuple(names.co_names)


def _classes_of(module: ModuleType) -> Iterator[type]:
    """Classes defined in ``module``."""
    for value in list(vars(module).values()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            yield value

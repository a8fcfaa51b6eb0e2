# SPDX-License-Identifier: Apache-2.0
"""torch_npu: the grouped-matmul family.

Target   attributes of the modules ``torch_npu`` and ``torch.ops.npu`` (the same operator packets).
Why      every grouped expert GEMM of verl's patches, VeOmni, MindSpeed's TE path and vllm-ascend passes here.
How      a plain closure for each operator; names bound before us are rebound by identity. ``.default`` and
         ``.List`` on ``torch_npu.X`` are hooked too; on ``torch.ops.npu.X`` they stay the real OpOverloads,
         which dispatch rules compare by identity.
Not covered  MindSpeed's C++ extension (integrations/mindspeed.py); calls from C++; graph replay runs no Python
         (captured adds into our buffers do count).
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rl_insight_hooks import compiled, guard
from rl_insight_hooks.compiled import is_compiling
from rl_insight_hooks.group_list import COUNTS, CUMULATIVE, WEIGHT_GROUP_TYPE
from rl_insight_hooks.patching import Gate
from rl_insight_hooks.state import STATE

if TYPE_CHECKING:
    from rl_insight_hooks.installer import Context
    from rl_insight_hooks.recorder import Recorder

SUPPORTED = "2.1 to 2.13 (tested with 2.13.0)"

_OVERLOADS = ("default", "List")
_DYNAMO_CODE = "<eval_with_key>"  # file name of the code of a torch.fx graph


class _Seam:
    """Where an operator takes its arguments; what its group_list and its axis are by default."""

    __slots__ = ("group_list_at", "group_list_type", "group_type", "name", "x_at")

    def __init__(
        self,
        name: str,
        *,
        group_list_at: int,
        group_list_type: int,
        x_at: int = 0,
        group_type: int = 0,
    ) -> None:
        self.name = f"torch_npu.{name}"
        self.x_at = x_at  # the weight follows
        self.group_list_at = group_list_at
        self.group_list_type = group_list_type
        self.group_type = group_type


_WEIGHT_NAMES = ("weight", "quantized_weight", "w")


# npu_grouped_matmul itself takes group_list by keyword only and has a closure of its own.
_OTHER_OPS = {
    # w13 of a quantised layer; group_list is cumulative and there is no type argument
    "npu_grouped_matmul_swiglu_quant": _Seam(
        "npu_grouped_matmul_swiglu_quant", group_list_at=2, group_list_type=CUMULATIVE
    ),
    "npu_grouped_matmul_swiglu_quant_v2": _Seam(
        "npu_grouped_matmul_swiglu_quant_v2", group_list_at=4, group_list_type=CUMULATIVE
    ),
    # w2 of a quantised layer, with the un-permutation fused
    "npu_grouped_matmul_finalize_routing": _Seam(
        "npu_grouped_matmul_finalize_routing", group_list_at=2, group_list_type=COUNTS
    ),
    "npu_quant_grouped_matmul_dequant": _Seam(
        "npu_quant_grouped_matmul_dequant", group_list_at=3, group_list_type=CUMULATIVE
    ),
    # a weight gradient, added to what is there
    **{
        name: _Seam(
            name,
            x_at=1,
            group_list_at=3,
            group_list_type=CUMULATIVE,
            group_type=WEIGHT_GROUP_TYPE,
        )
        for name in ("npu_grouped_matmul_add", "npu_grouped_matmul_add_")
    },
}
# operator -> position of ep_world_size; send_counts and recv_counts follow. npu_gmm_alltoallv, the way back of the
# same layer, is left alone.
_ALLTOALLV_OPS = {"npu_alltoallv_gmm": 3, "npu_alltoallv_quant_gmm": 5}


def install(ctx: Context) -> None:
    """Hook the operators that this torch_npu has; called again it only puts back what is missing."""
    import torch
    import torch_npu

    factories: dict[str, Callable[[Any, Gate], Any]] = {
        name: functools.partial(_alltoallv_gmm, ctx.recorder, f"torch_npu.{name}", at)
        for name, at in _ALLTOALLV_OPS.items()
    }
    factories["npu_grouped_matmul"] = functools.partial(_grouped_matmul, ctx.recorder)
    for name, seam in _OTHER_OPS.items():
        factories[name] = functools.partial(_other_op, ctx.recorder, seam)
    for name, factory in factories.items():
        if getattr(torch_npu, name, None) is None:
            continue
        ctx.patcher.replace(
            torch_npu, name, functools.partial(_with_overloads, factory, True), rebind=("",)
        )
        if getattr(torch.ops.npu, name, None) is not None:
            ctx.patcher.replace(
                torch.ops.npu, name, functools.partial(_with_overloads, factory, False)
            )


def _with_overloads(
    factory: Callable[[Any, Gate], Any], hook_overloads: bool, packet: Any, gate: Gate
) -> Any:
    """Make the replacement of a packet and give it the packet's overloads."""
    replacement = factory(packet, gate)
    for overload in _OVERLOADS:
        op = getattr(packet, overload, None)
        if op is not None:
            setattr(replacement, overload, factory(op, gate) if hook_overloads else op)
    # torch walks every packet of a namespace (export's and inductor's decomposition tables do)
    for name in dir(type(packet)):
        if not name.startswith("_") and not hasattr(replacement, name):
            setattr(replacement, name, getattr(packet, name))
    return replacement


def _grouped_matmul(recorder: Recorder, original: Any, gate: Gate) -> Any:
    state = STATE
    seam = "torch_npu.npu_grouped_matmul"

    @functools.wraps(original)
    def npu_grouped_matmul(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        if state.on and gate.live:
            if is_compiling():
                compiled.on_group_list(
                    kwargs.get("group_list"),
                    kwargs.get("group_list_type") or 0,
                    kwargs.get("group_type"),
                )
                return out
            counted = state.counted
            if counted is not None and kwargs.get("group_type") != WEIGHT_GROUP_TYPE:
                counted.num_calls += 1  # a later call of a watched layer's pass
                return out
            try:
                caller = sys._getframe().f_back  # None: called by C code
                if caller is not None and caller.f_code.co_filename.startswith(_DYNAMO_CODE):
                    return out  # a compiled graph run by Python: what was traced above speaks
                recorder.on_group_list(
                    seam,
                    kwargs.get("group_list"),
                    kwargs.get("group_list_type") or 0,
                    kwargs.get("group_type"),
                    args[0] if args else kwargs["x"],
                    args[1] if len(args) > 1 else kwargs["weight"],
                )
            except Exception:
                guard.failed(seam)
        return out

    return npu_grouped_matmul


def _other_op(recorder: Recorder, seam: _Seam, original: Any, gate: Gate) -> Any:
    state = STATE
    name = seam.name

    @functools.wraps(original)
    def grouped_matmul_op(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        if state.on and gate.live:
            at = seam.group_list_at
            group_list = args[at] if len(args) > at else kwargs.get("group_list")
            list_type = kwargs.get("group_list_type")
            if list_type is None:
                list_type = seam.group_list_type
            group_type = kwargs.get("group_type", seam.group_type)
            if is_compiling():
                compiled.on_group_list(group_list, list_type, group_type)
                return out
            try:
                at = seam.x_at
                x = args[at] if len(args) > at else kwargs["x"]
                weight = (
                    args[at + 1]
                    if len(args) > at + 1
                    else next(kwargs[key] for key in _WEIGHT_NAMES if key in kwargs)
                )
                weights = weight if isinstance(weight, (list, tuple)) else (weight,)
                recorder.on_group_list(name, group_list, list_type, group_type, (x,), weights)
            except Exception:
                guard.failed(name)
        return out

    return grouped_matmul_op


def _alltoallv_gmm(
    recorder: Recorder, seam: str, ep_world_size_at: int, original: Any, gate: Gate
) -> Any:
    state = STATE

    @functools.wraps(original)
    def alltoallv_gmm(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        if state.on and gate.live and not is_compiling():
            try:
                x = args[0] if args else kwargs["gmm_x"]
                weight = args[1] if len(args) > 1 else kwargs["gmm_weight"]
                at = ep_world_size_at
                ep_world_size = args[at] if len(args) > at else kwargs["ep_world_size"]
                recv_counts = args[at + 2] if len(args) > at + 2 else kwargs["recv_counts"]
                # recv_counts[r * E_local + e]: tokens that rank r sends to local expert e
                num_local = len(recv_counts) // ep_world_size
                per_expert = [sum(recv_counts[e::num_local]) for e in range(num_local)]
                recorder.begin_pass()  # one call is one layer
                recorder.on_group_list(
                    seam, list(itertools.accumulate(per_expert)), CUMULATIVE, 0, (x,), (weight,)
                )
            except Exception:
                guard.failed(seam)
        return out

    return alltoallv_gmm

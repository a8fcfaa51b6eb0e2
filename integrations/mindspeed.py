# SPDX-License-Identifier: Apache-2.0
"""MindSpeed: grouped matmuls that never reach torch_npu.

Target   ``mindspeed.ops.gmm.npu_gmm`` (cumulative list) and ``npu_gmm_v2`` (counts), looked up by attribute.
Why      in BF16 on A2 and A3 they run in a C++ extension.
How      as torch_npu's operator: a closure that records after the host's call. Where Megatron's experts module
         is hooked too, it speaks and this seam keeps quiet.
Not covered  callers of the loaded extension itself (overlap schedules, deferred weight gradients); gradients,
         which the extension computes. ``uncovered`` names them where the extension is loaded.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from rl_insight_hooks import guard
from rl_insight_hooks.compiled import is_compiling
from rl_insight_hooks.group_list import COUNTS, CUMULATIVE
from rl_insight_hooks.patching import Gate
from rl_insight_hooks.state import STATE

if TYPE_CHECKING:
    from rl_insight_hooks.installer import Context
    from rl_insight_hooks.recorder import Recorder

SUPPORTED = "master of 2026 (by its source; tested in its shape, it is on no package index)"

_GMM = "mindspeed.ops.gmm"
_FUNCTIONS = {"npu_gmm": CUMULATIVE, "npu_gmm_v2": COUNTS}


def install(ctx: Context) -> None:
    """Hook the functions of ``mindspeed.ops.gmm``, once it is imported."""
    gmm = sys.modules.get(_GMM)
    for name, list_type in _FUNCTIONS.items():
        if getattr(gmm, name, None) is not None:
            factory = functools.partial(_gmm, ctx.recorder, f"{_GMM}.{name}", list_type)
            ctx.patcher.replace(gmm, name, factory, rebind=("mindspeed", "megatron"))


def refresh(ctx: Context) -> None:
    """Hook what has come since."""
    install(ctx)


def uncovered(ctx: Context) -> list[str]:
    """Return the paths in use here that no hook sees."""
    builder = sys.modules.get("mindspeed.op_builder.builder")
    loaded = getattr(getattr(builder, "MindSpeedOpBuilder", None), "_loaded_ops", None) or {}
    return [
        f"direct callers of MindSpeed's C++ extension {name}"
        for name in ("grouped_matmul", "grouped_matmul_v2")
        if name in loaded
    ]


def _gmm(recorder: Recorder, seam: str, list_type: int, original: Any, gate: Gate) -> Any:
    state = STATE

    @functools.wraps(original)
    def npu_gmm(x: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
        if not (state.on and gate.live) or is_compiling():
            return original(x, weight, *args, **kwargs)
        state.claims += 1  # some chips reach torch_npu from here
        try:
            out = original(x, weight, *args, **kwargs)
        finally:
            state.claims -= 1
        try:
            recorder.on_group_list(
                seam,
                kwargs.get("group_list"),
                list_type,
                kwargs.get("group_type", 0),
                (x,),
                (weight,),
            )
        except Exception:
            guard.failed(seam)
        return out

    return npu_gmm

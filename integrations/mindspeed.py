# SPDX-License-Identifier: Apache-2.0
"""MindSpeed: grouped matmuls that never reach torch_npu.

Target   ``mindspeed.ops.gmm.npu_gmm`` (cumulative list) and ``npu_gmm_v2`` (counts), looked up by attribute, and
         the C++ extension that they load: ``npu_gmm``, ``npu_gmm_backward``, ``npu_gmm_backward_fusion``.
Why      in BF16 on A2 and A3 they run in that extension; overlap schedules call it directly, and only it sees
         the backward.
How      as torch_npu's operator: a closure that records after the host's call. The extension is hooked when
         ``MindSpeedOpBuilder.load`` hands it out, so that its first call counts too. The outer of two seams
         speaks, the inner keeps quiet.
Not covered  weight gradients by ``npu_groupmatmul_add_fp32`` (``gemm_fusion``): dx is recorded, dw is not.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rl_insight_hooks import guard
from rl_insight_hooks.compiled import is_compiling
from rl_insight_hooks.group_list import COUNTS, CUMULATIVE, WEIGHT_GROUP_TYPE
from rl_insight_hooks.patching import Gate, is_ours
from rl_insight_hooks.state import STATE

if TYPE_CHECKING:
    from rl_insight_hooks.installer import Context
    from rl_insight_hooks.recorder import Recorder

SUPPORTED = "master of 2026 (by its source; tested in its shape, it is on no package index)"

_GMM = "mindspeed.ops.gmm"
_BUILDER = "mindspeed.op_builder.builder"
_FUNCTIONS = {"npu_gmm": CUMULATIVE, "npu_gmm_v2": COUNTS}
_EXTENSIONS = {
    "grouped_matmul": CUMULATIVE,
    "grouped_matmul_v2": COUNTS,
}  # builder's name -> default


def install(ctx: Context) -> None:
    """Hook ``mindspeed.ops.gmm`` and the extension, as far as they are imported."""
    gmm = sys.modules.get(_GMM)
    for name, list_type in _FUNCTIONS.items():
        if getattr(gmm, name, None) is not None:
            factory = functools.partial(_gmm, ctx.recorder, f"{_GMM}.{name}", list_type)
            ctx.patcher.replace(gmm, name, factory, rebind=("mindspeed", "megatron"))
    builder = _builder()
    if builder is not None and "load" in vars(builder):
        ctx.patcher.replace(builder, "load", functools.partial(_load, ctx))
    for name, extension in _loaded().items():
        _hook_extension(ctx, name, extension)


def refresh(ctx: Context) -> None:
    """Hook what has come since."""
    install(ctx)


def uncovered(ctx: Context) -> list[str]:
    """Return the paths in use here that no hook sees."""
    return [
        f"direct callers of MindSpeed's C++ extension {name}"
        for name, extension in _loaded().items()
        if not is_ours(getattr(extension, "npu_gmm", None))
    ]


def _builder() -> Any:
    return getattr(sys.modules.get(_BUILDER), "MindSpeedOpBuilder", None)


def _loaded() -> dict[str, Any]:
    """Return the grouped-matmul extensions that were loaded, by name."""
    loaded = getattr(_builder(), "_loaded_ops", None) or {}
    return {name: loaded[name] for name in _EXTENSIONS if name in loaded}


def _load(ctx: Context, original: Any, gate: Gate) -> Any:
    seen: set[int] = set()  # load() is called for every operation

    @functools.wraps(original)
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        extension = original(self, *args, **kwargs)
        if gate.live and id(extension) not in seen:
            seen.add(id(extension))
            try:
                if self.name in _EXTENSIONS:
                    _hook_extension(ctx, self.name, extension)
            except Exception:
                guard.failed(f"{_BUILDER}.load")
        return extension

    return load


def _hook_extension(ctx: Context, name: str, extension: Any) -> None:
    if not isinstance(extension, ModuleType):
        return  # uncovered() names it
    for function, record in _EXTENSION_FUNCTIONS.items():
        factory = functools.partial(
            _extension, ctx.recorder, f"mindspeed.{name}.{function}", _EXTENSIONS[name], record
        )
        ctx.patcher.replace(extension, function, factory)


def _gmm(recorder: Recorder, seam: str, list_type: int, original: Any, gate: Gate) -> Any:
    state = STATE

    @functools.wraps(original)
    def npu_gmm(x: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
        if not (state.on and gate.live) or is_compiling():
            return original(x, weight, *args, **kwargs)
        state.claims += 1  # the extension, on some chips torch_npu, is reached from here
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


Record = Callable[["Recorder", str, int, tuple[Any, ...]], None]


def _extension(
    recorder: Recorder, seam: str, default_type: int, record: Record, original: Any, gate: Gate
) -> Any:
    """Replace one function of the extension; pybind's take positional arguments."""
    state = STATE

    @functools.wraps(original)
    def extension_function(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        if state.on and gate.live and not is_compiling():
            try:
                record(recorder, seam, default_type, args)
            except Exception:
                guard.failed(seam)
        return out

    return extension_function


def _type(args: tuple[Any, ...], at: int, default: int) -> int:
    return default if len(args) <= at or args[at] is None else int(args[at])


def _forward(recorder: Recorder, seam: str, default_type: int, args: tuple[Any, ...]) -> None:
    """``npu_gmm(x, weight, bias, group_list, group_type, group_list_type)``."""
    x, weight, _bias, group_list = args[:4]
    list_type = _type(args, 5, default_type)
    recorder.on_group_list(seam, group_list, list_type, _type(args, 4, 0), x, weight, depth=3)


def _dx(
    recorder: Recorder, seam: str, list_type: int, group_list: Any, grad: Any, weight: Any
) -> None:
    transposed = [w.transpose(-1, -2) for w in weight]
    recorder.on_group_list(seam, group_list, list_type, 0, grad, transposed, depth=4)


def _backward(recorder: Recorder, seam: str, default_type: int, args: tuple[Any, ...]) -> None:
    """``npu_gmm_backward(grad, x, weight, group_list, group_list_type)``: dx and dw in one call."""
    grad, x, weight, group_list = args[:4]
    list_type = _type(args, 4, default_type)
    _dx(recorder, seam, list_type, group_list, grad, weight)
    recorder.on_group_list(seam, group_list, list_type, WEIGHT_GROUP_TYPE, x, grad, depth=3)


def _backward_fusion(
    recorder: Recorder, seam: str, default_type: int, args: tuple[Any, ...]
) -> None:
    """``npu_gmm_backward_fusion(grad, weight, group_list, group_list_type)``: dx alone."""
    grad, weight, group_list = args[:3]
    _dx(recorder, seam, _type(args, 3, default_type), group_list, grad, weight)


_EXTENSION_FUNCTIONS: dict[str, Record] = {
    "npu_gmm": _forward,
    "npu_gmm_backward": _backward,
    "npu_gmm_backward_fusion": _backward_fusion,
}

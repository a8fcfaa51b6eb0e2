# SPDX-License-Identifier: Apache-2.0
"""Where the routed expert ids are seen: the selectors, the routers, the gating operator, the last resort.

Nothing is counted here. A hook puts the ids into the fused-MoE call under way (``CALL``), or, where experts
are selected before ``apply`` is called, aside for the next one.
"""

from __future__ import annotations

import contextvars
import functools
from typing import TYPE_CHECKING, Any

from rl_insight_hooks import guard
from rl_insight_hooks.compiled import is_compiling
from rl_insight_hooks.patching import Gate

if TYPE_CHECKING:
    from rl_insight_hooks.recorder import Recorder

# Where ids came from, least to most trusted: the best source that spoke in a call is counted.
FROM_COMM = (
    "fused_experts"  # what the communication method was handed, after zero experts were removed
)
FROM_GATING = "gating"  # npu_moe_gating_top_k, where a version has no selector
FROM_SELECTOR = "selector"
FROM_ROUTER = "router"
_TRUST = {FROM_COMM: 0, FROM_GATING: 1, FROM_SELECTOR: 2, FROM_ROUTER: 2}


class Call:
    """One fused-MoE call under way: the ids seen in it so far."""

    __slots__ = ("ids", "source")

    def __init__(self) -> None:
        self.ids: Any = None
        self.source: str | None = None

    def see(self, ids: Any, source: str) -> None:
        """Keep ``ids`` unless a better source has spoken."""
        if self.source is None or _TRUST[source] >= _TRUST[self.source]:
            self.ids, self.source = ids, source


# One apply call, on its own thread; two micro-batches may interleave on two threads.
CALL: contextvars.ContextVar[Call | None] = contextvars.ContextVar("rl_insight_call", default=None)


class Aside:
    """Ids selected before ``apply`` (fc3 overlap of 0.13 to 0.23, routers of main): for the next call."""

    __slots__ = ("_call", "_recorder")

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._call: Call | None = None

    def put(self, ids: Any, source: str) -> None:
        """Keep ``ids`` for the next apply; ids that no apply took are lost, and counted so."""
        if self._call is not None:
            self._recorder.drop("experts selected outside any hooked fused-MoE call")
        self._call = Call()
        self._call.see(ids, source)

    def take(self) -> Call:
        """Return what was put aside, or an empty call."""
        call = self._call
        if call is None:
            return Call()
        self._call = None
        return call


def selector(aside: Aside, original: Any, gate: Gate) -> Any:
    """``select_experts`` and its kin: return (weights, ids, ...)."""

    @functools.wraps(original)
    def select_experts(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if gate.live and not is_compiling():
            try:
                _see(aside, result[1], FROM_SELECTOR)
            except Exception:
                guard.failed("vllm_ascend.select_experts")
        return result

    return select_experts


_routing: contextvars.ContextVar[bool] = contextvars.ContextVar("rl_insight_routing", default=False)


def router(aside: Aside, original: Any, gate: Gate) -> Any:
    """``_compute_routing`` of main's routers: logical ids; the outermost of a class and its base speaks."""

    @functools.wraps(original)
    def _compute_routing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not gate.live or is_compiling() or _routing.get():
            return original(self, *args, **kwargs)
        token = _routing.set(True)
        try:
            result = original(self, *args, **kwargs)
        finally:
            _routing.reset(token)
        try:
            _see(aside, result[1], FROM_ROUTER)
        except Exception:
            guard.failed("vllm_ascend.router")
        return result

    return _compute_routing


def gating(original: Any, gate: Gate) -> Any:
    """``torch_npu.npu_moe_gating_top_k``: only inside a fused-MoE call."""

    @functools.wraps(original)
    def npu_moe_gating_top_k(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if gate.live and not is_compiling():
            call = CALL.get()
            if call is not None:
                try:
                    call.see(result[1], FROM_GATING)
                except Exception:
                    guard.failed("vllm_ascend.gating")
        return result

    return npu_moe_gating_top_k


def fused_experts(original: Any, gate: Gate) -> Any:
    """``MoECommMethod.fused_experts``: for a method whose selector nobody hooked."""

    @functools.wraps(original)
    def fused_experts(self: Any, *args: Any, **kwargs: Any) -> Any:
        if gate.live and not is_compiling():
            call = CALL.get()
            if call is not None and call.source is None:
                try:
                    given = kwargs.get("fused_experts_input", args[0] if args else None)
                    ids = getattr(given, "topk_ids", None)
                    ids = kwargs.get("topk_ids") if ids is None else ids
                    if ids is not None:
                        call.see(ids, FROM_COMM)
                except Exception:
                    guard.failed("vllm_ascend.fused_experts")
        return original(self, *args, **kwargs)

    return fused_experts


def _see(aside: Aside, ids: Any, source: str) -> None:
    call = CALL.get()
    if call is None:
        aside.put(ids, source)
    else:
        call.see(ids, source)

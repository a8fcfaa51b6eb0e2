# SPDX-License-Identifier: Apache-2.0
"""``watch(model)``: exact layer names and numbers by two light hooks on every MoE block."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from rl_insight_hooks import guard
from rl_insight_hooks.counters import FORM_COUNTS, FORM_CUMULATIVE
from rl_insight_hooks.layers import (
    Layer,
    layer_number_in_name,
    moe_blocks,
    num_experts_of,
    own_layer_number,
    top_k_of,
)
from rl_insight_hooks.schema import PHASE_COMPILED
from rl_insight_hooks.state import STATE

if TYPE_CHECKING:
    import torch

    from rl_insight_hooks.recorder import Recorder

_COMPILED_SEAM = "compiled graph"


class Watcher:
    """Holds the hooks that ``watch`` put on modules."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._handles: list[Any] = []
        self._watched: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def watch(self, model: torch.nn.Module, *, name_prefix: str = "", layer_offset: int = 0) -> int:
        """Hook every MoE block of ``model`` that is not hooked yet; return how many blocks are watched now.

        Args:
            model: any module, or a list of them (Megatron's virtual-pipeline chunks).
            name_prefix: put before the qualified names.
            layer_offset: added to numbers taken from names, for a pipeline stage whose names start at 0.
                Numbers that the module itself states (Megatron's layer_number) are global already.
        """
        chunks = list(model) if isinstance(model, (list, tuple)) else [model]
        num_watched = 0
        for chunk in chunks:
            for name, block in moe_blocks(chunk):
                num_watched += 1
                if block in self._watched:
                    continue
                self._watched.add(block)
                number = own_layer_number(block)
                if number is None:
                    number = layer_number_in_name(name)
                    number = None if number is None else number + layer_offset
                layer = self._recorder.layers.watch_module(block, number, f"{name_prefix}{name}")
                layer.num_experts = num_experts_of(block)
                layer.top_k = top_k_of(block)
                self._allocate_compiled(layer, block)
                self._handles.append(
                    block.register_forward_pre_hook(_enter_hook(layer), with_kwargs=True)
                )
                self._handles.append(block.register_forward_hook(_leave, always_call=True))
        return num_watched

    def unwatch(self) -> None:
        """Take every hook off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watched = weakref.WeakSet()

    def _allocate_compiled(self, layer: Layer, block: torch.nn.Module) -> None:
        """Rows for compiled graphs must exist before the trace; those of a ``watch`` before serve again."""
        parameter = next(block.parameters(), None)
        if layer.num_experts is None or parameter is None or parameter.device.type == "meta":
            return
        make = self._recorder.pool.allocate
        n = layer.num_experts
        where = parameter.device
        known = layer.compiled_counts
        if known is not None and known.shape[0] == n and known.device == where:
            return
        layer.compiled_counts = make(
            layer, PHASE_COMPILED, FORM_COUNTS, _COMPILED_SEAM, n, n, where
        ).buf
        layer.compiled_cumulative = make(
            layer, PHASE_COMPILED, FORM_CUMULATIVE, _COMPILED_SEAM, n, n, where
        ).buf


def _enter_hook(layer: Layer) -> Any:
    state = STATE

    def enter(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if not state.on:
            return
        state.layer = layer
        state.armed = True
        state.counted = None
        state.num_tokens = 0
        try:
            state.evaluating = not module.training
            state.num_tokens = _num_tokens(args, kwargs)
        except Exception:
            guard.failed("watch")

    return enter


def _num_tokens(args: Any, kwargs: Any) -> int:
    hidden = args[0] if args else kwargs.get("hidden_states")
    shape = getattr(hidden, "shape", None)
    if shape is None:
        return 0  # no tensor comes first: the tokens are not known
    num_tokens = 1
    for size in shape[:-1]:
        num_tokens *= size
    return num_tokens


def _leave(module: torch.nn.Module, args: Any, output: Any) -> None:
    STATE.layer = None
    STATE.armed = False
    STATE.counted = None
    STATE.evaluating = False


def watch_safely(watcher: Watcher, model: Any, **options: Any) -> int:
    """As :meth:`Watcher.watch`; a failure of ours is counted and returns 0."""
    with guard.failsafe("watch"):
        return watcher.watch(model, **options)
    return 0

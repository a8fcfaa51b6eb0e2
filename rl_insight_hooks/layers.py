# SPDX-License-Identifier: Apache-2.0
"""Which layer a call belongs to: from ``watch``, from the calling module, else from call order."""

from __future__ import annotations

import functools
import re
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from rl_insight_hooks.schema import LAYER_FROM_CALL_ORDER, LAYER_FROM_MODULE, LAYER_UNKNOWN

if TYPE_CHECKING:
    import torch

_LAYER_IN_NAME = re.compile(r"(?:^|\.)(?:layers|h|blocks|decoder_layers)\.(\d+)(?:\.|$)")
_MAX_FRAMES = 16
_MAX_LAYERS_BY_ORDER = (
    4096  # more passes in one forward are no layers: nothing tells where one ends
)


class LayerRef(NamedTuple):
    """How a seam names a layer: number (None: not known), qualified name, where both came from."""

    number: int | None
    name: str | None
    source: str


@dataclass(slots=True, eq=False)
class Layer:
    """One MoE layer of one model in this process.

    ``number`` is the decoder layer's (0-based) where source is "module"; None means that the order among the
    layers of the role decides when the file is written. ``slots`` holds its accumulators.
    """

    serial: int  # order of first sight in this process
    number: int | None
    name: str | None
    source: str
    slots: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    forward_slot: Any = None  # the slot of the last forward, to skip the dict
    num_experts: int | None = None
    top_k: int | None = None
    # rows that compiled graphs add to; allocated by watch, before any trace
    compiled_counts: Any = None
    compiled_cumulative: Any = None


class LayerRegistry:
    """Makes and finds the layers of this process."""

    def __init__(self) -> None:
        # id -> (module, its layer): a hundred ns faster than a WeakKeyDictionary
        self._by_module: dict[int, tuple[weakref.ref[torch.nn.Module], Layer]] = {}
        self._by_order: list[Layer] = []
        self._by_key: dict[tuple[object, ...], Layer] = {}
        self._layers: list[Layer] = []
        self._unknown: Layer | None = None

    def _new(self, number: int | None, name: str | None, source: str) -> Layer:
        layer = Layer(len(self._layers), number, name, source)
        self._layers.append(layer)
        return layer

    def of_module(self, module: torch.nn.Module) -> Layer:
        """Return the layer of ``module``, made at its first sight; numbered by itself or by call order."""
        key = id(module)
        known = self._by_module.get(key)
        if known is not None and known[0]() is module:  # else the id of one that is gone
            return known[1]
        number = own_layer_number(module)
        source = LAYER_FROM_CALL_ORDER if number is None else LAYER_FROM_MODULE
        layer = self._new(number, None, source)
        self._by_module[key] = (weakref.ref(module), layer)
        return layer

    def watch_module(self, module: torch.nn.Module, number: int | None, name: str) -> Layer:
        """Return the layer of a watched ``module``, its number and name set."""
        layer = self.of_module(module)
        layer.name = name
        if number is not None:
            layer.number, layer.source = number, LAYER_FROM_MODULE
        return layer

    def of_serial(self, serial: int) -> Layer:
        """Return the layer of that ``serial``; the unknown one where there is none."""
        return self._layers[serial] if 0 <= serial < len(self._layers) else self.unknown

    def of_order(self, order: int) -> Layer:
        """Return the layer that is ``order``-th in a forward pass of plain functions."""
        if order >= _MAX_LAYERS_BY_ORDER:
            return self.unknown
        while len(self._by_order) <= order:
            self._by_order.append(self._new(None, None, LAYER_FROM_CALL_ORDER))
        return self._by_order[order]

    def of_ref(self, ref: LayerRef, owner: object = None) -> Layer:
        """Return the layer that a seam names; ``owner`` tells two models with equal names apart."""
        key = (ref, id(owner))
        layer = self._by_key.get(key)
        if layer is None:
            layer = self._by_key[key] = self._new(ref.number, ref.name, ref.source)
        return layer

    @property
    def unknown(self) -> Layer:
        """The layer of calls that cannot be given to any (number -1)."""
        if self._unknown is None:
            self._unknown = self._new(-1, None, LAYER_UNKNOWN)
        return self._unknown


def layer_number_in_name(name: str) -> int | None:
    """Return N of ``...layers.N...`` (transformers, Megatron-Core, vLLM names), or None."""
    found = _LAYER_IN_NAME.search(name)
    return int(found.group(1)) if found else None


def own_layer_number(module: torch.nn.Module) -> int | None:
    """Return the 0-based decoder layer that ``module`` says it is, or None.

    Megatron-Core's ``layer_number`` is 1-based and global over pipeline stages; transformers' ``layer_idx``
    is 0-based.
    """
    number = getattr(module, "layer_number", None)
    if type(number) is int and number >= 1:
        return number - 1
    index = getattr(module, "layer_idx", None)
    return index if type(index) is int and index >= 0 else None


def is_moe_block(module: torch.nn.Module) -> bool:
    """Return True for a block that routes tokens to experts: it has experts and a gate or router."""
    if getattr(module, "experts", None) is None:
        return False
    return getattr(module, "router", None) is not None or getattr(module, "gate", None) is not None


def moe_blocks(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield (qualified name, block) of every MoE block of ``model``; dense layers have none."""
    for name, module in model.named_modules():
        if is_moe_block(module):
            yield name, module


def num_experts_of(block: torch.nn.Module) -> int | None:
    """Return the number of logical experts E that ``block`` says it has, or None."""
    for holder in (
        block,
        getattr(block, "config", None),
        getattr(block, "router", None),
        getattr(block, "gate", None),
    ):
        for name in (
            "num_experts",
            "n_routed_experts",
            "num_local_experts_total",
            "num_moe_experts",
        ):
            value = getattr(holder, name, None)
            if type(value) is int and value > 0:
                return value
    return None


def top_k_of(block: torch.nn.Module) -> int | None:
    """Return the number of experts a token goes to, or None."""
    for holder in (
        block,
        getattr(block, "config", None),
        getattr(block, "router", None),
        getattr(block, "gate", None),
    ):
        for name in ("top_k", "num_experts_per_tok", "moe_router_topk", "topk"):
            value = getattr(holder, name, None)
            if type(value) is int and value > 0:
                return value
    return None


@functools.cache
def _module_class() -> type[torch.nn.Module]:
    import torch

    return torch.nn.Module


def calling_module(depth: int) -> torch.nn.Module | None:
    """Return the nearest ``nn.Module`` whose method is on the stack ``depth`` frames up or above, or None."""
    module_class = _module_class()
    try:
        frame = sys._getframe(depth)
    except ValueError:  # called by C code, with no such frame above
        return None
    for _ in range(_MAX_FRAMES):
        names = frame.f_code.co_varnames
        if names and names[0] == "self" and frame.f_code.co_argcount:
            owner = frame.f_locals.get("self")
            if isinstance(owner, module_class):
                return owner
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def called_from_backward(depth: int) -> bool:
    """Return True when the nearest ``forward`` or ``backward`` on the stack is a ``backward``.

    Used inside the autograd engine only: an autograd Function's ``backward`` makes dx and dw calls, while a
    recompute runs a ``forward`` below the checkpoint's ``backward``.
    """
    try:
        frame = sys._getframe(depth)
    except ValueError:  # called by C code: the engine
        return True
    for _ in range(64):
        name = frame.f_code.co_name
        if name == "backward":
            return True
        if name == "forward":
            return False
        if frame.f_back is None:
            return True
        frame = frame.f_back
    return True

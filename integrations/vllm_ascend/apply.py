# SPDX-License-Identifier: Apache-2.0
"""The seam: ``apply`` of every fused-MoE method. The outermost call commits the ids seen inside it.

Device work only, into rows that never move: what Python does here is captured with a graph and counts on
each replay. Everything that a replay may have to switch is a device scalar (:mod:`.runner`).
"""

from __future__ import annotations

import functools
import sys
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_insight_hooks import guard, topology
from rl_insight_hooks.compiled import is_compiling
from rl_insight_hooks.layers import Layer
from rl_insight_hooks.patching import Gate
from rl_insight_hooks.schema import ID_PHYSICAL, TOKENS_UNKNOWN
from rl_insight_hooks.state import STATE

from . import context, layout, moe_layer
from .capture import CALL, Aside, Call
from .context import ForwardContext
from .runner import StepState, is_capturing
from .signatures import Arguments

if TYPE_CHECKING:
    from rl_insight_hooks.session import Session

_FROM_ARGUMENT = "apply_arg"
_COUNTS = ("global_num_experts", "num_experts")


@dataclass(frozen=True, slots=True)
class _Known:
    """A layer and what does not change about it."""

    layer: Layer
    experts: moe_layer.Experts
    draft: bool


class MoeSeam:
    """Makes the replacements of ``apply``; one a session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.recorder = session.recorder
        self.aside = Aside(session.recorder)
        self.steps = StepState(session.recorder)
        self.layout_unknown = False
        self._known: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()
        self._num_logical = 0

    def apply(self, name: str, original: Any, gate: Gate) -> Any:
        """Factory of the replacement of ``name``'s apply."""
        arguments = Arguments(original)
        reader = _Reader(name, arguments)
        seam = self

        @functools.wraps(original)
        def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
            # an adapter's scheme is inside the adapter's call; a compiled model is traced through
            if not gate.live or is_compiling() or CALL.get() is not None:
                return original(self, *args, **kwargs)
            call = token = None
            try:
                call = seam.aside.take()
                token = CALL.set(call)
            except Exception:
                guard.failed(f"{name}.apply")
            STATE.claims += 1  # the grouped matmuls inside are this same pass
            try:
                result = original(self, *args, **kwargs)
            finally:
                STATE.claims -= 1
                if token is not None:
                    CALL.reset(token)
            if call is not None:
                try:
                    seam.commit(reader, call, args, kwargs)
                except Exception:
                    guard.failed(f"{name}.apply")
            return result

        return apply

    def commit(
        self, reader: _Reader, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Count the ids of one call."""
        steps = self.steps
        x = reader.get("x", args, kwargs)
        capturing = is_capturing(x)
        if not (STATE.on or steps.dummy or capturing):
            return
        forward = ForwardContext()
        layer = reader.get("layer", args, kwargs)
        ids, source, id_space = call.ids, call.source, None
        if ids is None:
            ids, source = reader.get("topk_ids", args, kwargs), _FROM_ARGUMENT
            if getattr(layer, "log2phy", None) is not None or getattr(layer, "enable_eplb", False):
                id_space = ID_PHYSICAL
        if ids is None:
            self.recorder.drop("fused-MoE calls whose routed ids nobody saw")
            return
        known = self._known.get(layer)
        if known is None or (not known.draft and forward.get("is_draft_model") is True):
            if capturing:  # a row made during capture would be zeroed at each replay
                self.recorder.drop("layers first seen during graph capture")
                return
            known = self._meet(reader, layer, ids, args, kwargs, forward)
            if known is None:
                self.recorder.drop("fused-MoE calls without a known number of experts")
                return
        seam = reader.seam(source)
        num_experts = known.experts.num_physical if id_space else known.experts.num_logical
        num_extra = known.experts.num_extra
        if reader.get("enable_force_load_balance", args, kwargs) or forward.get("in_profile_run"):
            # random routing: not counted; but rows must be there before a graph is captured
            known.layer.forward_slot = self.recorder.ids_slot(
                seam,
                known.layer,
                num_experts,
                ids.device,
                num_extra=num_extra,
                id_space=id_space,
                draft=known.draft,
            )
            _count(self.recorder.masked, "profile_run_calls")
            return
        ids, valid = self._own_rows(reader, known, ids, args, kwargs, forward, capturing)
        if ids.shape[0] == 0:
            return
        self.recorder.on_expert_ids(
            seam,
            known.layer,
            ids,
            num_experts=num_experts,
            valid=valid,
            num_extra=num_extra,
            id_space=id_space,
            draft=known.draft,
        )
        if capturing:
            self.session.replays_graphs = True
        if (
            steps.dummy or capturing
        ):  # the device flag kept these ids out, or they were only captured
            slot = known.layer.forward_slot
            slot.num_calls -= 1
            slot.num_passes -= 1

    def _own_rows(
        self,
        reader: _Reader,
        known: _Known,
        ids: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        forward: ForwardContext,
        capturing: bool,
    ) -> tuple[Any, Any]:
        """Return (ids of this rank's own rows, bool mask of the real ones among them or None)."""
        groups = context.groups()
        rows = layout.own_rows(
            ids.shape[0],
            forward.comm,
            num_tokens=forward.get("num_tokens"),
            num_tokens_of_dp=forward.num_tokens_of_dp,
            dp_rank=groups.dp_rank,
            tp_rank=groups.tp_rank,
            tp_size=groups.tp_size,
            pcp_size=groups.pcp_size,
        )
        if not rows.known:
            self._stamp_unknown(forward.comm, ids.shape[0])
        valid = self._mask(reader, args, kwargs, forward, ids.shape[0], groups)
        if rows.stop - rows.start != ids.shape[0]:
            ids = ids[rows.start : rows.stop]
            valid = None if valid is None else valid[rows.start : rows.stop]
        if valid is None and rows.first_token is not None and not known.draft:
            valid = self.steps.real_rows(rows.first_token, ids.shape[0], ids.device, capturing)
        if not ids.is_contiguous():
            ids = ids.contiguous()
        return ids, valid

    def _mask(
        self,
        reader: _Reader,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        forward: ForwardContext,
        num_rows: int,
        groups: context.Groups,
    ) -> Any:
        """Return the MC2 mask [num_rows] of the call, from wherever its version puts it, or None."""
        mask = reader.get("mc2_mask", args, kwargs)
        if (
            mask is None
        ):  # not getattr: a module without it would search parameters and buffers first
            mask = vars(reader.get("layer", args, kwargs)).get("ascend_mc2_mask")
        if mask is None and layout.is_masked(forward.comm):
            mask = forward.get("mc2_mask")
        if mask is None or mask.shape[0] == num_rows:
            return mask
        if (
            mask.shape[0] == num_rows * groups.tp_size
        ):  # not split over the tensor-parallel ranks yet
            return mask[groups.tp_rank * num_rows : (groups.tp_rank + 1) * num_rows]
        self.recorder.stamps["mask"] = (
            "an MC2 mask did not fit the ids and was left aside: padding rows may be counted"
        )
        return None

    def _meet(
        self,
        reader: _Reader,
        layer: Any,
        ids: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        forward: ForwardContext,
    ) -> _Known | None:
        """First sight of a layer."""
        logits = reader.get("router_logits", args, kwargs)
        redundant = reader.get("global_redundant_expert_num", args, kwargs)
        if not redundant:
            redundant = getattr(layer, "global_redundant_expert_num", None)
        experts = moe_layer.experts_of(
            layer,
            next((n for c in _COUNTS if (n := reader.get(c, args, kwargs))), None),
            redundant,
            None if logits is None else logits.shape[-1],
        )
        if experts is None:
            return None
        forced = context.forced_routing()
        if forced is not None:
            self.recorder.stamps["forced_routing"] = forced
        ref = moe_layer.ref_of(layer)
        draft = moe_layer.is_draft(
            layer, ref.name, ref.number, drafting=forward.get("is_draft_model")
        )
        # one layer object, one row: a draft model may use the main model's names
        known = _Known(self.recorder.layers.of_ref(ref, layer), experts, draft)
        known.layer.forward_slot = None  # met before, not yet known as a draft's
        known.layer.num_experts, known.layer.top_k = experts.num_logical, ids.shape[-1]
        self.steps.prepare(ids.device)
        self._known[layer] = known
        self._num_logical = max(self._num_logical, experts.num_logical)
        return known

    def _stamp_unknown(self, comm: str | None, num_rows: int) -> None:
        if not self.layout_unknown:
            self.layout_unknown = True
            self.recorder.stamps["tokens_layout"] = (
                f"{comm}: whose tokens the {num_rows} rows of a call are could not be told; all were counted"
            )

    def provide(self, place: topology.Place) -> None:
        """Topology provider: vLLM's groups, the number of logical experts, the layout where it is open."""
        context.provide(place)
        if self._num_logical and place.num_experts is None:
            place.num_experts = self._num_logical
        if self.layout_unknown:
            place.tokens_layout = TOKENS_UNKNOWN


class _Reader:
    """Arguments of one method, and the names of its seam by source of the ids."""

    __slots__ = ("_name", "_seams", "get")

    def __init__(self, name: str, arguments: Arguments) -> None:
        self._name = name
        self.get = arguments.get
        self._seams: dict[str | None, str] = {}

    def seam(self, source: str | None) -> str:
        """Return the seam's name; the same object for the same source, as the recorder compares it so."""
        seam = self._seams.get(source)
        if seam is None:
            seam = self._seams[source] = sys.intern(f"{self._name}.apply ({source})")
        return seam


def _count(counters: dict[str, int], cause: str, num: int = 1) -> None:
    counters[cause] = counters.get(cause, 0) + num

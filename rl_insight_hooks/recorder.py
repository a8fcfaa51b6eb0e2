# SPDX-License-Identifier: Apache-2.0
"""Events of the seams -> adds into device counters. The hot path of the package.

A seam calls one of :meth:`Recorder.on_group_list`, :meth:`Recorder.on_counts` and
:meth:`Recorder.on_expert_ids` after the host's call returned. Nothing here waits for a device, allocates
in the steady state, takes a lock, logs or does I/O. Callers guard these calls (``guard.failed``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rl_insight_hooks.counters import (
    FORM_COUNTS,
    FORM_CUMULATIVE,
    FORM_IDS,
    CounterPool,
    IdBins,
    PendingReading,
    Slot,
)
from rl_insight_hooks.group_list import COUNTS, CUMULATIVE, SPARSE_PAIRS, WEIGHT_GROUP_TYPE
from rl_insight_hooks.layers import (
    Layer,
    LayerRef,
    LayerRegistry,
    called_from_backward,
    calling_module,
)
from rl_insight_hooks.passes import PassTracker
from rl_insight_hooks.schema import (
    PHASE_DW,
    PHASE_DX,
    PHASE_EVAL,
    PHASE_FORWARD,
    PHASE_RECOMPUTE,
)
from rl_insight_hooks.state import STATE

if TYPE_CHECKING:
    import torch

# Attribute on a group_list tensor: serial of the layer that used it in forward. Backward gets the same object.
# An int, since a host may pickle the tensor: nothing of ours must be needed to load it.
_LAYER_TAG = "_rl_insight_layer"

_NUM_FLAGS = 32_768  # ids of one call whose flags need no copy

_FORM_OF_TYPE = {CUMULATIVE: FORM_CUMULATIVE, COUNTS: FORM_COUNTS, SPARSE_PAIRS: FORM_COUNTS}


class Recorder:
    """Turns events into counter adds, for whatever region is active."""

    def __init__(self) -> None:
        self.pool = CounterPool()
        self.layers = LayerRegistry()
        self.gmm_per_layer = 0
        self.detail_calls = False
        self.max_detail_calls = 100_000
        self.call_log: list[tuple[Slot, Any]] = []
        self.dropped: dict[str, int] = {}
        self.masked: dict[str, int] = {}
        self.stamps: dict[str, str] = {}
        self.num_events = 0
        self._forward = PassTracker()
        self._recompute = PassTracker()
        self._dx = PassTracker(backward=True)
        self._dw_pass = -1
        self._dw_list: Any = None
        self._dw_slot: Slot | None = None
        self._order = 0
        self._backward_seen = False
        self._graph_task_id: Callable[[], int] = self._find_graph_task_id
        self._enabled_flags: dict[torch.device, torch.Tensor] = {}

    def _find_graph_task_id(self) -> int:
        """First call: find the function that is >= 0 inside the autograd engine and -1 outside.

        Private in torch, but FSDP2 in torch itself relies on it. Without it every call counts as forward,
        and the file is stamped so.
        """
        try:
            from torch._C import _current_graph_task_id as found
        except ImportError:
            self.stamps["phases"] = (
                "this torch cannot tell backward from forward: all calls count as forward"
            )
            self._graph_task_id = lambda: -1
        else:
            self._graph_task_id = found
        return self._graph_task_id()

    # -- regions ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Forget passes under way: a region begins."""
        for tracker in (self._forward, self._recompute, self._dx):
            tracker.reset()
        self._dw_pass = -1
        self._dw_list = None
        self._dw_slot = None
        self._order = 0
        self._backward_seen = False

    def begin_pass(self) -> None:
        """Let the next grouped matmul begin a layer pass, whatever came before."""
        self._forward.reset()
        self._recompute.reset()

    def drain(self) -> PendingReading:
        """Take what was counted since the last drain; asynchronous, see :meth:`CounterPool.drain`."""
        return self.pool.drain()

    def drop(self, cause: str, num: int = 1) -> None:
        """Count ``num`` calls or tokens that were not recorded, by cause."""
        self.dropped[cause] = self.dropped.get(cause, 0) + num

    # -- grouped matmul --------------------------------------------------------------------------------

    def on_group_list(
        self,
        seam: str,
        group_list: Any,
        group_list_type: int,
        group_type: int | None,
        x: Any,
        weight: Any,
        depth: int = 2,
    ) -> None:
        """Record one grouped matmul.

        Args:
            seam: name of the hooked function, for the file.
            group_list: int tensor [E] or [E, 2], list of ints [E] (cumulative), or None.
            group_list_type: 0 cumulative, 1 counts, 2 sparse pairs.
            group_type: 2 for dW (K axis); 0 or None for forward and dX; -1 without grouping.
            x: list of inputs [T, K] (one, or one an expert when there is no group_list).
            weight: list of weights: one [E, K, N], or E of [K, N].
            depth: stack frames between this method and the hooked call.
        """
        self.num_events += 1
        state = STATE
        if state.claims:
            if state.claimed is not None and hasattr(group_list, "dim"):
                # its gradients come without a claim
                setattr(group_list, _LAYER_TAG, state.claimed.serial)
            return
        if group_type == WEIGHT_GROUP_TYPE:
            self._on_dw(seam, group_list, group_list_type)
            return
        if self._graph_task_id() != -1:
            self._on_in_engine(seam, group_list, group_list_type, x, weight, depth + 1)
            return
        layer = watched = state.layer
        tracker = self._forward
        if layer is not None:
            if not state.armed:
                if tracker.slot is not None:
                    tracker.slot.num_calls += 1
                return
            state.armed = False
        else:
            if not tracker.begins(group_list, x[0], weight[0], self.gmm_per_layer):
                if tracker.slot is not None:
                    tracker.slot.num_calls += 1
                return
            layer = self._find_layer(depth + 1)
        phase = PHASE_EVAL if state.evaluating else PHASE_FORWARD
        slot = layer.forward_slot
        if (
            slot is None
            or slot.seam is not seam
            or slot.phase is not phase
            or type(group_list) is list
            or group_list is None
            or slot.form is not _FORM_OF_TYPE.get(group_list_type)
            or group_list.shape != slot.shape
            or group_list.is_cpu != slot.is_cpu
        ):
            slot = self._add_any(layer, phase, seam, group_list, group_list_type, x, weight)
            layer.forward_slot = slot
        else:
            slot.buf.add_(group_list)
            slot.num_calls += 1
            slot.num_passes += 1
            slot.num_rows += x[0].shape[0]
        tracker.slot = slot
        if slot is None:
            return
        if watched is not None:
            state.counted = slot
            slot.num_tokens += state.num_tokens
        if group_list is not None and type(group_list) is not list:
            setattr(group_list, _LAYER_TAG, layer.serial)
            if self.detail_calls:
                self._log_call(slot, group_list)

    def _find_layer(self, depth: int) -> Layer:
        module = calling_module(depth + 1)
        if module is not None:
            STATE.evaluating = not module.training
            return self.layers.of_module(module)
        STATE.evaluating = False
        if self._backward_seen:
            self._backward_seen = False
            self._order = 0
        layer = self.layers.of_order(self._order)
        self._order += 1
        return layer

    def _on_in_engine(
        self, seam: str, group_list: Any, group_list_type: int, x: Any, weight: Any, depth: int
    ) -> None:
        """A call inside the autograd engine: recompute, or dx."""
        state = STATE
        self._backward_seen = True
        if state.layer is not None:
            tracker = self._recompute
            if not state.armed:
                if tracker.slot is not None:
                    tracker.slot.num_calls += 1
                return
            state.armed = False
            layer, phase = state.layer, PHASE_RECOMPUTE
        else:
            backward = called_from_backward(depth + 1)
            tracker = self._dx if backward else self._recompute
            if not tracker.begins(group_list, x[0], weight[0], self.gmm_per_layer):
                if tracker.slot is not None:
                    tracker.slot.num_calls += 1
                return
            if backward:
                layer, phase = self._layer_of_forward(group_list), PHASE_DX
            else:
                module = calling_module(depth + 1)
                layer = self.layers.unknown if module is None else self.layers.of_module(module)
                phase = PHASE_RECOMPUTE
        slot = tracker.slot = self._add_any(
            layer, phase, seam, group_list, group_list_type, x, weight
        )
        if state.layer is not None:
            state.counted = slot
        if phase is PHASE_RECOMPUTE and group_list is not None and type(group_list) is not list:
            setattr(group_list, _LAYER_TAG, layer.serial)
        if self.detail_calls and slot is not None:
            self._log_call(slot, group_list)

    def _on_dw(self, seam: str, group_list: Any, group_list_type: int) -> None:
        """A weight-gradient call; the dW calls of one backward pass of a layer count once."""
        self._backward_seen = True
        same_list = group_list is not None and group_list is self._dw_list
        same_dx_pass = self._dx.num_passes > 0 and self._dx.num_passes == self._dw_pass
        self._dw_list = group_list
        self._dw_pass = self._dx.num_passes
        if (same_list or same_dx_pass) and self._dw_slot is not None:
            self._dw_slot.num_calls += 1
            return
        layer = self._layer_of_forward(group_list)
        self._dw_slot = self._add_any(layer, PHASE_DW, seam, group_list, group_list_type, (), ())

    def _layer_of_forward(self, group_list: Any) -> Layer:
        return self.layers.of_serial(getattr(group_list, _LAYER_TAG, -1))

    def _add_any(
        self,
        layer: Layer,
        phase: str,
        seam: str,
        group_list: Any,
        group_list_type: int,
        x: Any,
        weight: Any,
    ) -> Slot | None:
        """Add one pass in whatever form its group_list has; return the slot (None: nothing was counted)."""
        num_rows = x[0].shape[0] if len(x) == 1 else sum(part.shape[0] for part in x)
        if group_list is None:
            counts = [part.shape[0] for part in x]
            slot = self._host_slot(layer, phase, seam, len(counts))
            self._add_host(slot, counts)
        elif isinstance(group_list, (list, tuple)):
            slot = self._host_slot(layer, phase, seam, len(group_list))
            self._add_host(
                slot, [b - a for a, b in zip([0, *group_list[:-1]], group_list, strict=True)]
            )
        else:
            form = _FORM_OF_TYPE.get(group_list_type)
            if form is None:
                self.drop(f"unknown group_list_type {group_list_type}")
                return None
            num_experts = group_list.shape[0]
            if group_list_type == SPARSE_PAIRS:
                if len(weight):
                    num_experts = weight[0].shape[0] if len(weight) == 1 else len(weight)
                slot = self._slot(
                    layer, phase, form, seam, num_experts, num_experts, group_list.device
                )
                slot.buf.scatter_add_(
                    0, group_list[:, 0].clamp(0, num_experts - 1), group_list[:, 1]
                )
            else:
                slot = self._slot(
                    layer, phase, form, seam, num_experts, num_experts, group_list.device
                )
                slot.buf.add_(group_list)
        slot.num_calls += 1
        slot.num_passes += 1
        slot.num_rows += num_rows
        return slot

    def _host_slot(self, layer: Layer, phase: str, seam: str, num_experts: int) -> Slot:
        import torch

        return self._slot(
            layer, phase, FORM_COUNTS, seam, num_experts, num_experts, torch.device("cpu")
        )

    @staticmethod
    def _add_host(slot: Slot, counts: list[int]) -> None:
        import torch

        # the device is named: a host may have set another default
        slot.buf.add_(torch.tensor(counts, dtype=torch.int64, device="cpu"))

    def _slot(
        self,
        layer: Layer,
        phase: str,
        form: str,
        seam: str,
        num_experts: int,
        width: int,
        device: torch.device,
        *,
        id_space: str | None = None,
        draft: bool = False,
    ) -> Slot:
        key = (phase, form, seam, num_experts, width, device, id_space, draft)
        slot: Slot | None = layer.slots.get(key)
        if slot is None:
            slot = layer.slots[key] = self.pool.allocate(
                layer, phase, form, seam, num_experts, width, device, id_space=id_space, draft=draft
            )
        return slot

    def _log_call(self, slot: Slot, group_list: Any) -> None:
        if len(self.call_log) >= self.max_detail_calls:
            self.drop("detail: too many calls in one region")
        elif hasattr(group_list, "clone"):
            self.call_log.append((slot, group_list.clone()))

    # -- counts that a module was given ----------------------------------------------------------------

    def on_counts(
        self,
        seam: str,
        layer: Layer,
        counts: Any,
        *,
        num_rows: int = 0,
        id_space: str | None = None,
        evaluating: bool = False,
    ) -> None:
        """Record one pass of an experts module that was given its tokens per local expert.

        Args:
            seam: name of the hooked method.
            layer: from :attr:`layers`.
            counts: int tensor [E_local], or a list of ints.
            num_rows: rows of the module's input, 0 when unknown.
            id_space: "physical" where the columns are slots, not experts.
            evaluating: the module is in eval mode.
        """
        import torch

        self.num_events += 1
        if STATE.claims:
            return
        if self._graph_task_id() != -1:
            self._backward_seen = True
            phase = PHASE_RECOMPUTE
        else:
            phase = PHASE_EVAL if evaluating else PHASE_FORWARD
        if not isinstance(counts, torch.Tensor):
            counts = torch.tensor(list(counts), dtype=torch.int64, device="cpu")
        elif counts.is_floating_point():
            counts = counts.to(torch.int64)
        n = len(counts)
        slot = self._slot(layer, phase, FORM_COUNTS, seam, n, n, counts.device, id_space=id_space)
        slot.buf.add_(counts)
        slot.num_calls += 1
        slot.num_passes += 1
        slot.num_rows += num_rows
        if STATE.layer is layer:
            STATE.armed = False  # this pass is counted: later grouped matmuls of the block are not
            slot.num_tokens += STATE.num_tokens
        if self.detail_calls:
            self._log_call(slot, counts)

    # -- routed expert ids -----------------------------------------------------------------------------

    def enabled_flags(self, device: torch.device) -> torch.Tensor:
        """Return the flags [32768] (int64, all 0 or all 1) that gate every id add, in captured graphs too."""
        import torch

        flags = self._enabled_flags.get(device)
        if flags is None:
            with torch.inference_mode(False), torch.no_grad():
                flags = self._enabled_flags[device] = torch.ones(
                    _NUM_FLAGS, dtype=torch.int64, device=device
                )
        return flags

    def set_enabled(self, enabled: bool) -> None:
        """Open or shut the gate of :meth:`enabled_flags` on every device (in place, stream-ordered)."""
        for flags in self._enabled_flags.values():
            flags.fill_(int(enabled))

    def ids_slot(
        self,
        seam: str,
        layer: Layer,
        num_experts: int,
        device: torch.device,
        *,
        num_extra: int = 1,
        id_space: str | None = None,
        draft: bool = False,
    ) -> Slot:
        """Return (allocating at first) the slot of routed ids of ``layer``; call it before graph capture."""
        import torch

        self.enabled_flags(device)
        num_bins = 1 + num_experts + num_extra
        slot = self._slot(
            layer,
            PHASE_FORWARD,
            FORM_IDS,
            seam,
            num_experts,
            2 * num_bins,
            device,
            id_space=id_space,
            draft=draft,
        )
        if slot.id_bins is None:
            with torch.inference_mode(False), torch.no_grad():
                one, first_masked = (
                    torch.full((1,), number, dtype=torch.int64, device=device)
                    for number in (1, num_bins + 1)
                )
            slot.id_bins = IdBins(num_bins, one, first_masked)
        return slot

    def _flags_of(self, bins: IdBins, device: torch.device, num_ids: int) -> torch.Tensor:
        """Return the enabled flags of ``num_ids`` ids [num_ids]; remembers them in ``bins``."""
        import torch

        flags = self._enabled_flags[device]
        if num_ids > _NUM_FLAGS:  # a copy: not to be kept, it would not follow set_enabled
            return flags[:1].expand(num_ids).contiguous()
        flags = flags[:num_ids]
        if type(flags) is torch.Tensor:  # no fake one of a tracer
            bins.flags, bins.num_flags = flags, num_ids
        return flags

    def on_expert_ids(
        self,
        seam: str,
        layer: Layer | LayerRef,
        ids: torch.Tensor,
        *,
        num_experts: int,
        valid: torch.Tensor | None = None,
        num_extra: int = 1,
        id_space: str | None = None,
        draft: bool = False,
        owner: object = None,
    ) -> None:
        """Record the experts that one fused-MoE call routes its tokens to.

        Device work only: one masked scatter into a preallocated row, gated by :meth:`enabled_flags`.

        Args:
            seam: name of the hooked method.
            layer: the layer, or how the seam names it.
            ids: int tensor [T, top_k]; ids < 0 are padding, ids >= num_experts no routed experts; both are
                kept in bins of their own.
            num_experts: number of logical experts E.
            valid: bool tensor [T]: rows that are real tokens; None when all are.
            num_extra: bins for ids >= num_experts (the last takes all above).
            id_space: "logical" or "physical" where it differs from the file's.
            draft: the layer belongs to a draft / MTP model.
            owner: the model that ``layer`` belongs to, where names alone are not unique.
        """
        self.num_events += 1
        if isinstance(layer, LayerRef):
            layer = self.layers.of_ref(layer, owner)
        slot = layer.forward_slot
        bins = None if slot is None else slot.id_bins
        if (
            bins is None
            or slot.seam is not seam
            or slot.num_experts != num_experts
            or slot.id_space != id_space
            or bins.num_bins != num_experts + num_extra + 1
            or bins.one.device != ids.device
        ):
            slot = self.ids_slot(
                seam,
                layer,
                num_experts,
                ids.device,
                num_extra=num_extra,
                id_space=id_space,
                draft=draft,
            )
            layer.forward_slot, bins = slot, slot.id_bins
            assert bins is not None  # ids_slot made them
        bin_of_0 = bins.one
        if valid is not None:
            bin_of_0 = bins.first_masked.add(valid.unsqueeze(-1), alpha=-bins.num_bins)
        # clamp first: + 1 could overflow int32. One add shifts, masks and widens to int64.
        index = ids.clamp(-1, bins.num_bins - 2).add(bin_of_0).reshape(-1)
        num_ids = index.numel()
        flags = bins.flags
        if flags is None or bins.num_flags != num_ids:
            flags = self._flags_of(bins, ids.device, num_ids)
        slot.buf.scatter_add_(0, index, flags)
        slot.num_calls += 1
        slot.num_passes += 1

# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core: the experts modules, which are given their tokens per local expert.

Target   ``forward`` of ``TEGroupedMLP``, ``GroupedMLP`` and ``SequentialMLP`` (whichever this release has), and
         ``parallel_state`` for this rank's place.
Why      the counts are there by name, for every way to run the experts: also for MindSpeed's C++ extension and
         for sequential experts, which never reach torch_npu.
How      the class attribute is replaced; while the host's forward runs, inner seams keep quiet, so that a pass
         counts once. The layer is the enclosing MoE layer's ``layer_number``. Hooked again at every region's
         begin: MindSpeed's ``repatch`` sets class attributes anew.
Not covered  schedules that run experts without these forwards (MindSpeed's fb_overlap and dualpipe).
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any

from rl_insight_hooks import guard, topology
from rl_insight_hooks.compiled import is_compiling
from rl_insight_hooks.layers import num_experts_of, top_k_of
from rl_insight_hooks.patching import Gate, is_ours
from rl_insight_hooks.schema import ID_PHYSICAL, TOKENS_REPLICATED
from rl_insight_hooks.state import STATE
from rl_insight_hooks.topology import Place

if TYPE_CHECKING:
    import torch

    from rl_insight_hooks.installer import Context
    from rl_insight_hooks.layers import Layer
    from rl_insight_hooks.recorder import Recorder

SUPPORTED = (
    "core 0.9 to 0.16 (tested with the release that tests/megatron/requirements.txt installs)"
)

_CLASSES = ("TEGroupedMLP", "GroupedMLP", "SequentialMLP")
_EXPERTS = "megatron.core.transformer.moe.experts"
_PARALLEL_STATE = "megatron.core.parallel_state"
_MAX_FRAMES = 24

# Settings of the transformer config that falsify the load -> what the file says.
_STAMPS = {
    "moe_router_force_load_balancing": (
        "forced_routing",
        "moe_router_force_load_balancing: ids are random",
    ),
    "moe_expert_capacity_factor": (
        "capacity",
        "moe_expert_capacity_factor: tokens are dropped or padded, the sum is not tokens x top-k",
    ),
    "fix_router": ("forced_routing", "fix_router (MindSpeed): ids are forced"),
    "balanced_moe_experts": (
        "placement",
        "balanced_moe_experts (MindSpeed): hot experts are duplicated, columns are physical slots",
    ),
    "enable_expert_placement": (
        "placement",
        "enable_expert_placement (MindSpeed): experts are permuted, columns are physical slots",
    ),
}
_PHYSICAL = ("balanced_moe_experts", "enable_expert_placement")

# MindSpeed's moe_tp_extend_ep: tensor-parallel ranks own experts. (owners, which of them this rank is).
_owner_grid: tuple[int, int] | None = None


def install(ctx: Context) -> None:
    """Hook the experts classes that are imported, and register the place of this rank."""
    refresh(ctx)
    topology.add_provider("megatron", _place)


def refresh(ctx: Context) -> None:
    """Hook classes that have come since."""
    experts = sys.modules.get(_EXPERTS)
    for name in _CLASSES:
        cls = getattr(experts, name, None)
        # an inherited forward is hooked too, unless it is the hooked one: MindSpeed's classes have mixins
        if isinstance(cls, type) and ("forward" in vars(cls) or not is_ours(cls.forward)):  # type: ignore[attr-defined]
            ctx.patcher.replace(
                cls, "forward", functools.partial(_forward, ctx.recorder, f"megatron.{name}")
            )


def uninstall(ctx: Context) -> None:
    """Forget the place of this rank."""
    global _owner_grid
    _owner_grid = None
    topology.remove_provider("megatron")


def _forward(recorder: Recorder, seam: str, original: Any, gate: Gate) -> Any:
    import torch.utils.checkpoint

    state = STATE
    layers: weakref.WeakKeyDictionary[torch.nn.Module, Layer] = weakref.WeakKeyDictionary()
    # a checkpoint's recompute may end by this exception in the middle of the experts: it is a pass all the same
    stopped = getattr(torch.utils.checkpoint, "_StopRecomputationError", ())

    def record(self: Any, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            counts = args[1] if len(args) > 1 else kwargs["tokens_per_expert"]
            rows = args[0] if args else kwargs["permuted_local_hidden_states"]
            config = getattr(self, "config", None)
            physical = any(getattr(config, name, False) for name in _PHYSICAL)
            recorder.on_counts(
                seam,
                layer,
                counts,
                num_rows=rows.shape[0],
                id_space=ID_PHYSICAL if physical else None,
                evaluating=not self.training,
            )
        except Exception:
            guard.failed(seam)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not (state.on and gate.live) or is_compiling():
            return original(self, *args, **kwargs)
        layer = None
        try:
            layer = layers.get(self)
            if layer is None:
                layer = layers[self] = _find_layer(recorder, self)
        except Exception:
            guard.failed(seam)
        if layer is None:  # inner seams may speak
            return original(self, *args, **kwargs)
        try:
            outer, state.claimed = state.claimed, layer
            state.claims += 1
            try:
                out = original(self, *args, **kwargs)
            finally:
                state.claims -= 1
                state.claimed = outer
        except stopped:
            record(self, layer, args, kwargs)
            raise
        record(self, layer, args, kwargs)
        return out

    return forward


def _find_layer(recorder: Recorder, experts: torch.nn.Module) -> Layer:
    """Return the layer of the MoE layer whose ``experts`` this is: it stands on the stack; once a module."""
    owner: torch.nn.Module = experts
    frame = sys._getframe(2)
    for _ in range(_MAX_FRAMES):
        candidate: Any = frame.f_locals.get("self")
        if candidate is not experts and getattr(candidate, "experts", None) is experts:
            owner = candidate
            break
        if frame.f_back is None:
            break
        frame = frame.f_back
    layer = recorder.layers.of_module(owner)
    config = getattr(experts, "config", None)
    if config is not None:
        layer.num_experts = layer.num_experts or num_experts_of(owner) or config.num_moe_experts
        layer.top_k = layer.top_k or top_k_of(owner)
        for name, (stamp, text) in _STAMPS.items():
            if getattr(config, name, None):
                recorder.stamps[stamp] = text
        if getattr(config, "moe_tp_extend_ep", False):
            _read_owner_grid(owner, layer.num_experts)
    return layer


def _read_owner_grid(moe_layer: Any, num_experts: int) -> None:
    global _owner_grid
    owned = list(moe_layer.local_expert_indices)
    _owner_grid = (num_experts // len(owned), owned[0] // len(owned))


def _place(place: Place) -> None:
    """Fill in what ``parallel_state`` knows; no collective, only ranks and sizes."""
    state = sys.modules.get(_PARALLEL_STATE)
    if state is None or not state.is_initialized():
        return

    def ask(name: str) -> int | None:
        function = getattr(state, name, None)
        if function is None:
            return None
        try:
            return int(function())
        except (AssertionError, TypeError, ValueError):  # the group was not made
            return None

    parallel = place.parallel
    for short, long in (
        ("ep", "expert_model_parallel"),
        ("etp", "expert_tensor_parallel"),
        ("tp", "tensor_model_parallel"),
        ("pp", "pipeline_model_parallel"),
        ("dp", "data_parallel"),
        ("cp", "context_parallel"),
    ):
        setattr(parallel, f"{short}_rank", ask(f"get_{long}_rank"))
        setattr(parallel, f"{short}_size", ask(f"get_{long}_world_size"))
    if _owner_grid is not None:
        parallel.ep_size, parallel.ep_rank = _owner_grid
    elif (parallel.etp_size or 1) > 1:
        # every rank of an expert-tensor-parallel group is given the same tokens
        place.tokens_layout = TOKENS_REPLICATED
        edp = ask("get_expert_data_parallel_rank")
        parallel.replica_group = f"edp{edp}-ep{parallel.ep_rank}-pp{parallel.pp_rank}"

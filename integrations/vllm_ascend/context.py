# SPDX-License-Identifier: Apache-2.0
"""What vLLM says about the forward pass under way and this rank's groups, in every version's words."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

from rl_insight_hooks import topology

_EXTRA = "vllm_ascend.ascend_forward_context"  # 0.18 and later: _EXTRA_CTX, for both model runners
_FORWARD = "vllm.forward_context"
_GROUPS = "vllm.distributed.parallel_state"
_ASCEND_CONFIG = "vllm_ascend.ascend_config"
_SIMULATED = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"  # of vLLM, since 0.10


class ForwardContext:
    """Attributes of the forward pass under way; None where nobody sets them."""

    __slots__ = ("_context", "_extra", "comm")

    def __init__(self) -> None:
        self._context = getattr(sys.modules.get(_FORWARD), "_forward_context", None)
        self._extra = (
            None if self._context is None else getattr(sys.modules.get(_EXTRA), "_EXTRA_CTX", None)
        )
        kind = self.get("moe_comm_type")
        if kind is None:
            kind = self.get("fused_moe_state")
        # name of MoECommType, or of FusedMoEState in 0.9.1
        self.comm: str | None = None if kind is None else str(getattr(kind, "name", kind)).upper()

    def get(self, name: str) -> Any:
        """Return attribute ``name`` or None."""
        if self._context is None:
            return None
        value = getattr(self._context, name, None)
        if value is None and self._extra is not None and not hasattr(self._context, name):
            try:
                value = getattr(self._extra, name, None)
            except (AssertionError, KeyError):  # not one of its names, or not set in this pass
                return None
        return value

    @property
    def num_tokens_of_dp(self) -> tuple[int, ...] | None:
        """Tokens of every data-parallel rank; the tensor is on the CPU already."""
        metadata = self.get("dp_metadata")
        if metadata is None:
            return None
        tokens = getattr(metadata, "num_tokens_across_dp_cpu", None)
        return None if tokens is None else tuple(tokens.tolist())


def forced_routing() -> str | None:
    """Return why the experts that the engine computes with are not those that the gate chose, or None."""
    if os.environ.get(_SIMULATED):
        return f"{_SIMULATED}={os.environ[_SIMULATED]}: ids are simulated"
    try:
        config = sys.modules[_ASCEND_CONFIG].get_ascend_config()
    except (KeyError, AttributeError, RuntimeError):  # not imported, or not initialised
        return None
    if getattr(config, "enable_force_eplb", None) is True:
        return "enable_force_eplb (vllm-ascend): the engine spreads tokens evenly, whatever the gate chose"
    return None


@dataclass(frozen=True, slots=True)
class Groups:
    """Ranks and sizes of vLLM's groups; rank 0 of 1 where there is no group."""

    tp_rank: int = 0
    tp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    pcp_size: int = 1


_last: tuple[Any, Any, Groups] | None = None  # the TP and DP groups, and what was read beside them


def groups() -> Groups:
    """Return the groups of this process now."""
    global _last
    state = sys.modules.get(_GROUPS)
    tp_group, dp_group = getattr(state, "_TP", None), getattr(state, "_DP", None)
    if _last is not None and _last[0] is tp_group and _last[1] is dp_group:
        return _last[2]
    tp, dp, pp, ep = (_place(state, name) for name in ("_TP", "_DP", "_PP", "_EP"))
    found = Groups(*tp, *dp, *pp, *ep, pcp_size=_place(state, "_PCP")[1])
    _last = (tp_group, dp_group, found)
    return found


def _place(state: Any, name: str) -> tuple[int, int]:
    group = getattr(state, name, None)
    rank, size = getattr(group, "rank_in_group", None), getattr(group, "world_size", None)
    return (rank, size) if isinstance(rank, int) and isinstance(size, int) else (0, 1)


def provide(place: topology.Place) -> None:
    """Topology provider: this rank's place in vLLM's groups."""
    state = sys.modules.get(_GROUPS)
    for name in ("tp", "dp", "pp", "ep"):
        if getattr(state, f"_{name.upper()}", None) is None:
            continue
        rank, size = _place(state, f"_{name.upper()}")
        setattr(place.parallel, f"{name}_rank", rank)
        setattr(place.parallel, f"{name}_size", size)

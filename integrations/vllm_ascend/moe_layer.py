# SPDX-License-Identifier: Apache-2.0
"""What a fused-MoE layer object says about itself: name, number, experts, draft or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rl_insight_hooks.layers import LayerRef, layer_number_in_name
from rl_insight_hooks.schema import LAYER_FROM_CALL_ORDER, LAYER_FROM_MODULE

_MAX_EXTRA_BINS = 256


@dataclass(frozen=True, slots=True)
class Experts:
    """Expert counts of a layer.

    ``num_logical`` are the routed experts of the model. ``num_physical`` adds the redundant replicas.
    ``num_extra``: bins for ids of zero and shared experts, which follow the logical ids.
    """

    num_logical: int
    num_physical: int
    num_extra: int


def ref_of(layer: Any) -> LayerRef:
    """Return how ``layer`` is called: the decoder layer in its name, else its order of construction."""
    name = getattr(layer, "layer_name", None) or getattr(layer, "prefix", None)
    name = name if isinstance(name, str) else None
    number = None if name is None else layer_number_in_name(name)
    if number is not None:
        return LayerRef(number, name, LAYER_FROM_MODULE)
    instance = getattr(layer, "moe_instance_id", None)
    return LayerRef(instance if type(instance) is int else None, name, LAYER_FROM_CALL_ORDER)


def experts_of(
    layer: Any, num_experts: int | None, num_redundant: int | None, router_width: int | None
) -> Experts | None:
    """Return the expert counts of ``layer``, or None where neither it nor its call says.

    Args:
        layer: the layer object.
        num_experts: the call's global_num_experts or num_experts; with the redundant ones since 0.11,
            without before; with the shared ones where they are placed with the routed (0.13).
        num_redundant: the call's or the layer's number of redundant experts.
        router_width: columns of router_logits: logical experts, and zero experts where the model has them.
    """
    num_zero = _int(getattr(layer, "zero_expert_num", None)) or 0
    num_shared = _int(getattr(layer, "n_shared_experts", None)) or 0
    num_redundant = num_redundant or 0
    config = getattr(layer, "moe_config", None)
    told = _int(getattr(config, "num_logical_experts", None))
    given = _int(num_experts) or _int(getattr(layer, "global_num_experts", None))
    if given is None and told is None:
        if router_width is None:
            return None
        given = router_width - num_zero
    width = None if router_width is None else router_width - num_zero
    if told is not None:
        num_logical = told
    elif width is not None and width == given:  # 0.9.1, or nothing redundant
        num_logical = width
    else:
        num_logical = (given or 0) - num_redundant
        if width is not None:  # shared experts, placed with the routed ones, have no logit
            num_logical = min(num_logical, width)
    if num_logical <= 0:
        return None
    num_physical = max(given or 0, num_logical + num_redundant)
    return Experts(num_logical, num_physical, max(1, min(num_zero + num_shared, _MAX_EXTRA_BINS)))


def is_draft(layer: Any, name: str | None, number: int | None, *, drafting: Any) -> bool:
    """Return True for a layer of a draft or MTP model.

    ``drafting`` is what the forward pass says (0.18 and later). Before, the name or a number beyond the main
    model's layers tells.
    """
    if drafting is True:
        return True
    if name is not None and ("mtp" in name.lower() or "draft" in name.lower()):
        return True
    model_config = getattr(getattr(layer, "vllm_config", None), "model_config", None)
    hf_config = getattr(model_config, "hf_text_config", None) or getattr(
        model_config, "hf_config", None
    )
    num_layers = _int(getattr(hf_config, "num_hidden_layers", None))
    return (
        number is not None and name is not None and num_layers is not None and number >= num_layers
    )


def _int(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None

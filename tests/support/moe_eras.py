# SPDX-License-Identifier: Apache-2.0
"""Modules in the shape that each version of vllm-ascend and MindSpeed-RL has (names, signatures, calls).

They need no wheel, so they run everywhere; tests/vllm runs the real 0.11.0, 0.13.0 and 0.18.0. What is written
here is what the versions have in common with their source as far as a hook can see it: where ``select_experts``
is bound, the order and the defaults of ``apply``'s parameters, where mask, profile flag and layer names are,
which ids are random or physical. The arithmetic of the experts is left out: ``fused_experts`` keeps the ids that
it is handed.
"""

from __future__ import annotations

import sys
import types
from collections import Counter

import pytest
import torch
from tiny_run import read as read_file


class World:
    """One version's modules in ``sys.modules``, and what the engine would hold."""

    def __init__(self, monkeypatch):
        self._monkeypatch = monkeypatch
        self.handed = []  # ids that the experts were computed with
        self.context = types.SimpleNamespace(
            moe_comm_type=types.SimpleNamespace(name="ALLGATHER"), in_profile_run=False
        )
        self.module("vllm.forward_context", _forward_context=self.context)
        self.runner = self.module(
            "vllm_ascend.worker.model_runner_v1", NPUModelRunner=type("NPUModelRunner", (), {})
        )

    def module(self, name, source="", **attributes):
        module = types.ModuleType(name)
        vars(module).update(attributes)
        vars(module).update(torch=torch, WORLD=self)
        self._monkeypatch.setitem(sys.modules, name, module)
        if source:
            exec(compile(source, name, "exec"), vars(module))
        return module


SELECTOR = """
def select_experts(hidden_states, router_logits, top_k, use_grouped_topk, renormalize, topk_group=None,
                   num_expert_group=None, custom_routing_function=None, scoring_func="softmax",
                   e_score_correction_bias=None, global_num_experts=-1, **kwargs):
    weights, ids = router_logits.softmax(-1).topk(top_k)
    return weights, ids.to(torch.int32)


def random_like(ids, num_experts):
    return torch.full_like(ids, num_experts - 1)  # what nobody may count
"""

_0_9_1 = """
def _experts(topk_ids, **kwargs):
    WORLD.handed.append(topk_ids)


class AscendUnquantizedFusedMoEMethod:
    def apply(self, layer, x, router_logits, top_k, renormalize, use_grouped_topk=False, global_num_experts=-1,
              expert_map=None, is_prefill=False, enable_force_load_balance=False, log2phy=None,
              global_redundant_expert_num=0, **kwargs):
        if global_num_experts == 256:
            weights, ids, _ = torch_npu.npu_moe_gating_top_k(router_logits, k=top_k)
        else:
            weights, ids = select_experts(hidden_states=x, router_logits=router_logits, top_k=top_k,
                                          use_grouped_topk=use_grouped_topk, renormalize=renormalize)
        if enable_force_load_balance:
            ids = random_like(ids, global_num_experts)
        _experts(ids, mc2_mask=kwargs.get("mc2_mask"))
        return x
"""

_0_9_1_QUANTISED = """
from vllm_ascend.ops.fused_moe import select_experts, random_like


class AscendW8A8DynamicFusedMoEMethod:
    def apply(self, layer, x, router_logits, top_k, renormalize, use_grouped_topk=False, global_num_experts=-1,
              expert_map=None, enable_force_load_balance=True, log2phy=None, global_redundant_expert_num=0,
              prefix="", **kwargs):
        weights, ids = select_experts(hidden_states=x, router_logits=router_logits, top_k=top_k,
                                      use_grouped_topk=use_grouped_topk, renormalize=renormalize)
        if enable_force_load_balance:
            ids = random_like(ids, global_num_experts)
        WORLD.handed.append(ids)
        return x
"""

_0_11 = """
from vllm_ascend.ops.moe.experts_selector import select_experts, random_like


class AscendUnquantizedFusedMoEMethod:
    def apply(self, layer, x, use_grouped_topk, top_k, router_logits, renormalize, topk_group=None,
              num_expert_group=None, custom_routing_function=None, scoring_func="softmax",
              routed_scaling_factor=1.0, e_score_correction_bias=None, global_num_experts=-1, expert_map=None,
              apply_router_weight_on_input=False, activation="silu", enable_force_load_balance=False,
              **kwargs):
        weights, ids = select_experts(hidden_states=x, router_logits=router_logits, top_k=top_k,
                                      use_grouped_topk=use_grouped_topk, renormalize=renormalize)
        if enable_force_load_balance:
            ids = random_like(ids, global_num_experts)
        WORLD.handed.append(ids)
        return x
"""

_0_11_ADAPTER = """
class AscendFusedMoEMethod:
    def __init__(self, scheme):
        self.quant_method = scheme

    def apply(self, layer, x, router_logits, top_k, renormalize, use_grouped_topk=False, global_num_experts=-1,
              expert_map=None, enable_force_load_balance=False, **kwargs):
        return self.quant_method.apply(layer, x, router_logits, top_k, renormalize, use_grouped_topk,
                                       global_num_experts, expert_map, enable_force_load_balance, **kwargs)
"""

_0_11_SCHEME = """
from SELECTOR import select_experts, random_like


class AscendW4A8DynamicFusedMoEMethod:
    def apply(self, layer, x, router_logits, top_k, renormalize, use_grouped_topk=False, global_num_experts=-1,
              expert_map=None, enable_force_load_balance=True, **kwargs):
        weights, ids = select_experts(hidden_states=x, router_logits=router_logits, top_k=top_k,
                                      use_grouped_topk=use_grouped_topk, renormalize=renormalize)
        if enable_force_load_balance:
            ids = random_like(ids, global_num_experts)
        WORLD.handed.append(ids)
        return x
"""

_MAIN_ROUTER = """
class GroupedTopKRouter:
    def _compute_routing(self, hidden_states, router_logits, indices_type, *, input_ids=None):
        weights, ids = router_logits.softmax(-1).topk(2)
        return weights, ids.to(torch.int32)


class FusedTopKRouter(GroupedTopKRouter):
    def _compute_routing(self, hidden_states, router_logits, indices_type, *, input_ids=None):
        return super()._compute_routing(hidden_states, router_logits, indices_type)
"""

_MAIN = """
class AscendUnquantizedFusedMoEMethod:
    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        WORLD.handed.append(topk_ids)
        return x


class AscendRoutedExperts:
    log2phy = None
    num_shared = 0

    def _select_experts(self, x, router_logits):
        weights, ids = self.router._compute_routing(x, router_logits, torch.int32)
        if self.log2phy is not None:
            ids = self.log2phy[ids.long()].to(ids.dtype)
        if self.num_shared:
            shared = torch.full((ids.shape[0], self.num_shared), 8, dtype=ids.dtype)
            ids = torch.cat([ids, shared], dim=1)
        if WORLD.context.in_profile_run:
            ids = torch.full_like(ids, 7)
        return weights, ids

    def forward_impl(self, x, router_logits, mc2_mask=None):
        weights, ids = self._select_experts(x, router_logits)
        self.ascend_mc2_mask = mc2_mask
        try:
            return self.quant_method.apply(self, x, weights, ids, None, None)
        finally:
            del self.ascend_mc2_mask
"""

_MINDSPEED_RL = """
from vllm_ascend.ops.fused_moe import select_experts, random_like

_collects, _path = False, None


def set_EPLB_args(eplb_token_collects, eplb_token_save_path):
    global _collects, _path
    _collects, _path = eplb_token_collects, eplb_token_save_path


def get_EPLB_args():
    return _collects, _path


class AscendUnquantizedFusedMoEMethod:
    def apply(self, layer, x, router_logits, top_k, renormalize, use_grouped_topk=False, global_num_experts=-1,
              expert_map=None, is_prefill=False, enable_force_load_balance=False, log2phy=None,
              global_redundant_expert_num=0, **kwargs):
        if global_num_experts == 256:
            weights, ids, _ = torch_npu.npu_moe_gating_top_k(router_logits, k=top_k)
        else:
            weights, ids = select_experts(hidden_states=x, router_logits=router_logits, top_k=top_k,
                                          use_grouped_topk=use_grouped_topk, renormalize=renormalize)
        if enable_force_load_balance:
            ids = random_like(ids, global_num_experts)
        WORLD.handed.append(ids)
        return x


vllm_ascend_class = AscendUnquantizedFusedMoEMethod  # MindSpeed-RL puts it over vllm-ascend's
"""


def gating(router_logits, k):
    """As ``torch_npu.npu_moe_gating_top_k``: (weights, ids, out)."""
    weights, ids = router_logits.softmax(-1).topk(k)
    return weights, ids.to(torch.int32), None


def torch_npu_with_gating(world):
    return world.module("torch_npu", npu_moe_gating_top_k=gating)


def era_0_9_1(world):
    """(unquantised class, quantised class) of 0.9.1."""
    torch_npu = torch_npu_with_gating(world)
    fused = world.module("vllm_ascend.ops.fused_moe", SELECTOR + _0_9_1, torch_npu=torch_npu)
    quant = world.module("vllm_ascend.quantization.w8a8_dynamic", _0_9_1_QUANTISED)
    return fused.AscendUnquantizedFusedMoEMethod, quant.AscendW8A8DynamicFusedMoEMethod


def era_0_11(world):
    """(unquantised class, adapter class, scheme class) of 0.11."""
    world.module("vllm_ascend.ops.moe.experts_selector", SELECTOR)
    fused = world.module("vllm_ascend.ops.common_fused_moe", _0_11)
    adapter = world.module("vllm_ascend.quantization.quant_config", _0_11_ADAPTER)
    source = _0_11_SCHEME.replace("SELECTOR", "vllm_ascend.ops.moe.experts_selector")
    scheme = world.module("vllm_ascend.quantization.w4a8_dynamic", source)
    return (
        fused.AscendUnquantizedFusedMoEMethod,
        adapter.AscendFusedMoEMethod,
        scheme.AscendW4A8DynamicFusedMoEMethod,
    )


def era_0_13(world):
    """The same of 0.13: moved modules, mask and log2phy in kwargs."""
    selector = "vllm_ascend.ops.fused_moe.experts_selector"
    world.module(selector, SELECTOR)
    source = _0_11.replace("vllm_ascend.ops.moe.experts_selector", selector)
    fused = world.module("vllm_ascend.ops.fused_moe.fused_moe", source)
    adapter = world.module("vllm_ascend.quantization.quant_config", _0_11_ADAPTER)
    scheme = world.module(
        "vllm_ascend.quantization.w4a8_dynamic", _0_11_SCHEME.replace("SELECTOR", selector)
    )
    return (
        fused.AscendUnquantizedFusedMoEMethod,
        adapter.AscendFusedMoEMethod,
        scheme.AscendW4A8DynamicFusedMoEMethod,
    )


def era_main(world):
    """(layer class, method class, router class) of main: topk_ids is an argument of apply."""
    router = world.module("vllm_ascend.ops.fused_moe.router.fused_topk_router", _MAIN_ROUTER)
    fused = world.module("vllm_ascend.ops.fused_moe.routed_experts", _MAIN)
    return fused.AscendRoutedExperts, fused.AscendUnquantizedFusedMoEMethod, router.FusedTopKRouter


def mindspeed_rl(world):
    """MindSpeed-RL's adapter module over 0.9.1."""
    era_0_9_1(world)
    torch_npu = sys.modules["torch_npu"]
    name = "mindspeed_rl.models.rollout.vllm_adapter.fused_moe"
    adapter = world.module(name, _MINDSPEED_RL, torch_npu=torch_npu)
    fused = sys.modules["vllm_ascend.ops.fused_moe"]
    fused.AscendUnquantizedFusedMoEMethod = adapter.AscendUnquantizedFusedMoEMethod
    return adapter


NAME = "model.layers.3.mlp.experts"


def truth(scenario, version, verdict="exact", seam="AscendUnquantizedFusedMoEMethod.apply"):
    return pytest.mark.truth(scenario=scenario, seam=seam, version=version, verdict=verdict)


def layer_object(**attributes):
    layer = torch.nn.Module()
    layer.layer_name, layer.moe_instance_id = NAME, 0
    for key, value in attributes.items():
        setattr(layer, key, value)
    return layer


def logits(num_rows, num_experts=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, num_experts, generator=generator)


def counted(given, rows=None, num_experts=8, top_k=2):
    """Tokens per expert of the top-k of each row, by a loop."""
    seen = Counter()
    table = given.tolist()
    for row in range(len(table)) if rows is None else rows:
        seen.update(sorted(range(num_experts), key=lambda e: -table[row][e])[:top_k])
    return [seen.get(e, 0) for e in range(num_experts)]


def add(*many):
    return [sum(each) for each in zip(*many, strict=True)]


def read(tmp_path, step, role):
    from rl_insight_hooks.session import get_session

    assert get_session().writer.flush(30)
    return read_file(tmp_path, step, role)


def only_record(tmp_path):
    load_file = read(tmp_path, 1, "rollout")
    assert len(load_file.records) == 1, [r.seam for r in load_file.records]
    assert load_file.failed == {}
    return load_file, load_file.records[0]


def by_order_b(method, layer, given, **kwargs):
    """Call an apply of order B: (layer, x, router_logits, top_k, renormalize, ...)."""
    kwargs = {"global_num_experts": given.shape[1]} | kwargs
    return method.apply(layer, torch.ones(len(given), 4), given, 2, False, **kwargs)


def by_order_a(method, layer, given, **kwargs):
    """Call an apply of order A: (layer, x, use_grouped_topk, top_k, router_logits, renormalize, ...)."""
    kwargs = {"global_num_experts": given.shape[1]} | kwargs
    return method.apply(layer, torch.ones(len(given), 4), False, 2, given, False, **kwargs)

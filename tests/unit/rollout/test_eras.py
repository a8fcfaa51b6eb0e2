# SPDX-License-Identifier: Apache-2.0
"""vllm-ascend 0.9.1, 0.11, 0.13, main and MindSpeed-RL by class shapes (tests/support/moe_eras.py).

They run without any wheel; the real 0.11.0, 0.13.0 and 0.18.0 are in tests/vllm. The truth of every test is a
plain loop over the rows of the router's logits.
"""

from __future__ import annotations

from types import SimpleNamespace

import moe_eras
import pytest
import torch
from moe_eras import (
    NAME,
    add,
    by_order_a,
    by_order_b,
    counted,
    layer_object,
    logits,
    only_record,
    read,
    truth,
)


@pytest.fixture
def world(monkeypatch):
    return moe_eras.World(monkeypatch)


@truth("rollout: layers, mask in kwargs, profile flag", "vllm-ascend 0.9.1 (class shapes)")
def test_0_9_1(rih, world, tmp_path):
    unquantised, _ = moe_eras.era_0_9_1(world)
    rih.install(["vllm_ascend"])
    layer, given = layer_object(), logits(6)
    world.context.moe_comm_type = None
    world.context.fused_moe_state = SimpleNamespace(name="MC2")
    mask = torch.tensor([True] * 4 + [False] * 2)
    with rih.record(str(tmp_path), step=1, role="rollout"):
        by_order_b(unquantised(), layer, given, mc2_mask=mask)
        by_order_b(unquantised(), layer, given, enable_force_load_balance=True)
    load_file, record = only_record(tmp_path)
    assert record.counts == counted(given, range(4))
    assert load_file.masked == {"masked_ids": 4, "profile_run_calls": 1}


@truth(
    "rollout: flag that defaults to True", "vllm-ascend 0.9.1 (class shapes)", seam="W8A8Dynamic"
)
def test_0_9_1_quantised_methods_default_to_forced_routing(rih, world, tmp_path):
    _, quantised = moe_eras.era_0_9_1(world)
    rih.install(["vllm_ascend"])
    layer, given = layer_object(), logits(6)
    with rih.record(str(tmp_path), step=1, role="rollout"):
        by_order_b(quantised(), layer, given)
        by_order_b(quantised(), layer, given, enable_force_load_balance=False)
        quantised().apply(layer, given, given, 2, False, False, 8, None, False)  # by position
    load_file, record = only_record(tmp_path)
    assert record.counts == [2 * n for n in counted(given)]
    assert load_file.masked == {"profile_run_calls": 1}


@pytest.mark.parametrize("era", ["0.9.1", "mindspeed-rl"])
@truth("rollout: 256 experts by the gating operator", "0.9.1 and MindSpeed-RL (class shapes)")
def test_256_experts_by_the_gating_operator(rih, world, tmp_path, era):
    if era == "0.9.1":
        method, _ = moe_eras.era_0_9_1(world)
    else:
        method = moe_eras.mindspeed_rl(world).AscendUnquantizedFusedMoEMethod
    rih.install(["vllm_ascend"])
    layer, given = layer_object(), logits(5, 256)
    with rih.record(str(tmp_path), step=1, role="rollout"):
        by_order_b(method(), layer, given)
    _, record = only_record(tmp_path)
    assert record.counts == counted(given, num_experts=256)
    assert record.seam.endswith("(gating)")
    rih.uninstall()
    import sys

    assert sys.modules["torch_npu"].npu_moe_gating_top_k is moe_eras.gating


@pytest.mark.parametrize("era", ["0.11", "0.13"])
@truth("rollout: layers, redundant experts, profile flag", "vllm-ascend 0.11, 0.13 (class shapes)")
def test_unquantised(rih, world, tmp_path, era):
    unquantised = (moe_eras.era_0_11 if era == "0.11" else moe_eras.era_0_13)(world)[0]
    rih.install(["vllm_ascend"])
    layer, given, more = layer_object(global_redundant_expert_num=4), logits(6), logits(3, seed=2)
    with rih.record(str(tmp_path), step=1, role="rollout"):
        by_order_a(unquantised(), layer, given, global_num_experts=12)
        by_order_a(unquantised(), layer, more, global_num_experts=12)
        by_order_a(unquantised(), layer, more, enable_force_load_balance=True)
        world.context.in_profile_run = True
        by_order_a(unquantised(), layer, more)
    load_file, record = only_record(tmp_path)
    assert record.counts == add(counted(given), counted(more))
    assert load_file.num_experts == 8
    assert (record.layer, record.layer_name) == (3, NAME)


@pytest.mark.parametrize("era", ["0.11", "0.13"])
@truth(
    "rollout: adapter over a scheme", "0.11, 0.13 (class shapes)", seam="AscendFusedMoEMethod.apply"
)
def test_the_adapter_counts_once(rih, world, tmp_path, era):
    _, adapter, scheme = (moe_eras.era_0_11 if era == "0.11" else moe_eras.era_0_13)(world)
    rih.install(["vllm_ascend"])
    layer, given = layer_object(), logits(6)
    with rih.record(str(tmp_path), step=1, role="rollout"):
        by_order_b(adapter(scheme()), layer, given)
    load_file, record = only_record(tmp_path)
    assert record.counts == counted(given)
    assert record.seam == "vllm_ascend.AscendFusedMoEMethod.apply (selector)"
    assert load_file.dropped == {}


@truth("rollout: mask on the forward context", "vllm-ascend 0.11 (class shapes)")
def test_0_11_mask_of_the_forward_context(rih, world, tmp_path):
    unquantised = moe_eras.era_0_11(world)[0]
    rih.install(["vllm_ascend"])
    world.context.moe_comm_type.name = "MC2"
    world.context.mc2_mask = torch.tensor([True, False, True, False])
    given = logits(4)
    with rih.record(str(tmp_path), step=1, role="rollout"):
        by_order_a(unquantised(), layer_object(), given)
    _, record = only_record(tmp_path)
    assert record.counts == counted(given, [0, 2])


@truth("rollout: logical ids though apply is given physical ones", "main (class shapes)")
def test_main_takes_the_routers_logical_ids(rih, world, tmp_path):
    layer_class, method, router = moe_eras.era_main(world)
    rih.install(["vllm_ascend"])
    layer = layer_class()
    layer.layer_name, layer.quant_method, layer.router = NAME, method(), router()
    layer.moe_config = SimpleNamespace(num_logical_experts=8)
    layer.log2phy, layer.num_shared = torch.arange(12).flip(0)[:8], 1
    world.context.moe_comm_type.name = "MC2"
    given, mask = logits(6), torch.tensor([True, True, False, True, True, True])
    with rih.record(str(tmp_path), step=1, role="rollout"):
        layer.forward_impl(torch.ones(6, 4), given, mc2_mask=mask)
        layer.forward_impl(torch.ones(6, 4), given)
        world.context.in_profile_run = True
        layer.forward_impl(torch.ones(6, 4), given)
    load_file, record = only_record(tmp_path)
    assert record.counts == add(counted(given, [0, 1, 3, 4, 5]), counted(given))
    assert record.seam.endswith("(router)")
    assert load_file.dropped == {}
    assert load_file.masked == {"masked_ids": 2, "profile_run_calls": 1}


@truth("rollout: a router nobody hooked", "main (class shapes)", verdict="marked")
def test_main_without_a_router_marks_the_ids_physical(rih, world, tmp_path):
    _, method, _ = moe_eras.era_main(world)
    rih.install(["vllm_ascend"])
    layer = layer_object(
        log2phy=torch.arange(8),
        global_redundant_expert_num=4,
        moe_config=SimpleNamespace(num_logical_experts=8),
    )
    ids = torch.tensor([[0, 11], [8, 3]])
    with rih.record(str(tmp_path), step=1, role="rollout"):
        method().apply(layer, torch.ones(2, 4), torch.ones(2, 2), ids, None, None)
    _, record = only_record(tmp_path)
    assert record.counts == [1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 1]
    assert record.id_space == "physical"
    assert record.seam.endswith("(apply_arg)")


@truth("rollout: the adapter's own method", "MindSpeed-RL 2.3.0 (class shapes)")
def test_mindspeed_rl(rih, world, tmp_path):
    adapter = moe_eras.mindspeed_rl(world)
    rih.install(["mindspeed_rl"])
    given = logits(6)
    with rih.record(str(tmp_path), step=1, role="rollout"):
        by_order_b(adapter.AscendUnquantizedFusedMoEMethod(), layer_object(), given)
    load_file, record = only_record(tmp_path)
    assert record.counts == counted(given)
    assert "mindspeed_rl_collector" not in load_file.stamps


def test_mindspeed_rls_own_collector_is_noticed(rih, world, tmp_path):
    adapter = moe_eras.mindspeed_rl(world)
    rih.install(["mindspeed_rl"])
    adapter._collects = True  # switched on past the setter that hands over to us
    with rih.record(str(tmp_path), step=1, role="rollout"):
        by_order_b(adapter.AscendUnquantizedFusedMoEMethod(), layer_object(), logits(6))
    load_file, _ = only_record(tmp_path)
    assert "own collector is on" in load_file.stamps["mindspeed_rl_collector"]


def test_uninstall_leaves_nothing(rih, world, tmp_path):
    import sys

    moe_eras.mindspeed_rl(world)
    moe_eras.era_main(world)
    names = [n for n in sys.modules if n.startswith(("vllm_ascend", "mindspeed_rl"))]
    before = {n: dict(vars(sys.modules[n])) for n in names}
    of_classes = {
        cls: dict(vars(cls))
        for space in before.values()
        for cls in space.values()
        if type(cls) is type
    }
    rih.install(["vllm_ascend", "mindspeed_rl"])
    assert any(vars(cls) != space for cls, space in of_classes.items())
    rih.uninstall()
    for name, space in before.items():
        for key, value in space.items():
            assert vars(sys.modules[name])[key] is value, (name, key)
    for cls, space in of_classes.items():
        for key, value in space.items():
            if callable(value):
                assert vars(cls)[key] is value, (cls, key)


def test_a_method_whose_ids_nobody_saw_is_counted_as_lost(rih, world, tmp_path):
    unquantised = moe_eras.era_0_11(world)[0]
    unquantised.apply.__globals__["select_experts"] = lambda **kw: (None, None)
    rih.install(["vllm_ascend"])
    unquantised.apply.__wrapped__.__globals__["random_like"] = lambda ids, n: ids
    with rih.record(str(tmp_path), step=1, role="rollout"):
        by_order_a(unquantised(), layer_object(), logits(3))
    load_file = read(tmp_path, 1, "rollout")
    assert load_file.dropped == {"fused-MoE calls whose routed ids nobody saw": 1}


def test_a_half_imported_module_is_looked_at_again(rih, session, world, tmp_path):
    import sys

    moe_eras.era_0_11(world)
    module = sys.modules["vllm_ascend.ops.common_fused_moe"]
    method = module.AscendUnquantizedFusedMoEMethod
    del module.AscendUnquantizedFusedMoEMethod  # its class statement has not run yet
    module.__spec__ = SimpleNamespace(_initializing=True)
    rih.install(["vllm_ascend"])
    module.AscendUnquantizedFusedMoEMethod = method
    module.__spec__._initializing = False
    given = logits(4)
    with rih.record(str(tmp_path), step=1, role="rollout"):
        by_order_a(method(), layer_object(), given)
    assert only_record(tmp_path)[1].counts == counted(given)


def test_no_lazy_import_is_set_off(rih, world, monkeypatch):
    import sys
    import types

    class Lazy(types.ModuleType):
        def __getattr__(self, name):
            raise AssertionError(f"asked for {name}")

    moe_eras.era_0_11(world)
    for name in ("some_lazy_module", "vllm_ascend.lazy", "mindspeed_rl.lazy"):
        module = Lazy(name)
        del module.__spec__
        monkeypatch.setitem(sys.modules, name, module)
    rih.install(["vllm_ascend"])


@truth("rollout: draft model told after its layer was met", "0.13 (class shapes)", verdict="marked")
def test_a_layer_is_a_drafts_as_soon_as_the_forward_pass_says_so(rih, world, tmp_path):
    method = moe_eras.era_0_13(world)[0]
    rih.install(["vllm_ascend"])
    layer, given = layer_object(), logits(5)
    with rih.record(str(tmp_path), step=1, role="rollout"):
        world.context.in_profile_run = True  # a profile run of the engine does not say it
        by_order_a(method(), layer, given)
        world.context.in_profile_run, world.context.is_draft_model = False, True
        by_order_a(method(), layer, given)
    _, record = only_record(tmp_path)
    assert (record.draft, record.counts) == (True, counted(given))

# SPDX-License-Identifier: Apache-2.0
"""The real apply of vllm-ascend 0.18 over layers and calls; uninstall; who is imported first."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

VERSION = "vllm-ascend 0.18.0"
SEAM = "AscendUnquantizedFusedMoEMethod.apply"


def truth(scenario, verdict="exact", seam=SEAM, version=VERSION):
    return pytest.mark.truth(scenario=scenario, seam=seam, version=version, verdict=verdict)


@truth("rollout: two layers, several calls")
def test_two_layers_over_several_calls(hooked, forward, moe, recorded, tmp_path):
    first, second = moe("model.layers.3.mlp.experts"), moe("model.layers.7.mlp.experts")
    with hooked.record(str(tmp_path), step=1, role="rollout"):
        for call, num_tokens in enumerate((5, 1, 17)):
            first.apply(num_tokens, seed=call)
            second.apply(num_tokens, seed=100 + call)
    load_file, records = recorded()
    assert len(records) == 2
    for layer, number in ((first, 3), (second, 7)):
        record = records[layer.layer.layer_name]
        assert record.counts == layer.expected()
        assert (record.layer, record.layer_source) == (number, "module")
        assert (record.num_calls, record.num_passes) == (3, 3)
        assert record.num_assignments == 2 * (5 + 1 + 17)
        assert "selector" in record.seam
        assert record.num_tokens == 23
    assert load_file.failed == {}
    assert load_file.dropped == {}
    assert load_file.num_experts == 8


@truth("rollout: profile run with forced random routing", verdict="exact")
def test_a_profile_run_is_not_counted(hooked, forward, moe, recorded, tmp_path):
    layer = moe()
    with hooked.record(str(tmp_path), step=1, role="rollout"):
        layer.apply(4, seed=1)
        layer.apply(64, seed=2, count=False, enable_force_load_balance=True)
        forward.in_profile_run = True
        layer.apply(64, seed=3, count=False)
    load_file, records = recorded()
    assert records["model.layers.3.mlp.experts"].counts == layer.expected()
    assert load_file.masked == {"profile_run_calls": 2}
    # what the engine computed with in that call was random: the ids that we must not take
    assert forward.moe_comm_method.ids[1].tolist() != layer.selected(layer.logits(64, 2))


@truth("rollout: rows masked by mc2_mask")
def test_masked_rows_are_not_counted(hooked, forward, moe, recorded, tmp_path):
    from vllm_ascend.ascend_forward_context import MoECommType

    forward.moe_comm_type = MoECommType.MC2
    layer = moe()
    mask = torch.tensor([True, True, False, True, False, False])
    with hooked.record(str(tmp_path), step=1, role="rollout"):
        layer.apply(6, seed=1, rows=[0, 1, 3], mc2_mask=mask)
        forward.mc2_mask = mask  # 0.11 has no such parameter: the mask is the forward context's
        layer.apply(6, seed=2, rows=[0, 1, 3])
    load_file, records = recorded()
    assert records["model.layers.3.mlp.experts"].counts == layer.expected()
    assert load_file.masked == {"masked_ids": 2 * 2 * 3}


def test_the_output_is_the_same_with_and_without_us(rih, forward, moe, tmp_path):
    layer = moe()
    without = layer.apply(9, seed=5).routed_out
    ids_without = forward.moe_comm_method.ids[-1]
    rih.install(["vllm_ascend"])
    with rih.record(str(tmp_path), step=1, role="rollout"):
        inside = layer.apply(9, seed=5).routed_out
    assert torch.equal(without, inside)
    assert torch.equal(ids_without, forward.moe_comm_method.ids[-1])


def test_the_hosts_exception_comes_through_once(hooked, forward, moe, tmp_path):
    layer = moe()
    calls = []

    def fails(fused_experts_input):
        calls.append(fused_experts_input)
        raise RuntimeError("of the host")

    forward.moe_comm_method = type("Failing", (), {"fused_experts": staticmethod(fails)})
    from rl_insight_hooks.state import STATE

    with hooked.record(str(tmp_path), step=1, role="rollout"):
        with pytest.raises(RuntimeError, match="of the host"):
            layer.apply(3, seed=1)
        assert STATE.claims == 0
    assert len(calls) == 1


def test_uninstall_gives_every_name_its_function_back(rih, ascend, forward, moe):
    from vllm_ascend.ops.fused_moe import experts_selector

    before = {
        (name, key): value
        for name, module in sys.modules.items()
        if name.startswith("vllm_ascend") and hasattr(module, "__dict__")
        for key, value in vars(module).items()
        if callable(value)
    }
    apply = vars(ascend.AscendUnquantizedFusedMoEMethod)["apply"]
    rih.install(["vllm_ascend"])
    assert (
        experts_selector.select_experts is not before[experts_selector.__name__, "select_experts"]
    )
    assert ascend.select_experts is experts_selector.select_experts
    sys.modules.pop("vllm_ascend.ops.fused_moe.late", None)
    late = type(sys)("vllm_ascend.ops.fused_moe.late")  # bound after us
    exec("from vllm_ascend.ops.fused_moe.experts_selector import select_experts", vars(late))
    sys.modules[late.__name__] = late
    rih.uninstall()
    sys.modules.pop(late.__name__)
    for (name, key), value in before.items():
        assert vars(sys.modules[name])[key] is value, (name, key)
    assert vars(ascend.AscendUnquantizedFusedMoEMethod)["apply"] is apply
    assert late.select_experts is before[experts_selector.__name__, "select_experts"]


_ORDER = """
import sys
import rl_insight_hooks

if {first!r} == "ours":
    rl_insight_hooks.install(["vllm_ascend"])
from vllm_ascend.ops.fused_moe import experts_selector, fused_moe
from vllm_ascend.quantization.methods import w8a8_dynamic
if {first!r} == "theirs":
    rl_insight_hooks.install(["vllm_ascend"])
mark = "__rl_insight_hooks__"
assert hasattr(fused_moe.AscendUnquantizedFusedMoEMethod.apply, mark)
from rl_insight_hooks.session import get_session
get_session().installer.reassert()
assert hasattr(w8a8_dynamic.AscendW8A8DynamicFusedMoEMethod.apply, mark)
assert hasattr(w8a8_dynamic.select_experts, mark)
assert hasattr(fused_moe.select_experts, mark)
rl_insight_hooks.uninstall()
for place in (fused_moe.AscendUnquantizedFusedMoEMethod.apply, w8a8_dynamic.select_experts,
              w8a8_dynamic.AscendW8A8DynamicFusedMoEMethod.apply, fused_moe.select_experts,
              experts_selector.select_experts):
    assert not hasattr(place, mark), place
"""


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_it_does_not_matter_who_is_imported_first(ascend, first):
    script = _ORDER.format(first=first)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]


@truth(
    "rollout: enable_force_eplb (main's option on 0.18's classes): the gate's ids, stamped",
    verdict="marked",
)
def test_forced_balance_is_stamped(hooked, forward, moe, recorded, tmp_path, monkeypatch):
    from types import SimpleNamespace

    from vllm_ascend import ascend_config

    monkeypatch.setattr(ascend_config, "_ASCEND_CONFIG", SimpleNamespace(enable_force_eplb=True))
    layer = moe()
    with hooked.record(str(tmp_path), step=1, role="rollout"):
        layer.apply(4, seed=1)
    load_file, records = recorded()
    assert records["model.layers.3.mlp.experts"].counts == layer.expected()
    assert "enable_force_eplb" in load_file.stamps["forced_routing"]


def test_simulated_routing_is_stamped(hooked, forward, moe, recorded, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")
    layer = moe()
    with hooked.record(str(tmp_path), step=1, role="rollout"):
        layer.apply(4, seed=1)
    assert "uniform_random" in recorded()[0].stamps["forced_routing"]


def test_nothing_is_stamped_by_itself(hooked, forward, moe, recorded, tmp_path):
    layer = moe()
    with hooked.record(str(tmp_path), step=1, role="rollout"):
        layer.apply(4, seed=1)
    assert recorded()[0].stamps == {}

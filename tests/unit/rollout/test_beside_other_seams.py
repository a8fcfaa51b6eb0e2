# SPDX-License-Identifier: Apache-2.0
"""The rollout seam beside the grouped-matmul seam, and under the second model runner."""

from __future__ import annotations

from types import SimpleNamespace

import moe_eras
import pytest
import torch
from moe_eras import by_order_a, counted, layer_object, logits, only_record, read, truth

_COMPUTES = """
class AllGatherCommImpl:
    def fused_experts(self, topk_ids):
        counts = torch.bincount(topk_ids.view(-1).long(), minlength=8)
        x = torch.ones(int(counts.sum()), 4)
        torch_npu.npu_grouped_matmul([x], [torch.ones(8, 4, 4)], group_list=counts, group_list_type=1,
                                     split_item=2, group_type=0)
"""


@pytest.fixture
def world(monkeypatch):
    return moe_eras.World(monkeypatch)


@truth("rollout: grouped matmuls inside a fused-MoE call", "0.11 (class shapes)")
def test_the_grouped_matmul_inside_is_the_same_pass(npu, rih, world, tmp_path):
    method = moe_eras.era_0_11(world)[0]
    comm = world.module("vllm_ascend.ops.moe.moe_comm_method", _COMPUTES, torch_npu=npu)
    engine = comm.AllGatherCommImpl()
    world.handed = SimpleNamespace(append=engine.fused_experts)
    rih.install(["torch_npu", "vllm_ascend"])
    given = logits(6)
    with rih.record(str(tmp_path), step=1, role="rollout"):
        by_order_a(method(), layer_object(), given)
        engine.fused_experts(
            torch.zeros(1, 1)
        )  # outside apply the grouped matmul speaks for itself
    load_file = read(tmp_path, 1, "rollout")
    by_seam = {record.seam.partition(".")[0]: record.counts for record in load_file.records}
    assert by_seam == {"vllm_ascend": counted(given), "torch_npu": [1, 0, 0, 0, 0, 0, 0, 0]}


@truth("rollout: dummy runs of the second model runner", "0.13 and later (class shapes)")
def test_the_second_runners_dummy_run_is_shut_out(rih, world, tmp_path):
    class NPUModelRunner:
        def execute_model(self, scheduler_output, intermediate_tensors=None, dummy_run=False):
            return self.forward()

    world.module("vllm_ascend.worker.v2.model_runner", NPUModelRunner=NPUModelRunner)
    method = moe_eras.era_0_13(world)[0]
    rih.install(["vllm_ascend"])
    layer, given = layer_object(), logits(6)
    engine = NPUModelRunner()
    engine.forward = lambda: by_order_a(method(), layer, given)
    step = SimpleNamespace(total_num_scheduled_tokens=4)
    with rih.record(str(tmp_path), step=1, role="rollout"):
        engine.execute_model(step, dummy_run=True)
        engine.execute_model(step)
        engine.execute_model(step, None, dummy_run=True)
        engine.execute_model(step)
    _, record = only_record(tmp_path)
    assert record.counts == [2 * n for n in counted(given, range(4))]
    assert record.num_passes == 2


def test_counts_of_two_regions_do_not_mix(rih, world, tmp_path):
    method = moe_eras.era_0_13(world)[0]
    rih.install(["vllm_ascend"])
    layer = layer_object()
    for step in (1, 2):
        with rih.record(str(tmp_path), step=step, role="rollout"):
            by_order_a(method(), layer, logits(5, seed=step))
    for step in (1, 2):
        assert read(tmp_path, step, "rollout").records[0].counts == counted(logits(5, seed=step))


def test_ids_selected_for_nobody_are_told(rih, world, tmp_path):
    import sys

    moe_eras.era_0_13(world)
    rih.install(["vllm_ascend"])
    select = sys.modules["vllm_ascend.ops.fused_moe.experts_selector"].select_experts
    with rih.record(str(tmp_path), step=1, role="rollout"):
        for _ in range(3):
            select(None, logits(5), 2, False, False)
    dropped = read(tmp_path, 1, "rollout").dropped
    assert dropped == {"experts selected outside any hooked fused-MoE call": 2}

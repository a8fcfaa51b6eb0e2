# SPDX-License-Identifier: Apache-2.0
"""The hot path of the rollout seam: no wait for the device; graphs on a GPU; the last resort for ids."""

from __future__ import annotations

import types

import moe_eras
import pytest
import torch
from moe_eras import NAME, by_order_a, by_order_b, counted, layer_object, logits, only_record, truth
from torch.utils._python_dispatch import TorchDispatchMode

# What makes the host wait for a device, or makes a shape that depends on data.
_WAITS = (
    "_local_scalar_dense",
    "nonzero",
    "unique",
    "bincount",
    "is_nonzero",
    "equal",
    "masked_select",
)


@pytest.fixture
def world(monkeypatch):
    return moe_eras.World(monkeypatch)


class NoWaits(TorchDispatchMode):
    """Fails on an operator that would wait; keeps the names of the others."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, op, kinds, args=(), kwargs=None):
        name = op._schema.name.partition("::")[2]
        assert not name.startswith(_WAITS), name
        self.seen.append(name)
        return op(*args, **(kwargs or {}))


def with_runner(world):
    class NPUModelRunner:
        def _dummy_run(self):
            return self.forward()

        def profile_run(self):
            world.context.in_profile_run = True
            try:
                return self._dummy_run()
            finally:
                world.context.in_profile_run = False

        def execute_model(self, scheduler_output):
            return self.forward()

    world.runner.NPUModelRunner = NPUModelRunner
    return NPUModelRunner()


def test_nothing_waits_for_the_device(rih, world, tmp_path):
    engine = with_runner(world)
    method = moe_eras.era_0_11(world)[0]
    rih.install(["vllm_ascend"])
    layer, given = layer_object(), logits(16)
    world.context.moe_comm_type.name = "MC2"
    world.context.mc2_mask = torch.ones(16, dtype=torch.bool)
    engine.forward = lambda: by_order_a(method(), layer, given)
    step = types.SimpleNamespace(total_num_scheduled_tokens=16)
    with rih.record(str(tmp_path), step=1, role="rollout"):
        engine.execute_model(step)  # rows are made
        for comm in ("MC2", "ALLGATHER", "ALLTOALL", "SOMETHING_NEW"):
            world.context.moe_comm_type.name = comm
            with NoWaits() as ops:
                engine.execute_model(step)
            assert ops.seen.count("scatter_add_") == 1
    _, record = only_record(tmp_path)
    assert record.counts == [5 * n for n in counted(given)]


@truth("rollout: scheme imported with the model, before any region", "0.13 (class shapes)")
def test_a_scheme_that_comes_with_the_model_is_hooked_before_a_capture(rih, world, tmp_path):
    selector = world.module("vllm_ascend.ops.fused_moe.experts_selector", moe_eras.SELECTOR)
    name = "vllm_ascend.quantization.methods.w8a8_dynamic"
    source = moe_eras._0_11_SCHEME.replace("SELECTOR", selector.__name__)

    class NPUModelRunner:
        def load_model(self):
            self.scheme = world.module(name, source).AscendW4A8DynamicFusedMoEMethod()
            return "loaded"

        def _dummy_run(self):
            return None

        def execute_model(self, scheduler_output):
            return None

    world.runner.NPUModelRunner = NPUModelRunner
    own = dict(vars(NPUModelRunner))
    rih.install(["vllm_ascend"])
    engine = NPUModelRunner()
    assert engine.load_model() == "loaded"
    assert hasattr(type(engine.scheme).apply, "__rl_insight_hooks__")  # a capture may follow now
    given = logits(5)
    with rih.record(str(tmp_path), step=1, role="rollout"):
        by_order_b(engine.scheme, layer_object(), given, enable_force_load_balance=False)
    _, record = only_record(tmp_path)
    assert record.counts == counted(given)
    assert "(selector)" in record.seam
    rih.uninstall()
    assert dict(vars(NPUModelRunner)) == own


@truth(
    "rollout: ids of the communication method, no selector hooked", "0.11 (class shapes)", "marked"
)
def test_the_communication_methods_ids_are_the_last_resort(rih, world, tmp_path):
    source = moe_eras._0_11.replace(
        "from vllm_ascend.ops.moe.experts_selector import select_experts, random_like",
        "def select(router_logits):\n    return router_logits.topk(2)\n",
    )
    source = source.replace(
        "        WORLD.handed.append(ids)\n", "        COMM.fused_experts(topk_ids=ids)\n"
    )
    head, _, _ = source.partition("        weights, ids = select_experts(")
    tail = source[source.index("        COMM.fused_experts") :]
    comm = world.module(
        "vllm_ascend.ops.moe.moe_comm_method",
        "class MoECommMethod:\n    def fused_experts(self, topk_ids):\n        return topk_ids\n",
    )
    source = head + "        weights, ids = select(router_logits)\n" + tail
    fused = world.module("vllm_ascend.ops.common_fused_moe", source, COMM=comm.MoECommMethod())
    rih.install(["vllm_ascend"])
    given = logits(6)
    with rih.record(str(tmp_path), step=1, role="rollout"):
        by_order_a(fused.AscendUnquantizedFusedMoEMethod(), layer_object(), given)
    _, record = only_record(tmp_path)
    assert record.counts == counted(given)
    assert record.seam.endswith("(fused_experts)")


@pytest.mark.parametrize("order", ["eager first", "profile run first"])
@truth(
    "rollout: 100 replays of a CUDA graph, dummy replays between",
    "0.11 (class shapes; needs a CUDA GPU)",
    "not run",
)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_graph_counts_on_each_replay(rih, world, tmp_path, order):
    engine = with_runner(world)
    method = moe_eras.era_0_11(world)[0]
    rih.install(["vllm_ascend"])
    layer = layer_object()
    static = torch.zeros(16, 8, device="cuda")
    torch.softmax(static, -1).topk(2)  # libraries load outside the capture
    graph = torch.cuda.CUDAGraph()
    engine.forward = lambda: by_order_a(method(), layer, static)
    expected = [0] * 8
    with rih.record(str(tmp_path), step=1, role="rollout"):
        if order == "eager first":
            engine._dummy_run()
        else:
            engine.profile_run()

        def capture():
            with torch.cuda.graph(graph):
                by_order_a(method(), layer, static)

        engine.forward = capture
        engine._dummy_run()
        engine.forward = graph.replay
        for replay in range(100):
            given = logits(16, seed=replay)
            static.copy_(given)
            num_tokens = 1 + replay % 16
            engine.execute_model(types.SimpleNamespace(total_num_scheduled_tokens=num_tokens))
            expected = [
                a + b for a, b in zip(expected, counted(given, range(num_tokens)), strict=True)
            ]
            if replay % 10 == 0:
                engine._dummy_run()  # an idle rank replays too
    _, record = only_record(tmp_path)
    assert record.layer_name == NAME
    assert record.counts == expected

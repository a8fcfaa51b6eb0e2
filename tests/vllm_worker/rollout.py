# SPDX-License-Identifier: Apache-2.0
"""A rollout worker in a spawned process: the real NPUWorker's methods over a runner with one real MoE method.

Stand-ins: the runner, the sleep allocator, the pipeline group and the communication method, which need a device.
"""

from __future__ import annotations

import os
import sys
import time
import types
from unittest.mock import MagicMock

import spawned

NUM_EXPERTS, TOP_K = 8, 2


class _Comm:
    @staticmethod
    def fused_experts(fused_experts_input):
        return types.SimpleNamespace(
            routed_out=fused_experts_input.hidden_states, expert_tokens=None
        )


def _worker():
    """A real NPUWorker without its ``__init__``, and the list that its runner's truth goes to."""
    import torch
    import torch_npu  # noqa: F401
    import vllm.forward_context
    import vllm_ascend.worker.worker as module
    from vllm_ascend.ascend_forward_context import MoECommType
    from vllm_ascend.ops.fused_moe import experts_selector, fused_moe

    nothing = types.SimpleNamespace(
        maybe_prefetch_moe_weight_preprocess=lambda *args, **kwargs: None
    )
    experts_selector.get_weight_prefetch_method = lambda: nothing
    vllm.forward_context._forward_context = types.SimpleNamespace(
        moe_comm_method=_Comm,
        moe_comm_type=MoECommType.ALLGATHER,
        in_profile_run=False,
        is_draft_model=False,
        capturing=False,
        mc2_mask=None,
        num_tokens=None,
        dp_metadata=None,
        additional_kwargs={},
    )
    torch.npu.mem_get_info = lambda *args: (1, 2)
    module.CaMemAllocator = MagicMock()
    module.set_current_vllm_config = lambda config: MagicMock()
    module.get_pp_group = lambda: types.SimpleNamespace(is_first_rank=True, is_last_rank=True)
    method = object.__new__(fused_moe.AscendUnquantizedFusedMoEMethod)
    torch.nn.Module.__init__(method)
    method.moe, method.dynamic_eplb = types.SimpleNamespace(has_bias=False), False
    layer = torch.nn.Module()
    layer.layer_name = "model.layers.0.mlp.experts"
    layer.w13_weight = layer.w2_weight = torch.zeros(1)
    layer.vllm_config = types.SimpleNamespace(model_config=None)
    truth = [0] * NUM_EXPERTS

    class Runner:
        model = None

        def load_model(self):
            pass

        def execute_model(self, scheduler_output, intermediate_tensors=None):
            num = scheduler_output.total_num_scheduled_tokens
            logits = torch.randn(
                num, NUM_EXPERTS, generator=torch.Generator().manual_seed(sum(truth))
            )
            for row in logits.tolist():
                for expert in sorted(range(NUM_EXPERTS), key=lambda e: -row[e])[:TOP_K]:
                    truth[expert] += 1
            method.apply(
                layer=layer,
                x=torch.ones(num, 4),
                use_grouped_topk=False,
                top_k=TOP_K,
                router_logits=logits,
                renormalize=False,
                scoring_func="sigmoid",
                global_num_experts=NUM_EXPERTS,
            )

    worker = object.__new__(module.NPUWorker)
    worker.__dict__.update(
        vllm_config=MagicMock(**{"model_config.enable_sleep_mode": False}),
        model_runner=Runner(),
        _pp_send_work=[],
    )
    return worker, truth


def live(answers, how):
    """Load, run two steps, then ``how``: sleep, interval, exit or sigterm. Answers with what was chosen."""
    sys.meta_path.insert(0, spawned._Cann())
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    runner = types.ModuleType("vllm_ascend.worker.model_runner_v1")
    runner.NPUModelRunner = type("NPUModelRunner", (), {})
    sys.modules[runner.__name__] = runner
    worker, truth = _worker()
    worker.load_model()
    scheduled = types.SimpleNamespace(total_num_scheduled_tokens=6)
    for _ in range(2):
        worker.execute_model(scheduled)
        if how == "interval":
            time.sleep(0.3)
    if how == "sleep":
        worker.sleep(1)
    answers.put(truth)
    if how in ("sleep", "interval"):
        time.sleep(1.5)  # the queue's thread sends, and the writer's writes, what was handed over
        os._exit(9)  # as killed: nothing more can be written
    if how == "sigterm":
        time.sleep(120)

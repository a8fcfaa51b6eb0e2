# SPDX-License-Identifier: Apache-2.0
"""One process with the real rollout adapter of MindSpeed-RL over the real vllm-ascend 0.11.

    python mindspeed_rl_main.py SAVE_PATH FLAG

FLAG is ``eplb_token_collects``. Does what ``vllm_engine.py`` does: sets the flags, then makes an engine, which
loads vLLM's general plugins; then two MoE layers run in three forwards. Prints what was chosen, by a plain loop.
"""

from __future__ import annotations

import json
import pathlib
import sys
import types

from empty_torchair import EmptyTorchair

NUM_EXPERTS, TOP_K, NUM_LAYERS = 8, 2, 2


class Comm:
    """In place of the experts: they are not what is counted here."""

    @staticmethod
    def fused_experts(*, hidden_states, **kwargs):
        return hidden_states


def make_packages(root):
    """The packages above the adapter without their ``__init__``, which import the trainer."""
    folder, name = pathlib.Path(root), ""
    for part in ("mindspeed_rl", "models", "rollout", "vllm_adapter"):
        folder, name = folder / part, f"{name}.{part}" if name else part
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(folder)]


def main(save_path, flag, checkout):
    sys.meta_path.insert(0, EmptyTorchair())
    import torch
    import torch.distributed as dist
    import torch_npu  # noqa: F401
    import vllm.forward_context
    import vllm_ascend  # noqa: F401
    from vllm_ascend.ascend_forward_context import MoECommType
    from vllm_ascend.ops.moe import experts_selector

    # reads the engine's configuration for the redundant experts: there is no engine here
    experts_selector.get_ascend_config = lambda: types.SimpleNamespace(init_redundancy_expert=0)
    make_packages(checkout)
    from mindspeed_rl.models.rollout.vllm_adapter import fused_moe as adapter

    store = f"file://{save_path}.rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    adapter.set_EPLB_args(flag, save_path)
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # as the engine's arguments do
    vllm.forward_context._forward_context = types.SimpleNamespace(
        moe_comm_method=Comm,
        moe_comm_type=MoECommType.ALLGATHER,
        in_profile_run=False,
        mc2_mask=None,
        num_tokens=None,
        dp_metadata=None,
        weight_prefetch_method=None,
    )
    adapter.apply_router_weight_on_input = False  # 2.3.0 uses the name without having it
    method = object.__new__(adapter.AscendUnquantizedFusedMoEMethod)
    if isinstance(method, torch.nn.Module):
        torch.nn.Module.__init__(method)
    method.dynamic_eplb = False
    method.use_aclgraph = True

    import rl_insight_hooks as rih

    layers = [torch.nn.Module() for _ in range(NUM_LAYERS)]
    for number, layer in enumerate(layers):
        # the first three layers of the model are dense; the collects count MoE layers
        layer.moe_instance_id, layer.layer_name = number, f"model.layers.{number + 3}.mlp.experts"
        layer.w13_weight = layer.w2_weight = torch.zeros(1)
    chosen = {str(layer): {str(e): 0 for e in range(NUM_EXPERTS)} for layer in range(NUM_LAYERS)}
    with rih.record(step=1, role="actor_generate_sequences"):
        for forward in range(3):
            for number in range(NUM_LAYERS):
                generator = torch.Generator().manual_seed(10 * forward + number)
                logits = torch.randn(5 + forward, NUM_EXPERTS, generator=generator)
                for row in logits.tolist():
                    for expert in sorted(range(NUM_EXPERTS), key=lambda e: -row[e])[:TOP_K]:
                        chosen[str(number)][str(expert)] += 1
                method.apply(
                    layer=layers[number],
                    x=torch.ones(len(logits), 4),
                    router_logits=logits,
                    top_k=TOP_K,
                    renormalize=False,
                    scoring_func="sigmoid",
                    global_num_experts=NUM_EXPERTS,
                )
    rih.flush()
    print(json.dumps({"chosen": chosen, "theirs_is_on": bool(adapter.get_EPLB_args()[0])}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "true", sys.argv[3])

# SPDX-License-Identifier: Apache-2.0
"""One rank of a real Megatron-Core MoE on CPU: python rank_main.py OUT RANK WORLD EP ETP CHECKPOINT WATCH

Prints, as JSON on its last line, what this rank's routers chose: {"forward": [layer][global expert], ...}, and
"digest", a hash of outputs and gradients.
Only ``SequentialMLP`` runs on CPU; the alltoall dispatcher and its collectives are the real ones, over gloo.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import sys

import torch
import torch.distributed as dist

NUM_LAYERS, NUM_EXPERTS, TOP_K, HIDDEN, TOKENS = 3, 8, 2, 16, 24


def cpu_only():
    """Megatron asks for CUDA streams and memory in a few places that do nothing on CPU."""

    class Nothing:
        def __getattr__(self, name):
            return lambda *args, **kwargs: Nothing()

        def __enter__(self):
            return self

        def __exit__(self, *args):
            return False

    torch.cuda.Stream = lambda *a, **k: Nothing()
    torch.cuda.current_stream = lambda *a, **k: Nothing()
    torch.cuda.Event = lambda *a, **k: Nothing()
    torch.cuda.stream = lambda *a, **k: Nothing()
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *a, **k: None
    to = torch.Tensor.to

    def to_cpu(self, *args, **kwargs):
        args = tuple("cpu" if isinstance(a, str) and a.startswith("cuda") else a for a in args)
        return to(self, *args, **kwargs)

    torch.Tensor.to = to_cpu
    all_to_all = dist.all_to_all_single

    def with_lists(output, input, output_split_sizes=None, input_split_sizes=None, **kwargs):
        # only tensors on a device are turned into lists of sizes by the dispatcher
        sizes = [
            s.tolist() if isinstance(s, torch.Tensor) else s
            for s in (output_split_sizes, input_split_sizes)
        ]
        return all_to_all(output, input, *sizes, **kwargs)

    dist.all_to_all_single = torch.distributed.all_to_all_single = with_lists

    def gather_each(outputs, input, group=None, **kwargs):  # gloo gathers equal sizes only
        for output, source in zip(outputs, dist.get_process_group_ranks(group), strict=True):
            if source == dist.get_rank():
                output.copy_(input)
            dist.broadcast(output, src=source, group=group)

    def reduce_each(output, inputs, group=None, **kwargs):
        for part, target in zip(inputs, dist.get_process_group_ranks(group), strict=True):
            total = part.clone()
            dist.all_reduce(total, group=group)
            if target == dist.get_rank():
                output.copy_(total)

    torch.distributed.all_gather = gather_each
    torch.distributed.reduce_scatter = reduce_each
    torch.Tensor.cuda = lambda self, *a, **k: self


def break_ours(where):
    """Make a function of ours, "module:Class.method" or "module:function", raise for good."""
    module, _, name = where.partition(":")
    owner = importlib.import_module(module)
    *parents, last = name.split(".")
    for parent in parents:
        owner = getattr(owner, parent)

    def broken(*args, **kwargs):
        raise RuntimeError("injected")

    setattr(owner, last, broken)


def make_layers(ep=1, etp=1):
    """Initialise Megatron's groups and return its MoE layers 3, 4 and 5."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

    # a name that the module lacks where Transformer Engine is not installed
    moe_utils = sys.modules["megatron.core.transformer.moe.moe_utils"]
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=ep, expert_tensor_parallel_size=etp
    )
    config = TransformerConfig(
        num_layers=NUM_LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        ffn_hidden_size=16,
        moe_ffn_hidden_size=16,
        num_moe_experts=NUM_EXPERTS,
        moe_router_topk=TOP_K,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=False,
        add_bias_linear=False,
        use_cpu_initialization=True,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        moe_router_dtype="fp32",
    )
    spec = get_moe_module_spec(use_te=False, num_experts=NUM_EXPERTS, moe_grouped_gemm=False)
    torch.manual_seed(0)
    # layer_number is 1-based and global: layers 3, 4, 5 of a pipeline stage
    layers = torch.nn.ModuleList(
        MoELayer(config, submodules=spec.submodules, layer_number=n + 3) for n in range(NUM_LAYERS)
    )
    for layer in layers:
        torch.nn.init.normal_(layer.router.weight, std=1.0)
    return layers


def run_layers(layers, x, kind):
    """Return the output of ``layers``, each under a checkpoint of that ``kind``."""
    for layer in layers:
        if kind == "none":
            x = x + layer(x)[0]
        else:
            x = x + torch.utils.checkpoint.checkpoint(
                lambda y, layer=layer: layer(y)[0], x, use_reentrant=kind == "reentrant"
            )
    return x


def main(out, rank, world, ep, etp, kind, watched):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    cpu_only()
    dist.init_process_group(
        "gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=world
    )
    import rl_insight_hooks as rih

    layers = make_layers(ep, etp)
    truth = {phase: [[0] * NUM_EXPERTS for _ in layers] for phase in ("forward", "recompute")}
    phase = ["forward"]

    def count(index):
        def hook(router, args, output):
            for token in output[1].tolist():
                for expert, chosen in enumerate(token):
                    truth[phase[0]][index][expert] += bool(chosen)

        return hook

    for index, layer in enumerate(layers):
        layer.router.register_forward_hook(count(index))
    if watched:
        assert rih.watch(layers) == NUM_LAYERS
    rih.configure(replicas=os.environ["TEST_REPLICAS"])
    breaks = os.environ.get("TEST_BREAK")
    region = rih.record(f"{out}/data", step=1, role="update")
    if breaks == "off":
        region = contextlib.nullcontext()
    elif breaks:
        break_ours(breaks)
    digest = hashlib.sha256()
    torch.manual_seed(100 + rank)
    with region:
        for _ in range(2):
            x = torch.randn(TOKENS, 1, HIDDEN, requires_grad=True)
            x = run_layers(layers, x, kind)
            phase[0] = "recompute"
            x.sum().backward()
            phase[0] = "forward"
            digest.update(x.detach().numpy().tobytes())
    for parameter in layers.parameters():
        digest.update(parameter.grad.numpy().tobytes())
    assert rih.flush()
    print(json.dumps({**truth, "digest": digest.hexdigest()}))
    dist.barrier()


if __name__ == "__main__":
    out, rank, world, ep, etp, kind, watched = sys.argv[1:]
    main(out, int(rank), int(world), int(ep), int(etp), kind, watched == "True")

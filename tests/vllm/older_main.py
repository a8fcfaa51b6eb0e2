# SPDX-License-Identifier: Apache-2.0
"""One process with a real older vllm-ascend (0.11.0 or 0.13.0, first on PYTHONPATH): run it, print what was counted.

Prints one line of JSON: scenario -> {"counted": ..., "expected": ...}, where "expected" is worked out here by
a plain loop over the logits. Stand-ins: the weight prefetch, the object behind the forward context, the
communication method (it keeps the ids it is handed), and for 0.11 an empty ``torchair``.
"""

from __future__ import annotations

import json
import pathlib
import sys
import types
from collections import Counter

from empty_torchair import EmptyTorchair

NUM_EXPERTS, TOP_K = 8, 2
NAME = "model.layers.3.mlp.experts"
OUT = pathlib.Path(sys.argv[1])
OLD = sys.argv[2] == "0.11.0"


if OLD:
    sys.meta_path.insert(0, EmptyTorchair())

import torch  # noqa: E402
import torch_npu  # noqa: E402, F401
import vllm.forward_context  # noqa: E402
import vllm_ascend  # noqa: E402
from vllm_ascend.ascend_forward_context import MoECommType  # noqa: E402

import rl_insight_hooks  # noqa: E402
from rl_insight_hooks.schema import decode_load_file  # noqa: E402
from rl_insight_hooks.session import get_session  # noqa: E402

if OLD:
    from vllm_ascend.ops import common_fused_moe as fused_moe
    from vllm_ascend.ops.moe import experts_selector

    # reads the engine's configuration for the redundant experts: there is no engine here
    experts_selector.get_ascend_config = lambda: types.SimpleNamespace(init_redundancy_expert=0)
else:
    from vllm_ascend.ops.fused_moe import experts_selector, fused_moe

    experts_selector.get_weight_prefetch_method = lambda: None
from vllm_ascend.quantization import quant_config, w8a8_dynamic  # noqa: E402

torch.set_num_threads(1)


class Comm:
    """Keeps the ids that the experts would be computed with."""

    def __init__(self):
        self.ids = []

    def fused_experts(self, *, hidden_states, topk_ids, **kwargs):
        self.ids.append(topk_ids.tolist())
        return hidden_states


def selected(logits):
    """Top-k of each row by a plain loop."""
    return [sorted(range(len(row)), key=lambda e: -row[e])[:TOP_K] for row in logits.tolist()]


def logits_of(num_tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    skew = torch.linspace(1.0, -1.0, NUM_EXPERTS)
    return torch.randn(num_tokens, NUM_EXPERTS, generator=generator) + skew


def counts_of(rows):
    seen = Counter(expert for row in rows for expert in row)
    return [seen.get(expert, 0) for expert in range(NUM_EXPERTS)]


def layer_of(name=NAME, **attributes):
    layer = torch.nn.Module()
    layer.layer_name = name
    layer.w13_weight = layer.w2_weight = torch.zeros(1)
    layer.w13_weight_scale = layer.w13_weight_scale_fp32 = layer.w2_weight_scale = torch.zeros(1)
    layer.n_shared_experts, layer.mix_placement = 0, False
    for key, value in attributes.items():
        setattr(layer, key, value)
    return layer


def bare(cls):
    """An object without its ``__init__``, which asks for a configured engine."""
    method = object.__new__(cls)
    if isinstance(method, torch.nn.Module):  # in 0.11 and 0.13 not all are
        torch.nn.Module.__init__(method)
    return method


def unquantised():
    method = bare(fused_moe.AscendUnquantizedFusedMoEMethod)
    method.dynamic_eplb = False
    return method


def adapter(**attributes):
    scheme = object.__new__(w8a8_dynamic.AscendW8A8DynamicFusedMoEMethod)
    scheme.multistream_overlap_gate = scheme.dynamic_eplb = scheme.use_aclgraph = False
    scheme.in_dtype = torch.float32
    for key, value in attributes.items():
        setattr(scheme, key, value)
    method = bare(quant_config.AscendFusedMoEMethod)
    method.quant_method = scheme
    return method


def call(method, layer, logits, **kwargs):
    """As forward_impl calls apply: by keyword."""
    given = {
        "layer": layer,
        "x": torch.ones(len(logits), 4),
        "use_grouped_topk": False,
        "top_k": TOP_K,
        "router_logits": logits,
        "renormalize": False,
        "scoring_func": "sigmoid",
        "global_num_experts": NUM_EXPERTS,
    }
    return method.apply(**(given | kwargs))


results = {}
steps = iter(range(1, 1000))


def scenario(function):
    """Run ``function`` in a region of its own; it returns what ought to be counted, by layer."""
    context = types.SimpleNamespace(
        moe_comm_method=Comm(),
        moe_comm_type=MoECommType.ALLGATHER,
        in_profile_run=False,
        mc2_mask=None,
        num_tokens=None,
        dp_metadata=None,
        weight_prefetch_method=None,
    )
    vllm.forward_context._forward_context = context
    step = next(steps)
    with rl_insight_hooks.record(str(OUT), step=step, role="rollout"):
        expected = function(context)
    assert get_session().writer.flush(30)
    path = OUT / f"step_{step}" / "rollout" / "rank0" / "group_list.json"
    load_file = decode_load_file(path.read_bytes())
    results[function.__name__] = {
        "counted": {record.layer_name: record.counts for record in load_file.records},
        "expected": expected,
        "seams": sorted({record.seam for record in load_file.records}),
        "extra": [record.extra_counts for record in load_file.records],
        "masked": load_file.masked,
        "dropped": load_file.dropped,
        "failed": load_file.failed,
        "handed": context.moe_comm_method.ids,
    }


before = {
    (name, key): value
    for name, module in sys.modules.items()
    if name.startswith("vllm_ascend") and isinstance(module, types.ModuleType)
    for key, value in vars(module).items()
    if callable(value)
}
applies = [
    (cls, vars(cls)["apply"])
    for cls in (
        fused_moe.AscendUnquantizedFusedMoEMethod,
        quant_config.AscendFusedMoEMethod,
        w8a8_dynamic.AscendW8A8DynamicFusedMoEMethod,
    )
]
rl_insight_hooks.install(["vllm_ascend"])


@scenario
def two_layers(context):
    names = (NAME, "model.layers.7.mlp.experts")
    layers, rows = [layer_of(name) for name in names], {name: [] for name in names}
    for seed, num_tokens in enumerate((5, 1, 17)):
        for offset, (name, layer) in enumerate(zip(names, layers, strict=True)):
            logits = logits_of(num_tokens, seed + 100 * offset)
            call(unquantised(), layer, logits)
            rows[name] += selected(logits)
    return {name: counts_of(rows[name]) for name in names}


@scenario
def profile_run(context):
    layer, counted = layer_of(), logits_of(4, 1)
    call(unquantised(), layer, counted)
    call(unquantised(), layer, logits_of(64, 2), enable_force_load_balance=True)
    context.in_profile_run = True
    call(unquantised(), layer, logits_of(64, 3))
    return {NAME: counts_of(selected(counted))}


@scenario
def mc2_mask(context):
    context.moe_comm_type = MoECommType.MC2
    layer, logits = layer_of(), logits_of(6, 1)
    mask = torch.tensor([True, True, False, True, False, False])
    if OLD:  # no such argument: the mask is the forward context's
        context.mc2_mask = mask
        call(unquantised(), layer, logits)
    else:
        call(unquantised(), layer, logits, mc2_mask=mask)
    rows = selected(logits)
    return {NAME: counts_of([rows[0], rows[1], rows[3]])}


@scenario
def adapter_and_scheme(context):
    logits = logits_of(11, 4)
    call(adapter(), layer_of(), logits)  # hands on to the scheme, by position
    return {NAME: counts_of(selected(logits))}


@scenario
def adapter_profile_run(context):
    layer, logits = layer_of(), logits_of(3, 5)
    call(adapter(), layer, logits)
    call(adapter(), layer, logits_of(64, 6), enable_force_load_balance=True)
    return {NAME: counts_of(selected(logits))}


@scenario
def eplb(context):
    logits = logits_of(9, 4)
    layer = layer_of(log2phy=torch.arange(NUM_EXPERTS).flip(0), global_redundant_expert_num=4)
    call(
        adapter(),
        layer,
        logits,
        global_num_experts=NUM_EXPERTS + 4,
        log2phy=layer.log2phy,
        global_redundant_expert_num=4,
    )
    return {NAME: counts_of(selected(logits))}


if not OLD:

    @scenario
    def selected_ahead(context):
        from vllm_ascend import flash_common3_context as fc3

        layer, rows = layer_of(), []
        for seed in (1, 2):
            logits = logits_of(6, seed)
            weights, ids = fused_moe.select_experts(
                hidden_states=torch.ones(6, 4),
                router_logits=logits,
                top_k=TOP_K,
                use_grouped_topk=False,
                renormalize=False,
                scoring_func="sigmoid",
                global_num_experts=NUM_EXPERTS,
            )
            fc3.set_flash_common3_context(topk_weights=weights, topk_ids=ids)
            call(adapter(multistream_overlap_gate=True), layer, logits)
            rows += selected(logits)
        return {NAME: counts_of(rows)}

    @scenario
    def shared_experts_placed_with_the_routed(context):
        logits = logits_of(7, 8)
        layer = layer_of(n_shared_experts=1, mix_placement=True)
        call(adapter(), layer, logits, global_num_experts=NUM_EXPERTS + 1)
        return {NAME: counts_of(selected(logits))}


rl_insight_hooks.uninstall()
same_names = all(vars(sys.modules[name])[key] is value for (name, key), value in before.items())
same_methods = all(vars(cls)["apply"] is apply for cls, apply in applies)
folder = pathlib.Path(vllm_ascend.__file__).resolve().parent.parent
versions = [p.name for p in folder.glob("vllm_ascend-*.dist-info")]
print(json.dumps({"results": results, "restored": [same_names, same_methods], "dist": versions}))

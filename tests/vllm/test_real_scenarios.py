# SPDX-License-Identifier: Apache-2.0
"""Settings of a rollout, each with counts worked out by the test: the real 0.18 classes."""

from __future__ import annotations

import types
from collections import Counter

import pytest
import torch

VERSION = "vllm-ascend 0.18.0"
SEAM = "AscendUnquantizedFusedMoEMethod.apply"
NAME = "model.layers.3.mlp.experts"


def truth(scenario, verdict="exact", seam=SEAM, version=VERSION):
    return pytest.mark.truth(scenario=scenario, seam=seam, version=version, verdict=verdict)


def routed_to(ids):
    """A model's own routing function that gives ``ids``."""

    def route(hidden_states, gating_output, topk, renormalize, **kwargs):
        return torch.ones(ids.shape), ids.clone()

    return route


def counts_of(ids, num_experts):
    seen = Counter(e for row in ids for e in row)
    return [seen.get(e, 0) for e in range(num_experts)]


@pytest.fixture
def scheme(ascend):
    """The real adapter over the real W8A8 scheme, and a layer with what the scheme reads."""
    from vllm_ascend.quantization.method_adapters import AscendFusedMoEMethod
    from vllm_ascend.quantization.methods.w8a8_dynamic import AscendW8A8DynamicFusedMoEMethod

    inner = object.__new__(AscendW8A8DynamicFusedMoEMethod)
    inner.multistream_overlap_gate = inner.dynamic_eplb = False
    inner.in_dtype = torch.float32
    adapter = object.__new__(AscendFusedMoEMethod)
    adapter.quant_method = inner
    return adapter, inner


def quantised(moe, adapter, **attributes):
    one = torch.zeros(1)
    layer = moe(w13_weight_scale_fp32=one, w2_weight_scale=one, **attributes)
    layer.method = adapter
    return layer


@truth("rollout: quantised adapter and its scheme", seam="AscendFusedMoEMethod.apply")
def test_the_adapter_counts_once(hooked, forward, moe, scheme, recorded, tmp_path):
    layer = quantised(moe, scheme[0])
    with hooked.record(str(tmp_path), step=1, role="rollout"):
        layer.apply(11, seed=4)
    load_file, records = recorded()
    assert len(load_file.records) == 1
    assert records[NAME].counts == layer.expected()
    assert records[NAME].seam == "vllm_ascend.AscendFusedMoEMethod.apply (selector)"


@truth("rollout: experts selected ahead of apply (fc3)", seam="AscendFusedMoEMethod.apply")
def test_ids_selected_before_apply(hooked, ascend, forward, moe, scheme, recorded, tmp_path):
    from vllm_ascend import flash_common3_context as fc3

    adapter, inner = scheme
    inner.multistream_overlap_gate = True
    layer = quantised(moe, adapter)
    with hooked.record(str(tmp_path), step=1, role="rollout"):
        for seed in (1, 2):
            logits = layer.logits(6, seed)
            weights, ids = ascend.select_experts(
                hidden_states=torch.ones(6, 4),
                router_logits=logits,
                top_k=2,
                use_grouped_topk=False,
                renormalize=False,
                scoring_func="sigmoid",
                global_num_experts=8,
            )
            fc3.set_flash_common3_context(topk_weights=weights, topk_ids=ids)
            layer.apply(6, seed)
    load_file, records = recorded()
    assert records[NAME].counts == layer.expected()
    assert load_file.dropped == {}


@truth("rollout: EPLB with redundant experts (log2phy)")
def test_eplb_logical_ids_are_recorded(hooked, forward, moe, recorded, tmp_path):
    layer = moe(log2phy=torch.arange(8).flip(0), global_redundant_expert_num=4)
    with hooked.record(str(tmp_path), step=1, role="rollout"):
        layer.apply(
            9,
            seed=4,
            global_num_experts=12,
            log2phy=layer.layer.log2phy,
            global_redundant_expert_num=4,
        )
    load_file, records = recorded()
    assert records[NAME].counts == layer.expected()  # 8 columns, not 12
    assert load_file.num_experts == 8
    assert load_file.id_space == "logical"


@truth("rollout: zero and shared expert ids, padding ids")
def test_ids_that_are_no_routed_experts(hooked, forward, moe, recorded, tmp_path):
    rows = [[0, 7], [8, 3], [-1, 3], [11, 9], [-5, -1], [7, 2**31 - 1]]
    ids = torch.tensor(rows, dtype=torch.int32)
    layer = moe()
    with hooked.record(str(tmp_path), step=1, role="rollout"):
        layer.apply(6, seed=0, count=False, custom_routing_function=routed_to(ids))
    load_file, records = recorded()
    assert records[NAME].counts == counts_of(rows, 8)
    assert records[NAME].extra_counts == {"other_ids": 4}
    assert load_file.masked == {"padding_ids": 3}


@truth("rollout: draft model with the main model's layer names", verdict="marked")
def test_a_draft_layer_is_marked(hooked, forward, moe, tmp_path, recorded):
    main, draft = moe(), moe()
    with hooked.record(str(tmp_path), step=1, role="rollout"):
        main.apply(5, seed=1)
        forward.is_draft_model = True
        draft.apply(7, seed=2)
        forward.is_draft_model = False
        main.apply(5, seed=3)
    load_file, _ = recorded()
    by_draft = {record.draft: record.counts for record in load_file.records}
    assert by_draft == {False: main.expected(), True: draft.expected()}


@truth("rollout: MTP layer by its name", verdict="marked")
def test_an_mtp_layer_is_marked(hooked, forward, moe, tmp_path, recorded):
    layer = moe("model.layers.61.mtp_block.mlp.experts")
    with hooked.record(str(tmp_path), step=1, role="rollout"):
        layer.apply(5, seed=1)
    load_file, _ = recorded()
    assert [(r.draft, r.counts) for r in load_file.records] == [(True, layer.expected())]


@truth("rollout: dummy and profile runs of the runner")
def test_dummy_runs_are_shut_out(runner, hooked, forward, moe, recorded, tmp_path):
    layer = moe()
    engine = runner(lambda n: layer.apply(n, seed=n, count=n < 10))
    with hooked.record(str(tmp_path), step=1, role="rollout"):
        engine.profile_run()
        engine._dummy_run(16)
        engine.execute_model(types.SimpleNamespace(total_num_scheduled_tokens=3))
        engine._dummy_run(32)
        engine.execute_model(types.SimpleNamespace(total_num_scheduled_tokens=4))
    _, records = recorded()
    assert records[NAME].counts == layer.expected()
    assert sum(layer.truth.values()) == 2 * 7
    assert records[NAME].num_passes == 2


@truth("rollout: rows padded to a graph's size")
def test_padding_rows_of_a_step_are_masked(runner, hooked, forward, moe, recorded, tmp_path):
    layer = moe()
    engine = runner(lambda n: layer.apply(8, seed=n, rows=range(n)))  # 8 rows, n of them real
    with hooked.record(str(tmp_path), step=1, role="rollout"):
        for num_tokens in (5, 8, 1):
            engine.execute_model(types.SimpleNamespace(total_num_scheduled_tokens=num_tokens))
    load_file, records = recorded()
    assert records[NAME].counts == layer.expected()
    assert load_file.masked == {"masked_ids": 2 * (3 + 0 + 7)}


def over_ranks(hooked, groups, recorded, tmp_path, ranks, call):
    """Run ``call(rank)`` as each rank in turn; return the sum of the counts and the files."""
    total, files = [0] * 8, []
    for number, places in enumerate(ranks):
        groups(**places)
        with hooked.record(str(tmp_path), step=number, role="rollout"):
            call(number)
        load_file, records = recorded(step=number)
        if NAME in records:
            total = [a + b for a, b in zip(total, records[NAME].counts, strict=True)]
        files.append(load_file)
    return total, files


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "unpadded"])
@truth("rollout: AllGather over data-parallel and tensor-parallel ranks")
def test_allgather_counts_each_token_once(hooked, forward, groups, moe, recorded, tmp_path, padded):
    tokens = [5, 2, 4]
    layer = moe()
    ranks = [{"dp": (d, 3), "tp": (t, 2), "ep": (2 * d + t, 6)} for d in range(3) for t in range(2)]
    forward.dp_metadata = types.SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(tokens))
    rows = 3 * 5 if padded else sum(tokens)
    starts = [0, 5, 10] if padded else [0, 5, 7]
    real = [start + i for start, n in zip(starts, tokens, strict=True) for i in range(n)]

    def call(number):
        forward.num_tokens = tokens[number // 2]
        layer.apply(rows, seed=1, count=number == 0, rows=real)

    total, files = over_ranks(hooked, groups, recorded, tmp_path, ranks, call)
    assert total == layer.expected()
    assert {f.tokens_layout for f in files} == {"disjoint"}
    assert [(f.parallel.dp_rank, f.parallel.tp_rank) for f in files][3] == (1, 1)
    assert {f.first_expert for f in files} == {
        0
    }  # ids are global whatever the expert-parallel rank


@truth("rollout: all-to-all, each rank its shard with padding at the end")
def test_alltoall_shards_add_up(runner, hooked, forward, groups, moe, recorded, tmp_path):
    from vllm_ascend.ascend_forward_context import MoECommType

    forward.moe_comm_type = MoECommType.ALLTOALL
    forward.num_tokens = 5
    shards = [moe(), moe()]
    engine = runner(None)

    def call(number):
        engine.forward = lambda n: shards[number].apply(
            3, seed=number, rows=range(3 if number == 0 else 2)
        )
        engine.execute_model(types.SimpleNamespace(total_num_scheduled_tokens=5))

    ranks = [{"tp": (0, 2)}, {"tp": (1, 2)}]
    total, _ = over_ranks(hooked, groups, recorded, tmp_path, ranks, call)
    assert total == [a + b for a, b in zip(*(s.expected() for s in shards), strict=True)]


@truth("rollout: rows that fit no known layout", verdict="marked")
def test_an_unknown_layout_is_stamped(hooked, forward, groups, moe, recorded, tmp_path):
    layer = moe()
    groups(dp=(0, 2))
    forward.dp_metadata = types.SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor([5, 2]))
    with hooked.record(str(tmp_path), step=1, role="rollout"):
        layer.apply(9, seed=1)
    load_file, records = recorded()
    assert records[NAME].counts == layer.expected()
    assert load_file.tokens_layout == "unknown"
    assert "9 rows" in load_file.stamps["tokens_layout"]


def test_a_mask_of_another_length_is_left_aside(hooked, forward, moe, recorded, tmp_path):
    from vllm_ascend.ascend_forward_context import MoECommType

    forward.moe_comm_type = MoECommType.MC2
    layer = moe()
    with hooked.record(str(tmp_path), step=1, role="rollout"):
        layer.apply(6, seed=1, mc2_mask=torch.ones(4, dtype=torch.bool))
    load_file, records = recorded()
    assert records[NAME].counts == layer.expected()
    assert "mask" in load_file.stamps


def test_outside_a_region_nothing_is_counted(hooked, forward, moe, recorded, tmp_path):
    layer = moe()
    layer.apply(6, seed=1, count=False)
    with hooked.record(str(tmp_path), step=1, role="rollout"):
        layer.apply(4, seed=2)
    layer.apply(6, seed=3, count=False)
    _, records = recorded()
    assert records[NAME].counts == layer.expected()


@pytest.mark.parametrize(
    "place",
    [
        "rl_insight_hooks.recorder.Recorder.on_expert_ids",
        "rl_insight_hooks.integrations.vllm_ascend.capture.Call.see",
        "rl_insight_hooks.integrations.vllm_ascend.context.groups",
        "rl_insight_hooks.integrations.vllm_ascend.moe_layer.experts_of",
        "rl_insight_hooks.integrations.vllm_ascend.layout.own_rows",
    ],
)
def test_our_own_failure_does_not_reach_the_model(
    hooked, forward, moe, recorded, tmp_path, monkeypatch, place
):
    layer = moe()
    want = layer.apply(6, seed=1).routed_out

    def broken(*args, **kwargs):
        raise RuntimeError("ours")

    monkeypatch.setattr(place, broken)
    with hooked.record(str(tmp_path), step=1, role="rollout"):
        got = layer.apply(6, seed=1).routed_out
    load_file, _ = recorded()
    assert torch.equal(want, got)
    assert sum(load_file.failed.values()) == 1

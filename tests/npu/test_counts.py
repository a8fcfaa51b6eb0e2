# SPDX-License-Identifier: Apache-2.0
"""Recorded counts against the routers' own, with the real torch_npu operator and dispatcher."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tiny_run import counts_by_layer, read

sys.path.insert(0, str(Path(__file__).parent))
from models import (
    HIDDEN,
    NUM_EXPERTS,
    NUM_LAYERS,
    TOP_K,
    VOCABULARY,
    CallersMoe,
    RouterTruth,
    qwen3_moe,
)

NPU = "torch_npu.npu_grouped_matmul"
STYLES = ["verl", "cumulative", "pairs", "list", "te", "padded"]


def by_phase(load):
    phases = {r.phase for r in load.records}
    return {phase: counts_by_layer(load, phase) for phase in phases}


def times(rows, factor):
    return [[factor * n for n in row] for row in rows]


def check_common(load, watched):
    assert load.failed == {}
    assert [r.layer for r in load.records if r.phase == "forward"] == list(range(NUM_LAYERS))
    assert {r.layer_source for r in load.records if r.layer >= 0} == {
        "module" if watched else "call_order"
    }
    for record in load.records:
        assert sum(record.counts) == record.num_assignments


# -- Qwen3-MoE with verl's patch ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def qwen():
    return qwen3_moe()


@pytest.mark.parametrize("watched", [True, False], ids=["watch", "no watch"])
@pytest.mark.truth(scenario="log-prob pass", seam=NPU, version="2.13.0", verdict="exact")
def test_log_prob_pass(rih, qwen, tmp_path, watched):
    truth = RouterTruth(qwen)
    if watched:
        assert rih.watch(qwen) == NUM_LAYERS
    with rih.record(tmp_path, step=1, role="log_prob"), torch.no_grad():
        for seed in range(3):  # micro-batches
            torch.manual_seed(seed)
            qwen.eval()(torch.randint(0, VOCABULARY, (2, 17)))
    rih.flush()
    load = read(tmp_path, 1, "log_prob")
    assert by_phase(load) == {"forward": truth.counts["forward"]}
    check_common(load, watched)
    assert {(r.num_calls, r.num_passes) for r in load.records} == {(9, 3)}
    if watched:
        assert (load.num_experts, load.top_k) == (NUM_EXPERTS, TOP_K)
        assert [r.num_tokens for r in load.records] == [3 * 2 * 17] * NUM_LAYERS
        assert [r.layer_name for r in load.records] == [
            f"model.layers.{i}.mlp" for i in range(NUM_LAYERS)
        ]
        assert load.notes == []


@pytest.mark.parametrize("watched", [True, False], ids=["watch", "no watch"])
@pytest.mark.parametrize("own_thread", [False, True], ids=["same thread", "own thread"])
@pytest.mark.parametrize("kind", [None, "reentrant", "non-reentrant"])
@pytest.mark.truth(
    scenario="update, two micro-batches, each checkpoint flavour",
    seam=NPU,
    version="2.13.0",
    verdict="exact",
)
def test_update(rih, qwen, tmp_path, kind, own_thread, watched):
    truth = RouterTruth(qwen)
    if kind is None:
        qwen.gradient_checkpointing_disable()
    else:
        qwen.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
    if watched:
        rih.watch(qwen)
    qwen.train()
    with rih.record(tmp_path, step=1, role="update"):
        for seed in range(2):
            torch.manual_seed(seed)
            ids = torch.randint(0, VOCABULARY, (2, 13 + seed))
            truth.backward(qwen(input_ids=ids, labels=ids).loss, own_thread=own_thread)
    rih.flush()
    qwen.zero_grad()
    load = read(tmp_path, 1, "update")
    found = by_phase(load)
    assert found.pop("forward") == truth.counts["forward"]
    if kind is not None:
        assert found.pop("recompute") == truth.counts["recompute"] == truth.counts["forward"]
    assert found.pop("dx") == truth.counts["forward"]
    assert found.pop("dw") == truth.counts["forward"]
    assert found == {}
    check_common(load, watched)
    num_calls = {
        phase: {r.num_calls for r in load.records if r.phase == phase}
        for phase in ("forward", "dx", "dw")
    }
    assert num_calls == {"forward": {6}, "dx": {6}, "dw": {6}}


# -- every way to call the operator ---------------------------------------------------------------------


@pytest.mark.parametrize("watched", [True, False], ids=["watch", "no watch"])
@pytest.mark.parametrize("kind", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.truth(
    scenario="every form of group_list, two micro-batches, each checkpoint flavour",
    seam=NPU,
    version="2.13.0",
    verdict="exact",
)
def test_forms(rih, tmp_path, style, kind, watched):
    model = CallersMoe(style)
    model.checkpointing = kind
    truth = RouterTruth(model)
    if watched:
        rih.watch(model)
    with rih.record(tmp_path, step=1, role="r"):
        for seed in range(2):
            torch.manual_seed(seed)
            x = torch.randn(11 + seed, HIDDEN, requires_grad=True)
            truth.backward(model(x).square().sum())
    rih.flush()
    load = read(tmp_path, 1, "r")
    found = by_phase(load)
    assert found["forward"] == truth.counts["forward"]
    check_common(load, watched)
    if kind is not None:
        assert found["recompute"] == truth.counts["recompute"] == truth.counts["forward"]
    if style in ("verl", "cumulative", "pairs", "padded"):
        assert found["dx"] == found["dw"] == truth.counts["forward"]
    else:
        # no object to know the layer by: all in one record, marked layer -1, right in sum
        total = [sum(column) for column in zip(*truth.counts["forward"], strict=True)]
        assert found["dx"] == [total]
        assert {r.layer for r in load.records if r.phase in ("dx", "dw")} == {-1}
        assert any("layer -1" in note for note in load.notes)
    assert load.masked == ({"padding_rows": 2 * NUM_LAYERS * 5} if style == "padded" else {})


@pytest.mark.parametrize("watched", [True, False], ids=["watch", "no watch"])
@pytest.mark.parametrize("kind", [None, "reentrant", "non-reentrant"])
@pytest.mark.truth(
    scenario="all forwards before all backwards", seam=NPU, version="2.13.0", verdict="exact"
)
def test_forwards_first_then_backwards(rih, tmp_path, kind, watched):
    model = CallersMoe("verl")
    model.checkpointing = kind
    truth = RouterTruth(model)
    if watched:
        rih.watch(model)
    with rih.record(tmp_path, step=1, role="r"):
        losses = [model(torch.randn(9, HIDDEN, requires_grad=True)).sum() for _ in range(3)]
        for loss in reversed(losses):
            truth.backward(loss, own_thread=True)
    rih.flush()
    found = by_phase(read(tmp_path, 1, "r"))
    assert found["forward"] == found["dx"] == truth.counts["forward"]


@pytest.mark.truth(scenario="dense layers between", seam=NPU, version="2.13.0", verdict="exact")
def test_dense_layers_are_skipped(rih, tmp_path):
    model = CallersMoe("verl", dense_first=True)
    truth = RouterTruth(model)
    assert rih.watch(model) == NUM_LAYERS - 1
    with rih.record(tmp_path, step=1, role="r"), torch.no_grad():
        model(torch.randn(9, HIDDEN))
    rih.flush()
    load = read(tmp_path, 1, "r")
    assert [r.layer for r in load.records] == [1, 2, 3]
    assert counts_by_layer(load) == truth.counts["forward"]


@pytest.mark.truth(
    scenario="one block shared by all layers", seam=NPU, version="2.13.0", verdict="exact"
)
def test_shared_weights(rih, tmp_path):
    model = CallersMoe("verl")
    shared = model.layers[0]
    for i in range(NUM_LAYERS):
        model.layers[i] = shared
    truth = RouterTruth(model)
    rih.watch(model)
    with rih.record(tmp_path, step=1, role="r"), torch.no_grad():
        model(torch.randn(9, HIDDEN))
    rih.flush()
    load = read(tmp_path, 1, "r")
    total = [sum(column) for column in zip(*truth.counts["forward"], strict=True)]
    assert counts_by_layer(load) == [total]
    assert load.records[0].num_passes == NUM_LAYERS


@pytest.mark.truth(
    scenario="eval pass beside training", seam=NPU, version="2.13.0", verdict="exact"
)
def test_an_evaluation_has_its_own_role(rih, tmp_path):
    model = CallersMoe("verl")
    truth = RouterTruth(model)
    rih.watch(model)
    x = torch.randn(9, HIDDEN)
    with rih.record(tmp_path, step=1, role="train"):
        truth.backward(model(x.requires_grad_()).sum())
        trained = truth.counts["forward"]
        truth.reset()
        with rih.record(tmp_path, step=1, role="eval"), torch.no_grad():
            model(torch.randn(20, HIDDEN))
    rih.flush()
    assert by_phase(read(tmp_path, 1, "train"))["forward"] == trained
    assert by_phase(read(tmp_path, 1, "eval")) == {"forward": truth.counts["forward"]}


@pytest.mark.truth(
    scenario="a GMM audit by TorchDispatchMode", seam=NPU, version="2.13.0", verdict="exact"
)
def test_dispatch_mode_sees_as_many_calls_as_were_recorded(rih, tmp_path):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Audit(TorchDispatchMode):
        num_calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Audit.num_calls += "npu_grouped_matmul" in func.name()
            return func(*args, **(kwargs or {}))

    model = CallersMoe("verl")
    model.checkpointing = "non-reentrant"
    with rih.record(tmp_path, step=1, role="r"), Audit():
        model(torch.randn(9, HIDDEN, requires_grad=True)).sum().backward()
    rih.flush()
    assert (
        Audit.num_calls
        == sum(r.num_calls for r in read(tmp_path, 1, "r").records)
        == 12 * NUM_LAYERS
    )

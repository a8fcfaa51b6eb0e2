# SPDX-License-Identifier: Apache-2.0
"""What broke the recorder once: hosts that pickle, export, trace on fake tensors, fork, or run out of everything."""

from __future__ import annotations

import _thread
import io
import sys
import threading

import pytest
import torch
from tiny_run import counts_by_layer, layer_pass, read
from torch import nn

A, B = [1, 2, 3, 4], [4, 0, 0, 1]


class Block(nn.Module):
    """An MoE block whose router says ``num_experts`` and which holds ``num_local`` of them."""

    def __init__(self, num_local=4, num_experts=4):
        super().__init__()
        self.experts = nn.Module()
        self.experts.weight = nn.Parameter(torch.ones(num_local, 4, 6))
        self.gate = nn.Linear(4, num_experts)
        self.num_experts = num_experts
        self.num_local = num_local

    def forward(self, x):
        ids = torch.arange(x.shape[0], device=x.device) % self.num_local
        counts = torch.histc(ids.float(), self.num_local, 0, self.num_local - 1).long()
        return call(x, self.experts.weight, counts)


def call(x, weight, group_list, list_type=1):
    import torch_npu

    return torch_npu.npu_grouped_matmul(
        [x], [weight], group_list=group_list, group_list_type=list_type, group_type=0, split_item=2
    )[0]


def ones(counts=A, device="cpu"):
    """Input, weight and counts of one call."""
    x = torch.ones(sum(counts), 4, device=device)
    return x, torch.ones(len(counts), 4, 6, device=device), torch.tensor(counts, device=device)


# -- what the host does with its own objects -------------------------------------------------------------


def test_a_group_list_is_pickled_without_anything_of_ours(rih, npu, tmp_path):
    x, weight, group_list = ones()
    with rih.record(tmp_path, step=1, role="r"):
        call(x, weight, group_list)
    buffer = io.BytesIO()
    torch.save(group_list, buffer)
    assert b"rl_insight_hooks" not in buffer.getvalue()
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True).tolist() == A


def test_an_operator_called_without_a_python_frame_above(rih, npu, tmp_path, monkeypatch):
    """As a hook that the autograd engine's thread calls: there is no caller to look at."""
    raised = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    x, weight, group_list = ones()
    done = threading.Event()

    class Options(dict):
        def __del__(self):
            done.set()

    with rih.record(tmp_path, step=1, role="r"):
        options = Options(group_list=group_list, group_list_type=1, group_type=0, split_item=2)
        _thread.start_new_thread(npu.npu_grouped_matmul, ([x], [weight]), options)
        del options
        assert done.wait(30)
    assert not raised
    rih.flush()
    assert counts_by_layer(read(tmp_path, 1, "r")) == [A]


def test_an_exported_program_has_nothing_of_ours(rih, npu, tmp_path):
    block, x = Block(), torch.ones(10, 4)
    rih.watch(block)
    with rih.record(tmp_path, step=1, role="r"):
        program = torch.export.export(block, (x,))
    assert "add_" not in program.graph_module.code
    assert torch.equal(program.module()(x), block(x))


# -- tensors without data --------------------------------------------------------------------------------


@pytest.mark.truth(scenario="meta tensors first", seam="stand-in", version="-", verdict="marked")
def test_meta_tensors_do_not_take_the_real_counts_with_them(rih, npu, tmp_path):
    with rih.record(tmp_path, step=1, role="r"):
        call(*ones(device="meta"))
        layer_pass(A)
    rih.flush()
    load = read(tmp_path, 1, "r")
    assert sum(map(sum, counts_by_layer(load))) == 10
    assert load.failed == {"torch_npu.npu_grouped_matmul": 1}


@pytest.mark.truth(scenario="fake tensors first", seam="stand-in", version="-", verdict="marked")
def test_fake_tensors_do_not_take_the_real_counts_with_them(rih, npu, tmp_path):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with rih.record(tmp_path, step=1, role="r"):
        with FakeTensorMode():
            call(*ones())
        layer_pass(A)
    rih.flush()
    load = read(tmp_path, 1, "r")
    assert sum(map(sum, counts_by_layer(load))) == 10
    assert load.failed == {"torch_npu.npu_grouped_matmul": 1}


def test_lists_are_counted_under_another_default_device(rih, npu, tmp_path):
    x, weight, _ = ones()
    with rih.record(tmp_path, step=1, role="r"), torch.device("meta"):
        call(x, weight, [1, 3, 6, 10], list_type=0)
    rih.flush()
    assert counts_by_layer(read(tmp_path, 1, "r")) == [A]


# -- compiled graphs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_local", "num_experts"), [(2, 4), (1, 4), (4, 1)], ids=["EP 2", "EP 4", "odd"]
)
def test_a_compiled_block_with_local_experts_runs_as_without_us(
    rih, npu, tmp_path, num_local, num_experts
):
    block, x = Block(num_local, num_experts), torch.ones(10, 4)
    expected = block(x)
    rih.watch(block)
    torch._dynamo.reset()
    with rih.record(tmp_path, step=1, role="r"):
        out = torch.compile(block, backend="eager", fullgraph=True)(x)
    assert torch.equal(out, expected)
    rih.flush()
    load = read(tmp_path, 1, "r")
    assert not load.records
    assert "compiled graph" in load.notes[0]


def test_a_compiled_block_that_moved_after_watch(rih, npu, tmp_path):
    block = Block()
    rih.watch(block)
    block.to("meta")
    torch._dynamo.reset()
    with rih.record(tmp_path, step=1, role="r"):
        out = torch.compile(block, backend="eager", fullgraph=True)(torch.ones(10, 4).to("meta"))
    assert out.shape == (10, 6)


# -- bounds ----------------------------------------------------------------------------------------------


def test_layers_by_order_are_bounded(rih, npu, tmp_path, session, monkeypatch):
    """Plain functions without a module, a loop of forwards: nothing tells where a forward pass ends."""
    from rl_insight_hooks import layers

    monkeypatch.setattr(layers, "_MAX_LAYERS_BY_ORDER", 8)
    with rih.record(tmp_path, step=1, role="r"):
        for _ in range(20):
            layer_pass(A)
    rih.flush()
    load = read(tmp_path, 1, "r")
    assert sum(map(sum, counts_by_layer(load))) == 20 * 10
    assert len(load.records) == 8 + 1
    assert any("layer -1" in note for note in load.notes)

# SPDX-License-Identifier: Apache-2.0
"""Passes in eval mode: a phase of their own beside training, the forward of a role that only evaluates."""

from __future__ import annotations

import pytest
import torch
from tiny_run import collects, layer_pass, read

A, B, C = [1, 2, 3, 4], [4, 0, 0, 1], [0, 0, 7, 0]


class Block(torch.nn.Module):
    """A MoE block whose routing is given."""

    def __init__(self):
        super().__init__()
        self.num_experts = 4
        self.gate = torch.nn.Linear(1, 1)
        self.experts = torch.nn.Identity()

    def forward(self, hidden_states, counts):
        layer_pass(counts)
        return hidden_states


@pytest.fixture(params=["watched", "unwatched"])
def model(rih, npu, request):
    model = torch.nn.ModuleList([Block()])
    if request.param == "watched":
        rih.watch(model)
    return model


def play(model, counts, *, training):
    model.train(training)
    model[0](torch.zeros(1, 1), counts)


def by_phase(load):
    found = {}
    for record in load.records:
        assert record.phase not in found
        found[record.phase] = record.counts
    return found


def total(*rows):
    return [sum(column) for column in zip(*rows, strict=True)]


@pytest.mark.truth(
    scenario="evaluation inside a training region, watched and not", seam="torch_npu",
    version="stand-in", verdict="exact",
)  # fmt: skip
def test_evaluation_does_not_leak_into_training(rih, model, tmp_path):
    with rih.record(tmp_path, step=1, role="train"):
        play(model, A, training=True)
        play(model, C, training=False)
        play(model, B, training=True)
    rih.flush()
    assert by_phase(read(tmp_path, 1, "train")) == {"forward": total(A, B), "eval": C}
    assert collects(tmp_path)["0"] == {str(e): n for e, n in enumerate(total(A, B))}
    assert rih.summary()["moe_load/train/assignments"] == sum(A) + sum(B)


@pytest.mark.truth(
    scenario="a role that runs in eval mode throughout (log-prob)", seam="torch_npu",
    version="stand-in", verdict="exact",
)  # fmt: skip
def test_a_role_that_only_evaluates_counts_as_forward(rih, model, tmp_path):
    with rih.record(tmp_path, step=1, role="log_prob"):
        play(model, A, training=False)
        play(model, C, training=False)
    with rih.record(tmp_path, step=1, role="train"):
        play(model, B, training=True)
    rih.flush()
    assert by_phase(read(tmp_path, 1, "log_prob")) == {"forward": total(A, C)}
    assert by_phase(read(tmp_path, 1, "train")) == {"forward": B}
    assert collects(tmp_path)["0"] == {str(e): n for e, n in enumerate(total(A, B, C))}


def test_regions_of_one_step_are_judged_together(rih, model, tmp_path):
    with rih.record(tmp_path, step=1, role="train"):
        play(model, C, training=False)
    with rih.record(tmp_path, step=1, role="train"):
        play(model, A, training=True)
    rih.flush()
    assert by_phase(read(tmp_path, 1, "train")) == {"forward": A, "eval": C}


def test_calls_one_by_one_have_the_same_phases(rih, model, tmp_path):
    rih.configure(detail="calls")
    with rih.record(tmp_path, step=1, role="train"):
        play(model, A, training=True)
        play(model, C, training=False)
    rih.flush()
    calls = read(tmp_path, 1, "train").calls
    assert [(call.phase, call.counts) for call in calls] == [("forward", A), ("eval", C)]


def test_fine_tuning_in_eval_mode_is_forward(rih, npu, tmp_path):
    """Some switch dropout off by eval() and train all the same."""
    block = Block().eval()
    rih.watch(block)
    with rih.record(tmp_path, step=1, role="train"):
        out = torch.zeros(1, 1, requires_grad=True)
        (block(out, A) * 2).sum().backward()
    rih.flush()
    assert by_phase(read(tmp_path, 1, "train"))["forward"] == A

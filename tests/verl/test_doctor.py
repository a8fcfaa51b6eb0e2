# SPDX-License-Identifier: Apache-2.0
"""doctor where the real verl is, and with the real msprobe on one attribute with us."""

from __future__ import annotations

import functools
import json

import pytest
from doctor_run import run_doctor


@pytest.fixture
def doctor(npu_env, tmp_path):
    return functools.partial(run_doctor, npu_env, tmp_path)


def test_with_verl(doctor):
    found = json.loads(doctor("--json"))
    assert found["versions"]["verl"] == "0.9.1"
    states = {i["name"]: i for i in found["integrations"]}
    assert (states["torch_npu"]["state"], states["verl"]["state"]) == ("hooked", "hooked")
    places = {hook["where"] for hook in states["verl"]["hooks"]}
    assert {
        "verl.workers.engine_workers.ActorRolloutRefWorker.update_actor",
        "verl.workers.engine_workers.TrainingWorker.infer_batch",
        "verl.workers.engine.fsdp.transformer_impl.FSDPEngine.initialize",
        "verl.trainer.ppo.v1.trainer_base.PPOTrainer._update_actor",
        "verl.utils.tracking.RLInsightLogger.trace_state",
        "verl.utils.tracking.Tracking.log",
    } <= places
    # an engine whose own library is missing is named; modules of other versions of verl are not
    not_here = states["verl"]["not_imported"]
    assert "megatron" in not_here["verl.workers.engine.megatron.transformer_impl"]
    assert "verl.workers.fsdp_workers" not in not_here
    assert states["megatron"]["state"] == "absent"
    # verl's own decorators on its methods are no other tool
    assert found["tools_on_attributes"] == []


def test_with_verl_to_read(doctor):
    text = doctor()
    assert "verl          hooked" in text
    assert "verl.workers.engine_workers.TrainingWorker: train_mini_batch, train_batch" in text
    assert "tested with 0.7.1 and 0.9.1" in text
    assert len(text.splitlines()) < 60
    assert max(map(len, text.splitlines())) <= 120


def test_msprobe_on_the_same_attribute_is_named(python, tmp_path):
    pytest.importorskip("msprobe", reason="msprobe is not installed (tests/verl/requirements.txt)")
    config = {"task": "statistics", "dump_path": str(tmp_path / "dump"), "level": "L1"}
    config |= {"rank": [], "step": [], "statistics": {"scope": [], "list": []}}
    (tmp_path / "msprobe.json").write_text(json.dumps(config))
    code = """
import json, sys
import torch_npu
from torch import nn
import rl_insight_hooks as rih
from rl_insight_hooks.diagnose import diagnose, lines
from msprobe.pytorch import PrecisionDebugger

def look():
    found = diagnose(import_targets=False)
    (hook,) = [h for i in found.integrations for h in i.hooks if h.where == "torch_npu.npu_grouped_matmul"]
    return hook.chain, found.tools_on_attributes, lines(found)

rih.install()
alone = look()
debugger = PrecisionDebugger(config_path=sys.argv[1])
debugger.start(nn.Linear(2, 2))
under = look()
with rih.record(sys.argv[2], step=1, role="r"):
    over = look()
debugger.stop()
print(json.dumps([alone, under, over]))
"""
    alone, under, over = python(code, tmp_path / "msprobe.json", tmp_path / "out")
    assert alone[0][0] == "rl_insight_hooks (live)"
    assert alone[1] == []
    # msprobe replaced us: it stands on top
    assert under[0][0].startswith("msprobe.")
    assert any(tool.startswith("msprobe.") for tool in under[1])
    # a region begins: we are on top of msprobe, once
    assert over[0][0] == "rl_insight_hooks (live)"
    assert over[0][1].startswith("msprobe.")
    assert over[0].count("rl_insight_hooks (live)") == 1
    assert any("also on torch_npu.npu_grouped_matmul" in line for line in over[2])
    said = " ".join(" ".join(over[2]).split())
    assert "other tools stand on hooked attributes: msprobe." in said

# SPDX-License-Identifier: Apache-2.0
"""doctor where the real vllm-ascend is."""

from __future__ import annotations

import functools
import importlib.util
import json
from importlib.metadata import version

import pytest
from doctor_run import run_doctor


@pytest.fixture
def doctor(tmp_path, npu_env):
    return functools.partial(run_doctor, npu_env, tmp_path)


def test_with_vllm_ascend(doctor):
    found = json.loads(doctor("--json"))  # vllm's own words do not get into it
    assert found["versions"]["vllm-ascend"] == version("vllm-ascend")
    states = {i["name"]: i for i in found["integrations"]}
    assert states["vllm_ascend"]["state"] == "hooked"
    places = {hook["where"] for hook in states["vllm_ascend"]["hooks"]}
    assert "vllm_ascend.ops.fused_moe.fused_moe.AscendUnquantizedFusedMoEMethod.apply" in places
    assert "vllm_ascend.ops.fused_moe.experts_selector.select_experts" in places
    worker = states["vllm_worker"]
    if importlib.util.find_spec("acl") is None:  # without CANN its worker does not import
        assert worker["state"] == "failed"
        assert worker["not_imported"] == {"vllm_ascend.worker.worker": "No module named 'acl'"}
    else:
        assert worker["state"] == "hooked"
    assert states["verl"]["state"] in ("absent", "hooked")
    assert found["tools_on_attributes"] == []


def test_with_vllm_ascend_to_read(doctor):
    text = doctor()
    assert "vllm_ascend   hooked" in text
    assert "AscendUnquantizedFusedMoEMethod: apply" in text
    assert max(map(len, text.splitlines())) <= 120
    assert len(text.splitlines()) < 80

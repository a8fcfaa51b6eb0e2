# SPDX-License-Identifier: Apache-2.0
"""doctor where the real vllm-ascend is."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib.metadata import version

import pytest


@pytest.fixture
def doctor(tmp_path, npu_env):
    def run(*args):
        command = [sys.executable, "-m", "rl_insight_hooks.report.main", "doctor", *args]
        done = subprocess.run(
            command, env=npu_env, capture_output=True, text=True, timeout=240, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    return run


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

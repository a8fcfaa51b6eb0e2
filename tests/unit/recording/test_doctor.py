# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

from rl_insight_hooks.report.main import run


def test_bare_machine(rih, capsys):
    assert run(["doctor", "--no-import"]) == 0
    out = capsys.readouterr().out
    assert "vllm_ascend   absent  vllm_ascend is not installed here" in out
    assert "numpy" in out


def test_hooks_and_another_tool_on_one_attribute(rih, npu, capsys):
    original = npu.npu_grouped_matmul
    rih.install()
    ours = npu.npu_grouped_matmul

    def other_tool(*args, **kwargs):
        return ours(*args, **kwargs)

    other_tool.__wrapped__ = ours
    npu.npu_grouped_matmul = other_tool
    try:
        assert run(["doctor", "--no-import", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        (integration,) = [i for i in found["integrations"] if i["name"] == "torch_npu"]
        assert integration["state"] == "hooked"
        chain = next(
            h["chain"] for h in integration["hooks"] if h["where"] == "torch_npu.npu_grouped_matmul"
        )
        assert "other_tool" in chain[0]
        assert chain[1] == "rl_insight_hooks (live)"
        assert any("other_tool" in tool for tool in found["tools_on_attributes"])
        # a look changes nothing
        assert npu.npu_grouped_matmul is other_tool
    finally:
        npu.npu_grouped_matmul = ours
        rih.uninstall()
    assert npu.npu_grouped_matmul is original


def test_switched_off(rih, npu, monkeypatch, capsys):
    monkeypatch.setenv("RL_INSIGHT_HOOKS", "0")
    original = npu.npu_grouped_matmul
    assert run(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["switched"] == "off"
    assert npu.npu_grouped_matmul is original


def test_estimate(capsys):
    line = "doctor --estimate --layers 58 --experts 256 --steps 1000 --roles 3 --ranks 1 --pack-every 100 --json"
    assert run(line.split()) == 0
    volume = json.loads(capsys.readouterr().out)
    assert volume["packed_bytes_per_step"] < 40_000
    assert volume["num_files"] < 1000

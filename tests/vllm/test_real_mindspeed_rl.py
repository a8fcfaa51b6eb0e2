# SPDX-License-Identifier: Apache-2.0
"""MindSpeed-RL's real rollout adapter over the real vllm-ascend 0.11: its collector's files, and ours in its place.

Runs where RLIH_VLLM_ERAS names a folder with vllm-ascend 0.11.0 (test_real_older.py says how to make it), and
RLIH_MINDSPEED_RL a checkout of MindSpeed-RL 2.3.0 (github.com/Ascend/MindSpeed-RL, commit 05a90d7).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ERAS, CHECKOUT = os.environ.get("RLIH_VLLM_ERAS", ""), os.environ.get("RLIH_MINDSPEED_RL", "")
ADAPTER = "mindspeed_rl/models/rollout/vllm_adapter/fused_moe.py"
NAME = "eplb_token_collects_0.json"


@pytest.fixture
def run(ascend, tmp_path):
    if not Path(ERAS, "0.11.0", "vllm_ascend").is_dir() or not ERAS:
        pytest.skip("RLIH_VLLM_ERAS names no folder with 0.11.0: see this module's head")
    if not Path(CHECKOUT, ADAPTER).is_file() or not CHECKOUT:
        pytest.skip("RLIH_MINDSPEED_RL names no checkout of MindSpeed-RL: see this module's head")

    def run(name, flag, **env):
        folder = tmp_path / name
        folder.mkdir()
        full = {k: v for k, v in os.environ.items() if not k.startswith("RL_INSIGHT_HOOKS")}
        path = [str(Path(ERAS, "0.11.0")), full.get("PYTHONPATH", "")]
        full |= {"PYTHONPATH": os.pathsep.join(filter(None, path))} | env
        script = Path(__file__).with_name("mindspeed_rl_main.py")
        done = subprocess.run(
            [sys.executable, script, folder, flag, CHECKOUT],
            env=full,
            capture_output=True,
            text=True,
            timeout=240,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return folder, json.loads(done.stdout.strip().splitlines()[-1]), done.stderr

    return run


@pytest.mark.truth(
    scenario="rollout: eplb_token_collects switches us on in place of MindSpeed-RL's collector",
    seam="AscendUnquantizedFusedMoEMethod.apply",
    version="MindSpeed-RL 2.3.0, vllm-ascend 0.11.0 (RLIH_MINDSPEED_RL)",
    verdict="exact",
)
def test_the_flag_alone_gives_the_collectors_file(run):
    """No variable of ours is set: vLLM's plugin loader brings us up, and we read the flag."""
    theirs, truth, _ = run("theirs", "true", RL_INSIGHT_HOOKS="0")
    assert truth["theirs_is_on"]
    assert [p.name for p in theirs.rglob("*") if p.is_file()] == [NAME]
    ours, same_truth, log = run("ours", "true")
    assert same_truth["chosen"] == truth["chosen"]
    assert not same_truth["theirs_is_on"]
    assert f"rl_insight_hooks is on in this process: expert load goes to {ours}" in log
    assert json.loads((ours / NAME).read_bytes()) == truth["chosen"]
    assert json.loads((ours / NAME).read_bytes()) == json.loads((theirs / NAME).read_bytes())
    # what their reader takes for collects, every *.json of the folder, is the one file
    assert [p.name for p in ours.glob("*.json")] == [NAME]
    assert (ours / "step_1/actor_generate_sequences/rank0/group_list.json").exists()


_LOADER = """
import json, sys
from mindspeed_rl_main import EmptyTorchair
sys.meta_path.insert(0, EmptyTorchair())
import torch, torch_npu, vllm_ascend
from vllm_ascend.ops.expert_load_balancer import ExpertLoadBalancer
balancer = ExpertLoadBalancer(sys.argv[1], 8)
print(json.dumps([
    [balancer.layers_num, balancer.ranks_num, balancer.get_global_redundant_expert_num()],
    balancer.expert_map_tensor.tolist(),
    [[balancer.generate_log2phy_expert_map(layer)[rank].tolist() for rank in range(4)] for layer in range(2)],
]))
"""


def test_expert_map_path_gets_our_map(run, tmp_path):
    """From the collects to the map, with MindSpeed-RL's own command line, into the loader that it uses."""
    folder, truth, _ = run("ours", "true")
    target = tmp_path / "expert_map.json"
    command = [sys.executable, "-m", "rl_insight_hooks.report.main", "rebalance"]
    command += ["--json_folder", folder, "--num_replicas", "12", "--num_groups", "1"]
    command += ["--num_nodes", "1", "--num_gpus", "4", "--output_path", target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    path = [str(Path(ERAS, "0.11.0")), str(Path(__file__).parent)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(
        [sys.executable, "-c", _LOADER, target],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shape, slots, log2phy = json.loads(done.stdout.strip().splitlines()[-1])
    assert shape == [2, 4, 4]  # layers, devices, redundant slots
    for layer in range(2):
        flat = [expert for device in slots[layer] for expert in device]
        assert sorted(set(flat)) == list(range(8))
        assert all(len(set(device)) == len(device) == 3 for device in slots[layer])
        # every replica that a rank is sent to holds the expert that was meant
        for of_rank in log2phy[layer]:
            assert [flat[slot] for slot in of_rank] == list(range(8))
        # the hottest expert is not left alone
        loads = truth["chosen"][str(layer)]
        assert flat.count(int(max(loads, key=loads.get))) > 1


def test_without_the_flag_nothing_is_written(run):
    folder, answer, log = run("off", "false")
    assert not answer["theirs_is_on"]
    assert not list(folder.iterdir())
    assert "rl_insight_hooks is on" not in log

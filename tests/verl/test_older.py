# SPDX-License-Identifier: Apache-2.0
"""The real verl 0.7.1 and 0.8.0, carried by VERL_USE_EXTERNAL_MODULES.

They run where the environment variable RLIH_VERL_ERAS names a folder with their wheels unpacked (the nox session
``npu`` makes it)::

    pip install --no-deps --target ERAS/0.7.1 -r tests/verl/requirements-0.7.1.txt
    pip install --no-deps --target ERAS/0.8.0 -r tests/verl/requirements-0.8.0.txt

Everything else comes from the environment of 0.9.1 (requirements.txt). Of 0.8.0 it is tested what is hooked: its
patch of Qwen3-MoE for NPU needs modules of transformers 5 and the router of transformers 4, so no model runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from results import NUM_EXPERTS, STAGES, recorded, truth_of
from tiny_model import save_in_process

HERE = Path(__file__).resolve().parent
FSDP2 = "actor_rollout_ref.actor.fsdp_config.strategy=fsdp2"
ERAS = os.environ.get("RLIH_VERL_ERAS", "")


@pytest.fixture
def era():
    """Environment in which ``import verl`` gives the version."""

    def of(version):
        if not ERAS or not Path(ERAS, version, "verl").is_dir():
            pytest.skip(f"RLIH_VERL_ERAS names no folder with {version}: see this module's head")
        return {
            "PYTHONPATH": os.pathsep.join([str(HERE), str(Path(ERAS, version))]),
            "VERL_USE_EXTERNAL_MODULES": "rl_insight_hooks.autoload",
        }

    return of


@pytest.mark.truth(
    scenario="verl FSDP2: log-prob and update with checkpointing, 2 ranks",
    seam="torch_npu.npu_grouped_matmul",
    version="verl 0.7.1 (RLIH_VERL_ERAS)",
    verdict="exact",
)
def test_two_steps_on_two_ranks(era, npu_env, run_ranks, tmp_path):
    env, out = era("0.7.1"), tmp_path / "out"
    model = save_in_process(tmp_path / "model", npu_env | env)  # by the transformers that reads it
    on = {"RL_INSIGHT_HOOKS": "1", "RL_INSIGHT_HOOKS_PATH": str(out)}
    results = run_ranks(2, FSDP2, model=model, **on, **env)
    for rank, result in enumerate(results):
        assert result["verl"] == "0.7.1"
        truth, files = truth_of(result), recorded(out, rank)
        assert set(files) == {(f"step_{step}", stage) for step in (1, 2) for stage in STAGES}
        for (step_dir, stage), file in files.items():
            step = int(step_dir.removeprefix("step_"))
            assert (file.step, file.step_source, file.role) == (step, "given", stage)
            assert (file.rank, file.world_size, file.num_experts) == (rank, 2, NUM_EXPERTS)
            phases = ("forward", "recompute") if stage == "actor_update" else ("forward",)
            counted = {
                (step, stage, r.layer, r.phase): r.counts for r in file.records if r.phase in phases
            }
            expected = {key: row for key, row in truth.items() if key[:2] == (step, stage)}
            assert counted == expected


def test_off_means_absent(era, npu_env, run_ranks, tmp_path):
    env = era("0.7.1")
    (result,) = run_ranks(1, FSDP2, model=save_in_process(tmp_path / "model", npu_env | env), **env)
    assert not result["hooked"]
    assert result["metrics"] == {}
    assert not list(tmp_path.rglob("group_list.json"))


@pytest.mark.parametrize("version", ["0.7.1", "0.8.0"])
def test_what_is_hooked(era, version, npu_env, tmp_path):
    command = [sys.executable, "-m", "rl_insight_hooks.report.main", "doctor", "--json"]
    env = npu_env | era(version)
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = {i["name"]: i for i in json.loads(done.stdout)["integrations"]}
    places = {hook["where"] for hook in found["verl"]["hooks"]}
    assert {
        "verl.workers.engine_workers.ActorRolloutRefWorker.update_actor",
        "verl.workers.engine.fsdp.transformer_impl.FSDPEngine.initialize",
        "verl.trainer.ppo.ray_trainer.RayPPOTrainer._update_actor",
        "verl.utils.tracking.Tracking.log",
    } <= places
    legacy = {  # gone in 0.8
        "verl.workers.fsdp_workers.ActorRolloutRefWorker.generate_sequences",
        "verl.workers.fsdp_workers.CriticWorker.update_critic",
    }
    assert (legacy <= places) == (version == "0.7.1")

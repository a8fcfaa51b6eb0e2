# SPDX-License-Identifier: Apache-2.0
"""Driver to file over a real Ray: verl's trainer methods, its worker group, two workers, its tracker."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from results import NUM_EXPERTS, STAGES, recorded

HERE = Path(__file__).resolve().parent
NUM_TOKENS, TOP_K, NUM_LAYERS, NUM_RANKS = 64, 2, 2, 2  # of a step of ray_main.py


@pytest.fixture
def train(npu_env, model, tmp_path):
    def run(**env):
        full = npu_env | {"VERL_USE_EXTERNAL_MODULES": "cpu_world", "OMP_NUM_THREADS": "1"} | env
        with tempfile.TemporaryDirectory(
            prefix="rih", dir="/tmp"
        ) as short:  # socket paths are short
            command = [sys.executable, HERE / "ray_main.py", model, tmp_path / "out", short]
            done = subprocess.run(
                command, env=full, capture_output=True, text=True, timeout=280, cwd=tmp_path
            )
        assert done.returncode == 0, done.stderr[-4000:]
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))

    return run


@pytest.mark.parametrize("trainer", ["v0", "v1"])
def test_driver_workers_tracker(train, trainer, tmp_path):
    """v0 sends a TensorDict, v1 the keys of a real TransferQueue."""
    logged = train(RL_INSIGHT_HOOKS="1", TEST_TRAINER=trainer)
    files = [recorded(tmp_path / "out", rank) for rank in range(NUM_RANKS)]
    for of_rank in files:
        assert set(of_rank) == {(f"step_{step}", stage) for step in (1, 2) for stage in STAGES}
        assert {file.step_source for file in of_rank.values()} == {"given"}  # the driver sent it
        assert {file.world_size for file in of_rank.values()} == {NUM_RANKS}
    for step in (1, 2):
        metrics = logged[step]
        assert metrics.pop("actor/loss") == 0.5
        assert len(metrics) <= 10 * len(STAGES)
        for stage in STAGES:
            rows = [
                (r.layer, r.counts)
                for of_rank in files
                for r in of_rank[f"step_{step}", stage].records
                if r.phase == "forward"
            ]
            total = sum(sum(counts) for _, counts in rows)
            assert (
                total == NUM_TOKENS * TOP_K * NUM_LAYERS
            )  # both ranks together see every token once
            worst = max(max(counts) * NUM_EXPERTS / sum(counts) for _, counts in rows)
            assert metrics[f"moe_load/{stage}/assignments"] == total
            assert metrics[f"moe_load/{stage}/max_over_mean"] == pytest.approx(worst)
            assert metrics[f"moe_load/{stage}/notes"] == 0


def test_workers_without_us_train_on(train, tmp_path):
    """On in the driver only, e.g. since the variable did not reach the workers."""
    (tmp_path / "out").mkdir()
    assert train(RL_INSIGHT_HOOKS="1", TEST_DRIVER_ONLY="1") == {
        1: {"actor/loss": 0.5},
        2: {"actor/loss": 0.5},
    }
    assert not list((tmp_path / "out").rglob("*.json"))

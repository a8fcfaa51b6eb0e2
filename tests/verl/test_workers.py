# SPDX-License-Identifier: Apache-2.0
"""verl 0.9.1's own ActorRolloutRefWorker, FSDP2 engine and NPU patches, on 2 ranks with a tiny Qwen3-MoE."""

from __future__ import annotations

import pytest
from results import NUM_EXPERTS, STAGES, recorded, truth_of


@pytest.mark.truth(
    scenario="verl FSDP2: log-prob and update with checkpointing, 2 ranks",
    seam="torch_npu.npu_grouped_matmul",
    version="verl 0.9.1",
    verdict="exact",
)
def test_two_steps_on_two_ranks(run_ranks, tmp_path):
    out = tmp_path / "out"
    results = run_ranks(2, RL_INSIGHT_HOOKS="1", RL_INSIGHT_HOOKS_PATH=str(out))
    assert results[0]["counts"] != results[1]["counts"]  # ranks see different tokens
    for rank, result in enumerate(results):
        truth, files = truth_of(result), recorded(out, rank)
        assert set(files) == {(f"step_{step}", stage) for step in (1, 2) for stage in STAGES}
        for (step_dir, stage), file in files.items():
            step = int(step_dir.removeprefix("step_"))
            assert (file.step, file.step_source, file.role) == (step, "given", stage)
            assert (file.rank, file.world_size) == (rank, 2)
            assert (file.num_experts, file.top_k, file.parallel.dp_size) == (NUM_EXPERTS, 2, 2)
            assert (file.dropped, file.failed, file.notes) == ({}, {}, [])
            phases = ("forward", "recompute") if stage == "actor_update" else ("forward",)
            counted = {
                (step, stage, r.layer, r.phase): r.counts for r in file.records if r.phase in phases
            }
            expected = {key: row for key, row in truth.items() if key[:2] == (step, stage)}
            assert counted == expected
            assert {r.layer_name for r in file.records} == {f"model.layers.{i}.mlp" for i in (0, 1)}
    # the ranks of the rollout own these names (docs/adr/0050)
    assert not list(out.rglob("eplb_token_collects_*"))


def test_hooks_are_there_again_once_the_engine_is_built(run_ranks, tmp_path):
    """Somebody puts the pristine operator back while verl builds its FSDP engine."""
    out = tmp_path / "out"
    (result,) = run_ranks(1, RL_INSIGHT_HOOKS="1", RL_INSIGHT_HOOKS_PATH=str(out), TEST_REPATCH="1")
    assert result["hooked"]  # at once, not only when the first stage begins
    truth, files = truth_of(result), recorded(out, 0)
    for layer in (0, 1):
        (record,) = [
            r
            for r in files["step_1", "actor_compute_log_prob"].records
            if (r.layer, r.phase) == (layer, "forward")
        ]
        assert record.counts == truth[1, "actor_compute_log_prob", layer, "forward"]


def test_metrics_are_those_of_the_step(run_ranks, tmp_path):
    (result,) = run_ranks(1, RL_INSIGHT_HOOKS="1", RL_INSIGHT_HOOKS_PATH=str(tmp_path / "out"))
    rows = [
        counts
        for (step, stage, _, phase), counts in truth_of(result).items()
        if (step, stage, phase) == (2, "actor_update", "forward")
    ]
    worst = max(max(row) / (sum(row) / len(row)) for row in rows)
    metrics = result["metrics"]
    assert metrics["moe_load/actor_update/max_over_mean"] == pytest.approx(worst)
    assert metrics["moe_load/actor_update/assignments"] == sum(map(sum, rows))
    assert len([name for name in metrics if name.startswith("moe_load/actor_update/")]) <= 10


def test_without_the_driver_the_step_is_counted_and_marked(run_ranks, tmp_path):
    out = tmp_path / "out"
    run_ranks(1, RL_INSIGHT_HOOKS="1", RL_INSIGHT_HOOKS_PATH=str(out), TEST_CARRY="0")
    files = recorded(out, 0)
    assert set(files) == {(f"step_{step}", stage) for step in (1, 2) for stage in STAGES}
    assert {file.step_source for file in files.values()} == {"inferred"}


def test_off_runs_as_without_us(run_ranks, tmp_path):
    (result,) = run_ranks(1)
    assert result["metrics"] == {}
    assert not list(tmp_path.rglob("group_list.json"))

# SPDX-License-Identifier: Apache-2.0
"""verl's precision_debugger (the real msprobe) and the hooks at once: both see every call, once."""

from __future__ import annotations

import json

import pytest
from results import NUM_EXPERTS, STAGES, recorded, truth_of

_LOAD = "import json, sys, torch; print(json.dumps(torch.load(sys.argv[1], weights_only=True).tolist()))"


@pytest.fixture
def with_msprobe(tmp_path):
    config = {
        "task": "tensor",
        "rank": [],
        "step": [],
        "level": "L1",
        "async_dump": False,
        "tensor": {"scope": [], "list": ["npu_grouped_matmul"], "data_mode": ["forward", "input"]},
    }
    path = tmp_path / "msprobe.json"
    path.write_text(json.dumps(config))
    profiler = "actor_rollout_ref.actor.profiler"
    return (
        f"{profiler}.tool=precision_debugger",
        f"{profiler}.enable=True",
        f"{profiler}.all_ranks=True",
        f"{profiler}.save_path={tmp_path / 'dumps'}",
        f"global_profiler.global_tool_config.precision_debugger.config_path={path}",
        "global_profiler.global_tool_config.precision_debugger.stages=[actor_update,actor_compute_log_prob]",
    )


@pytest.mark.truth(
    scenario="verl with its precision_debugger (msprobe) on at the same time",
    seam="torch_npu.npu_grouped_matmul",
    version="verl 0.9.1, msprobe 26.2.0",
    verdict="exact",
)
def test_both_at_once(run_ranks, with_msprobe, python, tmp_path):
    out = tmp_path / "out"
    env = {
        "RL_INSIGHT_HOOKS": "1",
        "RL_INSIGHT_HOOKS_PATH": str(out),
        "TEST_PROFILE": "1",
        "TEST_CARRY": "0",
    }
    (result,) = run_ranks(1, *with_msprobe, **env)
    truth, files = truth_of(result), recorded(out, 0)
    assert set(files) == {(f"step_{step}", stage) for step in (1, 2) for stage in STAGES}
    for (step_dir, stage), file in files.items():
        step = int(step_dir.removeprefix("step_"))
        assert file.step_source == "given"  # start_profile(profile_step) told it
        forward = {r.layer: r for r in file.records if r.phase == "forward"}
        assert {layer: r.counts for layer, r in forward.items()} == {
            layer: truth[step, stage, layer, "forward"] for layer in (0, 1)
        }
        # up, gate and down of each of two micro-batches: no call is lost and none is seen twice
        assert {r.num_calls for r in forward.values()} == {6}
        dumps = sorted(
            (tmp_path / "dumps" / step_dir / stage).rglob(
                "*npu_grouped_matmul.0.forward.kwargs.group_list.pt"
            )
        )
        assert dumps, "msprobe dumped nothing: it was not on"
        first = python(_LOAD, dumps[0])
        assert len(first) == NUM_EXPERTS
        assert all(a <= b for a, b in zip(first, forward[0].counts, strict=True))

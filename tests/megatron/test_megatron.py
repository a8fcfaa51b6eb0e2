# SPDX-License-Identifier: Apache-2.0
"""The real Megatron-Core on CPU, alone and with expert parallelism over four processes (gloo, all_to_all)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rl_insight_hooks.report.check import check
from rl_insight_hooks.report.load import load
from rl_insight_hooks.schema import decode_load_file

HERE = Path(__file__).parent
NUM_TOKENS, TOP_K = 24, 2  # as in rank_main.py

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="megatron-core is not installed: nox session megatron",
)


def run_ranks(out, world, ep, kind, watched, *, etp=1, replicas="one", broken=""):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TEST_REPLICAS": replicas, "TEST_BREAK": broken}
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                HERE / "rank_main.py",
                out,
                str(rank),
                str(world),
                str(ep),
                str(etp),
                kind,
                str(watched),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for rank in range(world)
    ]
    truths, digests = [], []
    for process in ranks:
        stdout, stderr = process.communicate(timeout=240)
        assert process.returncode == 0, stderr[-3000:]
        truths.append(json.loads(stdout.strip().splitlines()[-1]))
        digests.append(truths[-1].pop("digest"))
    run_ranks.digests = digests
    return {phase: np.sum([t[phase] for t in truths], axis=0) for phase in truths[0]}


def merged(root, phase):
    table = load(root, merge_ranks=True, phases=phase)
    assert table.layer_N.tolist() == [2, 3, 4]  # layer_number - 1
    return table.counts_NE


@pytest.mark.parametrize("watched", [True, False], ids=["watch", "no watch"])
@pytest.mark.parametrize("kind", ["none", "reentrant", "non-reentrant"])
@pytest.mark.truth(
    scenario="experts modules, each checkpoint flavour, pipeline offset by layer_number",
    seam="megatron.SequentialMLP",
    version="core",
    verdict="exact",
)
def test_one_rank(tmp_path, kind, watched):
    truth = run_ranks(tmp_path, 1, 1, kind, watched)
    assert np.array_equal(merged(tmp_path / "data", "forward"), truth["forward"])
    if kind != "none":
        assert np.array_equal(merged(tmp_path / "data", "recompute"), truth["recompute"])


@pytest.mark.truth(
    scenario="expert parallelism over 4 processes, all_to_all: global expert ids",
    seam="megatron.SequentialMLP",
    version="core",
    verdict="exact",
)
def test_expert_parallel(tmp_path):
    truth = run_ranks(tmp_path, 4, 4, "none", True)
    assert np.array_equal(merged(tmp_path / "data", "forward"), truth["forward"])
    for rank in range(4):
        path = tmp_path / f"data/step_1/update/rank{rank}/group_list.json"
        file = decode_load_file(path.read_bytes())
        assert (file.parallel.ep_size, file.parallel.ep_rank, file.first_expert) == (
            4,
            rank,
            2 * rank,
        )
        assert (file.num_experts, file.top_k) == (8, 2)
        assert {len(r.counts) for r in file.records} == {2}
        assert {r.seam for r in file.records} == {"megatron.SequentialMLP"}


@pytest.mark.truth(
    scenario="expert and data parallelism over 4 processes: ranks add up",
    seam="megatron.SequentialMLP",
    version="core",
    verdict="exact",
)
def test_expert_and_data_parallel(tmp_path):
    truth = run_ranks(tmp_path, 4, 2, "reentrant", False)
    assert np.array_equal(merged(tmp_path / "data", "forward"), truth["forward"])
    assert np.array_equal(merged(tmp_path / "data", "recompute"), truth["recompute"])
    assert merged(tmp_path / "data", "forward").sum() == 3 * 2 * 4 * NUM_TOKENS * TOP_K


@pytest.mark.truth(
    scenario="expert and expert-tensor parallelism over 4 processes: replicas count once",
    seam="megatron.SequentialMLP",
    version="core",
    verdict="exact",
)
@pytest.mark.parametrize("replicas", ["one", "all"])
def test_expert_tensor_parallel(tmp_path, replicas):
    truth = run_ranks(tmp_path, 4, 2, "none", True, etp=2, replicas=replicas)
    counts = merged(tmp_path / "data", "forward")
    assert np.array_equal(counts, truth["forward"])
    assert counts.sum() == 3 * 2 * 4 * NUM_TOKENS * TOP_K  # layers, micro-batches, ranks
    folders = sorted(p.name for p in (tmp_path / "data/step_1/update").iterdir())
    writers = {"one": ["rank0", "rank2"], "all": ["rank0", "rank1", "rank2", "rank3"]}[replicas]
    assert folders == writers
    assert sorted(p.name for p in (tmp_path / "data").glob("*.json")) == [
        f"eplb_token_collects_{name.removeprefix('rank')}.json" for name in writers
    ]
    for name in writers:
        path = tmp_path / "data/step_1/update" / name / "group_list.json"
        file = decode_load_file(path.read_bytes())
        assert file.tokens_layout == "replicated"
        assert ("replicas" in file.stamps) == (replicas == "one")
    found = check(tmp_path / "data")
    assert found.num_errors == 0, found.problems


@pytest.mark.parametrize(
    "broken",
    [
        "rl_insight_hooks.recorder:Recorder.on_counts",
        "rl_insight_hooks.recorder:Recorder._slot",
        "rl_insight_hooks.integrations.megatron:_find_layer",
        "rl_insight_hooks.layers:LayerRegistry.of_module",
        "rl_insight_hooks.watching:_num_tokens",
    ],
)
def test_a_failure_of_ours_changes_nothing(tmp_path, broken):
    """Outputs and gradients are those of a run without us, bit by bit; the failure is in the file."""
    (tmp_path / "off").mkdir()
    (tmp_path / "on").mkdir()
    run_ranks(tmp_path / "off", 1, 1, "non-reentrant", False, broken="off")
    without = run_ranks.digests
    run_ranks(tmp_path / "on", 1, 1, "non-reentrant", True, broken=broken)
    assert run_ranks.digests == without
    assert not (tmp_path / "off/data").exists()
    file = decode_load_file((tmp_path / "on/data/step_1/update/rank0/group_list.json").read_bytes())
    assert sum(file.failed.values()) > 0


@pytest.mark.parametrize("kind", ["none", "reentrant", "non-reentrant"])
def test_an_exception_at_every_line_changes_no_bit(tmp_path, kind):
    """Outputs and gradients of a step, once for each line of ours that runs in it."""
    done = subprocess.run(
        [sys.executable, HERE / "fault_main.py", tmp_path, kind],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent / "support")},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert set(found.pop("unguarded")) <= {"original", "is_compiling", "failed", "wraps", "record"}
    assert set(found) == {"megatron.py", "recorder.py", "session.py"}
    assert found["megatron.py"] > 50

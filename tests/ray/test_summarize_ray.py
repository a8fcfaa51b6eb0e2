# SPDX-License-Identifier: Apache-2.0
"""summarize --ray: folded on the nodes, equal to what a plain loop over all files gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from collect_data import NUM_EXPERTS, NUM_LAYERS, counts_of, write_node, write_step_file

import ray
from rl_insight_hooks.report.collect.fold import fold_sources
from rl_insight_hooks.report.collect.node import INCLUDE
from rl_insight_hooks.report.collect.ray_transport import list_nodes, ray_sources
from rl_insight_hooks.report.select import make_selection

pytestmark = [pytest.mark.ray, pytest.mark.slow]

STEPS = range(3)
RANKS_PER_NODE = 4


def folders(tmp_path):
    return {
        int(dict(where.labels)["slot"]): tmp_path / where.node_id / "load"
        for where in list_nodes(ray)
        if "slot" in dict(where.labels)
    }


def fold(tmp_path, **kw):
    sources, dead = ray_sources(ray, f"{tmp_path}/{{node_id}}/load", INCLUDE, 60)
    assert dead == []
    return fold_sources(sources, selection=make_selection(), **kw)


def test_expert_parallel_over_nodes_and_replicas_on_two_nodes(cluster, tmp_path):
    # nodes 0 and 1 hold experts 0-7 and 8-15 of disjoint ranks; on 2 and 3 each tensor-parallel pair of the
    # rollout saw the same tokens, one rank of a pair on each node
    where = folders(tmp_path)
    expected = np.zeros((len(STEPS), NUM_LAYERS, NUM_EXPERTS), dtype=np.int64)
    rollout = np.zeros_like(expected)
    half = NUM_EXPERTS // 2
    for step in STEPS:
        for slot in (0, 1):
            for number in range(RANKS_PER_NODE):
                rank = slot * RANKS_PER_NODE + number
                write_step_file(
                    where[slot], step, rank, world_size=8, first_expert=slot * half, width=half
                )
                for layer in range(NUM_LAYERS):
                    columns = slice(slot * half, (slot + 1) * half)
                    expected[step, layer, columns] += counts_of(step, rank, layer, half)
        for pair in range(RANKS_PER_NODE):
            for slot in (2, 3):
                write_step_file(
                    where[slot],
                    step,
                    2 * pair + slot - 2,
                    role="rollout",
                    world_size=8,
                    seed_rank=100 + pair,
                    replica_group=f"tp{pair}",
                )
            for layer in range(NUM_LAYERS):
                rollout[step, layer] += counts_of(step, 100 + pair, layer)

    folded = fold(tmp_path)

    table = folded.table
    assert table.problems == ()
    assert table.roles == ("actor_update", "rollout")
    for role, truth in enumerate((expected, rollout)):
        for row in np.flatnonzero(table.role_N == role):
            step, layer = table.step_N[row], table.layer_N[row]
            assert table.counts_NE[row].tolist() == truth[step, layer].tolist()
    assert table.num_rows == 2 * len(STEPS) * NUM_LAYERS
    # 16 rank files a step travel as 2 x 3 half rows and 2 x 4 x 3 rows of int32
    assert folded.num_bytes == len(STEPS) * NUM_LAYERS * (2 * half + 2 * 4 * NUM_EXPERTS) * 4
    assert folded.num_files == len(STEPS) * 16


def test_a_rank_on_two_nodes_counts_once(cluster, tmp_path):
    where = folders(tmp_path)
    write_step_file(where[0], 1, 0, world_size=3)
    write_step_file(where[1], 1, 0, world_size=3)  # a copy
    write_step_file(where[1], 1, 1, world_size=3)
    write_step_file(where[2], 1, 1, world_size=3, seed_rank=77)  # another run's
    write_step_file(where[2], 1, 2, world_size=3)
    folded = fold(tmp_path)
    owner = {slot: n.name for n in list_nodes(ray) if (slot := dict(n.labels).get("slot"))}
    first_of_rank1 = min(("1", "2"), key=lambda slot: owner[slot])
    for row in range(NUM_LAYERS):
        kept = 1 if first_of_rank1 == "1" else 77
        truth = np.sum([counts_of(1, seed, row) for seed in (0, kept, 2)], axis=0)
        assert folded.table.counts_NE[row].tolist() == truth.tolist()
    rules = sorted((p.rule, p.severity) for p in folded.table.problems)
    assert rules == [("copy-on-two-nodes", "note"), ("duplicate-rank", "error")]


def test_command_ships_the_package_and_names_what_a_dead_node_had(cluster, tmp_path):
    where = folders(tmp_path)
    for slot, folder in where.items():
        first = slot * RANKS_PER_NODE
        write_node(folder, range(first, first + RANKS_PER_NODE), STEPS, world_size=16)
    run = [sys.executable, "-m", "rl_insight_hooks.report.main", "summarize"]
    args = [f"{tmp_path}/{{node_id}}/load", "--ray", cluster.cluster.address]
    out = tmp_path / "merged.csv"
    env = {**os.environ, "RAY_ENABLE_RECORD_ACTOR_TASK_LOGGING": "0"}
    done = subprocess.run(
        [*run, *args, "--json", "-o", str(out)],
        capture_output=True,
        text=True,
        timeout=120,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["num_files"] == 16 * len(STEPS)
    (role,) = said["summary"]["roles"]
    assert said["summary"]["problems"] == []
    assert role["steps"] == list(STEPS)
    total = sum(
        sum(counts_of(step, rank, layer))
        for step in STEPS
        for rank in range(16)
        for layer in range(NUM_LAYERS)
    )
    assert role["assignments"] == total
    assert len(out.read_text().splitlines()) == 1 + len(STEPS) * NUM_LAYERS * NUM_EXPERTS

    cluster.kill(3)
    done = subprocess.run([*run, *args], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 4
    assert "no data of ranks 12-15 of a world of 16" in done.stderr
    assert "was dead before we began" in done.stderr
    assert "4 nodes, 36 files" in done.stdout  # the head and three

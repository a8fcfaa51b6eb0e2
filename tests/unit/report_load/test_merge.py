# SPDX-License-Identifier: Apache-2.0
"""Ranks to global counts: expert offsets, replicas once, pipeline stages; while reading and afterwards."""

from __future__ import annotations

import random

import pytest

from rl_insight_hooks.errors import UsageError
from rl_insight_hooks.report.load import load
from rl_insight_hooks.report.merge import merge_ranks


def _both_ways(root, **options):
    """Return the table folded while reading; the one merged afterwards must be equal to it."""
    folded = load(root, merge_ranks=True, **options)
    merged = merge_ranks(load(root), options.get("aggregate", "auto"))
    for name in (
        "step_N",
        "role_N",
        "rank_N",
        "layer_N",
        "phase_N",
        "counts_NE",
        "num_passes_N",
        "num_tokens_N",
    ):
        assert getattr(folded, name).tolist() == getattr(merged, name).tolist(), name
    assert folded.held_N.tolist() == merged.held_N.tolist()
    return folded


def test_expert_parallel_offsets_data_parallel_sums_and_pipeline_stages(tmp_path, write_step):
    """2 data-parallel x 2 expert-parallel x 2 pipeline ranks, 6 experts, 4 layers; truth by a plain loop."""
    rng = random.Random(4)
    truth = {}
    for step in range(3):
        for rank in range(8):
            data, stage, expert_rank = rank // 4, rank // 2 % 2, rank % 2
            loads = {}
            for layer in range(2 * stage, 2 * stage + 2):
                counts = [rng.randrange(100) for _ in range(3)]
                loads[layer] = counts
                total = truth.setdefault((step, layer), [0] * 6)
                for column, tokens in enumerate(counts):
                    total[3 * expert_rank + column] += tokens
            assert data in (0, 1)
            write_step(
                tmp_path,
                step,
                "actor",
                rank,
                loads,
                first=3 * expert_rank,
                world_size=8,
                num_experts=6,
            )
    table = _both_ways(tmp_path)
    found = {
        (int(table.step_N[row]), int(table.layer_N[row])): table.counts_NE[row].tolist()
        for row in range(table.num_rows)
    }
    assert found == truth
    assert set(table.rank_N.tolist()) == {-1}
    assert table.problems == ()


def _replicas(tmp_path, write_step, **fields):
    for rank in range(4):
        write_step(
            tmp_path,
            1,
            "actor",
            rank,
            {0: [1 + rank // 2, 10]},
            world_size=4,
            tokens_layout="replicated",
            parallel={"replica_group": f"dp{rank // 2}", "tp_size": 2, "tp_rank": rank % 2},
            **fields,
        )


def test_tensor_parallel_copies_count_once(tmp_path, write_step):
    _replicas(tmp_path, write_step)
    assert _both_ways(tmp_path).counts_NE.tolist() == [[3, 20]]
    assert _both_ways(tmp_path, aggregate="sum").counts_NE.tolist() == [[6, 40]]
    assert _both_ways(tmp_path, aggregate="max").counts_NE.tolist() == [[2, 10]]
    assert _both_ways(tmp_path, aggregate="one-rank").counts_NE.tolist() == [[1, 10]]


def test_copies_with_different_experts_are_no_copies(tmp_path, write_step):
    """Expert-parallel ranks inside one replica group hold different experts: each range counts."""
    for rank in range(2):
        write_step(
            tmp_path,
            1,
            "actor",
            rank,
            {0: [5, 7]},
            first=2 * rank,
            world_size=2,
            num_experts=4,
            tokens_layout="replicated",
            parallel={"replica_group": "g"},
        )
    assert load(tmp_path, merge_ranks=True).counts_NE.tolist() == [[5, 7, 5, 7]]


def test_one_file_for_a_group_of_copies_is_not_a_missing_rank(tmp_path, write_step):
    write_step(
        tmp_path,
        1,
        "actor",
        0,
        {0: [5, 7]},
        world_size=4,
        tokens_layout="replicated",
        parallel={"replica_group": "0-3"},
    )
    assert load(tmp_path).problems == ()


def test_tokens_add_up_and_stay_unknown_if_one_rank_does_not_know(tmp_path, write_step):
    import json

    for rank, tokens in ((0, 10), (1, 20)):
        path = write_step(tmp_path, 1, "actor", rank, {0: [5, 7], 1: [6, 6]}, world_size=2)
        value = json.loads(path.read_text())
        value["records"][0]["num_tokens"] = tokens
        if rank == 1:
            value["records"][1]["num_tokens"] = 4
        path.write_text(json.dumps(value))
    assert _both_ways(tmp_path).num_tokens_N.tolist() == [30, -1]


def test_experts_that_no_rank_reported_are_named(tmp_path, write_step, by_rule):
    for rank in (0, 2):
        write_step(
            tmp_path, 1, "actor", rank, {0: [1, 1]}, first=2 * rank, world_size=3, num_experts=6
        )
    table = load(tmp_path, merge_ranks=True)
    assert table.counts_NE.tolist() == [[1, 1, 0, 0, 1, 1]]
    rules = by_rule(table)
    assert "experts 2-3" in rules["missing-experts"][0].what
    assert "rank 1 of a world of 3" in rules["missing-rank"][0].what
    assert "missing-experts" in {p.rule for p in merge_ranks(load(tmp_path)).problems}


def test_ranks_with_different_layer_sets_fold_right(tmp_path, write_step):
    write_step(tmp_path, 1, "actor", 0, {0: [1], 2: [2], 4: [3]}, world_size=2)
    write_step(tmp_path, 1, "actor", 1, {4: [10], 1: [20], 0: [30]}, world_size=2)
    table = _both_ways(tmp_path)
    assert dict(zip(table.layer_N.tolist(), table.counts_NE[:, 0].tolist(), strict=True)) == {
        0: 31,
        1: 20,
        2: 2,
        4: 13,
    }


def test_call_order_layers_of_pipeline_stages_are_not_added_up(tmp_path, write_step):
    for rank in (0, 1):
        write_step(
            tmp_path,
            1,
            "actor",
            rank,
            {0: [1 + rank, 0], 1: [3, rank]},
            world_size=2,
            parallel={"pp_size": 2, "pp_rank": rank},
        )
    table = _both_ways(tmp_path)
    assert table.layer_N.tolist() == [0, 1, 2, 3]
    assert table.counts_NE.tolist() == [[1, 0], [3, 0], [2, 0], [3, 1]]
    assert "pipeline stage" in table.assumptions[0]


def test_merged_tables_pass_through_and_unknown_ways_are_refused(tmp_path, write_step):
    write_step(tmp_path, 1, "actor", 0, {0: [1]})
    table = load(tmp_path, merge_ranks=True)
    assert merge_ranks(table) is table
    with pytest.raises(UsageError, match="median"):
        merge_ranks(load(tmp_path), "median")


def test_memory_does_not_grow_with_ranks(tmp_path, write_step):
    """Rows of one rank are dropped once folded: the peak with 8 times the ranks is about the same."""
    import tracemalloc

    rng = random.Random(0)
    peaks = []
    for num_ranks in (8, 64):
        root = tmp_path / str(num_ranks)
        for rank in range(num_ranks):
            loads = {layer: [rng.randrange(1000) for _ in range(128)] for layer in range(24)}
            write_step(root, 1, "actor", rank, loads, world_size=num_ranks)
        load(root, merge_ranks=True)
        tracemalloc.start()
        load(root, merge_ranks=True)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 150_000  # 56 more ranks of 24 KB each would be 1.4 MB

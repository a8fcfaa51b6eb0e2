# SPDX-License-Identifier: Apache-2.0
"""MindSpeed-RL's collects: real data, aggregation of ranks, damage."""

from __future__ import annotations

import json

import pytest

from rl_insight_hooks.errors import DataError, UsageError
from rl_insight_hooks.report.load import load


def _write(folder, rank, loads):
    folder.mkdir(exist_ok=True)
    (folder / f"eplb_token_collects_{rank}.json").write_text(json.dumps(loads))


@pytest.mark.parametrize("name", ["esft_intent_token_collects", "esft_law_token_collects"])
def test_real_collects_equal_the_plain_sum(shared, name):
    truth = {}
    for path in (shared / name).glob("*.json"):
        for layer, experts in json.loads(path.read_text()).items():
            for expert, tokens in experts.items():
                key = (int(layer), int(expert))
                truth[key] = truth.get(key, 0) + tokens
    table = load(shared / name, merge_ranks=True)
    found = {
        (int(table.layer_N[row]), expert): int(table.counts_NE[row, expert])
        for row in range(table.num_rows)
        for expert in range(table.num_experts)
    }
    assert found == truth
    assert table.problems == ()
    # top-6 of every token in every layer
    sums = set(table.counts_NE.sum(axis=1).tolist())
    assert len(sums) == 1
    assert sums.pop() % 6 == 0


def test_rank_comes_from_the_name(shared):
    table = load(shared / "esft_law_token_collects")
    truth = json.loads(
        (shared / "esft_law_token_collects" / "eplb_token_collects_5.json").read_text()
    )
    rows = (table.rank_N == 5) & (table.layer_N == 11)
    assert table.counts_NE[rows].tolist() == [list(truth["11"].values())]


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [("auto", [3, 5]), ("sum", [5, 9]), ("max", [2, 4]), ("one-rank", [2, 4])],
)
def test_equal_ranks_count_once_unless_told_otherwise(tmp_path, aggregate, expected):
    _write(tmp_path, 0, {"0": {"0": 2, "1": 4}})
    _write(tmp_path, 1, {"0": {"0": 2, "1": 4}})  # the same tokens as rank 0
    _write(tmp_path, 2, {"0": {"0": 1, "1": 1}})
    table = load(tmp_path, merge_ranks=True, aggregate=aggregate)
    assert table.counts_NE.tolist() == [expected]
    (assumption,) = table.assumptions
    assert "1 token-collects files equal another one" in assumption
    assert f"aggregate: {aggregate}" in assumption


def test_ranks_of_zeros_are_not_taken_for_copies(tmp_path):
    for rank in range(3):
        _write(tmp_path, rank, {"0": {"0": 0, "1": 0}})
    assert load(tmp_path).assumptions == ()


def test_unknown_aggregate_is_a_usage_error(tmp_path):
    _write(tmp_path, 0, {"0": {"0": 1}})
    with pytest.raises(UsageError, match="'mean'"):
        load(tmp_path, merge_ranks=True, aggregate="mean")


def test_sum_beside_ranks_is_not_added(tmp_path, by_rule):
    _write(tmp_path, 0, {"0": {"0": 1, "1": 2}})
    (tmp_path / "token_collects_all.json").write_text('{"0": {"0": 1, "1": 2}}')
    table = load(tmp_path, merge_ranks=True)
    assert table.counts_NE.tolist() == [[1, 2]]
    assert by_rule(table)["sum-beside-ranks"][0].severity == "note"
    assert load(tmp_path / "token_collects_all.json").counts_NE.tolist() == [[1, 2]]


def test_expert_map_and_other_json_in_the_folder_are_not_loads(tmp_path, by_rule):
    _write(tmp_path, 0, {"0": {"0": 1, "1": 2}})
    (tmp_path / "expert_map.json").write_text('{"moe_layer_count": 1, "layer_list": []}')
    (tmp_path / "eplb_token_collects_0.json.20260101T000000.old").write_text('{"0": {"0": 9}}')
    table = load(tmp_path, merge_ranks=True)
    assert table.counts_NE.tolist() == [[1, 2]]
    (problem,) = by_rule(table)["ignored-file"]
    assert problem.what.startswith("2 files")


def test_collects_beside_our_step_files_are_not_counted_again(tmp_path, write_step, by_rule):
    write_step(tmp_path, 1, "rollout", 0, {0: [1, 2]})
    _write(tmp_path, 0, {"0": {"0": 1, "1": 2}})
    table = load(tmp_path)
    assert table.counts_NE.tolist() == [[1, 2]]
    assert by_rule(table)["collects-beside-steps"][0].severity == "note"
    assert load(tmp_path / "eplb_token_collects_0.json").step_N.tolist() == [-1]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('{"0": {"0": 5, "1"', "torn-file"),
        ("", "empty-file"),
        ('{"0": {"0": "five"}}', "bad-schema"),
        ('{"0": {"0": -5}}', "bad-counts"),
        ('{"0": {"zero": 5}}', "bad-counts"),
        ('{"0": {}}', "bad-counts"),
        ('{"0": {"0": 9223372036854775807, "1": 3}}', "bad-counts"),
        ('{"layer": {"0": 5}}', "bad-counts"),
        ('{"0": {"99999999": 5}}', "bad-counts"),
        ('{"0": {"0": 1}, "00": {"0": 1}}', "bad-counts"),
        ("[1, 2]", "bad-schema"),
    ],
)
def test_damage_is_named_and_the_other_ranks_are_shown(tmp_path, by_rule, text, rule):
    _write(tmp_path, 0, {"0": {"0": 1, "1": 2}})
    (tmp_path / "eplb_token_collects_1.json").write_text(text)
    table = load(tmp_path)
    assert table.counts_NE.tolist() == [[1, 2]]
    assert [p.where for p in by_rule(table)[rule]] == [str(tmp_path / "eplb_token_collects_1.json")]
    assert table.is_incomplete
    with pytest.raises(DataError):
        load(tmp_path, strict=True)

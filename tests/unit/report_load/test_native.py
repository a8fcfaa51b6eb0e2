# SPDX-License-Identifier: Apache-2.0
"""Our own step files: read exactly, and every kind of damage named."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from rl_insight_hooks.errors import DataError
from rl_insight_hooks.report.load import load
from rl_insight_hooks.report.load.native import _parse_digits


def test_counts_of_every_length_are_read_exactly(tmp_path, write_step, rows_of):
    counts = [0, 9, 10, 12345, 7, 999_999_999, 10**15, 1]
    write_step(tmp_path, 2, "actor", 0, {0: counts, 5: counts[::-1]})
    assert rows_of(load(tmp_path)) == [
        [2, "actor", 0, 0, "forward", 0, counts],
        [2, "actor", 0, 5, "forward", 0, counts[::-1]],
    ]


def test_digit_parser_equals_int_on_random_numbers():
    rng = random.Random(5)
    for _ in range(200):
        width, longest = rng.randint(1, 40), rng.randint(1, 8)
        rows = [
            [rng.randrange(10 ** rng.randint(1, longest)) for _ in range(width)] for _ in range(3)
        ]
        found = _parse_digits([json.dumps(row, separators=(",", ":")).encode() for row in rows])
        assert found is not None
        assert found.tolist() == rows


@pytest.mark.parametrize(
    "raws",
    [
        [b"[1,-2]"],
        [b"[1, 2]"],
        [b"[]"],
        [b"[1,2]", b"[3]"],
        [b"[1.5]"],
        [b"[1]", b"[]"],
        [b"[1e3]"],
    ],
)
def test_digit_parser_leaves_what_is_not_plain_digits_to_the_slow_way(raws):
    assert _parse_digits(raws) is None


@pytest.mark.parametrize(
    "number", [0, 7, 10, 99, 100, 9999, 10_000, 10_203, 99_999_999, 10_000_001]
)
@pytest.mark.parametrize("neighbour", [0, 9, 12, 99_999_999])
def test_digit_parser_keeps_neighbours_apart(number, neighbour):
    row = [neighbour, number, neighbour, number, number]
    text = json.dumps(row, separators=(",", ":")).encode()
    assert _parse_digits([text, text]).tolist() == [row, row]


def test_numbers_of_nine_digits_are_left_to_the_slow_way():
    assert _parse_digits([b"[123456789]"]) is None


def test_whitespace_and_uneven_rows_are_read_by_the_slow_way(tmp_path, write_step, rows_of):
    path = write_step(tmp_path, 0, "actor", 0, {0: [1, 2, 3], 1: [4]})
    path.write_text(json.dumps(json.loads(path.read_text()), indent=4))
    table = load(tmp_path)
    assert table.counts_NE.tolist() == [[1, 2, 3], [4, 0, 0]]


def test_role_without_steps_has_no_step(tmp_path, write_step, rows_of):
    write_step(tmp_path, None, "rollout", 0, {0: [1, 2]})
    assert rows_of(load(tmp_path)) == [[None, "rollout", 0, 0, "forward", 0, [1, 2]]]


def test_detail_calls_do_not_change_the_counts(tmp_path, write_step, rows_of):
    calls = [{"layer": 0, "phase": "forward", "index": 0, "counts": [1, 2]}]
    write_step(tmp_path, 1, "actor", 0, {0: [1, 2]}, calls=calls)
    assert rows_of(load(tmp_path)) == [[1, "actor", 0, 0, "forward", 0, [1, 2]]]


def test_two_seams_of_one_layer_and_phase_add_up(tmp_path, write_step, rows_of):
    path = write_step(tmp_path, 0, "actor", 0, {0: [1, 2], 1: [3, 4]})
    value = json.loads(path.read_text())
    value["records"].append(
        {**value["records"][0], "seam": "other", "counts": [10, 20], "num_assignments": 30}
    )
    path.write_text(json.dumps(value))
    assert rows_of(load(tmp_path))[0][-1] == [11, 22]


@pytest.mark.parametrize(
    ("damage", "rule", "word"),
    [
        (lambda text: text[: len(text) // 2], "torn-file", "truncated"),
        (lambda text: "", "empty-file", "0 bytes"),
        (lambda text: text.replace('"rank": 0', '"rank": "zero"'), "bad-schema", "rank"),
        (lambda text: text.replace('"run_id"', '"run_idx"'), "bad-schema", "run_id"),
        (
            lambda text: text.replace('"schema_version": 1', '"schema_version": 99'),
            "newer-schema",
            "99",
        ),
        (lambda text: text.replace("[3, 4]", "[3, -4]"), "bad-counts", "-4"),
        (lambda text: text.replace("[3, 4]", "[3, 5]"), "bad-counts", "num_assignments 7"),
        (lambda text: text.replace("[3, 4]", "[3, 4.5]"), "bad-schema", "int"),
        (lambda text: "[" * 100_000, "bad-schema", "object"),
        (lambda text: '{"calls": ' + "[" * 100_000, "torn-file", ""),
    ],
)
def test_damage_is_named_and_the_rest_still_shown(
    tmp_path, write_step, by_rule, damage, rule, word
):
    write_step(tmp_path, 1, "actor", 0, {0: [1, 2]})
    path = write_step(tmp_path, 2, "actor", 0, {0: [3, 4]})
    path.write_text(damage(path.read_text()))
    table = load(tmp_path)
    assert table.step_N.tolist() == [1]
    (problem,) = by_rule(table)[rule]
    assert problem.where == str(path)
    assert word in problem.what
    assert table.is_incomplete
    with pytest.raises(DataError, match=rule):
        load(tmp_path, strict=True)


def test_newer_schema_with_new_fields_is_named_as_newer(tmp_path, write_step, by_rule):
    path = write_step(tmp_path, 2, "actor", 0, {0: [3, 4]}, schema_version=2, new_field=[1])
    table = load(tmp_path)
    assert "schema_version 2" in by_rule(table)["newer-schema"][0].what
    assert table.num_rows == 0
    assert path.exists()


def test_same_step_role_and_rank_twice_counts_once(tmp_path, write_step, by_rule):
    write_step(tmp_path / "a", 1, "actor", 0, {0: [1, 2]})
    write_step(tmp_path / "b", 1, "actor", 0, {0: [5, 5]})
    for merge in (False, True):
        table = load(tmp_path, merge_ranks=merge)
        assert table.counts_NE.tolist() == [[1, 2]]
        (problem,) = by_rule(table)["duplicate-rank"]
        assert str(tmp_path / "a") in problem.what
        assert str(tmp_path / "b") in problem.where


def test_a_file_under_another_name_is_known_by_its_content(tmp_path, write_step, rows_of):
    path = write_step(tmp_path, 1, "actor", 0, {0: [1, 2]})
    renamed = tmp_path / "copy-of-step-1.json"
    path.rename(renamed)
    assert rows_of(load(renamed)) == [[1, "actor", 0, 0, "forward", 0, [1, 2]]]


def test_conflict_file_of_a_second_process_is_not_added_silently(tmp_path, write_step, by_rule):
    path = write_step(tmp_path, 1, "actor", 0, {0: [1, 2]})
    path.with_name("group_list.conflict-x.json").write_text(path.read_text())
    table = load(tmp_path)
    assert table.counts_NE.tolist() == [[1, 2]]
    assert "duplicate-rank" in by_rule(table)


def test_zero_call_file_is_no_missing_rank(tmp_path, write_step, by_rule):
    write_step(tmp_path, 1, "actor", 0, {0: [1, 2]}, world_size=2)
    write_step(tmp_path, 1, "actor", 1, {}, world_size=2)
    table = load(tmp_path)
    assert table.rank_N.tolist() == [0]
    assert by_rule(table) == {}


def test_expert_numbers_beyond_any_model_do_not_take_memory(tmp_path, write_step, by_rule):
    write_step(tmp_path, 1, "actor", 0, {0: [1, 2]}, first=2**40)
    write_step(tmp_path, 2, "actor", 0, {0: [1, 2]})
    table = load(tmp_path)
    assert table.counts_NE.shape == (1, 2)
    assert by_rule(table)["expert-out-of-range"]


def test_table_is_sorted_and_typed(tmp_path, write_step):
    for step in (10, 2):
        for role in ("b", "a"):
            for rank in (10, 2):
                loads = {(3, "recompute"): [1], (3, "forward"): [2], (0, "forward"): [3]}
                write_step(tmp_path, step, role, rank, loads)
    table = load(tmp_path)
    keys = list(
        zip(
            table.role_N.tolist(),
            table.step_N.tolist(),
            table.rank_N.tolist(),
            table.layer_N.tolist(),
            table.phase_N.tolist(),
            strict=True,
        )
    )
    assert keys == sorted(keys)
    assert table.roles == ("a", "b")
    assert table.phases == ("forward", "recompute")
    assert table.counts_NE.dtype == np.int64


@pytest.mark.parametrize("merge", [False, True])
def test_several_processes_read_the_same(tmp_path, write_step, rows_of, monkeypatch, merge):
    from rl_insight_hooks.report.load import parallel

    rng = random.Random(6)
    for step in range(60):
        for rank in range(5):
            loads = {
                layer: [rng.randrange(2**33) if layer else rng.randrange(99) for _ in range(6)]
                for layer in (0, 1)
            }
            write_step(tmp_path, step, "actor", rank, loads, world_size=5)
    (tmp_path / "step_7" / "actor" / "rank3" / "group_list.json").write_text("{")
    one = load(tmp_path, merge_ranks=merge)
    monkeypatch.setattr(parallel, "MIN_FILES", 10)
    monkeypatch.setattr(parallel.read_native_in_processes, "__defaults__", (10,))
    seen = []
    two = load(
        tmp_path, merge_ranks=merge, jobs=2, progress=lambda done, total: seen.append((done, total))
    )
    assert rows_of(two) == rows_of(one)
    assert two.problems == one.problems
    assert seen == [(128, 300), (256, 300), (300, 300)]
    with pytest.raises(DataError, match="torn-file"):
        load(tmp_path, merge_ranks=merge, jobs=2, strict=True)

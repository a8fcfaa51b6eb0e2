# SPDX-License-Identifier: Apache-2.0
"""Finding files: links, odd folders, nothing there, what is missing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from rl_insight_hooks.errors import DataError, UsageError
from rl_insight_hooks.report.load import load


def test_nothing_there_names_the_path_and_what_was_expected(tmp_path):
    with pytest.raises(DataError, match=r"no/such.*cannot be opened.*Expected: group_list.json"):
        load(tmp_path / "no" / "such")
    with pytest.raises(DataError, match=r"nothing to read.*Expected"):
        load(tmp_path)
    (tmp_path / "a.png").write_bytes(b"x")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="2 other files"):
        load(tmp_path)
    with pytest.raises(DataError, match="no input path"):
        load([])
    with pytest.raises(DataError, match="cannot be opened"):
        load("a\0b")


def test_a_named_file_of_no_format_is_an_error_and_the_rest_is_shown(tmp_path, write_step, by_rule):
    path = write_step(tmp_path / "run", 1, "actor", 0, {0: [1]})
    other = tmp_path / "notes.txt"
    other.write_text("hello")
    empty = tmp_path / "empty.json"
    empty.write_text("")
    table = load([path, other, empty])
    assert table.num_rows == 1
    assert [p.what for p in by_rule(table)["unknown-format"]] == [
        "no known load format",
        "empty file",
    ]
    assert table.is_incomplete


def test_links_are_followed_once_and_loops_end(tmp_path, write_step, by_rule):
    write_step(tmp_path / "run", 1, "actor", 0, {0: [1]})
    (tmp_path / "run" / "latest").symlink_to("step_1")
    (tmp_path / "run" / "loop").symlink_to("..")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "run").symlink_to(tmp_path / "run")
    for root in (tmp_path / "run", tmp_path / "elsewhere"):
        table = load(root)
        assert table.step_N.tolist() == [1]
        assert by_rule(table) == {}


def test_a_link_into_a_dump_does_not_change_its_place(tmp_path):
    golden = Path(__file__).resolve().parents[2] / "golden" / "load" / "msprobe_verl"
    shutil.copytree(golden, tmp_path / "d")
    (tmp_path / "d" / "a_link").symlink_to("step_2")
    table = load(tmp_path / "d")
    assert table.step_N.tolist() == [2]
    assert table.roles == ("ref_compute_log_prob",)


def test_a_broken_link_to_a_step_file_is_named(tmp_path, write_step, by_rule):
    path = write_step(tmp_path, 1, "actor", 0, {0: [1]})
    write_step(tmp_path, 2, "actor", 0, {0: [1]})
    path.unlink()
    path.symlink_to(tmp_path / "gone.json")
    table = load(tmp_path)
    assert table.step_N.tolist() == [2]
    assert by_rule(table)["unreadable-file"][0].where == str(path)


def test_a_renamed_or_moved_root_changes_nothing(tmp_path, write_step, rows_of):
    write_step(tmp_path / "rank7" / "step_3" / "r", 1, "actor", 0, {0: [1]})
    assert rows_of(load(tmp_path / "rank7")) == [[1, "actor", 0, 0, "forward", 0, [1]]]


def test_an_unreadable_file_or_folder_is_named(tmp_path, write_step, by_rule):
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    path = write_step(tmp_path, 1, "actor", 0, {0: [1]})
    folder = write_step(tmp_path, 2, "actor", 0, {0: [1]}).parent
    write_step(tmp_path, 3, "actor", 0, {0: [1]})
    path.chmod(0)
    folder.chmod(0)
    try:
        table = load(tmp_path)
    finally:
        folder.chmod(0o755)
    assert table.step_N.tolist() == [3]
    assert {"unreadable-file", "unreadable-folder"} <= set(by_rule(table))


def test_temp_files_and_others_are_notes(tmp_path, write_step, by_rule):
    path = write_step(tmp_path, 1, "actor", 0, {0: [1]})
    path.with_name(".group_list.json.12.0.tmp").write_text("{")
    (tmp_path / "picture.png").write_bytes(b"x")
    table = load(tmp_path)
    rules = by_rule(table)
    assert {p.severity for p in table.problems} == {"note"}
    assert rules["temp-file"][0].where.endswith(".tmp")
    assert "picture.png" in rules["ignored-file"][0].what


def test_a_folder_given_twice_counts_once(tmp_path, write_step, by_rule):
    write_step(tmp_path, 1, "actor", 0, {0: [1]})
    table = load([tmp_path, tmp_path])
    assert table.num_rows == 1
    assert by_rule(table) == {}


def test_a_named_pipe_does_not_hang(tmp_path, by_rule):
    os.mkfifo(tmp_path / "pipe.json")
    os.mkfifo(tmp_path / "eplb_token_collects_0.json")
    (tmp_path / "eplb_token_collects_1.json").write_text('{"0": {"0": 1}}')
    table = load(tmp_path)
    assert table.num_rows == 1
    assert by_rule(table)["empty-file"][0].where.endswith("collects_0.json")


def test_a_device_is_no_file(by_rule):
    with pytest.raises(DataError, match="nothing to read"):
        load("/dev/zero")


# --- what is missing -------------------------------------------------------------------------------


def test_missing_ranks_are_named_per_step_and_by_world_size(tmp_path, write_step, by_rule):
    for step in (1, 2):
        for rank in (0, 1, 2, 4):
            if (step, rank) != (2, 1):
                write_step(tmp_path, step, "actor", rank, {0: [1]}, world_size=8)
    for merge in (False, True):
        what = [
            (p.where, p.what) for p in by_rule(load(tmp_path, merge_ranks=merge))["missing-rank"]
        ]
        assert what == [
            ("step 2, role actor", "no data of rank 1, which other steps of the role have"),
            ("role actor", "no data of ranks 3, 5-7 of a world of 8 at any step"),
        ]


def test_selecting_ranks_does_not_make_the_others_missing(tmp_path, write_step):
    for rank in range(4):
        write_step(tmp_path, 1, "actor", rank, {0: [1]}, world_size=4)
    assert load(tmp_path, ranks="1-2").problems == ()


def test_ranks_that_the_recorder_was_told_to_leave_out_are_not_missing(tmp_path, write_step):
    write_step(tmp_path, 1, "actor", 0, {0: [1]}, world_size=4, stamps={"ranks": "0"})
    assert load(tmp_path).problems == ()


def test_a_rank_with_fewer_layers_is_named_but_pipeline_stages_are_not(
    tmp_path, write_step, by_rule
):
    for rank in (0, 1):
        write_step(tmp_path, 1, "pp", rank, {2 * rank: [1], 2 * rank + 1: [1]}, world_size=2)
        write_step(tmp_path, 1, "dp", rank, {n: [1] for n in range(4 - rank)}, world_size=2)
    (problem,) = by_rule(load(tmp_path))["short-rank"]
    assert problem.where == "step 1, role dp"
    assert "rank 1 have fewer layers" in problem.what


def test_files_that_disagree_on_experts_are_named(tmp_path, write_step, by_rule):
    write_step(tmp_path, 1, "actor", 0, {0: [1, 2]}, num_experts=2)
    write_step(tmp_path, 2, "actor", 0, {0: [1, 2, 3]}, num_experts=3)
    (problem,) = by_rule(load(tmp_path))["uneven-experts"]
    assert problem.where == "role actor"


def test_long_lists_of_one_rule_are_counted(tmp_path, write_step, by_rule):
    for step in range(50):
        write_step(tmp_path, step, "actor", 0, {0: [1]}).write_text("{")
    write_step(tmp_path, 99, "actor", 0, {0: [1]})
    problems = by_rule(load(tmp_path))["torn-file"]
    assert len(problems) == 21
    assert problems[-1].where == "30 more"
    assert "50 problems" in problems[-1].what


# --- selection -------------------------------------------------------------------------------------


def _steps(tmp_path, write_step):
    for step in range(1, 9):
        write_step(tmp_path, step, "actor", 0, {0: [step], 1: [step]})
    write_step(tmp_path, None, "rollout", 0, {0: [100]})


@pytest.mark.parametrize(
    ("spec", "steps"),
    [
        ("1", [1]),
        (3, [3]),
        ("1,3-5", [1, 3, 4, 5]),
        (" 7 - 8 ".replace(" ", ""), [7, 8]),
        ("[1,2]", [1, 2]),
        ([2, 4], [2, 4]),
        (range(2, 4), [2, 3]),
        ("5-99", [5, 6, 7, 8]),
        ("all", [-1, 1, 2, 3, 4, 5, 6, 7, 8]),
        (None, [-1, 1, 2, 3, 4, 5, 6, 7, 8]),
        ("", [-1, 1, 2, 3, 4, 5, 6, 7, 8]),
        ("50", []),
    ],
)
def test_steps_are_selected(tmp_path, write_step, spec, steps):
    _steps(tmp_path, write_step)
    assert sorted(set(load(tmp_path, steps=spec).step_N.tolist())) == steps


@pytest.mark.parametrize("spec", ["x", "1-", "-1", "3-1", "1.5", "1;2", "1--2", "9" * 50])
def test_bad_steps_are_usage_errors_that_name_the_part(tmp_path, write_step, spec):
    _steps(tmp_path, write_step)
    with pytest.raises(UsageError, match="step: "):
        load(tmp_path, steps=spec)


def test_an_unknown_role_or_phase_is_named_with_the_nearest(tmp_path, write_step):
    _steps(tmp_path, write_step)
    with pytest.raises(UsageError, match=r"no role 'actr'; did you mean 'actor'.*actor, rollout"):
        load(tmp_path, roles="actr")
    with pytest.raises(UsageError, match=r"no phase 'forwrd'; did you mean 'forward'"):
        load(tmp_path, phases="forwrd")


def test_a_role_that_the_selected_steps_lack_gives_no_rows(tmp_path, write_step):
    _steps(tmp_path, write_step)
    assert load(tmp_path, roles="rollout", steps="1").num_rows == 0


@pytest.mark.parametrize("name", ["jobs", "gmm_per_layer", "ep_size", "num_moe_layers"])
def test_numbers_below_one_are_usage_errors(tmp_path, write_step, name):
    _steps(tmp_path, write_step)
    with pytest.raises(UsageError, match=name):
        load(tmp_path, **{name: 0})


def test_select_on_a_table_equals_select_while_reading(tmp_path, write_step, rows_of):
    from rl_insight_hooks.report.select import select

    _steps(tmp_path, write_step)
    options = {"steps": "2-5", "roles": ["actor"], "layers": 1, "phases": "forward"}
    assert rows_of(select(load(tmp_path), **options)) == rows_of(load(tmp_path, **options))
    with pytest.raises(UsageError, match="no role"):
        select(load(tmp_path), roles="nobody")


def test_progress_counts_every_file(tmp_path, write_step):
    _steps(tmp_path, write_step)
    (tmp_path / "eplb_token_collects_0.json").write_text('{"0": {"0": 1}}')
    seen = []
    load(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (10, 10)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)

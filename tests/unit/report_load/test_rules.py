# SPDX-License-Identifier: Apache-2.0
"""Every rule of check fires on what it is for, and on nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rl_insight_hooks.report.check import check
from rl_insight_hooks.report.pack import pack_folder
from rl_insight_hooks.report.rules import RULES


def _found(root):
    out = {}
    for problem in check(root).problems:
        out.setdefault(problem.rule, []).append(problem)
    return out


def test_a_sound_run_has_no_finding(tmp_path, write_step):
    for step in (1, 2, 3):
        for rank in (0, 1):
            loads = {0: [step, 4 - rank, 2 + rank], 1: [4, step, 2]}
            write_step(tmp_path, step, "actor", rank, loads, world_size=2)
    result = check(tmp_path)
    assert result.problems == ()
    assert (result.num_files, result.num_errors) == (6, 0)


@pytest.mark.parametrize(
    ("rule", "severity", "loads", "fields"),
    [
        ("recorder-failed", "error", {0: [1]}, {"failed": {"writer.region": 3}}),
        ("recorder-dropped", "error", {0: [1]}, {"dropped": {"region lost": 2}}),
        ("masked", "note", {0: [1]}, {"masked": {"padding_rows": 2}}),
        ("stamp", "warning", {0: [1]}, {"stamps": {"forced_routing": "enable_force_eplb"}}),
        ("recorder-note", "warning", {0: [1]}, {"notes": ["layers were passed unequally often"]}),
        ("zero-calls", "error", {}, {"notes": ["zero calls: nothing is hooked"]}),
        ("expert-outside", "error", {0: [1, 2, 3]}, {"num_experts": 2}),
        ("rank-outside", "error", {0: [1]}, {"world_size": 0}),
        ("replica-unnamed", "warning", {0: [1]}, {"tokens_layout": "replicated"}),
        ("compiled", "note", {(0, "compiled"): [1]}, {}),
        ("unknown-layer", "warning", {-1: [1]}, {}),
        ("uneven-totals", "warning", {0: [1, 2], 1: [1, 3]}, {}),
        ("empty-layer", "warning", {0: [0, 0]}, {}),
    ],
)
def test_rule_of_one_file(tmp_path, write_step, rule, severity, loads, fields):
    path = write_step(tmp_path, 1, "actor", 0, loads, **fields)
    (problem,) = _found(tmp_path)[rule]
    assert problem.severity == severity
    assert problem.fix
    if rule not in ("uneven-totals", "empty-layer"):
        assert problem.where.startswith(str(path))


def test_packed_steps_are_checked_too(tmp_path, write_step):
    for step in (1, 2):
        write_step(tmp_path, step, "actor", 0, {0: [1]}, failed={"writer": step})
    pack_folder(tmp_path, keep=0)
    found = _found(tmp_path)["recorder-failed"]
    assert [p.where.rsplit(" (", 1)[1] for p in found] == ["step 1)", "step 2)"]


def test_call_count_and_two_seams(tmp_path, write_step):
    import json

    path = write_step(tmp_path, 1, "actor", 0, {0: [1]})
    value = json.loads(path.read_text())
    value["records"][0]["num_passes"] = 5
    value["records"].append({**value["records"][0], "seam": "fused", "num_calls": 9})
    path.write_text(json.dumps(value))
    found = _found(tmp_path)
    assert "3 calls for 5 passes" in found["call-count"][0].what
    assert "fused" in found["two-seams"][0].what


def test_conservation(tmp_path, write_step):
    import json

    path = write_step(tmp_path, 1, "actor", 0, {0: [6, 4], 1: [6, 3]}, top_k=2, num_experts=2)
    value = json.loads(path.read_text())
    for record in value["records"]:
        record["num_tokens"] = 5
    path.write_text(json.dumps(value))
    (problem,) = _found(tmp_path)["conservation"]
    assert "layer 1" in problem.where
    assert "9 assignments, not tokens x top-k = 5 x 2 = 10" in problem.what


def test_conservation_is_not_asked_of_part_of_the_experts(tmp_path, write_step):
    import json

    for rank in (0, 1):
        path = write_step(
            tmp_path,
            1,
            "actor",
            rank,
            {0: [1, 2]},
            top_k=2,
            num_experts=4,
            first=2 * rank,
            world_size=2,
        )
        value = json.loads(path.read_text())
        value["records"][0]["num_tokens"] = 77
        path.write_text(json.dumps(value))
    assert _found(tmp_path) == {}


def test_missing_step_and_gap(tmp_path, write_step):
    for step in (1, 2, 3, 4, 6):
        write_step(tmp_path, step, "actor", 0, {0: [step]})
        if step != 3:
            write_step(tmp_path, step, "critic", 0, {0: [step]})
    found = _found(tmp_path)
    assert [(p.where, p.what) for p in found["missing-step"]] == [
        ("role critic", "no data of step 3, which other roles have")
    ]
    assert sorted((p.where, p.what) for p in found["step-gap"]) == [
        ("role actor", "no data of step 5; the other steps come every 1"),
        ("role critic", "no data of step 5; the other steps come every 1"),
    ]


def test_every_tenth_step_is_no_gap(tmp_path, write_step):
    for step in (10, 20, 30):
        write_step(tmp_path, step, "actor", 0, {0: [step]})
    assert _found(tmp_path) == {}


def test_replicas_that_differ_and_copies_that_are_not_marked(tmp_path, write_step):
    for rank in (0, 1):
        write_step(
            tmp_path / "a",
            1,
            "actor",
            rank,
            {0: [rank, 2 - rank]},
            world_size=2,
            tokens_layout="replicated",
            parallel={"replica_group": "g"},
        )
        write_step(tmp_path / "b", 1, "actor", rank, {0: [1, 2], 1: [3, 0]}, world_size=2)
    (problem,) = _found(tmp_path / "a")["replica-differs"]
    assert problem.severity == "error"
    (problem,) = _found(tmp_path / "b")["replica-unmarked"]
    assert "ranks 0 and 1" in problem.what


def test_misplaced_file_and_several_runs(tmp_path, write_step):
    path = write_step(tmp_path, 1, "actor", 0, {0: [1]}, run_id="a")
    write_step(tmp_path, 2, "actor", 0, {0: [1]}, run_id="b")
    moved = tmp_path / "step_5" / "actor" / "rank0"
    moved.parent.mkdir(parents=True)
    path.parent.rename(moved)
    found = _found(tmp_path)
    assert "step_1/actor/rank0" in found["misplaced-file"][0].what
    assert "2 runs: " in found["several-runs"][0].what


def test_every_rule_that_the_code_raises_is_listed_and_documented():
    """The table of rules, the code and the page agree."""
    root = Path(__file__).resolve().parents[3]
    code = "".join(
        path.read_text()
        for folder in ("report/load", "report")
        for path in (root / "rl_insight_hooks" / folder).glob("*.py")
    )
    raised = set(re.findall(r'rule="([a-z-]+)"', code))
    raised |= set(re.findall(r'(?:problem|_warning|_note)\(\s*"([a-z-]+)"', code))
    raised |= set(re.findall(r'rule = "([a-z-]+)"', code))
    assert raised - {"torn-file"} <= set(RULES), raised - set(RULES)
    page = (root / "docs" / "commands" / "check.md").read_text()
    missing = [rule for rule in RULES if f"`{rule}`" not in page]
    assert missing == []

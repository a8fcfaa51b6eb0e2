# SPDX-License-Identifier: Apache-2.0
"""What a newcomer does: the examples, the old command lines, real loads to picture, table and map."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest
from tiny_run import REPO, counts_by_layer, read

from rl_insight_hooks.report.main import run

SHARED = REPO.parent / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="../shared/data is not here")


def example(script, *args, cwd):
    done = subprocess.run(
        [sys.executable, str(REPO / "examples" / script), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_quickstart(tmp_path):
    out = example("quickstart.py", "out", cwd=tmp_path)
    assert "moe_load/actor_update/max_over_mean" in out
    for step in range(3):
        load = read(tmp_path / "out", step, "actor_update")
        assert {r.phase for r in load.records} == {
            "forward"
        }  # this caller's backward is inside the operator
        assert [r.layer for r in load.records] == list(range(1, 7))
        assert all(sum(c) == 2 * 64 * 4 for c in counts_by_layer(load))
        assert load.notes == []


def test_decorator_example(tmp_path):
    example("decorator.py", "out", cwd=tmp_path)
    for step in range(2):
        assert all(
            sum(c) == 2 * 64 * 4
            for c in counts_by_layer(read(tmp_path / "out", step, "actor_update"))
        )
        log_prob = read(tmp_path / "out", step, "actor_compute_log_prob")
        assert {r.phase for r in log_prob.records} == {"forward"}


def test_yaml_example(tmp_path):
    example("yaml_flag.py", REPO / "examples/config.yaml", cwd=tmp_path)
    for step in range(2):
        load = read(tmp_path / "expert_load", step, "train")
        assert [sum(c) for c in counts_by_layer(load)] == [2 * 64 * 4] * 6


@pytest.mark.slow
def test_demo(tmp_path):
    out = example("demo.py", "--out", "demo", cwd=tmp_path)
    named = dict(re.findall(r"^(picture|summary|expert map)\s+(\S+)$", out, re.MULTILINE))
    assert set(named) == {"picture", "summary", "expert map"}
    picture = matplotlib.image.imread(tmp_path / named["picture"])
    assert min(picture.shape[:2]) > 500
    assert len({tuple(p) for p in picture[::7, ::7, :3].reshape(-1, 3).tolist()}) > 50
    expert_map = json.loads((tmp_path / named["expert map"]).read_text())
    check_map(expert_map, num_layers=6, num_experts=32, num_devices=8, num_slots=40)
    # both ranks, both micro-batches, every step: tokens x top-k in every layer
    for rank in range(2):
        for step in (1, 2, 3):
            load = read(tmp_path / "demo/expert_load", step, "actor_update", rank)
            assert all(sum(c) == 2 * 4 * 128 * 4 for c in counts_by_layer(load))
            assert counts_by_layer(load, "recompute") == counts_by_layer(load)


def check_map(expert_map, *, num_layers, num_experts, num_devices, num_slots):
    """The rules that vllm-ascend's loader lives by, read in its way: the order of the lists is the truth."""
    assert expert_map["moe_layer_count"] == len(expert_map["layer_list"]) == num_layers
    for i, layer in enumerate(expert_map["layer_list"]):
        assert layer["layer_id"] == i
        assert layer["device_count"] == len(layer["device_list"]) == num_devices
        rows = [device["device_expert"] for device in layer["device_list"]]
        assert [d["device_id"] for d in layer["device_list"]] == list(range(num_devices))
        assert {len(row) for row in rows} == {num_slots // num_devices}
        assert all(len(set(row)) == len(row) for row in rows)
        assert {e for row in rows for e in row} == set(range(num_experts))


@needs_shared
@pytest.mark.parametrize("name", ["esft_intent_token_collects", "esft_law_token_collects"])
def test_real_collects_to_summary_picture_and_map(tmp_path, capsys, name):
    data = str(SHARED / name)
    assert run(["summary", data, "--json"]) == 0
    (role,) = json.loads(capsys.readouterr().out)["roles"]
    total = 0
    for path in (SHARED / name).glob("*.json"):
        total += sum(n for layer in json.loads(path.read_text()).values() for n in layer.values())
    assert role["assignments"] == total
    assert (role["num_layers"], role["num_experts"]) == (26, 64)
    assert run(["heatmap", data, "-o", str(tmp_path / "folder")]) == 0
    assert (tmp_path / "folder/gmm_heatmap.png").stat().st_size > 10_000
    out = tmp_path / "map.json"
    line = f"--json_folder {data} --num_replicas 72 --num_groups 1 --num_nodes 1 --num_gpus 8 --output_path {out}"
    assert run(["rebalance", *line.split()]) == 0
    check_map(
        json.loads(out.read_text()), num_layers=26, num_experts=64, num_devices=8, num_slots=72
    )
    printed = capsys.readouterr().out
    for word in ("before", "after", "bound"):
        assert word in printed


@needs_shared
@pytest.mark.truth(
    scenario="verl's msprobe tree, 2 ranks, reentrant checkpointing", seam="msprobe reader",
    version="26.2, verl 0.9.1", verdict="exact",
)  # fmt: skip
def test_real_msprobe_tree_gives_the_truth(capsys):
    truth = json.loads((SHARED / "msprobe_verl_truth.json").read_text())["truth"]
    from rl_insight_hooks.report.load import load

    table = load(SHARED / "msprobe_verl", merge_ranks=True, phases="forward")
    found = {}
    for n in range(table.num_rows):
        step, role = str(int(table.step_N[n])), table.role_of(n)
        found.setdefault(step, {}).setdefault(role, {})[str(int(table.layer_N[n]))] = (
            table.counts_NE[n].tolist()
        )
    assert found == truth


@needs_shared
def test_old_command_line_of_rl_insight(tmp_path, capsys):
    line = (
        f"input.path={SHARED / 'msprobe_verl'} input.rank_list=all heatmap.parser.type=gmm "
        "heatmap.visualizer.type=gmm_heatmap heatmap.parser.step=1 "
        f"heatmap.parser.role=actor_compute_log_prob output.path={tmp_path / 'out'}"
    )
    assert run(line.split()) == 0
    assert (tmp_path / "out/gmm_heatmap.png").exists()


def test_commands_of_the_readme_exist():
    from rl_insight_hooks.report.cli import COMMANDS

    named = set(
        re.findall(r"^rl-insight-report (\w+)", (REPO / "README.md").read_text(), re.MULTILINE)
    )
    assert named
    assert named <= set(COMMANDS)


def test_truth_page_is_what_the_tests_say():
    done = subprocess.run(
        [sys.executable, REPO / "tools/make_truth.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_no_file_names_a_path_of_a_machine():
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=REPO)
    if listed.returncode:
        pytest.skip("not a git checkout")
    here = str(REPO.parent) + "/"
    for name in listed.stdout.split():
        path = REPO / name
        if path.suffix in (".png", ".npz", ".pt", ".safetensors") or not path.is_file():
            continue
        assert here not in path.read_text(errors="replace"), name


def test_packages_of_pyproject_are_those_of_the_tree():
    text = (REPO / "pyproject.toml").read_text()
    listed = set(
        re.findall(r'"(rl_insight_hooks[a-z_.]*)",', text.split("packages = [")[1].split("]")[0])
    )
    tree = set()
    core, seams = "rl_insight_hooks", "rl_insight_hooks.integrations"
    for top, name in ((REPO / "rl_insight_hooks", core), (REPO / "integrations", seams)):
        for init in top.rglob("__init__.py"):
            tree.add(".".join((name, *Path(init.parent).relative_to(top).parts)))
    assert listed == tree

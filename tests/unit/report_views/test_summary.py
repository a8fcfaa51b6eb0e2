# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import numpy as np
import pytest
from small_table import table

from rl_insight_hooks.errors import UsageError
from rl_insight_hooks.rebalance import encode, plan
from rl_insight_hooks.report.main import run
from rl_insight_hooks.report.summary import Devices, exceeded, parse_thresholds, summarize
from rl_insight_hooks.report.summary_text import summary_lines

EVEN, HOT, DEAD = [4, 4, 4, 4], [13, 1, 1, 1], [8, 8, 0, 0]


def rows():
    return [
        (1, "train", None, 0, "forward", EVEN),
        (1, "train", None, 1, "forward", HOT),
        (1, "train", None, 1, "recompute", [99, 0, 0, 0]),
        (2, "train", None, 0, "forward", DEAD),
        (2, "train", None, 1, "forward", HOT),
        (1, "log_prob", None, 0, "eval", EVEN),
    ]


def made():
    return table(rows(), roles=("train", "log_prob"), phases=("forward", "recompute", "eval"))


def test_worst_layer_first_and_recompute_is_left_out():
    found = summarize(made())
    train = found.roles[0]
    assert (train.role, train.phase, train.steps) == ("train", "forward", [1, 2])
    assert [(la.layer, la.assignments) for la in train.layers] == [(1, 32), (0, 32)]
    assert train.worst_layer == 1
    assert train.max_over_mean == pytest.approx(26 / 8)
    assert train.layers[1].experts["max_over_mean"] == pytest.approx(12 / 8)
    assert (train.hottest[0].layer, train.hottest[0].expert, train.hottest[0].tokens) == (1, 0, 26)
    # an even load: mean of the busiest is (8 + 8), the busiest do (26 + 12)
    assert train.even_load_saves == pytest.approx(1 - 16 / 38)
    assert found.roles[1].phase == "eval"


def test_devices_in_a_row():
    train = summarize(made(), Devices(num_devices=2)).roles[0]
    assert train.num_devices == 2
    assert train.device_max_over_mean == pytest.approx((26 + 2) / 16)
    with pytest.raises(UsageError, match="3 devices"):
        summarize(made(), Devices(num_devices=3))


def test_thresholds():
    found = summarize(made())
    assert exceeded(found, {"max_over_mean": 4.0}) == []
    (text,) = exceeded(found, {"max_over_mean": 3.0})
    assert "layer 1 is 3.25, above 3" in text
    assert "below" in exceeded(found, {"balancedness": 0.5})[0]
    with pytest.raises(UsageError, match="max_mean"):
        parse_thresholds(["max_mean=1"])
    for value in ("x", "nan"):
        with pytest.raises(UsageError, match=f"'{value}' is no number"):
            parse_thresholds([f"cv={value}"])


def test_text_says_the_verdict():
    text = "\n".join(summary_lines(summarize(made()), num_layers=1))
    assert "worst 3.25 (layer 1)" in text
    assert "up to 58% of the expert part's time" in text
    assert "1 better layers" in text


def collects(folder, counts):
    folder.mkdir(exist_ok=True)
    (folder / "eplb_token_collects_0.json").write_text(json.dumps(counts))
    return str(folder)


def test_exit_codes(tmp_path, capsys):
    data = collects(tmp_path / "d", {"0": {"0": 30, "1": 10}})
    assert run(["summary", data]) == 0
    assert run(["summary", data, "--fail-above", "max_over_mean=1.4"]) == 3
    assert "max_over_mean of layer 0 is 1.5, above 1.4" in capsys.readouterr().err
    assert run(["summary", data, "--fail-above", "nothing=1"]) == 2
    assert run(["summary", str(tmp_path / "nowhere")]) == 1
    assert run(["summary", data, "--step", "7-3"]) == 2
    (tmp_path / "d/eplb_token_collects_1.json").write_text('{"0": {"0": 3')
    assert run(["summary", data]) == 4
    shown = capsys.readouterr()
    assert "30" in shown.out
    assert "eplb_token_collects_1.json" in shown.err
    assert run(["summary", data, "--strict"]) in (1, 4)


def test_json_keys_are_stable(tmp_path, capsys):
    data = collects(tmp_path / "d", {"0": {"0": 30, "1": 10}})
    assert run(["summary", data, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"summary_version", "roles", "problems", "assumptions"}
    assert set(found["roles"][0]) == {
        "role", "phase", "steps", "num_layers", "num_experts", "num_devices", "assignments", "worst_layer",
        "max_over_mean", "max_over_mean_mean", "percentiles", "device_max_over_mean",
        "device_max_over_mean_mean", "even_load_saves", "dead_experts", "hottest", "trend", "layers",
    }  # fmt: skip
    assert set(found["roles"][0]["layers"][0]["experts"]) == {
        "max_over_mean", "balancedness", "imbalance_ratio", "max_vio", "min_vio", "avg_vio", "cv", "entropy",
        "dead", "dead_fraction",
    }  # fmt: skip


def test_all_zero_load(tmp_path, capsys):
    data = collects(tmp_path / "d", {"0": {"0": 0, "1": 0}})
    assert run(["summary", data]) == 0
    assert "no token was routed" in capsys.readouterr().out


@pytest.mark.parametrize("filter", [["--layer", "9"], ["--rank", "7"], ["--step", "3"]])
def test_a_filter_that_leaves_nothing_is_a_usage_error(tmp_path, capsys, filter):
    data = collects(tmp_path / "d", {"0": {"0": 30, "1": 10}})
    commands = (
        ["summary", data, "--fail-above", "max_over_mean=9"],
        ["heatmap", data, "-o", str(tmp_path / "p.png")],
        ["export", data, "-o", str(tmp_path / "t.csv")],
        ["compare", data, data],
        ["rebalance", data, "--num-npus", "1", "--num-replicas", "2"],
    )
    for command in commands:
        assert run([*command, *filter]) == 2, command
        assert " ".join(filter) in capsys.readouterr().err
    assert not list(tmp_path.glob("*.*"))


def test_nothing_to_judge_passes_no_threshold(tmp_path, capsys):
    for counts in ({}, {"0": {"0": 0, "1": 0}}):
        data = collects(tmp_path / "d", counts)
        assert run(["summary", data, "--fail-above", "max_over_mean=9"]) == 4
        assert "no forward, eval or compiled counts" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["summary", "heatmap", "compare", "rebalance", "check"])
def test_json_is_an_object_where_there_is_no_result_too(tmp_path, capsys, command):
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "eplb_token_collects_0.json").write_text("{")
    words = {
        "compare": [str(folder)],
        "heatmap": ["-o", str(tmp_path / "p.png")],
        "rebalance": ["--num-npus", "1", "--num-replicas", "1"],
    }.get(command, [])
    for data, code in ((folder, 4), (tmp_path / "nowhere", 1)):
        assert run([command, str(data), *words, "--json"]) == code
        found = json.loads(capsys.readouterr().out)
        assert found["exit_code"] == code if "error" in found else found["problems"]
    assert run([command, "--no-such-flag", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2


def test_a_folder_of_any_name_is_no_error(tmp_path, capsys):
    folder = tmp_path / os.fsdecode(b"\xff\x1b[31m\n")
    folder.mkdir()
    (folder / "eplb_token_collects_0.json").write_text("{")
    (folder / "eplb_token_collects_1.json").write_text('{"0": {"0": 3}}')
    for command in (["summary"], ["check"], ["export", "-o", str(tmp_path / "t.json")]):
        assert run([*command, str(tmp_path), "--json"]) == 4
        shown = capsys.readouterr()
        (problem,) = json.loads(shown.out)["problems"]
        assert "\\udcff\\x1b[31m\\n/eplb_token" in problem["where"]
        assert "\x1b" not in shown.err


def test_a_map_is_judged_where_a_step_lacks_a_layer(tmp_path):
    data = table([*rows()[:2], (2, "train", None, 1, "forward", HOT)])
    placement = plan(np.array([EVEN, HOT]), 4, 1, 1, 2)
    train = summarize(data, Devices(placement=placement)).roles[0]
    # step 2 has layer 1 only: 13 + 1 of 16 on one of two devices
    assert train.trend["last"] == pytest.approx(14 / 8)


def test_an_error_of_a_map_names_the_file(tmp_path, capsys):
    data = collects(tmp_path / "d", {"0": {"0": 30, "1": 10}})
    no_map = tmp_path / "no_map.json"
    no_map.write_text("{}")
    assert run(["summary", data, "--map", str(no_map)]) == 1
    assert f"--map {no_map}: this is no expert map" in capsys.readouterr().err
    big = tmp_path / "big.json"
    big.write_bytes(encode(plan(np.ones((1, 8)), 8, 1, 1, 2), "vllm-ascend"))
    assert run(["summary", data, "--map", str(big)]) == 1
    assert "names expert 7, the data has 2" in capsys.readouterr().err


def test_devices_of_a_map_that_does_not_say_them(tmp_path, capsys):
    data = collects(tmp_path / "d", {"0": {"0": 30, "1": 10}})
    path = tmp_path / "map.json"
    path.write_bytes(encode(plan(np.array([[30, 10]]), 2, 1, 1, 2), "sglang"))
    assert run(["summary", data, "--map", str(path)]) == 2
    assert "give it (--num-npus)" in capsys.readouterr().err
    assert run(["summary", data, "--map", str(path), "--num-npus", "2"]) == 0
    assert "over 2 devices: worst 1.50" in capsys.readouterr().out


def shell(line, **env):
    # the program under a shell, which closes and redirects its streams
    start = f"{shlex.quote(sys.executable)} -m rl_insight_hooks.report.main"
    return subprocess.run(
        line.replace("REPORT", start),
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        env={**os.environ, **env},
    )


def test_closed_streams_and_a_narrow_encoding(tmp_path):
    role = "\u89d2\u8272"
    folder = tmp_path / "step_1" / role / "rank0"
    folder.mkdir(parents=True)
    collected = shlex.quote(collects(tmp_path / "d", {"0": {"0": 30, "1": 10}}))
    for line in (f"REPORT summary {collected} | true", f"REPORT summary {collected} --json | true"):
        found = shell(f"{line}; echo ${{PIPESTATUS[0]}}")
        assert (found.stdout, found.stderr) == ("0\n", "")
    assert shell(f"REPORT summary {collected} >&-").returncode == 0
    full = shell(f"REPORT summary {collected} > /dev/full")
    assert (full.returncode, full.stderr) == (1, "error: No space left on device\n")
    (tmp_path / "d" / "eplb_token_collects_0.json").rename(folder / "eplb_token_collects_0.json")
    (folder / "eplb_token_collects_1.json").write_text("{")
    narrow = shell(f"REPORT check {tmp_path}", PYTHONIOENCODING="latin-1")
    assert narrow.returncode == 4
    assert "\\u89d2\\u8272/rank0/eplb_token" in narrow.stdout

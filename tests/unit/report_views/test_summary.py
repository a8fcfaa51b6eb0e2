# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest
from small_table import table

from rl_insight_hooks.errors import UsageError
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
    with pytest.raises(UsageError, match="'x' is no number"):
        parse_thresholds(["cv=x"])


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

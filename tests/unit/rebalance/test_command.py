# SPDX-License-Identifier: Apache-2.0
"""The command from files to files, and the table that it plans on."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import typer
from placement_cases import (
    SHARED,
    assert_valid,
    plain_ratios,
    write_collects,
    write_steps,
    zipf_load,
)
from typer.testing import CliRunner

from rl_insight_hooks.errors import DataError, IncompleteDataError, RlInsightError, UsageError
from rl_insight_hooks.rebalance import decode, encode, linear_placement, plan
from rl_insight_hooks.report.commands.rebalance import rebalance
from rl_insight_hooks.report.load import load
from rl_insight_hooks.report.rebalance_data import only_layers, plan_data

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(rebalance)


@app.callback()
def _group():
    """Make ``rebalance`` a subcommand, as in the real program."""


def call(*args):
    """Run the command; return its result and the error it ended with."""
    try:
        runner = CliRunner(mix_stderr=False)  # click before 8.2 needs to be told
    except TypeError:
        runner = CliRunner()
    result = runner.invoke(app, ["rebalance", *map(str, args)])
    error = result.exception
    if error is not None and not isinstance(error, RlInsightError | SystemExit):
        raise error
    return result, error


@pytest.fixture
def collects(tmp_path):
    return write_collects(tmp_path / "collects", zipf_load(0, 4, 16))


def test_mindspeed_rl_line_verbatim_writes_a_map_that_reads(collects, tmp_path):
    target = tmp_path / "out" / "M.json"
    result, error = call(
        "--json_folder", collects, "--num_replicas", 24, "--num_groups", 4, "--num_nodes", 1,
        "--num_gpus", 8, "--output_path", target,
    )  # fmt: skip
    assert error is None, result.output
    placement = decode(target.read_bytes(), num_experts=16)
    assert_valid(placement.physical_to_logical, 16, 8)
    assert placement.num_devices == 8
    expected = plan(zipf_load(0, 4, 16), 24, 4, 1, 8)
    assert np.array_equal(placement.physical_to_logical, expected.physical_to_logical)
    ratios = plain_ratios(zipf_load(0, 4, 16), placement.physical_to_logical, 8)
    before = plain_ratios(zipf_load(0, 4, 16), linear_placement(4, 16, 8).physical_to_logical, 8)
    mean_line = next(line for line in result.stdout.splitlines() if line.startswith(" mean"))
    assert mean_line.split()[1:3] == [f"{np.mean(before):.4f}", f"{np.mean(ratios):.4f}"]
    assert [p.name for p in target.parent.iterdir()] == ["M.json"]  # no temp files left


def test_json_on_stdout_is_one_object(collects):
    result, error = call(collects, "--num-replicas", 24, "--num-npus", 4, "--json")
    assert error is None
    value = json.loads(result.stdout)
    assert value["schema"] == "rl-insight-hooks/rebalance/1"
    assert_valid(value["physical_to_logical"], 16, 4)
    assert value["forecast"] is None
    assert value["roles"] == ["rollout"]
    assert value["after"]["mean"] == pytest.approx(
        np.mean(plain_ratios(zipf_load(0, 4, 16), value["physical_to_logical"], 4))
    )


def test_the_loaded_map_is_never_overwritten_without_force(collects, tmp_path):
    target = tmp_path / "map.json"
    link = tmp_path / "link.json"
    call(collects, "--num-replicas", 24, "--num-npus", 4, "-o", target)
    link.symlink_to(target)
    before = target.read_bytes()
    for output in (target, link):
        _, error = call(collects, "--from-map", target, "-o", output)
        assert isinstance(error, UsageError)
        assert "--force" in str(error)
    assert target.read_bytes() == before
    _, error = call(collects, "--from-map", target, "-o", target, "--force")
    assert error is None


def test_a_map_of_an_earlier_call_is_replaced_but_nothing_else(collects, tmp_path):
    target = tmp_path / "map.json"
    assert call(collects, "--num-replicas", 24, "--num-npus", 4, "-o", target)[1] is None
    assert call(collects, "--num-replicas", 32, "--num-npus", 4, "-o", target)[1] is None
    assert decode(target.read_bytes()).num_replicas == 32
    counts = collects / "eplb_token_collects_0.json"
    before = counts.read_bytes()
    _, error = call(collects, "--num-replicas", 24, "--num-npus", 4, "-o", counts)
    assert isinstance(error, UsageError)
    assert counts.read_bytes() == before
    _, error = call(collects, "--num-replicas", 24, "--num-npus", 4, "-o", tmp_path)
    assert isinstance(error, UsageError)


def test_few_moves_from_a_map_in_use(collects, tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    other = write_collects(tmp_path / "other", zipf_load(5, 4, 16))
    call(other, "--num-replicas", 24, "--num-npus", 4, "-o", old)
    result, error = call(
        collects, "--from-map", old, "--max-moves", 6, "--expert-size-bytes", 1000, "-o", new
    )
    assert error is None
    before, after = decode(old.read_bytes()), decode(new.read_bytes())
    moves = json.loads((tmp_path / "new.moves.json").read_text())
    assert moves["num_moves"] == len(moves["moves"]) <= 6
    assert moves["bytes"] == 1000 * moves["num_moves"]
    changed = (before.physical_to_logical != after.physical_to_logical).sum()
    assert changed == moves["num_moves"]
    assert f"transfers: {moves['num_moves']} of 96 slots" in result.stdout
    for move in moves["moves"]:
        assert (
            f"expert {move['expert']}, device {move['from_device']} -> {move['to_device']}"
            in result.stdout
        )


def test_transfers_replace_older_transfers_and_nothing_else(collects, tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    call(collects, "--num-replicas", 24, "--num-npus", 4, "-o", old)
    args = [collects, "--from-map", old, "-o", new]
    assert call(*args)[1] is None
    assert call(*args)[1] is None
    (tmp_path / "new.moves.json").write_text("mine")
    _, error = call(*args)
    assert isinstance(error, UsageError)
    assert (tmp_path / "new.moves.json").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("m.json", "vllm-ascend"),
        ("m.json", "sglang"),
        ("m.yaml", "tensorrt-llm"),
        ("m.npz", "deepseek"),
    ],
)
def test_every_format_from_the_command_line(collects, tmp_path, name, format):
    target = tmp_path / name
    args = ["--num-replicas", 24, "--num-npus", 4, "--format", format, "--first-moe-layer", 3]
    result, error = call(collects, *args, "-o", target)
    assert error is None, result.output
    placement = decode(target.read_bytes(), num_devices=4, layer_ids=None)
    rows = placement.physical_to_logical
    if format == "sglang":
        assert len(rows) == 7  # three dense layers first
        rows = rows[3:]
    if format in ("tensorrt-llm", "deepseek"):
        assert placement.layer_ids == (3, 4, 5, 6)
    assert np.array_equal(rows, plan(zipf_load(0, 4, 16), 24, 1, 1, 4).physical_to_logical)


def test_absolute_formats_warn_where_layers_are_only_counted(collects, tmp_path):
    result, _ = call(collects, "--num-replicas", 24, "--num-npus", 4, "-o", tmp_path / "m.yaml")
    assert "--first-moe-layer" in result.stderr


def history(seed, num_steps=12):
    law = zipf_load(seed, 2, 16) / (131_072 * 8)
    return np.random.default_rng(seed).poisson(law * 30_000, (num_steps, 2, 16))


def test_an_sglang_map_is_not_read_by_guessed_layers(collects, tmp_path):
    path = tmp_path / "map.json"
    sizes = ("--num-replicas", 20, "--num-npus", 4)
    call(collects, *sizes, "--format", "sglang", "--first-moe-layer", 1, "-o", path)
    _, error = call(collects, "--num-npus", 4, "--from-map", path)
    assert isinstance(error, UsageError)
    assert "--first-moe-layer" in str(error)
    result, error = call(collects, "--num-npus", 4, "--from-map", path, "--first-moe-layer", 1)
    assert error is None
    assert "0 of 80 slots" in result.stdout or "0 transfers" in result.stdout


def test_steps_are_windows_and_the_forecast_is_held_out(tmp_path):
    windows = history(0)
    root = write_steps(tmp_path / "run", windows)
    target = tmp_path / "m.yaml"
    result, error = call(root, "--num-replicas", 24, "--num-npus", 4, "--json", "-o", target)
    assert error is None, result.output
    value = json.loads(result.stdout)
    assert value["steps"] == list(range(1, 13))
    assert value["layer_ids"] == [3, 4]
    assert decode(target.read_bytes(), num_devices=4).layer_ids == (3, 4)
    planned = plan(windows[:6], 24, 1, 1, 4)
    expected = plain_ratios(windows[6:].sum(axis=0), planned.physical_to_logical, 4)
    assert value["forecast"]["held_out"]["max_over_mean"] == pytest.approx(expected)
    assert (value["forecast"]["num_planned"], value["forecast"]["num_scored"]) == (6, 6)
    whole = plan(windows, 24, 1, 1, 4)
    assert value["physical_to_logical"] == whole.physical_to_logical.tolist()
    text, _ = call(root, "--num-replicas", 24, "--num-npus", 4, "--holdout", 0.25)
    assert "planned on 9 steps, scored on the 3 after them" in text.stdout
    assert "fitted (that plan on its own 9 steps)" in text.stdout


def test_step_filter_and_other_steps_are_warned_of(tmp_path):
    root = write_steps(tmp_path / "run", history(0))
    later = write_steps(tmp_path / "later", history(0), role="actor_update", first_step=50)
    result, error = call(
        root, "--num-replicas", 24, "--num-npus", 4, "--step", "2-5", "--evaluate-on", later
    )
    assert error is None
    assert "4 steps, 2 to 5" in result.stdout
    assert "scored on role actor_update" in result.stderr
    assert "scored on 12 steps, 50 to 61" in result.stderr


def test_several_roles_must_be_chosen(tmp_path):
    root = write_steps(tmp_path / "run", history(0))
    write_steps(root, history(1), role="actor_update")
    args = [root, "--num-replicas", 24, "--num-npus", 4]
    _, error = call(*args)
    assert isinstance(error, UsageError)
    assert "actor_update, rollout" in str(error)
    assert "--role" in str(error)
    one, _ = call(*args, "--role", "rollout", "--json")
    assert json.loads(one.stdout)["roles"] == ["rollout"]
    both, _ = call(*args, "--role", "rollout,actor_update", "--json")
    rows = json.loads(both.stdout)["physical_to_logical"]
    summed = plan(history(0) + history(1), 24, 1, 1, 4)
    assert rows == summed.physical_to_logical.tolist()


def test_a_role_of_another_model_is_neither_added_nor_ends_the_evaluation(tmp_path):
    root = write_steps(tmp_path / "run", history(0))
    write_steps(root, np.ones((2, 1, 8), dtype=int), role="critic", first_step=70)
    args = [root, "--num-replicas", 24, "--num-npus", 4]
    _, error = call(*args, "--role", "rollout,critic")
    assert isinstance(error, UsageError)
    assert "critic: 8, rollout: 16" in str(error)
    result, error = call(*args, "--role", "rollout", "--evaluate-on", root, "--json")
    assert error is None
    found = json.loads(result.stdout)
    assert [one["roles"] for one in found["evaluations"]] == [["rollout"]]
    assert any("not scored on role critic" in said for said in found["warnings"])
    _, error = call(*args, "--role", "rollout", "--evaluate-on", root / "step_70")
    assert "8 experts, the plan 16" in str(error)


def test_torn_data_to_evaluate_on_is_incomplete(tmp_path):
    root = write_steps(tmp_path / "run", history(0))
    other = write_steps(tmp_path / "other", history(1))
    (other / "step_2/rollout/rank0/group_list.json").write_text("{")
    result, error = call(root, "--num-replicas", 24, "--num-npus", 4, "--evaluate-on", other)
    assert isinstance(error, IncompleteDataError)
    assert "placement:" in result.stdout


def test_layers_and_steps_that_are_missing_are_said(tmp_path):
    windows = history(0, 3)
    root = write_steps(tmp_path / "run", windows[:2])
    write_steps(root, windows[2:, :1], first_step=3)
    table = load(root, merge_ranks=True)
    data = plan_data(table)
    assert data.history_WLE[2, 1].sum() == 0
    assert np.array_equal(data.history_WLE[:2], windows[:2])
    assert any("1 of 6 (step, layer) pairs" in remark for remark in data.remarks)
    with pytest.raises(DataError, match="no layer 9"):
        only_layers(data, (3, 9), 16)
    with pytest.raises(DataError, match="16 experts, the plan 8"):
        only_layers(data, (3,), 8)


def test_only_forward_counts_are_planned_on(tmp_path):
    windows = history(0, 2)
    root = write_steps(tmp_path / "run", windows, phases=("forward", "recompute", "dx"))
    data = plan_data(load(root, merge_ranks=True))
    assert data.phase == "forward"
    assert np.array_equal(data.history_WLE, windows)


def test_physical_counts_are_refused(tmp_path):
    root = write_steps(tmp_path / "run", history(0), id_space="physical")
    with pytest.raises(DataError, match="logical"):
        plan_data(load(root, merge_ranks=True))


def test_a_forecast_from_a_map_in_use_starts_from_it(tmp_path):
    windows = history(0)
    root = write_steps(tmp_path / "run", windows)
    old = plan(history(3), 24, 1, 1, 4, layer_ids=[3, 4])
    (tmp_path / "old.json").write_bytes(encode(old, "vllm-ascend"))
    result, error = call(root, "--from-map", tmp_path / "old.json", "--max-moves", 4, "--json")
    assert error is None
    value = json.loads(result.stdout)
    expected = plain_ratios(windows[6:].sum(axis=0), old.physical_to_logical, 4)
    assert value["forecast"]["before"]["max_over_mean"] == pytest.approx(expected)
    assert value["transfers"]["num_moves"] <= 4
    assert value["forecast"]["held_out"]["mean"] < value["forecast"]["before"]["mean"]


def test_sweep_prints_balance_against_memory(collects, tmp_path):
    picture = tmp_path / "sweep.png"
    result, error = call(
        collects, "--sweep-replicas", "16,24,32", "--num-npus", 4, "--expert-size-bytes", 10**6,
        "--plot", picture,
    )  # fmt: skip
    assert error is None
    rows = [line.split() for line in result.stdout.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["16", "24", "32"]
    assert [" ".join(row[-2:]) for row in rows] == ["0 B", "8.0 MB", "16.0 MB"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_picture_is_drawn_and_not_overwritten(collects, tmp_path):
    picture = tmp_path / "p.png"
    args = [collects, "--num-replicas", 24, "--num-npus", 4, "--plot", picture]
    assert call(*args)[1] is None
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert isinstance(call(*args)[1], UsageError)
    assert call(*args, "--force")[1] is None


def test_a_plan_that_does_not_pay_is_called_so(tmp_path):
    even = write_collects(tmp_path / "even", np.full((2, 8), 1000))
    result, _ = call(even, "--num-replicas", 8, "--num-npus", 4)
    assert "does not pay" in result.stderr
    skewed = write_collects(tmp_path / "skewed", np.array([[900, 1, 1, 1, 1, 1, 1, 1]] * 2))
    result, _ = call(skewed, "--num-replicas", 12, "--num-npus", 4)
    assert "does not pay" not in result.stderr


def test_other_data_that_differs_is_warned_of(collects, tmp_path):
    other = write_collects(tmp_path / "other", zipf_load(5, 4, 16))
    result, error = call(
        collects, "--num-replicas", 24, "--num-npus", 4, "--evaluate-on", other, "--json"
    )
    assert error is None
    value = json.loads(result.stdout)
    a, b = (zipf_load(seed, 4, 16) / (131_072 * 8) for seed in (0, 5))
    assert value["evaluations"][0]["total_variation"] == pytest.approx(
        0.5 * np.abs(a - b).sum(axis=1).mean()
    )
    expected = plain_ratios(zipf_load(5, 4, 16), value["physical_to_logical"], 4)
    assert value["evaluations"][0]["after"]["max_over_mean"] == pytest.approx(expected)
    assert any("total variation" in warning for warning in value["warnings"])
    same, _ = call(collects, "--num-replicas", 24, "--num-npus", 4, "--evaluate-on", collects)
    assert "total variation, mean over layers; above" not in same.stderr


def test_a_map_beside_the_counts_is_warned_of(collects):
    result, _ = call(collects, "--num-replicas", 24, "--num-npus", 4, "-o", collects / "map.json")
    assert "beside eplb_token_collects" in result.stderr


def test_the_threshold_gives_exit_code_3(collects):
    _, error = call(collects, "--num-replicas", 24, "--num-npus", 4, "--fail-above", 1.0)
    assert isinstance(error, RlInsightError)
    assert error.exit_code == 3


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--num-replicas", 24], "--num-npus"),
        (["--num-npus", 4], "--num-replicas"),
        (["--num-replicas", 25, "--num-npus", 4], "24 or 28"),
        (["--num-replicas", 24, "--num-npus", 4, "--max-moves", 3], "--from-map"),
        (["--num-replicas", 24, "--num-npus", 4, "--holdout", 1.5], "--holdout"),
        (["--num-replicas", 24, "--num-npus", 4, "--fail-above", "nan"], "--fail-above is nan"),
        (["--num-replicas", 24, "--num-npus", 4, "--min-gain", "nan"], "--min-gain is nan"),
        (["--num-replicas", 24, "--num-npus", 4, "--plot", "p.svg"], "ends in .png"),
        (["--from-map", "m.json", "--max-moves", "nan"], "max_moves is nan"),
        (["--from-map", "m.json", "--max-moves", "inf"], "max_moves is inf"),
        (["--num-replicas", 24, "--num-npus", 4, "-o", "m.txt"], "ending"),
        (["--num-replicas", 24, "--num-npus", 4, "--format", "x", "-o", "m.json"], "unknown"),
        (["--sweep-replicas", "a,b", "--num-npus", 4], "write numbers"),
        (["--from-map", "nowhere.json"], "nowhere.json"),
        (["--num-replicas", 24, "--num-npus", 4, "--format", "sglang"], "give -o"),
        (["--num-replicas", 24, "--num-npus", 4, "--moves", "m.json"], "--from-map"),
        (["--sweep-replicas", "24", "--num-npus", 4, "-o", "m.json"], "--num-replicas"),
        (
            ["--num-replicas", 24, "--num-npus", 4, "-o", "m.json", "--num-hidden-layers", 9],
            "sglang",
        ),
        (["--num-replicas", 24, "--num-npus", 4, "--role", "nobody"], "nobody"),
    ],
)
def test_wrong_use_is_said_before_anything_is_written(collects, tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    _, error = call(collects, *args)
    assert isinstance(error, UsageError)
    assert words in str(error)
    assert sorted(tmp_path.rglob("*")) == before


def test_no_data_is_a_usage_error():
    assert isinstance(call("--num-replicas", 24, "--num-npus", 4)[1], UsageError)


def test_the_map_file_stays_whole_when_the_write_fails(collects, tmp_path, monkeypatch):
    target = tmp_path / "map.json"
    call(collects, "--num-replicas", 24, "--num-npus", 4, "-o", target)
    before = target.read_bytes()

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rl_insight_hooks.atomic.os.write", no_space)
    with pytest.raises(OSError, match="No space"):
        call(collects, "--num-replicas", 32, "--num-npus", 4, "-o", target)
    assert target.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["map.json"]


def test_real_counts_give_a_map_near_the_bound(tmp_path):
    folder = SHARED / "esft_law_token_collects"
    if not folder.exists():
        pytest.skip("../shared/data with the ESFT counts is not here")
    target = tmp_path / "map.json"
    result, error = call(folder, "--num-replicas", 72, "--num-npus", 8, "-o", target, "--json")
    assert error is None
    value = json.loads(result.stdout)
    assert value["after"]["mean"] < 1.001 < 1.3 < value["before"]["mean"]
    assert_valid(decode(target.read_bytes()).physical_to_logical, 64, 8)


def test_help_needs_neither_numpy_nor_torch():
    code = (
        "import sys; import rl_insight_hooks.report.commands.rebalance; "
        "print([m for m in ('numpy', 'torch', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_planner_imports_no_torch_matplotlib_typer_or_report():
    code = (
        "import sys; import rl_insight_hooks.rebalance, rl_insight_hooks.rebalance.assess; "
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'matplotlib', 'typer') "
        "or m.startswith('rl_insight_hooks.report')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

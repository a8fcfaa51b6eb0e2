# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys

import pytest

from rl_insight_hooks.errors import UsageError
from rl_insight_hooks.report.cli import COMMANDS, _command
from rl_insight_hooks.report.grammar import translate
from rl_insight_hooks.report.main import run


def words(line):
    return translate(line.split(), COMMANDS, _command)


def test_old_line_without_a_command_is_the_heatmap():
    assert words(
        "input.path=D input.rank_list=all heatmap.parser.type=gmm heatmap.visualizer.type=gmm_heatmap "
        "heatmap.parser.step=1 heatmap.parser.role=actor output.path=O heatmap.visualizer.dpi=300 "
        "heatmap.visualizer.cmap=magma heatmap.visualizer.gmm_per_layer=3 pipeline.type=heatmap preset=heatmap"
    ) == [
        "heatmap", "D", "--rank", "all", "--step", "1", "--role", "actor", "--output", "O", "--dpi", "300",
        "--cmap", "magma", "--gmm-per-layer", "3",
    ]  # fmt: skip


def test_keys_and_flags_in_any_order():
    assert words("output.path=O heatmap --dpi 90 input.path=D") == [
        "heatmap",
        "--dpi",
        "90",
        "--output",
        "O",
        "D",
    ]
    assert words("summary D summary.fail_above=cv=1") == ["summary", "D", "--fail-above", "cv=1"]
    assert words("rebalance input.path=D rebalance.num_replicas=40 -o M") == [
        "rebalance", "-o", "M", "D", "--num-replicas", "40",
    ]  # fmt: skip


def test_null_is_no_setting():
    assert words("input.path=D heatmap.parser.step=null") == ["heatmap", "D"]


def test_key_and_flag_that_agree_or_contradict():
    assert words("heatmap D --step 1 heatmap.parser.step=1") == ["heatmap", "D", "--step", "1"]
    with pytest.raises(UsageError, match=r"heatmap\.parser\.step=1 and --step 2 contradict"):
        words("heatmap D --step 2 heatmap.parser.step=1")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("input.pth=D", "did you mean input.path"),
        ("heatmap D heatmap.parser.stp=1", "did you mean heatmap.parser.step"),
        ("summary D heatmap.visualizer.dpi=3", "means nothing to the command summary"),
        ("heatmap D pipeline.type=timeline", "pipeline.type=timeline is not supported"),
        ("input.path=D config_path=nowhere.yaml", "nowhere.yaml"),
    ],
)
def test_errors_name_the_key(line, says, capsys):
    assert run(line.split()) == 2
    assert says in capsys.readouterr().err


def test_config_file(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(
        "input: {path: D, rank_list: [0, 1]}\nheatmap: {parser: {step: 3, role: null}}\n"
    )
    assert words(f"config_path={file} heatmap.parser.step=5") == [
        "heatmap", "--step", "5", "D", "--rank", "0,1",
    ]  # fmt: skip


def test_usage_errors(capsys):
    assert run(["nonsense"]) == 2
    assert run(["summary"]) == 2
    assert run(["summary", "--nonsense", "D"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert "--help" in err


def test_help_of_every_command_exits_with_0():
    for name in COMMANDS:
        assert run([name, "--help"]) == 0


def test_help_imports_neither_numpy_nor_matplotlib():
    code = (
        "import sys\nfrom rl_insight_hooks.report.main import run\nassert run(['--help']) == 0\n"
        "bad = [m for m in ('numpy', 'matplotlib', 'torch', 'omegaconf') if m in sys.modules]\nassert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_reader_that_goes_away_is_quiet(tmp_path):
    (tmp_path / "eplb_token_collects_0.json").write_text('{"0": {"0": 30, "1": 10}}')
    code = f"{sys.executable} -m rl_insight_hooks.report.main summary {tmp_path} | true"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_debug_lets_the_traceback_through(tmp_path):
    from rl_insight_hooks.errors import DataError

    with pytest.raises(DataError):
        run(["summary", str(tmp_path / "nowhere"), "--debug"])


def test_a_bug_of_ours_is_one_line_and_exit_1(monkeypatch, capsys):
    def broken(argv):
        raise TypeError("no such thing")

    monkeypatch.setattr("rl_insight_hooks.report.cli.invoke", broken)
    assert run(["summary", "x"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: TypeError: no such thing (a bug of rl-insight-report;")
    assert "Traceback" not in said
    with pytest.raises(TypeError):
        run(["summary", "x", "--debug"])

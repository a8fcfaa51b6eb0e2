# SPDX-License-Identifier: Apache-2.0
"""The commands and the code of docs/rebalance.md run as they stand there, in order."""

from __future__ import annotations

import pathlib
import re
import shlex

import numpy as np
import pytest
import typer
from placement_cases import write_collects, write_steps, zipf_load
from typer.testing import CliRunner

from rl_insight_hooks.rebalance import RULES, decode
from rl_insight_hooks.rebalance.formats import FORMATS, deepseek, sglang, tensorrt_llm, vllm_ascend
from rl_insight_hooks.report.commands.rebalance import rebalance

DOC = pathlib.Path(__file__).resolve().parents[3] / "docs" / "rebalance.md"

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(rebalance)


@app.callback()
def _group():
    """Make ``rebalance`` a subcommand, as in the real program."""


@pytest.fixture(scope="module")
def text():
    return DOC.read_text()


def test_commands_run_in_order(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    law = zipf_load(0, 3, 64) / (131_072 * 8)
    windows = np.random.default_rng(0).poisson(law * 50_000, (6, 3, 64))
    write_steps(tmp_path / "run", windows)
    write_steps(tmp_path / "run", windows[:, :, ::-1], role="actor_update")
    write_collects(tmp_path / "eplb", zipf_load(1, 3, 64))
    commands = re.findall(r"^\$ rl-insight-report (rebalance .*)$", text, flags=re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        result = CliRunner().invoke(app, shlex.split(command))
        assert result.exception is None, (command, result.exception)
    for name in ("expert_map.json", "map.json", "new_map.json"):
        assert decode((tmp_path / name).read_bytes(), num_experts=64).num_replicas == 72
    assert (tmp_path / "new_map.moves.json").exists()
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_the_python_example_runs(text):
    code = re.search(r"```python\n(.*?)```", text, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(code.group(1), names)
    assert len(names["moves"]) <= 100
    assert names["data"].startswith(b"{")


def test_every_rule_format_and_option_is_described(text):
    rules = {*RULES, *vllm_ascend.RULES, *sglang.RULES, *tensorrt_llm.RULES, *deepseek.RULES}
    for word in (*rules, *FORMATS):
        assert f"`{word}`" in text, word
    for option in ("--holdout", "--half-life", "--max-moves", "--evaluate-on", "--sweep-replicas"):
        assert option in text

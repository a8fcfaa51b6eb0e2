# SPDX-License-Identifier: Apache-2.0
"""The real msprobe: its dumps read back, and both tools on at once."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_run import REPO, counts_by_layer, read

from rl_insight_hooks.report.load import load

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("msprobe") is None, reason="mindstudio-probe is not installed here"
)


def run(out, style, order):
    done = subprocess.run(
        [sys.executable, HERE / "msprobe_run.py", out, style, order],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{REPO / 'tests/support'}"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def forward_of(table):
    rows = table.phase_N == table.phases.index("forward")
    order = np.argsort(table.layer_N[rows], kind="stable")
    return table.counts_NE[rows][order].tolist()


@pytest.mark.parametrize("style", ["verl", "cumulative", "te", "list"])
@pytest.mark.truth(
    scenario="an msprobe dump, counts and cumulative lists",
    seam="msprobe reader",
    version="26.2.0",
    verdict="exact",
)
def test_dump_gives_the_routers_counts(tmp_path, style):
    truth = run(tmp_path, style, "alone")
    table = load(tmp_path / "dump", merge_ranks=True)
    assert forward_of(table) == truth
    assert {"recompute", "dx", "dw"} <= set(table.phases)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.truth(
    scenario="msprobe and the recorder at once",
    seam="torch_npu.npu_grouped_matmul",
    version="26.2.0",
    verdict="exact",
)
def test_both_at_once(tmp_path, order):
    truth = run(tmp_path, "verl", order)
    assert forward_of(load(tmp_path / "dump", merge_ranks=True)) == truth
    ours = read(tmp_path / "ours", 0, "update")
    assert counts_by_layer(ours) == truth
    assert ours.failed == {}

# SPDX-License-Identifier: Apache-2.0
"""Every format, read from files that its own producer (or a plain script) wrote once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from rl_insight_hooks.report.load import load
from rl_insight_hooks.report.main import run
from rl_insight_hooks.schema import SCHEMA_VERSION

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "load"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_golden_file_reads_as_spelled_out(name, rows_of):
    table = load(GOLDEN / name)
    assert rows_of(table) == EXPECTED[name]
    assert [p for p in table.problems if p.severity == "error"] == []


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_golden_file_merges_to_the_plain_sum(name, rows_of):
    truth = {}
    for step, role, _, layer, phase, first, counts in EXPECTED[name]:
        total = truth.setdefault((step, role, layer, phase), {})
        for expert, tokens in enumerate(counts, start=first):
            total[expert] = total.get(expert, 0) + tokens
    table = load(GOLDEN / name, merge_ranks=True)
    found = {
        (step, role, layer, phase): {first + i: n for i, n in enumerate(counts)}
        for step, role, rank, layer, phase, first, counts in rows_of(table)
    }
    assert found == truth


def test_every_golden_folder_has_expected_rows():
    assert {path.name for path in GOLDEN.iterdir() if path.is_dir()} == set(EXPECTED)


def test_formats_in_one_folder_are_told_apart(tmp_path, rows_of):
    for name in ("native_v1", "msprobe_verl", "megatron", "trtllm", "sglang"):
        shutil.copytree(GOLDEN / name, tmp_path / name)
    table = load(tmp_path)
    names = ("native_v1", "msprobe_verl", "megatron", "trtllm", "sglang")
    assert sorted(map(str, rows_of(table))) == sorted(
        str(r) for name in names for r in EXPECTED[name]
    )
    assert len(table.sources) == 5


def test_every_schema_version_ever_written_has_a_golden_folder():
    """A release reads what every release before it wrote."""
    for version in range(1, SCHEMA_VERSION + 1):
        for kind in ("native", "packed"):
            assert (GOLDEN / f"{kind}_v{version}").is_dir()


@pytest.mark.parametrize("name", ["native_v1", "packed_v1"])
def test_a_folder_of_the_first_release_passes_the_commands(name, capsys):
    tokens = sum(sum(row[-1]) for row in EXPECTED[name] if row[4] == "forward")
    assert run(["check", str(GOLDEN / name), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_errors"] == 0
    assert run(["summary", str(GOLDEN / name), "--json"]) == 0
    (role,) = json.loads(capsys.readouterr().out)["roles"]
    assert role["assignments"] == tokens


@pytest.mark.parametrize("new_fields", [{}, {"field_of_tomorrow": [1]}])
def test_a_pack_of_a_newer_release_is_named_and_says_what_to_do(
    tmp_path, by_rule, capsys, new_fields
):
    shutil.copytree(GOLDEN / "packed_v1", tmp_path / "run")
    path = tmp_path / "run/packed/actor_update/rank1/pack_3-3.npz"
    with np.load(path) as pack:
        arrays = dict(pack)
    meta = json.loads(arrays["meta"].tobytes())
    for file in meta:
        file.update(new_fields, schema_version=SCHEMA_VERSION + 1)
    arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8)
    np.savez(path, **arrays)
    table = load(tmp_path)
    (problem,) = by_rule(table)["newer-schema"]
    assert str(path) in problem.where
    assert f"schema_version {SCHEMA_VERSION + 1}" in problem.what
    assert "pip install -U rl-insight-hooks" in problem.fix
    assert set(table.rank_N.tolist()) == {0}  # the rest is shown
    assert run(["summary", str(tmp_path)]) == 4
    assert "newer-schema" in capsys.readouterr().err

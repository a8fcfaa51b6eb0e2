# SPDX-License-Identifier: Apache-2.0
"""Every format, read from files that its own producer (or a plain script) wrote once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_insight_hooks.report.load import load
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
    import shutil

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

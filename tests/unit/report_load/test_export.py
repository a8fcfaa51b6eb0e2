# SPDX-License-Identifier: Apache-2.0
"""Exports read back by others' readers: csv, json, pyarrow, torch, and rl-insight's own parser."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rl_insight_hooks.errors import MissingDependencyError, UsageError
from rl_insight_hooks.report.export import export, format_of
from rl_insight_hooks.report.load import load


@pytest.fixture
def table(tmp_path, write_step):
    root = tmp_path / "run"
    for rank in (0, 1):
        loads = {
            (3, "forward"): [1 + rank, 0],
            (3, "recompute"): [1 + rank, 0],
            (7, "forward"): [5, rank],
        }
        write_step(
            root, 4, "actor_update", rank, loads, first=2 * rank, num_experts=4, world_size=2
        )
    write_step(root, None, "rollout", 0, {3: [9, 8, 7, 6]})
    return load(root)


def _truth():
    rows = []
    for rank in (0, 1):
        for layer, phase, counts in (
            (3, "forward", [1 + rank, 0]),
            (3, "recompute", [1 + rank, 0]),
            (7, "forward", [5, rank]),
        ):
            for column, tokens in enumerate(counts):
                rows.append((4, "actor_update", rank, layer, phase, 2 * rank + column, tokens))
    rows += [
        (None, "rollout", 0, 3, "forward", column, tokens)
        for column, tokens in enumerate([9, 8, 7, 6])
    ]
    return rows


def test_csv_has_one_line_per_expert_held(table, tmp_path):
    export(table, tmp_path / "out" / "f.csv")
    with (tmp_path / "out" / "f.csv").open(newline="") as stream:
        header, *lines = csv.reader(stream)
    assert header == ["step", "role", "rank", "layer", "phase", "expert", "tokens"]
    truth = [tuple("" if cell is None else str(cell) for cell in row) for row in _truth()]
    assert sorted(map(tuple, lines)) == sorted(truth)


def test_json_keys_and_rows(table, tmp_path):
    export(table, tmp_path / "f.json")
    value = json.loads((tmp_path / "f.json").read_text())
    assert list(value) == [
        "schema",
        "num_experts",
        "id_space",
        "top_k",
        "world_size",
        "sources",
        "layer_sources",
        "layer_names",
        "assumptions",
        "problems",
        "rows",
    ]
    assert value["schema"] == "rl-insight-hooks/load-table/1"
    found = [
        (
            row["step"],
            row["role"],
            row["rank"],
            row["layer"],
            row["phase"],
            row["first_expert"] + n,
            tokens,
        )
        for row in value["rows"]
        for n, tokens in enumerate(row["tokens"])
    ]
    assert sorted(map(str, found)) == sorted(map(str, _truth()))


def test_parquet_reads_back(table, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    export(table, tmp_path / "f.parquet")
    found = [tuple(row.values()) for row in pq.read_table(tmp_path / "f.parquet").to_pylist()]
    assert sorted(map(str, found)) == sorted(map(str, _truth()))


def test_parquet_without_pyarrow_names_the_extra_and_leaves_nothing(table, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependencyError, match=r"rl-insight-hooks\[parquet\]"):
        export(table, tmp_path / "f.parquet")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_msprobe_tree_reads_back_through_torch_and_through_us(table, tmp_path):
    said = export(table, tmp_path / "tree")
    assert any("recompute" in sentence for sentence in said)
    assert any("step_0" in sentence for sentence in said)
    files = sorted(
        p.relative_to(tmp_path / "tree").as_posix() for p in (tmp_path / "tree").rglob("*.pt")
    )
    assert files[0] == (
        "step_0/rollout/step0/rank0/dump_tensor_data/NPU.npu_grouped_matmul.0.forward.kwargs.group_list.pt"
    )
    assert len(files) == 5
    torch = pytest.importorskip("torch")
    values = [torch.load(tmp_path / "tree" / name, weights_only=True).tolist() for name in files]
    assert values == [[9, 8, 7, 6], [1, 0], [5, 0], [2, 0], [5, 1]]
    back = load(
        tmp_path / "tree", num_moe_layers=2, ep_size=2, roles="actor_update", merge_ranks=True
    )
    assert back.counts_NE.tolist() == [[1, 0, 2, 0], [5, 0, 5, 1]]


def test_equal_layers_survive_the_tree(tmp_path, write_step):
    write_step(tmp_path / "run", 1, "actor", 0, {n: [4, 4] for n in range(5)})
    export(load(tmp_path / "run"), tmp_path / "tree")
    assert load(tmp_path / "tree").counts_NE.tolist() == [[4, 4]] * 5


def _rl_insight_python():
    """The interpreter of an environment with rl-insight 0.2.1 (nox session rl_insight sets it)."""
    named = os.environ.get("RL_INSIGHT_021_PYTHON")
    if not named or not Path(named).exists():
        pytest.skip("RL_INSIGHT_021_PYTHON names no Python with rl-insight==0.2.1")
    return named


_PARSE = """
import json, sys
from loguru import logger
logger.remove()
from omegaconf import OmegaConf
from recipe.parser.gmm_parser import GmmParser
parser = GmmParser(OmegaConf.create({"input": {"rank_list": "all"}}))
events = [e for m in parser.allocate_prof_data(sys.argv[1])
          for e in parser.parse_analysis_data(m["profiler_data_path"], m["rank_id"], m["role"])]
print(json.dumps([[e[k] for k in ("step", "role", "rank_id", "stage", "expert_index")] + [int(e["load"])]
                  for e in events]))
"""


def test_the_real_rl_insight_reads_the_tree(table, tmp_path):
    python = _rl_insight_python()
    export(table, tmp_path / "tree")
    out = subprocess.run(
        [python, "-c", _PARSE, str(tmp_path / "tree")], capture_output=True, text=True, check=True
    )
    found = sorted(map(tuple, json.loads(out.stdout.splitlines()[-1])))
    truth = []
    for step, role, rank, layer, phase, expert, tokens in _truth():
        if phase == "forward":
            local = expert - 2 * rank if role == "actor_update" else expert
            truth.append((step or 0, role, rank, 0 if layer == 3 else 1, local, tokens))
    assert found == sorted(truth)


def test_the_real_rl_insight_draws_the_tree(table, tmp_path):
    python = _rl_insight_python()
    export(table, tmp_path / "tree")
    command = [
        str(Path(python).with_name("rl-insight-recipe")),
        "preset=heatmap",
        f"input.path={tmp_path / 'tree'}",
        "input.rank_list=all",
        "heatmap.parser.type=gmm",
        "heatmap.visualizer.type=gmm_heatmap",
        f"output.path={tmp_path / 'out'}",
    ]
    subprocess.run(command, capture_output=True, check=True, timeout=120)
    assert (tmp_path / "out" / "gmm_heatmap.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.csv", "csv"),
        ("A.JSON", "json"),
        ("x.parquet", "parquet"),
        ("out", "msprobe"),
        ("msprobe", "msprobe"),
    ],
)
def test_format_from_the_name(name, kind):
    assert format_of(name) == kind


def test_unknown_endings_formats_and_existing_targets_are_usage_errors(table, tmp_path):
    with pytest.raises(UsageError, match=r"\.csv, \.json or \.parquet"):
        export(table, tmp_path / "f.xlsx")
    with pytest.raises(UsageError, match="'xlsx'"):
        export(table, tmp_path / "f.csv", "xlsx")
    (tmp_path / "f.csv").write_text("mine")
    with pytest.raises(UsageError, match="--force"):
        export(table, tmp_path / "f.csv")
    assert (tmp_path / "f.csv").read_text() == "mine"
    export(table, tmp_path / "f.csv", overwrite=True)
    assert (tmp_path / "f.csv").read_text().startswith("step,")
    with pytest.raises(UsageError, match="is a folder"):
        export(table, tmp_path / "run", "csv", overwrite=True)


def test_a_failed_write_leaves_the_old_file(table, tmp_path, monkeypatch):
    from rl_insight_hooks.report import export_flat

    def fail(table, stream):
        stream.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(export_flat, "write_csv", fail)
    (tmp_path / "f.csv").write_text("old")
    with pytest.raises(OSError, match="disk full"):
        export(table, tmp_path / "f.csv", overwrite=True)
    assert (tmp_path / "f.csv").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f.csv", "run"]


def _files(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_tree_replaces_a_tree_whole_and_no_dumps(tmp_path, write_step, golden):
    for steps, layers in ((3, 4), (1, 2)):
        for step in range(steps):
            write_step(
                tmp_path / f"run{steps}", step, "actor", 0, {n: [4, n] for n in range(layers)}
            )
    tree = tmp_path / "tree"
    export(load(tmp_path / "run3"), tree)
    export(load(tmp_path / "run1"), tree, overwrite=True)
    assert load(tree).counts_NE.tolist() == [[4, 0], [4, 1]]  # nothing of the three steps is left
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run1", "run3", "tree"]
    (tree / "step_0" / "notes.txt").write_text("mine")
    dumps = tmp_path / "dumps"
    shutil.copytree(golden / "msprobe_verl", dumps)
    for taken in (tree, dumps, tmp_path / "run1", tmp_path):
        before = _files(taken)
        with pytest.raises(UsageError, match="other files than an export"):
            export(load(tmp_path / "run1"), taken, "msprobe", overwrite=True)
        assert _files(taken) == before


def test_a_tree_that_cannot_be_written_leaves_the_old_one(tmp_path, write_step, monkeypatch):
    write_step(tmp_path / "run", 1, "actor", 0, {0: [4, 4], 1: [4, 4]})
    table, tree = load(tmp_path / "run"), tmp_path / "tree"
    export(table, tree)
    before = _files(tree)

    def full(counts):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rl_insight_hooks.report.export_msprobe.int_tensor_file", full)
    with pytest.raises(OSError, match="No space"):
        export(table, tree, overwrite=True)
    assert _files(tree) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "tree"]

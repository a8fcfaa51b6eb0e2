# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core, SGLang and TensorRT-LLM: what they hold, and every damage named."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from rl_insight_hooks.report.load import load
from rl_insight_hooks.report.load.trtllm import read_tensors

# --- Megatron-Core ---------------------------------------------------------------------------------


def _jsonl(tmp_path, rank, lines):
    folder = tmp_path / "tokens_per_expert"
    folder.mkdir(exist_ok=True)
    path = folder / f"rank{rank}.jsonl"
    path.write_text(
        "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    )
    return path


def test_megatron_blocks_stay_apart_and_repeats_replace(tmp_path, rows_of, by_rule):
    _jsonl(
        tmp_path,
        1,
        [
            {"iter": 1, "block": "decoder", "layer": 0, "tpe": [[1, 2]]},
            {"iter": 1, "block": "mtp", "layer": 0, "tpe": [[5, 5]]},
            {"iter": 1, "block": "decoder", "layer": 0, "tpe": [[3, 4], [1, 1]]},
        ],
    )
    table = load(tmp_path)
    assert rows_of(table) == [
        [1, "train", 1, 0, "forward", 0, [4, 5]],
        [1, "train (mtp)", 1, 0, "forward", 0, [5, 5]],
    ]
    assert table.num_passes_N.tolist() == [2, 1]
    assert "repeated-line" in by_rule(table)
    assert any("ep_size" in sentence for sentence in table.assumptions)
    assert load(tmp_path, ep_size=4, roles="train").first_N.tolist() == [2]


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ('{"iter": 2, "layer": 0, "tpe": [[1', "torn-line"),
        ('{"iter": 2, "layer": 0}\n', "bad-line"),
        ('{"iter": 2, "layer": 0, "tpe": [[1, -2]]}\n', "bad-line"),
        ('{"iter": -2, "layer": 0, "tpe": [[1, 2]]}\n', "bad-line"),
        ('{"iter": 2, "layer": 0, "tpe": [[1, 2], [1]]}\n', "bad-line"),
    ],
)
def test_megatron_bad_lines_are_named_and_left_out(tmp_path, rows_of, by_rule, line, rule):
    path = _jsonl(tmp_path, 0, [{"iter": 1, "layer": 0, "tpe": [[1, 2]]}, line])
    table = load(tmp_path)
    assert rows_of(table) == [[1, "train", 0, 0, "forward", 0, [1, 2]]]
    (problem,) = by_rule(table)[rule]
    assert problem.where == f"{path}, line 2"


def test_megatron_last_line_without_an_end_is_read_and_named(tmp_path, rows_of, by_rule):
    _jsonl(tmp_path, 0, ['{"iter": 1, "layer": 0, "tpe": [[1, 2]]}'])
    table = load(tmp_path)
    assert rows_of(table) == [[1, "train", 0, 0, "forward", 0, [1, 2]]]
    assert by_rule(table)["torn-line"][0].severity == "warning"


# --- SGLang ----------------------------------------------------------------------------------------


def _recorder(path, value):
    torch = pytest.importorskip("torch")
    torch.save(value, path)


def test_sglang_detail_records_are_mapped_to_logical_experts(tmp_path, rows_of):
    torch = pytest.importorskip("torch")
    placement = torch.tensor([[0, 1, 2, 1], [2, 2, 0, 1]])
    records = [
        {
            "forward_pass_id": n,
            "rank": 2,
            "global_physical_count": torch.tensor([[n, 1, 2, 3], [4, n, 6, 7]]),
        }
        for n in range(3)
    ]
    _recorder(
        tmp_path / "expert_distribution_recorder_1.pt",
        {"records": records, "last_physical_to_logical_map": placement},
    )
    assert rows_of(load(tmp_path)) == [
        [None, "rollout", 2, 0, "forward", 0, [3, 12, 6]],
        [None, "rollout", 2, 1, "forward", 0, [18, 21, 15]],
    ]


def test_several_sglang_dumps_become_steps_and_that_is_said(tmp_path):
    torch = pytest.importorskip("torch")
    for number in (2, 10):
        _recorder(
            tmp_path / f"expert_distribution_recorder_{number}.pt",
            {"logical_count": torch.full((1, 2, 3), number)},
        )
    table = load(tmp_path)
    assert table.step_N.tolist() == [0, 0, 1, 1]
    assert table.counts_NE[:, 0].tolist() == [2, 2, 10, 10]
    assert "numbered as steps" in table.assumptions[0]


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda torch: {"logical_count": torch.tensor([[1, -2]])}, "negative"),
        (lambda torch: {"logical_count": torch.tensor([[1.5]])}, "whole"),
        (lambda torch: {"logical_count": torch.tensor([[float("nan")]])}, "whole"),
        (lambda torch: {"logical_count": torch.tensor([1, 2])}, "shape"),
        (lambda torch: {"logical_count": [1, 2]}, "no tensor"),
        (lambda torch: {"other": 1}, "no logical_count"),
        (lambda torch: torch.tensor([1]), "not a recorder's dict"),
        (lambda torch: {"records": [{"topk_ids_of_layer": torch.tensor([1])}]}, "per_token"),
        (lambda torch: {"records": []}, "nothing was recorded"),
    ],
)
def test_sglang_damage_is_named(tmp_path, by_rule, make, word):
    torch = pytest.importorskip("torch")
    _recorder(tmp_path / "expert_distribution_recorder_1.pt", make(torch))
    table = load(tmp_path)
    assert table.num_rows == 0
    (problem,) = by_rule(table)["bad-tensor-file"]
    assert word in problem.what


# --- TensorRT-LLM ----------------------------------------------------------------------------------


def _safetensors(tensors):
    header, body = {}, b""
    for name, array in tensors.items():
        raw = array.tobytes()
        kinds = {"i4": "I32", "i8": "I64", "f4": "F32", "u1": "U8"}
        kind = kinds[array.dtype.str[1:]]
        header[name] = {
            "dtype": kind,
            "shape": list(array.shape),
            "data_offsets": [len(body), len(body) + len(raw)],
        }
        body += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def test_safetensors_header_reads_as_the_package_writes_it():
    numpy_io = pytest.importorskip("safetensors.numpy")
    rng = np.random.default_rng(0)
    tensors = {
        f"{i}_{j}": rng.integers(0, 99, (j + 1,)).astype(np.int32)
        for i in range(3)
        for j in range(4)
    }
    found = read_tensors(numpy_io.save(tensors, metadata={"by": "test"}))
    assert {name: array.tolist() for name, array in found.items()} == {
        name: array.tolist() for name, array in tensors.items()
    }


def test_trtllm_ranks_add_up(tmp_path):
    for rank in (0, 1):
        data = _safetensors(
            {"7_3": np.array([1 + rank, 5], np.int64), "7_4": np.array([2.0, 0.0], np.float32)}
        )
        (tmp_path / f"rank{rank}.safetensors").write_bytes(data)
    (tmp_path / "meta_info.json").write_text('{"num_experts": 2, "top_k": 1, "model": "x"}')
    table = load(tmp_path, merge_ranks=True)
    assert table.counts_NE.tolist() == [[3, 10], [4, 0]]
    assert table.layer_N.tolist() == [3, 4]
    assert table.step_N.tolist() == [7, 7]
    assert table.top_k == 1
    assert table.problems == ()


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "0 bytes"),
        (b"\xff" * 16, "claims"),
        (_safetensors({"1_1": np.array([1, 2], np.int64)})[:-1], "cut off"),
        (_safetensors({"1_1": np.array([1, -2], np.int64)}), "negative"),
        (_safetensors({"1_1": np.array([1.5], np.float32)}), "whole"),
        (_safetensors({"1_1": np.array([np.inf], np.float32)}), "no numbers"),
        (_safetensors({"layer": np.array([1], np.int64)}), "iteration_layer"),
        (_safetensors({"1_1": np.ones((2, 4), np.int64)}), "the shape [2, 4]"),
        (struct.pack("<Q", 40) + b'{"1_1": {"dtype": "BF16", "shape": [1]  ', "header"),
    ],
)
def test_trtllm_damage_is_named_and_other_ranks_shown(tmp_path, by_rule, data, word):
    (tmp_path / "rank0.safetensors").write_bytes(_safetensors({"1_1": np.array([1, 2], np.int64)}))
    (tmp_path / "rank1.safetensors").write_bytes(data)
    table = load(tmp_path)
    assert table.counts_NE.tolist() == [[1, 2]]
    rules = by_rule(table)
    (problem,) = rules.get("bad-tensor-file") or rules["empty-file"]
    assert problem.where.endswith("rank1.safetensors")
    assert word in problem.what
    assert "no-meta-info" in rules


def test_trtllm_counts_of_more_experts_than_the_model_has_are_refused(tmp_path, by_rule):
    (tmp_path / "rank0.safetensors").write_bytes(_safetensors({"1_1": np.ones(4, np.int64)}))
    (tmp_path / "meta_info.json").write_text('{"num_experts": 2}')
    table = load(tmp_path)
    assert table.num_rows == 0
    assert "4 experts, but meta_info.json says 2" in by_rule(table)["bad-tensor-file"][0].what


def test_a_dtype_that_counts_cannot_have_is_refused():
    info = {"1_1": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}
    header = json.dumps(info).encode()
    with pytest.raises(ValueError, match="dtype BF16"):
        read_tensors(struct.pack("<Q", len(header)) + header + b"\0\0")

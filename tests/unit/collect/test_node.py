# SPDX-License-Identifier: Apache-2.0
"""What runs on a node: list, hash, check, send."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import pathlib
import sys
import zipfile

import numpy as np
import pytest
from collect_data import make_file, write_step_file

from rl_insight_hooks.report.collect import node


def test_only_load_files_are_listed_and_links_are_not_followed(tmp_path, monkeypatch):
    path = write_step_file(tmp_path, 1, 0)
    (tmp_path / "eplb_token_collects_3.json").write_text("{}")
    (tmp_path / "expert_map.json").write_text("{}")
    (tmp_path / ".group_list.json.1.0.tmp").write_text("{")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "group_list.json").write_text("{}")
    (tmp_path / "group_list.json").symlink_to(path)
    monkeypatch.setenv("DATA_OF_NODE", str(tmp_path))
    folder, stats = node.list_files("$DATA_OF_NODE", node.INCLUDE)
    assert folder == str(tmp_path)
    assert [stat[0] for stat in stats] == [
        "eplb_token_collects_3.json",
        "step_1/actor_update/rank0/group_list.json",
    ]
    info = path.stat()
    assert stats[1][1:] == (info.st_ino, info.st_size, info.st_mtime_ns)


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        node.list_files(str(tmp_path / "none"), node.INCLUDE)


def test_files_are_sent_in_batches_and_broken_ones_stay(tmp_path):
    paths = ["a.json", "b.json", "gone.json", "c.json"]
    contents = {"a.json": b'{"0": 1}', "b.json": b'{"0": ', "c.json": b"[1, 2]"}
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    batches = list(node.send_files(str(tmp_path), paths, batch_bytes=8))
    assert [[item[0] for item in batch] for batch in batches] == [["a.json"], paths[1:]]
    sent = {item[0]: item for batch in batches for item in batch}
    assert sent["a.json"][2:] == (hashlib.sha256(contents["a.json"]).hexdigest(), None, b'{"0": 1}')
    assert sent["b.json"][4] == b""
    assert "cut off" in sent["b.json"][3]
    assert "cannot be read" in sent["gone.json"][3]


def zipped(data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("meta.npy", data)
    return out.getvalue()


def safetensors() -> bytes:
    header = json.dumps({"x": {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]}}).encode()
    return len(header).to_bytes(8, "little") + header + np.arange(2).tobytes()


WHOLE = {
    "group_list.json": make_file(1, 0),
    "pack_0-9.npz": zipped(b"x" * 100),
    "NPU.0.group_list.pt": zipped(b"y" * 100),
    "rank0.jsonl": b'{"iter": 1}\n{"iter": 2}\n',
    "rank0.safetensors": safetensors(),
}


@pytest.mark.parametrize("name", WHOLE)
def test_every_cut_is_seen(name):
    data = WHOLE[name]
    assert node.what_is_broken(name, data) is None
    cuts = range(0, len(data) - 1, max(1, len(data) // 37))
    for cut in cuts:
        if name.endswith(".jsonl") and data[:cut].endswith((b"}", b"}\n")):
            continue  # whole lines: nothing shows that there were more
        if name.endswith(".pt") and cut < 2:
            continue
        assert node.what_is_broken(name, data[:cut]), cut


def test_a_flipped_byte_in_a_pack_is_seen():
    data = bytearray(WHOLE["pack_0-9.npz"])
    data[50] ^= 0xFF
    assert node.what_is_broken("pack_0-9.npz", bytes(data))


def test_the_node_side_needs_nothing_but_python():
    tree = ast.parse(pathlib.Path(node.__file__).read_text())
    for statement in ast.walk(tree):
        names = []
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            names = [statement.module]
        for name in names:
            assert name.split(".")[0] in sys.stdlib_module_names

# SPDX-License-Identifier: Apache-2.0
"""What the HTML page holds, and how the file is made; tests/browser looks at it in a browser."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import zlib

import numpy as np
import pytest
from collect_data import counts_of, write_node, write_step_file
from small_table import table

from rl_insight_hooks.errors import MissingDependencyError, UsageError
from rl_insight_hooks.report.main import run
from rl_insight_hooks.report.page import data as page_data
from rl_insight_hooks.report.page import write as page_write
from rl_insight_hooks.report.summary import Devices
from rl_insight_hooks.report.table import ALL_RANKS, LoadTable

A, B = [5, 0, 3, 70_000], [1, 2, 3, 4]


def decoded(page):
    """{(step, role, rank, layer): {expert: tokens}}, read as the page's script reads it."""
    head = page.head
    planes = zlib.decompress(base64.b64decode(page.counts))
    num = head["num_cells"]
    assert len(planes) == num * head["num_planes"]
    counts = [
        sum(planes[plane * num + i] << (8 * plane) for plane in range(head["num_planes"]))
        for i in range(num)
    ]
    found, at = {}, 0
    rows = head["rows"]
    for step, role, rank, layer, first, held in zip(
        *(rows[name] for name in ("step", "role", "rank", "layer", "first", "held")), strict=True
    ):
        key = (head["steps"][step], head["roles"][role], rank, head["layers"][layer])
        found[key] = dict(zip(range(first, first + held), counts[at : at + held], strict=True))
        at += held
    assert at == num
    return found


def by_expert(counts):
    return dict(enumerate(counts))


def test_every_count_is_exact_merged_and_by_rank():
    loads = table([(1, "train", 0, 3, "forward", A), (1, "train", 1, 3, "forward", B)])
    found = decoded(page_data.build(loads, title="t"))
    assert found == {
        (1, "train", ALL_RANKS, 3): by_expert([6, 2, 6, 70_004]),
        (1, "train", 0, 3): by_expert(A),
        (1, "train", 1, 3): by_expert(B),
    }


def test_ranks_that_hold_parts_are_the_devices(tmp_path):
    for rank in range(4):
        write_step_file(tmp_path, 1, rank, first_expert=4 * rank, width=4, world_size=4)
    from rl_insight_hooks.report.load import load

    page = page_data.build(load([tmp_path], merge_ranks=False), title="t")
    assert page.head["devices"] == {"num": 4, "slots": None, "source": "experts in a row"}
    found = decoded(page)
    for layer in range(3):
        parts = [counts_of(1, rank, layer, 4) for rank in range(4)]
        assert found[1, "actor_update", ALL_RANKS, layer] == by_expert(
            [n for part in parts for n in part]
        )
        assert found[1, "actor_update", 2, layer] == dict(zip(range(8, 12), parts[2], strict=True))
    assert "over 4 devices" in page.head["verdict"][0]["text"]


def test_no_devices_where_ranks_hold_everything():
    loads = table([(1, "train", 0, 3, "forward", A)])
    assert page_data.build(loads, title="t").head["devices"] is None
    page = page_data.build(loads, title="t", devices=Devices(num_devices=2))
    assert page.head["devices"]["num"] == 2


def test_too_many_ranks_are_left_out_and_that_is_said(monkeypatch):
    monkeypatch.setattr(page_data, "MAX_RANK_CELLS", 7)
    loads = table([(1, "train", 0, 3, "forward", A), (1, "train", 1, 3, "forward", B)])
    page = page_data.build(loads, title="t")
    assert set(decoded(page)) == {(1, "train", ALL_RANKS, 3)}
    assert "ranks are shown merged: 8 counts" in page.head["notes"][0]


def test_huge_counts_say_that_a_browser_rounds_them():
    page = page_data.build(table([(1, "train", None, 0, "forward", [2**60, 1])]), title="t")
    assert decoded(page)[1, "train", ALL_RANKS, 0] == {0: 2**60, 1: 1}
    assert any("2^53" in note for note in page.head["notes"])


def test_problems_and_assumptions_are_on_the_page():
    loads = dataclasses.replace(
        table([(None or -1, "train", None, 0, "forward", B)]), assumptions=("the moon is round",)
    )
    page = page_data.build(loads, title="t")
    assert page.head["notes"] == ["assumed: the moon is round"]
    assert page.head["steps"] == [None]


def test_names_cannot_leave_their_place():
    evil = "</script><script>alert(1)</script><!--{{counts}}"
    loads = table([(1, evil, None, 0, "forward", B)], roles=(evil,))
    page = page_data.build(loads, title=evil)
    text = page_write.render(page).decode()
    assert "<script>alert" not in text
    assert text.count("<script") == 4  # head, counts, plotly, the page's own
    head = re.search(r'id="head">(.*?)</script>', text, re.DOTALL).group(1)
    assert json.loads(head)["roles"] == [evil]
    counts = re.search(r'id="counts">(.*?)</script>', text, re.DOTALL).group(1)
    assert counts == page.counts
    assert "<title>&lt;/script&gt;" in text


def test_nothing_is_loaded_from_anywhere():
    text = page_write.render(
        page_data.build(table([(1, "t", None, 0, "forward", B)], roles=("t",)), title="t")
    )
    without_library = re.sub(rb'id="plotly">[^<]*', b"", text)
    assert not re.search(rb"(src|href)\s*=\s*[\"']?(https?:)?//", without_library)
    assert b"default-src 'none'" in text


def test_size_of_a_big_run():
    """60 layers x 256 experts x 50 steps x 3 roles stay under 10 MB."""
    num_steps, num_layers, num_experts = 50, 60, 256
    rng = np.random.default_rng(0)
    counts, steps, layers, roles = [], [], [], []
    for role in range(3):
        for layer in range(num_layers):
            share = rng.permutation(1 / np.arange(1, num_experts + 1) ** rng.uniform(0.4, 1.1))
            counts.append(rng.multinomial(131_072 * 8, share / share.sum(), size=num_steps))
            steps += range(num_steps)
            layers += [layer] * num_steps
            roles += [role] * num_steps
    order = np.lexsort([layers, steps, roles])
    num_rows = len(steps)
    loads = LoadTable(
        step_N=np.array(steps)[order],
        role_N=np.array(roles)[order],
        rank_N=np.full(num_rows, ALL_RANKS),
        layer_N=np.array(layers)[order],
        phase_N=np.zeros(num_rows, dtype=np.int64),
        counts_NE=np.concatenate(counts)[order],
        first_N=np.zeros(num_rows, dtype=np.int64),
        held_N=np.full(num_rows, num_experts),
        num_passes_N=np.ones(num_rows, dtype=np.int64),
        num_tokens_N=np.full(num_rows, -1),
        roles=("a", "b", "c"),
        phases=("forward",),
    )
    page = page_data.build(loads, title="big")
    assert page.head["num_cells"] == 3 * 50 * 60 * 256
    num_bytes = len(page_write.render(page))
    assert 2_000_000 < num_bytes < 10_000_000


def test_command(tmp_path, capsys):
    write_node(tmp_path / "data", ranks=[0, 1], steps=[1, 2], world_size=2)
    assert run(["html", str(tmp_path / "data"), "-o", str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    page = tmp_path / "moe_load.html"
    assert said["file"] == str(page)
    assert said["num_bytes"] == page.stat().st_size > 1_000_000
    assert run(["html", str(tmp_path / "data"), "-o", str(tmp_path / "page.png")]) == 2
    assert "ends in .html" in capsys.readouterr().err
    assert run(["html", str(tmp_path / "data"), "--step", "9", "-o", str(tmp_path)]) == 2
    assert "--step" in capsys.readouterr().err


def test_partial_data_is_shown_with_exit_code_4(tmp_path, capsys):
    write_node(tmp_path / "data", ranks=[0, 1], steps=[1], world_size=2)
    write_step_file(tmp_path / "data", 1, 1, data=b'{"schema_version": 1, "pro')
    assert run(["html", str(tmp_path / "data"), "-o", str(tmp_path / "p.html")]) == 4
    head = json.loads(
        re.search(r'id="head">(.*?)</script>', (tmp_path / "p.html").read_text(), re.DOTALL).group(
            1
        )
    )
    assert any("rank1" in note for note in head["notes"])


def test_without_plotly_the_fix_is_named(monkeypatch):
    monkeypatch.setattr(page_write.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"rl-insight-hooks\[html\]"):
        page_write.render(
            page_data.build(table([(1, "t", None, 0, "forward", B)], roles=("t",)), title="t")
        )


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    page = page_data.build(table([(1, "t", None, 0, "forward", B)], roles=("t",)), title="t")
    with pytest.raises(UsageError, match="cannot be written"):
        page_write.write(page, tmp_path / "file" / "p.html")

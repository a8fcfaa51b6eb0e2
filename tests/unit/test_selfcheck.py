# SPDX-License-Identifier: Apache-2.0
"""What the file says about itself: zero calls with their cause, conservation, what was inferred."""

from __future__ import annotations

import msgspec
import pytest
from tiny_run import layer_pass, read

from rl_insight_hooks.selfcheck import Facts, notes


@pytest.fixture
def load(rih, npu, tmp_path):
    """A real file: one layer, 2 + 0 + 5 tokens."""
    rih.install()
    with rih.record(tmp_path, step=1, role="r"):
        layer_pass([2, 0, 5])
    rih.flush()
    return read(tmp_path, 1, "r")


def changed(load, **fields):
    """Return ``load`` with fields of its only record changed."""
    return msgspec.structs.replace(
        load, records=[msgspec.structs.replace(load.records[0], **fields)]
    )


def test_nothing_to_say_about_a_good_file(load):
    assert load.notes == []
    assert notes(load, Facts(hooked=["torch_npu.npu_grouped_matmul"])) == []


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        (Facts(), "nothing is hooked"),
        (Facts(hooked=["a.b"], uncovered=["c++ path"]), "no hook can see them: c[+][+] path"),
        (Facts(hooked=["a.b"], compiled_unwatched=True), "watch.model. before the first step"),
        (Facts(hooked=["a.b"], replayed_graphs=True), "install earlier"),
        (Facts(hooked=["a.b"], overwritten=["a.b"]), "somebody overwrote a.b"),
        (Facts(hooked=["a.b"]), "by a path other than a.b"),
    ],
)
def test_zero_calls_name_the_cause(load, facts, cause):
    (note,) = notes(msgspec.structs.replace(load, records=[]), facts)
    assert note.startswith("zero calls")
    import re

    assert re.search(cause, note)


def test_a_region_without_calls_says_so_in_its_file(rih, npu, tmp_path):
    rih.install()
    with rih.record(tmp_path, step=1, role="r"):
        pass
    rih.flush()
    (note,) = read(tmp_path, 1, "r").notes
    assert note.startswith("zero calls")


def test_negative_count(load):
    (note,) = notes(changed(load, counts=[2, -1, 5], num_assignments=6), Facts())
    assert "negative count (-1)" in note


def test_more_counted_than_given(load):
    (note,) = notes(changed(load, num_assignments=9, num_rows=7), Facts())
    assert "counts 9 rows of 7 given" in note


def test_tokens_times_top_k(load):
    whole = msgspec.structs.replace(load, num_experts=3, top_k=2)
    assert (
        notes(
            changed(whole, counts=[4, 0, 10], num_assignments=14, num_tokens=7, num_rows=14),
            Facts(),
        )
        == []
    )
    (note,) = notes(changed(whole, num_tokens=7), Facts())
    assert "7 assignments, not tokens x top-k = 7 x 2 = 14" in note
    # a rank of an expert-parallel group sees a part only
    part = msgspec.structs.replace(whole, num_experts=6)
    assert notes(changed(part, num_tokens=7), Facts()) == []


def test_unknown_layer_and_unequal_passes(load):
    (note,) = notes(changed(load, layer_source="unknown", layer=-1), Facts())
    assert "layer -1" in note
    one = load.records[0]
    two = msgspec.structs.replace(one, layer=1, num_passes=3)
    (note,) = notes(msgspec.structs.replace(load, records=[one, two]), Facts())
    assert "unequally often (1 to 3" in note

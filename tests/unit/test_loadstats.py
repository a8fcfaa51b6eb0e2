# SPDX-License-Identifier: Apache-2.0
"""The numbers for the trainer's metrics, against sums done by hand."""

from __future__ import annotations

import math

import msgspec
import pytest
from tiny_run import layer_pass, read

from rl_insight_hooks.loadstats import headline_phase, summary


@pytest.fixture
def load(rih, npu, tmp_path):
    """Two layers: [6, 0, 0] is one hot expert, [1, 2, 3] is nearly even."""
    rih.install()
    with rih.record(tmp_path, step=1, role="actor"):
        layer_pass([6, 0, 0])
        layer_pass([1, 2, 3])
    rih.flush()
    return read(tmp_path, 1, "actor")


def test_by_hand(load):
    values = summary(load)
    assert values["moe_load/actor/max_over_mean"] == pytest.approx(3.0)
    assert values["moe_load/actor/max_over_mean_avg"] == pytest.approx((3.0 + 1.5) / 2)
    assert values["moe_load/actor/cv"] == pytest.approx(math.sqrt((16 + 4 + 4) / 3) / 2)
    assert values["moe_load/actor/dead_experts"] == pytest.approx(2 / 3)
    assert values["moe_load/actor/worst_layer"] == 0
    assert values["moe_load/actor/assignments"] == 12
    assert values["moe_load/actor/passes"] == 2
    assert values["moe_load/actor/failed"] == 0
    assert len(values) <= 10
    assert all(type(value) is float for value in values.values())


def test_the_public_summary_is_the_same(load, rih):
    assert rih.summary() == summary(load)


def test_other_phases_do_not_count(load):
    recompute = [msgspec.structs.replace(r, phase="recompute") for r in load.records]
    both = msgspec.structs.replace(load, records=[*load.records, *recompute])
    assert summary(both) == summary(load)


def test_an_empty_file_has_finite_numbers(load):
    values = summary(msgspec.structs.replace(load, records=[]))
    assert values["moe_load/actor/assignments"] == 0
    assert "moe_load/actor/max_over_mean" not in values
    assert all(math.isfinite(value) for value in values.values())


def test_what_went_wrong_is_in_it(load):
    bad = msgspec.structs.replace(load, failed={"a": 2, "b": 1}, dropped={"x": 4}, notes=["n"])
    values = summary(bad)
    assert values["moe_load/actor/failed"] == 3
    assert values["moe_load/actor/dropped"] == 4
    assert values["moe_load/actor/notes"] == 1


def test_headline_phase():
    assert headline_phase({"dx", "forward", "eval"}) == "forward"
    assert headline_phase({"dw", "eval"}) == "eval"
    assert headline_phase({"compiled"}) == "compiled"
    assert headline_phase({"dw", "recompute"}) is None
    assert headline_phase(set()) is None

# SPDX-License-Identifier: Apache-2.0
"""Map formats: round trips, each rule by name, and readers written here the way the servers read."""

from __future__ import annotations

import io
import json
import random

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_cases import assert_valid, zipf_load

from rl_insight_hooks.errors import DataError, RlInsightError, UsageError
from rl_insight_hooks.rebalance import (
    FORMATS,
    broken_rules,
    decode,
    encode,
    make_placement,
    plan,
    validate,
)
from rl_insight_hooks.rebalance.formats import (
    deepseek,
    format_of,
    sglang,
    tensorrt_llm,
    vllm_ascend,
)
from rl_insight_hooks.rebalance.formats.vllm import from_arrays, to_arrays
from rl_insight_hooks.rebalance.placement import Placement
from rl_insight_hooks.rebalance.rules import RULES
from rl_insight_hooks.rebalance.shape import make_shape


@st.composite
def placements(draw):
    num_nodes = draw(st.integers(1, 2))
    devices_per_node = draw(st.integers(1, 4))
    num_devices = num_nodes * devices_per_node
    num_groups = draw(st.sampled_from([num_nodes, 1, 2 * num_nodes]))
    num_experts = 2 * num_nodes * draw(st.integers(1, 8))
    domains = num_nodes if num_nodes > 1 and num_groups % num_nodes == 0 else 1
    most = num_experts // domains
    least = -(-num_experts // num_devices)
    slots = draw(st.integers(least, min(most, least + 4))) if most >= least else least
    layers = sorted(draw(st.sets(st.integers(0, 12), min_size=1, max_size=4)))
    load = np.random.default_rng(draw(st.integers(0, 10**6))).zipf(1.4, (len(layers), num_experts))
    return plan(
        load % 5000, slots * num_devices, num_groups, num_nodes, num_devices, layer_ids=layers
    )


@settings(max_examples=1000, deadline=None)
@given(placements())
def test_every_map_reads_back_and_passes_the_rules_of_its_format(placement):
    shape = placement.shape
    for format in FORMATS:
        again = decode(
            encode(placement, format, num_hidden_layers=15),
            num_experts=shape.num_experts,
            num_devices=shape.num_devices,
            num_groups=shape.num_groups,
            num_nodes=shape.num_nodes,
            layer_ids=placement.layer_ids,
        )
        assert np.array_equal(again.physical_to_logical, placement.physical_to_logical)
        assert np.array_equal(again.logical_to_physical, placement.logical_to_physical)
        assert again.layer_ids == placement.layer_ids
        assert not broken_rules(again)
    arrays = to_arrays(placement, max_copies=placement.logical_to_physical.shape[2] + 2)
    again = from_arrays(arrays, shape.num_devices, layer_ids=placement.layer_ids)
    assert np.array_equal(again.physical_to_logical, placement.physical_to_logical)


def as_vllm_ascend_reads(path, layer_id):
    """What ``expert_file_to_tensor`` does: by the order of the lists, ids ignored, ragged rows fail."""
    with open(path) as file:
        data = json.load(file)
    if layer_id == data["moe_layer_count"]:
        return None, None
    if layer_id > data["moe_layer_count"]:
        raise ValueError("layer_id is beyond the map")
    devices = data["layer_list"][layer_id]["device_list"]
    rows = [device["device_expert"] for device in devices]
    if len({len(row) for row in rows}) != 1:
        raise ValueError("expected sequence of equal length")
    return rows, sum(len(row) for row in rows)


def test_vllm_ascend_reads_the_map_as_it_was_planned(tmp_path):
    placement = plan(zipf_load(0, 3, 16), 24, 1, 1, 4, layer_ids=[3, 4, 5])
    path = tmp_path / "expert_map.json"
    path.write_bytes(encode(placement, "vllm-ascend"))
    for index in range(3):
        rows, num_slots = as_vllm_ascend_reads(path, index)
        assert rows == placement.per_device[index].tolist()
        assert num_slots == 24
        redundant = len(rows) * len(rows[0]) - 16
        assert (16 + redundant) % 4 == 0
        assert_valid([[expert for row in rows for expert in row]], 16, 4)
    assert as_vllm_ascend_reads(path, 3) == (None, None)
    with pytest.raises(ValueError, match="beyond"):
        as_vllm_ascend_reads(path, 4)


def test_the_file_is_the_example_of_the_format():
    placement = make_placement([[0, 1, 2, 3, 2, 0]], num_experts=4, num_devices=2)
    assert json.loads(encode(placement, "vllm-ascend")) == {
        "moe_layer_count": 1,
        "layer_list": [
            {
                "layer_id": 0,
                "device_count": 2,
                "device_list": [
                    {"device_id": 0, "device_expert": [0, 1, 2]},
                    {"device_id": 1, "device_expert": [3, 2, 0]},
                ],
            }
        ],
    }
    assert json.loads(encode(placement, "sglang")) == {
        "physical_to_logical_map": [[0, 1, 2, 3, 2, 0]]
    }
    late = make_placement([[0, 1, 2, 3, 2, 0]], num_experts=4, num_devices=2, layer_ids=[3])
    assert yaml.safe_load(encode(late, "tensorrt-llm")) == {
        "num_slots": 6,
        "initial_global_assignments": {3: [0, 1, 2, 3, 2, 0]},
        "layer_updates_per_iter": 0,
    }


def test_sglang_has_a_row_for_every_decoder_layer():
    placement = plan(zipf_load(0, 2, 8), 12, 1, 1, 4, layer_ids=[1, 3])
    rows = json.loads(encode(placement, "sglang", num_hidden_layers=6))["physical_to_logical_map"]
    assert len(rows) == 6
    trivial = [slot % 8 for slot in range(12)]
    assert [rows[layer] for layer in (0, 2, 4, 5)] == [trivial] * 4
    assert [rows[1], rows[3]] == placement.physical_to_logical.tolist()
    with pytest.raises(UsageError, match="at least 4"):
        encode(placement, "sglang", num_hidden_layers=3)


def test_deepseek_arrays_are_those_of_its_eplb_and_the_same_bytes_each_time():
    placement = plan(zipf_load(0, 2, 8), 12, 1, 1, 4)
    data = encode(placement, "deepseek")
    assert data == encode(placement, "deepseek")
    with np.load(io.BytesIO(data)) as arrays:
        phy2log, log2phy, logcnt = (arrays[name] for name in ("phy2log", "log2phy", "logcnt"))
    for layer in range(2):
        for expert in range(8):
            slots = [slot for slot in range(12) if phy2log[layer, slot] == expert]
            assert logcnt[layer, expert] == len(slots)
            assert [slot for slot in log2phy[layer, expert] if slot >= 0] == slots


def ascend(change):
    placement = make_placement([[0, 1, 2, 3, 2, 0]] * 2, num_experts=4, num_devices=2)
    value = json.loads(encode(placement, "vllm-ascend"))
    change(value)
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("layer-order", lambda v: v["layer_list"].reverse()),
        ("device-order", lambda v: v["layer_list"][0]["device_list"].reverse()),
        ("counts-agree", lambda v: v.update(moe_layer_count=3)),
        ("counts-agree", lambda v: v["layer_list"][1].update(device_count=3)),
        ("equal-slots", lambda v: v["layer_list"][1]["device_list"][0]["device_expert"].pop()),
        ("equal-devices", lambda v: drop_device(v)),
    ],
)
def test_vllm_ascend_rules_by_name(rule, change):
    assert rule in vllm_ascend.RULES
    with pytest.raises(DataError, match=rule):
        decode(ascend(change))


def drop_device(value):
    layer = value["layer_list"][1]
    layer["device_list"].pop()
    layer["device_count"] = 1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"layer_list": [', "no JSON"),
        (b'{"layer_list": []}', "empty"),
        (b"[1, 2]", "no expert map"),
        (b'{"physical_to_logical_map": [[0, 1]], "x": 1}', "one-key"),
        (b'{"physical_to_logical_map": [[0, 1.5]]}', "whole numbers"),
        (b'{"physical_to_logical_map": [[0, 1], [0]]}', "equal-slots"),
        (b"initial_global_assignments:\n  a: [0, 1]\n", "layer-keys"),
        (b"num_slots: 3\ninitial_global_assignments:\n  1: [0, 1]\n", "num-slots"),
        (b"initial_global_assignments:\n  1: [0, 1]\nlayer_updates_per_iter: 2\n", "static"),
        (b"initial_global_assignments: [", "no YAML"),
        (b"PK\x03\x04rest", "no npz"),
        (b'{"layer_list": ' + b"[" * 50_000, "no JSON"),
        (b'{"physical_to_logical_map": ' + b"[" * 50_000, "no JSON"),
        (b'{"physical_to_logical_map": [[' + b"9" * 30 + b"]]}", "no expert has that id"),
        (b"initial_global_assignments:\n  1: [-1, 1]\n", "no expert has that id"),
    ],
)
def test_broken_files_are_named(data, words):
    with pytest.raises(DataError, match=words):
        decode(data, num_devices=1)


@pytest.mark.parametrize("format", FORMATS)
def test_damaged_files_are_refused_or_valid_placements(format):
    rng = random.Random(5)
    data = encode(plan(np.arange(1, 17).reshape(2, 8), 12, 2, 2, 4), format)
    num_refused = 0
    for _ in range(400):
        at, what = rng.randrange(len(data)), rng.randrange(4)
        put = rng.choice([b"[", b"-1", b"9" * 30, b"null", b"1.5", b"\xff", b"&a ", b"*a "])
        damaged = {
            0: data[:at],
            1: data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :],
            2: data[:at] + put + data[at:],
            3: data[:at] + data[at + rng.randint(1, 20) :],
        }[what]
        try:
            validate(decode(damaged, num_experts=8, num_devices=4, num_groups=2, num_nodes=2))
        except RlInsightError:
            num_refused += 1
    assert num_refused > 200


def test_deepseek_arrays_that_disagree_are_refused():
    placement = make_placement([[0, 1, 2, 3, 2, 0]], num_experts=4, num_devices=2)
    for name, change in (("logcnt", 1), ("log2phy", 1)):
        with np.load(io.BytesIO(encode(placement, "deepseek"))) as found:
            arrays = {key: found[key].copy() for key in found.files}
        arrays[name].flat[0] += change
        stream = io.BytesIO()
        np.savez(stream, **arrays)
        with pytest.raises(DataError, match="maps-agree"):
            decode(stream.getvalue())
    assert set(deepseek.RULES) == {"maps-agree"}


def test_pickles_are_never_read():
    stream = io.BytesIO()
    np.savez(stream, phy2log=np.array([{"a": 1}], dtype=object))
    with pytest.raises(DataError, match="plain arrays"):
        decode(stream.getvalue())


def test_a_map_for_other_devices_or_layers_is_refused():
    placement = plan(zipf_load(0, 2, 8), 12, 1, 1, 4, layer_ids=[1, 3])
    with pytest.raises(DataError, match="for 4 devices, not 3"):
        decode(encode(placement, "vllm-ascend"), num_devices=3)
    with pytest.raises(DataError, match=r"for layers \[1, 3\], not \[1, 2\]"):
        decode(encode(placement, "tensorrt-llm"), num_devices=4, layer_ids=[1, 2])
    with pytest.raises(DataError, match="all-layers"):
        decode(encode(placement, "sglang"), num_devices=4, layer_ids=[1, 9])
    with pytest.raises(UsageError, match="number of devices"):
        decode(encode(placement, "sglang"))


@pytest.mark.parametrize(
    ("name", "format", "expected"),
    [
        ("m.json", None, "vllm-ascend"),
        ("m.json", "sglang", "sglang"),
        ("m.yaml", None, "tensorrt-llm"),
        ("m.npz", None, "deepseek"),
    ],
)
def test_the_ending_gives_the_format(name, format, expected):
    assert format_of(name, format) == expected


@pytest.mark.parametrize(
    ("name", "format"), [("m.txt", None), ("m.json", "x"), ("m.txt", "vllm-ascend"), ("m", None)]
)
def test_endings_that_no_reader_takes_are_refused(name, format):
    with pytest.raises(UsageError):
        format_of(name, format)


def broken_placement(rows, num_experts, num_devices, num_groups=1, num_nodes=1, **changes):
    """A placement that make_placement would not make."""
    rows = np.array(rows)
    count = np.array([[list(row).count(e) for e in range(num_experts)] for row in rows])
    log = np.full((len(rows), num_experts, max(count.max(), 1)), -1)
    for layer, row in enumerate(rows):
        for expert in range(num_experts):
            slots = np.flatnonzero(row == expert)
            log[layer, expert, : len(slots)] = slots
    fields = {
        "physical_to_logical": rows,
        "logical_to_physical": log,
        "replica_count": count,
        "layer_ids": tuple(range(len(rows))),
        "shape": make_shape(num_experts, rows.shape[1], num_groups, num_nodes, num_devices),
    }
    return Placement(**{**fields, **changes})


@pytest.mark.parametrize(
    ("rule", "placement"),
    [
        ("ids-in-range", broken_placement([[0, 1, 2, 9]], 4, 2)),
        ("every-expert-placed", broken_placement([[0, 1, 2, 0]], 4, 2)),
        ("no-twins", broken_placement([[0, 0, 1, 2, 3, 1]], 4, 2)),
        ("groups-whole", broken_placement([[0, 2, 1, 3]], 4, 2, 2, 2)),
        ("layers-ascend", broken_placement([[0, 1]], 2, 1, layer_ids=(1, 0))),
        ("maps-agree", broken_placement([[0, 1]], 2, 1, replica_count=np.array([[2, 1]]))),
        (
            "maps-agree",
            broken_placement([[0, 1]], 2, 1, logical_to_physical=np.array([[[1], [0]]])),
        ),
        (
            "equal-slots",
            broken_placement([[0, 1]], 2, 1, physical_to_logical=np.array([[0, 1, 0]])),
        ),
    ],
)
def test_every_rule_is_found_by_name(rule, placement):
    assert rule in RULES
    assert rule in [broken.rule for broken in broken_rules(placement)]
    with pytest.raises(DataError, match=rule):
        validate(placement)
    with pytest.raises(DataError):
        encode(placement, "vllm-ascend")


def test_groups_unevenly_on_nodes_are_found():
    rows = [[0, 1, 2, 3, 4, 5, 6, 7, 6, 7, 6, 7]]  # groups 0, 1, 2 on node 0, 3 on node 1
    placement = broken_placement(rows, 8, 4, 4, 2)
    assert "nodes-full" in [broken.rule for broken in broken_rules(placement)]
    assert set(sglang.RULES) | set(tensorrt_llm.RULES) >= {"one-key", "num-slots"}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[0, 1], [0]], "differ in length"),
        ([[0.0, 1.0]], "whole numbers"),
        ([[0, 5]], "expert 5 is not one of 0..1"),
        ([[0, 0]], "expert 1 is in no slot"),
    ],
)
def test_make_placement_names_what_is_wrong(rows, words):
    with pytest.raises(DataError, match=words):
        make_placement(rows, num_experts=2, num_devices=1)


def test_vllm_arrays_that_disagree_are_refused():
    placement = plan(zipf_load(0, 2, 8), 12, 1, 1, 4)
    arrays = to_arrays(placement)
    with pytest.raises(DataError, match="logical_replica_count"):
        from_arrays({**arrays, "logical_replica_count": arrays["logical_replica_count"] + 1}, 4)
    with pytest.raises(DataError, match="logical_to_physical_map"):
        from_arrays({**arrays, "logical_to_physical_map": arrays["logical_to_physical_map"] * 0}, 4)
    with pytest.raises(DataError, match="has no physical_to_logical_map"):
        from_arrays({}, 4)
    with pytest.raises(UsageError, match="max_copies is 0"):
        to_arrays(placement, max_copies=0)

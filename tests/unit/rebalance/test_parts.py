# SPDX-License-Identifier: Apache-2.0
"""Replicas, groups, bounds, packing and search, each against a plain loop."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_cases import plain_device_loads, zipf_load

from rl_insight_hooks.rebalance import lower_bound
from rl_insight_hooks.rebalance.exchange import exchanges
from rl_insight_hooks.rebalance.groups import all_ways, give_groups, num_ways
from rl_insight_hooks.rebalance.pack import pack
from rl_insight_hooks.rebalance.replicate import replicate
from rl_insight_hooks.rebalance.risk import expected_largest
from rl_insight_hooks.rebalance.search import improve


def no_twins(row, num_devices):
    slots = len(row) // num_devices
    devices = [row[d * slots : (d + 1) * slots] for d in range(num_devices)]
    return all(len(set(device)) == slots for device in devices)


def one_by_one(weights, num_slots, max_copies, offset):
    counts = [1] * len(weights)
    for _ in range(num_slots - len(weights)):
        values = [
            w / (n - offset) if n < max_copies else -1.0
            for w, n in zip(weights, counts, strict=True)
        ]
        counts[values.index(max(values))] += 1
    return counts


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_replicas_are_those_of_one_by_one(data):
    num_experts = data.draw(st.integers(1, 30))
    max_copies = data.draw(st.integers(1, 9))
    num_slots = data.draw(st.integers(num_experts, num_experts * max_copies))
    offset = data.draw(st.sampled_from([0.0, 0.4, 0.7]))
    rows = data.draw(
        st.lists(
            st.lists(st.integers(1, 10**6), min_size=num_experts, max_size=num_experts),
            min_size=1,
            max_size=3,
        )
    )
    found = replicate(np.array(rows, dtype=float), num_slots, max_copies, offset)
    assert found.tolist() == [one_by_one(row, num_slots, max_copies, offset) for row in rows]


def test_replicas_of_experts_without_load_stay_within_limits():
    found = replicate(np.array([[100.0, 0, 0, 0], [0, 0, 0, 0]]), 9, 3)
    assert found.sum(axis=1).tolist() == [9, 9]
    assert found.max() <= 3
    assert found[0, 0] == 3


def test_d_hondt_makes_the_heaviest_replica_as_light_as_can_be():
    weights = [50, 30, 11, 9]
    found = replicate(np.array([weights], dtype=float), 7, 4)[0]
    ours = max(w / n for w, n in zip(weights, found, strict=True))
    best = min(
        max(w / n for w, n in zip(weights, counts, strict=True))
        for counts in itertools.product(range(1, 5), repeat=4)
        if sum(counts) == 7
    )
    assert ours == best


@pytest.mark.parametrize(("groups", "nodes"), [(8, 4), (8, 2), (6, 3), (4, 1), (4, 4)])
def test_all_ways_are_all_and_each_once(groups, nodes):
    ways = {frozenset(frozenset(node) for node in way) for way in all_ways(groups, nodes).tolist()}
    assert len(ways) == len(all_ways(groups, nodes)) == num_ways(groups, nodes)
    assert all(set().union(*way) == set(range(groups)) for way in ways)


def test_there_are_105_ways_to_pair_8_groups():
    assert num_ways(8, 4) == 105


def test_groups_are_paired_as_well_as_any_pairing():
    loads = np.random.default_rng(3).integers(1, 1000, (20, 8)).astype(float)
    found = give_groups(loads, 4)
    for row, nodes in zip(loads, found, strict=True):
        ours = max(sum(row[g] for g in node) for node in nodes)
        best = min(
            max(row[order[i]] + row[order[i + 1]] for i in range(0, 8, 2))
            for order in itertools.permutations(range(8))
            if all(order[i] < order[i + 1] for i in range(0, 8, 2))
            and order[0] < order[2] < order[4] < order[6]
        )
        assert ours == best


def test_groups_too_many_to_list_are_still_given_evenly():
    loads = zipf_load(0, 5, 64).astype(float)
    found = give_groups(loads, 8)
    for row, nodes in zip(loads, found, strict=True):
        assert sorted(nodes.ravel().tolist()) == list(range(64))
        least = max(
            row.sum() / 8, row.max() + sum(sorted(row)[:7])
        )  # no way has a lighter heaviest node
        assert max(sum(row[g] for g in node) for node in nodes) <= 1.01 * least


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(0, 2))
def test_no_placement_at_all_beats_the_bound(seed, num_devices, spare):
    """Every placement of a tiny shape, by brute force."""
    num_experts = 3
    num_slots = -(-(num_experts + spare) // num_devices) * num_devices
    if num_slots > num_experts * num_devices:
        return
    load = np.random.default_rng(seed).integers(0, 100, num_experts)
    bound = lower_bound(load[None], num_slots, num_devices)[0]
    best = min(
        max(plain_device_loads([load], [row], num_devices)[0])
        for row in itertools.product(range(num_experts), repeat=num_slots)
        if set(row) == set(range(num_experts)) and no_twins(row, num_devices)
    )
    assert best >= bound - 1e-9


def test_the_bound_by_groups_is_that_of_the_best_pairing():
    load = np.repeat(
        [[8.0, 1, 1, 1]], 1, axis=0
    )  # four groups of one expert, two nodes of two devices
    assert lower_bound(load, 4, 4, 4, 2).tolist() == [
        8.0
    ]  # one replica each: the hot expert's device
    assert lower_bound(load, 8, 4, 4, 2).tolist() == [4.5]  # the node with 8 + 1, on two devices
    assert lower_bound(load, 8, 4, 1, 1).tolist() == [2.75]  # the mean


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_packing_has_equal_slots_and_no_twins(data):
    num_devices = data.draw(st.integers(1, 7))
    counts = data.draw(st.lists(st.integers(1, num_devices), min_size=1, max_size=20))
    while sum(counts) % num_devices:
        counts.append(1)
    seed = data.draw(st.integers(0, 1000))
    weights = np.random.default_rng(seed).integers(0, 50, len(counts)).astype(float)
    held = pack(weights[None], np.array([counts]), num_devices)[0]
    assert sorted(held.ravel().tolist()) == sorted(
        expert for expert, count in enumerate(counts) for _ in range(count)
    )
    assert all(len(set(device)) == len(device) for device in held.tolist())


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(1, 12))
def test_search_never_makes_a_row_worse_and_reports_true_loads(seed, num_devices, slots):
    rng = np.random.default_rng(seed)
    weights = rng.zipf(1.5, (2, num_devices * slots)).astype(float) % 1000
    counts = np.ones(weights.shape, dtype=np.int64)
    held = pack(weights, counts, num_devices)
    before = plain_device_loads(weights, held.reshape(2, -1), num_devices)
    loads = improve(held, weights, weights.sum(axis=1) / num_devices, 8)
    after = plain_device_loads(weights, held.reshape(2, -1), num_devices)
    assert np.allclose(loads, after)
    assert (np.max(after, axis=1) <= np.max(before, axis=1) + 1e-9).all()
    for row in held.reshape(2, -1):
        assert sorted(row.tolist()) == list(range(num_devices * slots))


def test_search_finds_the_even_split():
    weights = np.array([[8.0, 7, 6, 5, 4, 3, 2, 1]])
    held = np.array([[[0, 1, 2, 3], [4, 5, 6, 7]]])
    assert improve(held, weights, np.array([18.0]), 4).tolist() == [[18.0, 18.0]]


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 6, 9, 40, 1000])
def test_exchanges_keep_slots_equal(slots):
    ways = exchanges(slots)
    assert (ways.keep_TM.sum(axis=0) == slots).all()
    assert (np.sort(ways.order_MT, axis=1) == np.arange(2 * slots)).all()
    for column, order in enumerate(ways.order_MT):
        assert set(np.flatnonzero(ways.keep_TM[:, column])) == set(order[:slots].tolist())
    assert ways.keep_TM.shape[1] <= 512


def test_expected_largest_is_that_of_samples():
    for num in (2, 8, 64):
        sampled = np.random.default_rng(0).normal(size=(20_000, num)).max(axis=1).mean()
        assert abs(expected_largest(num) - sampled) < 0.05
    assert expected_largest(1) == 0.0

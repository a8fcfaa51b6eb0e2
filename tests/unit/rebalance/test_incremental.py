# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_cases import assert_valid, plain_ratios, zipf_load

from rl_insight_hooks.errors import UsageError
from rl_insight_hooks.rebalance import linear_placement, make_placement, moves_between, plan, replan
from rl_insight_hooks.rebalance.align import align, match
from rl_insight_hooks.rebalance.shape import make_shape


def drifted(load, seed):
    factor = np.exp(np.random.default_rng(seed).normal(0.0, 0.2, load.shape))
    return np.rint(load * factor).astype(np.int64)


def apply_moves(old, moves):
    """The old map with each transfer carried out, and each source checked to hold the expert before."""
    rows = old.physical_to_logical.copy()
    slots = old.shape.slots_per_device
    for move in moves:
        row = old.layer_ids.index(move.layer_id)
        source = old.per_device[row, move.from_device].tolist()
        assert move.expert in source
        assert move.expert not in old.per_device[row, move.to_device]
        assert move.to_slot // slots == move.to_device
        assert rows[row, move.to_slot] == move.replaces
        rows[row, move.to_slot] = move.expert
    return rows


@pytest.mark.parametrize("seed", range(3))
def test_few_moves_bring_most_of_a_full_plan(seed):
    sizes = (288, 8, 4, 32)
    load = zipf_load(seed, 58, 256)
    old = plan(load, *sizes)
    now = drifted(load, 100 + seed)
    new, moves = replan(old, now, 0.15)
    before = np.mean(plain_ratios(now, old.physical_to_logical, 32))
    few = np.mean(plain_ratios(now, new.physical_to_logical, 32))
    full = np.mean(plain_ratios(now, plan(now, *sizes).physical_to_logical, 32))
    assert (before - few) / (before - full) >= 0.90
    assert len(moves) <= 0.15 * old.physical_to_logical.size
    assert (new.physical_to_logical != old.physical_to_logical).sum() == len(moves)
    assert_valid(new.physical_to_logical, 256, 32, 8, 4)
    assert np.array_equal(apply_moves(old, moves), new.physical_to_logical)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([(12, 1, 1, 4), (16, 2, 2, 4), (8, 1, 1, 4)]),
    st.integers(0, 12),
)
def test_any_budget_is_kept_and_never_makes_it_worse(seed, sizes, budget):
    load = zipf_load(seed, 2, 8)
    old = plan(load, *sizes)
    now = drifted(load, seed + 1)
    new, moves = replan(old, now, budget)
    assert len(moves) <= budget
    assert_valid(new.physical_to_logical, 8, sizes[3], sizes[1], sizes[2])
    assert np.array_equal(apply_moves(old, moves), new.physical_to_logical)
    before = plain_ratios(now, old.physical_to_logical, sizes[3])
    after = plain_ratios(now, new.physical_to_logical, sizes[3])
    assert all(a <= b + 1e-9 for a, b in zip(after, before, strict=True))


def test_no_moves_leave_the_map_as_it_is():
    load = zipf_load(0, 3, 16)
    old = linear_placement(3, 16, 4)
    new, moves = replan(old, load, 0)
    assert not moves
    assert np.array_equal(new.physical_to_logical, old.physical_to_logical)


def test_without_a_limit_it_is_as_good_as_a_full_plan():
    load = zipf_load(0, 6, 32)
    old = make_placement(np.tile(np.arange(40) % 32, (6, 1)), num_experts=32, num_devices=8)
    new, _ = replan(old, load)
    full = plan(load, 40, 1, 1, 8)
    ours = plain_ratios(load, new.physical_to_logical, 8)
    theirs = plain_ratios(load, full.physical_to_logical, 8)
    assert all(a <= b + 1e-9 for a, b in zip(ours, theirs, strict=True))


def test_most_gain_comes_first():
    load = zipf_load(1, 10, 64)
    old = make_placement(np.tile(np.arange(72) % 64, (10, 1)), num_experts=64, num_devices=8)
    means = []
    for budget in (0, 10, 20, 40, 80, 160):
        new, moves = replan(old, load, budget)
        assert len(moves) <= budget
        means.append(np.mean(plain_ratios(load, new.physical_to_logical, 8)))
    assert all(later < earlier for earlier, later in itertools.pairwise(means))
    per_move = -np.diff(means) / np.diff([0, 10, 20, 40, 80, 160])
    assert per_move[0] == max(per_move)


def test_twins_of_another_planner_are_parted():
    old = make_placement([[0, 0, 1, 2, 3, 1]], num_experts=4, num_devices=2)
    new, moves = replan(old, [[10, 20, 30, 5]], 0)
    assert_valid(new.physical_to_logical, 4, 2)
    assert len(moves) == 1
    assert moves[0].replaces == 0


def test_a_map_that_splits_groups_is_refused():
    old = make_placement([[0, 2, 1, 3]], num_experts=4, num_devices=2, num_groups=2, num_nodes=2)
    with pytest.raises(UsageError, match="groups-whole"):
        replan(old, [[1, 2, 3, 4]])


@pytest.mark.parametrize("limit", [-1, 1.5, -0.1])
def test_limits_that_are_none_are_refused(limit):
    with pytest.raises(UsageError, match="max_moves"):
        replan(linear_placement(1, 4, 2), [[1, 2, 3, 4]], limit)


def test_a_map_of_another_model_is_refused():
    with pytest.raises(UsageError, match="2 layers and 8 experts"):
        replan(linear_placement(1, 4, 2), np.ones((2, 8)))


def test_renumbering_devices_costs_no_moves():
    load = zipf_load(0, 4, 32)
    old = plan(load, 40, 4, 2, 8)
    order = np.array([6, 5, 4, 7, 1, 0, 3, 2])  # nodes swapped, devices shuffled within
    shuffled = old.per_device[:, order][:, :, ::-1]
    back = align(np.ascontiguousarray(shuffled), old.per_device, old.shape)
    assert np.array_equal(back, old.per_device)


def test_match_takes_the_largest_first():
    common = np.array([[[5, 9, 0], [8, 0, 1], [0, 0, 2]]])
    assert match(common).tolist() == [[1, 0, 2]]


def test_transfers_come_from_the_same_node_where_they_can():
    old = make_placement([[0, 1, 2, 3, 0, 1, 2, 3]], num_experts=4, num_devices=4, num_nodes=2)
    new = make_placement([[2, 1, 0, 3, 0, 1, 2, 3]], num_experts=4, num_devices=4, num_nodes=2)
    moves = moves_between(old, new)
    assert [(m.expert, m.from_device, m.to_device) for m in moves] == [(2, 1, 0), (0, 0, 1)]
    assert make_shape(4, 8, 1, 2, 4).num_domains == 1

# SPDX-License-Identifier: Apache-2.0
"""The parts of the verl integration that need no verl: the step, what carries it, the merged metrics."""

from __future__ import annotations

import pytest
from rl_insight_hooks.integrations.verl.carry import KEY, put_step, take_step
from rl_insight_hooks.integrations.verl.clock import StepClock
from rl_insight_hooks.integrations.verl.metrics import merge


def test_a_clock_that_hears_nothing_counts_updates():
    clock = StepClock()
    assert (clock.step, clock.source) == (1, "inferred")
    clock.updated()
    clock.updated()
    assert (clock.step, clock.source) == (3, "inferred")


def test_a_checkpoint_sets_the_count_right():
    clock = StepClock()
    for _ in range(4):  # four updates a step
        clock.updated()
    clock.saved(1)
    assert (clock.step, clock.source) == (2, "inferred")


def test_synced_weights_of_a_step_begin_the_next_and_end_the_counting():
    clock = StepClock()
    clock.synced(10)  # a run that resumed
    assert (clock.step, clock.source) == (11, "inferred")
    clock.updated()
    clock.saved(10)  # an older checkpoint: the weights are the better witness
    assert clock.step == 11
    clock.synced(11)
    assert clock.step == 12


def test_what_the_driver_tells_beats_everything_and_is_no_guess():
    clock = StepClock()
    clock.synced(4)
    clock.carried(7)
    assert (clock.step, clock.source) == (7, "given")
    clock.synced(7)
    assert (clock.step, clock.source) == (8, "inferred")
    clock.profiled(9)
    assert (clock.step, clock.source) == (9, "given")


class _Batch:
    def __init__(self, **holders):
        self.__dict__.update(holders)


@pytest.mark.parametrize("holder", ["extra_info", "meta_info"])
def test_a_batch_carries_the_step_and_is_left_as_it_was(holder):
    batch = _Batch(**{holder: {"temperature": 1.0}})
    assert put_step(batch, 12)
    assert getattr(batch, holder)[KEY] == 12
    assert take_step(batch) == 12
    assert getattr(batch, holder) == {"temperature": 1.0}
    assert take_step(batch) is None


@pytest.mark.parametrize("step", [None, True, "3", 3.0])
def test_what_is_no_step_is_not_sent(step):
    batch = _Batch(extra_info={})
    assert not put_step(batch, step)
    assert batch.extra_info == {}


def test_a_batch_without_a_place_for_it():
    assert not put_step(_Batch(), 3)
    assert take_step(_Batch()) is None
    assert take_step(None) is None


def test_merge_over_ranks():
    first = {
        "moe_load/r/max_over_mean": 1.5,
        "moe_load/r/worst_layer": 3.0,
        "moe_load/r/assignments": 10.0,
    }
    second = {
        "moe_load/r/max_over_mean": 4.0,
        "moe_load/r/worst_layer": 8.0,
        "moe_load/r/assignments": 30.0,
    }
    first |= {
        "moe_load/r/max_over_mean_avg": 1.0,
        "moe_load/r/failed": 1.0,
        "moe_load/r/passes": 4.0,
    }
    second |= {
        "moe_load/r/max_over_mean_avg": 2.0,
        "moe_load/r/failed": 2.0,
        "moe_load/r/passes": 4.0,
    }
    expected = {
        "moe_load/r/max_over_mean": 4.0,
        "moe_load/r/worst_layer": 8.0,
        "moe_load/r/assignments": 40.0,
        "moe_load/r/max_over_mean_avg": 1.5,
        "moe_load/r/failed": 3.0,
        "moe_load/r/passes": 4.0,
    }
    assert merge([first, second]) == merge([second, first]) == expected
    assert merge([]) == {}

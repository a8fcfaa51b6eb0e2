# SPDX-License-Identifier: Apache-2.0
"""Score, forecast, sweep: against loops and hand-made numbers."""

from __future__ import annotations

import numpy as np
import pytest
from placement_cases import plain_device_loads, plain_ratios, zipf_load

from rl_insight_hooks.errors import UsageError
from rl_insight_hooks.rebalance import (
    device_load,
    linear_placement,
    make_placement,
    max_over_mean,
    plan,
    score,
    total_variation,
)
from rl_insight_hooks.rebalance.assess import assess, hold_out, sweep
from rl_insight_hooks.rebalance.history import forecast
from rl_insight_hooks.rebalance.shape import make_shape


def test_device_loads_are_those_of_a_loop():
    load = zipf_load(0, 4, 16)
    placement = plan(load, 24, 1, 1, 4)
    expected = plain_device_loads(load, placement.physical_to_logical, 4)
    assert np.allclose(device_load(load, placement), expected)


def test_scores_by_hand():
    # Two layers, two devices; the first layer has one device loaded three times as much.
    placement = linear_placement(2, 2, 2)
    found = score([[3, 1], [2, 2]], placement)
    assert found.max_over_mean_L.tolist() == [1.5, 1.0]
    assert (found.mean, found.worst, found.worst_row) == (1.25, 1.5, 0)
    assert max_over_mean([[0, 0]]).tolist() == [1.0]


def test_replicas_share_evenly():
    placement = make_placement([[0, 1, 0, 2]], num_experts=3, num_devices=2)
    assert device_load([[10, 3, 7]], placement).tolist() == [[8.0, 12.0]]


def test_a_load_of_other_layers_is_refused():
    with pytest.raises(UsageError, match=r"\[3, 2\].*\[2, 2\]"):
        score(np.ones((3, 2)), linear_placement(2, 2, 2))


def test_total_variation_by_hand():
    assert total_variation([[1, 1, 0, 0], [5, 0, 0, 0]], [[1, 0, 1, 0], [0, 0, 0, 9]]).tolist() == [
        0.5,
        1.0,
    ]
    assert total_variation([[0, 0]], [[1, 1]]).tolist() == [0.0]


def test_linear_placement_is_what_a_server_does_without_a_map():
    assert linear_placement(1, 6, 3).per_device.tolist() == [[[0, 1], [2, 3], [4, 5]]]
    padded = linear_placement(1, 5, 2).per_device.tolist()
    assert padded == [[[0, 1, 2], [3, 4, 0]]]


def test_holdout_plans_on_the_first_windows_and_scores_on_the_last():
    rng = np.random.default_rng(0)
    law = zipf_load(0, 3, 16) / zipf_load(0, 3, 16).sum()
    history = rng.poisson(law * 20_000, (10, 3, 16))
    shape = make_shape(16, 24, 1, 1, 4)
    found = hold_out(history, shape, 0.3)
    assert (found.num_planned, found.num_scored) == (7, 3)
    planned = plan(history[:7], 24, 1, 1, 4)
    for name, part in (("fitted", history[:7]), ("held_out", history[7:])):
        expected = plain_ratios(part.sum(axis=0), planned.physical_to_logical, 4)
        assert np.allclose(getattr(found, name).max_over_mean_L, expected)
    linear = linear_placement(3, 16, 4).physical_to_logical
    assert np.allclose(
        found.before.max_over_mean_L, plain_ratios(history[7:].sum(axis=0), linear, 4)
    )
    assert found.held_out.mean > found.fitted.mean


def test_holdout_never_looks_at_the_held_out_windows():
    history = np.random.default_rng(1).integers(1, 100, (8, 2, 16))
    shape = make_shape(16, 24, 1, 1, 4)
    changed = history.copy()
    changed[4:] = np.random.default_rng(2).integers(1, 100, changed[4:].shape)
    first, second = hold_out(history, shape, 0.5), hold_out(changed, shape, 0.5)
    assert first.fitted.max_over_mean_L.tolist() == second.fitted.max_over_mean_L.tolist()
    assert first.held_out.max_over_mean_L.tolist() != second.held_out.max_over_mean_L.tolist()


@pytest.mark.parametrize(
    ("windows", "fraction", "words"), [(1, 0.5, "at least two"), (4, 0.0, "0.0"), (4, 1.0, "1.0")]
)
def test_holdout_that_cannot_be_is_refused(windows, fraction, words):
    with pytest.raises(UsageError, match=words):
        hold_out(np.ones((windows, 1, 4), dtype=int), make_shape(4, 4, 1, 1, 2), fraction)


def test_assessment_forecasts_by_the_held_out_score():
    history = np.random.default_rng(0).integers(1, 100, (6, 2, 16))
    placement = plan(history, 24, 1, 1, 4)
    held = hold_out(history, placement.shape)
    with_history = assess(history, placement, held_out=held)
    without = assess(history, placement)
    assert with_history.forecast is held.held_out
    assert without.forecast is without.after
    assert with_history.gain == 1 - held.held_out.mean / held.before.mean
    assert (without.after.max_over_mean_L >= without.bound_L * (1 - 1e-12)).all()
    assert without.gap >= 0


def test_more_replicas_balance_better_and_cost_memory():
    load = zipf_load(0, 5, 32)[None]
    rows = sweep(load, [48, 32, 40], 1, 1, 8, expert_size_bytes=100)
    assert [row.num_replicas for row in rows] == [32, 40, 48]
    assert [row.extra_slots for row in rows] == [0, 1, 2]
    assert [row.extra_bytes for row in rows] == [0, 5 * 100, 2 * 5 * 100]
    assert rows[0].fitted.mean > rows[1].fitted.mean >= rows[2].fitted.mean - 1e-4
    assert all(row.held_out is None for row in rows)
    with pytest.raises(UsageError, match="40 or 48"):
        sweep(load, [41], 1, 1, 8)


def test_forecast_is_the_covariance_of_sums_by_hand():
    # Two experts, shares one half; in windows of 10 tokens they get 5 + x and 5 - x.
    xs = [1, -1, 2, -2, 0, 0]
    history = np.array([[[5 + x, 5 - x]] for x in xs])
    found = forecast(history)
    assert found.mean_LE.tolist() == [[30.0, 30.0]]
    covariance = found.deviation_LEB[0] @ found.deviation_LEB[0].T
    expected = 2 * 6 / 5 * sum(x * x for x in xs)
    assert np.allclose(covariance, [[expected, -expected], [-expected, expected]])


def test_forecast_weighs_by_half_life():
    history = np.array([[[8, 0]], [[0, 8]]])
    assert forecast(history, half_life=1).mean_LE.tolist() == [[4.0, 8.0]]
    with pytest.raises(UsageError, match="half_life"):
        forecast(history, half_life=0)

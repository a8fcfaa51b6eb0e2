# SPDX-License-Identifier: Apache-2.0
"""Metrics against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rl_insight_hooks.report import metrics
from rl_insight_hooks.report.trend import trend

LOAD = [[8, 4, 4, 0], [4, 4, 4, 4], [0, 0, 0, 0]]  # mean 4, 4, 0


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("max_over_mean", 2.0),
        ("balancedness", 0.5),
        ("imbalance_ratio", 1.0),
        ("max_vio", 1.0),  # 4 * 0.5 - 1
        ("min_vio", -1.0),
        ("avg_vio", 0.5),  # (1 + 0 + 0 + 1) / 4
        ("cv", math.sqrt(8) / 4),  # variance (16 + 0 + 0 + 16) / 4 = 8
        ("entropy", 1.5 / 2),  # 0.5 bit + 2 * 0.5 bit of 2 bits
        ("dead", 1.0),
        ("dead_fraction", 0.25),
    ],
)
def test_by_hand(name, first):
    values = metrics.METRICS[name](LOAD)
    assert values[0] == pytest.approx(first)
    even = {"max_over_mean": 1, "balancedness": 1, "entropy": 1}.get(name, 0)
    assert values[1] == pytest.approx(even)
    assert math.isnan(values[2])


def test_entropy_of_one_hot_expert_is_not_minus_zero():
    assert math.copysign(1.0, float(metrics.normalised_entropy([[7, 0, 0]])[0])) == 1.0


def test_one_rank_that_is_always_twice_loaded_is_never_called_balanced():
    """Two layers, two ranks, rank 0 always twice as loaded: mean/max is 1.5/2, over ranks and not layers."""
    assert metrics.balancedness([[2, 1], [2, 1]]).tolist() == [0.75, 0.75]


def test_distances_by_hand():
    p, q = [[2, 2, 0, 0]], [[0, 2, 2, 0]]
    assert metrics.total_variation(p, q)[0] == pytest.approx(0.5)
    assert metrics.jensen_shannon(p, q)[0] == pytest.approx(math.sqrt(0.5))
    assert metrics.jensen_shannon(p, p)[0] == 0
    assert metrics.total_variation([[1, 0]], [[0, 9]])[0] == 1
    assert metrics.jensen_shannon([[1, 0]], [[0, 9]])[0] == pytest.approx(1)
    assert math.isnan(metrics.total_variation([[0, 0]], [[1, 1]])[0])


def test_percentiles_leave_out_layers_without_tokens():
    found = metrics.percentiles([1.0, 2.0, np.nan, 3.0])
    assert found["p50"] == 2.0
    assert found["p95"] == pytest.approx(2.9)
    assert all(math.isnan(v) for v in metrics.percentiles([np.nan]).values())


def test_trend_finds_the_step_of_the_turn():
    found = trend([10, 20, 30, 40, 50, 60, 70, 80], [1.0, 1.01, 0.99, 1.0, 2.0, 2.01, 1.99, 2.0])
    assert found.turned_at == 50
    assert found.before == pytest.approx(1.0)
    assert found.after == pytest.approx(2.0)


def test_trend_is_silent_on_noise_and_on_few_steps():
    noise = np.random.default_rng(0).normal(1.5, 0.1, 40)
    assert trend(range(40), noise).turned_at is None
    assert trend([1, 2, 3], [1.0, 5.0, 9.0]).turned_at is None
    assert trend([1], [math.nan]) is None

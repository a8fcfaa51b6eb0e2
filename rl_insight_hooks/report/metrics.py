# SPDX-License-Identifier: Apache-2.0
"""Metrics of balance. Pure: arrays in, arrays out; always over experts or devices, never over layers.

Shape letters: L layers (or any rows), B bins (experts or devices). ``load_LB`` are tokens per bin. A row
without a token gives NaN: there is nothing to judge.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def max_over_mean(load_LB: npt.ArrayLike) -> FloatArray:
    """Return max_b c / mean_b c [L], in [1, B]; 1 is perfect (vllm-ascend's imbalance).

    The expert part of a layer takes the time of its busiest bin, so this bounds the slow-down against an even
    load.
    """
    load = _float(load_LB)
    return _over(load.max(-1), load.mean(-1))


def balancedness(load_LB: npt.ArrayLike) -> FloatArray:
    """Return mean_b c / max_b c [L], in (0, 1]; 1 is perfect (SGLang's utilisation, without its 1e-5)."""
    load = _float(load_LB)
    return _over(load.mean(-1), load.max(-1))


def imbalance_ratio(load_LB: npt.ArrayLike) -> FloatArray:
    """Return (max - mean) / mean [L], in [0, B - 1]; 0 is perfect (TensorRT-LLM)."""
    ratio: FloatArray = max_over_mean(load_LB) - 1.0
    return ratio


def max_violation(load_LB: npt.ArrayLike) -> FloatArray:
    """Return max_b d [L], d = B c / sum c - 1, in [0, B - 1] (verl's max_vio)."""
    largest: FloatArray = _deviation(load_LB).max(-1)
    return largest


def min_violation(load_LB: npt.ArrayLike) -> FloatArray:
    """Return min_b d [L], in [-1, 0]; -1: some bin gets nothing (verl's min_vio)."""
    smallest: FloatArray = _deviation(load_LB).min(-1)
    return smallest


def mean_violation(load_LB: npt.ArrayLike) -> FloatArray:
    """Return mean_b |d| [L], in [0, 2 - 2 / B]; 0 is perfect (verl's avg_vio)."""
    mean: FloatArray = np.abs(_deviation(load_LB)).mean(-1)
    return mean


def coefficient_of_variation(load_LB: npt.ArrayLike) -> FloatArray:
    """Return std_b c / mean_b c [L] (population std), in [0, sqrt(B - 1)]; 0 is perfect (MindSpeed, NeMo)."""
    load = _float(load_LB)
    return _over(load.std(-1), load.mean(-1))


def normalised_entropy(load_LB: npt.ArrayLike) -> FloatArray:
    """Return -sum_b p ln p / ln B [L], p = c / sum c, in [0, 1]; 1 is perfect."""
    load = _float(load_LB)
    share = _over(load, load.sum(-1, keepdims=True))
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(share > 0, share * np.log(share), 0.0)
    num_bins = load.shape[-1]
    entropy = 0.0 - terms.sum(-1) / np.log(num_bins) if num_bins > 1 else np.ones(load.shape[:-1])
    result: FloatArray = np.where(load.sum(-1) > 0, entropy, np.nan)
    return result


def num_dead(load_LB: npt.ArrayLike) -> FloatArray:
    """Return the number of bins without a token [L], in [0, B]."""
    load = _float(load_LB)
    dead: FloatArray = np.where(load.sum(-1) > 0, (load == 0).sum(-1), np.nan)
    return dead


def dead_fraction(load_LB: npt.ArrayLike) -> FloatArray:
    """Return the share of bins without a token [L], in [0, 1)."""
    fraction: FloatArray = num_dead(load_LB) / _float(load_LB).shape[-1]
    return fraction


def total_variation(load_LB: npt.ArrayLike, other_LB: npt.ArrayLike) -> FloatArray:
    """Return 0.5 sum_b |p - q| [L], in [0, 1]: the share of tokens that go elsewhere; 0 is equal."""
    p, q = _share(load_LB), _share(other_LB)
    distance: FloatArray = 0.5 * np.abs(p - q).sum(-1)
    return distance


def jensen_shannon(load_LB: npt.ArrayLike, other_LB: npt.ArrayLike) -> FloatArray:
    """Return the Jensen-Shannon distance [L] (root of the divergence, base 2), in [0, 1]; 0 is equal."""
    p, q = _share(load_LB), _share(other_LB)
    middle = 0.5 * (p + q)
    divergence = 0.5 * (_kullback_leibler(p, middle) + _kullback_leibler(q, middle))
    distance: FloatArray = np.sqrt(np.maximum(divergence, 0.0))
    return distance


METRICS: dict[str, Callable[[npt.ArrayLike], FloatArray]] = {
    "max_over_mean": max_over_mean,
    "balancedness": balancedness,
    "imbalance_ratio": imbalance_ratio,
    "max_vio": max_violation,
    "min_vio": min_violation,
    "avg_vio": mean_violation,
    "cv": coefficient_of_variation,
    "entropy": normalised_entropy,
    "dead": num_dead,
    "dead_fraction": dead_fraction,
}

# Metrics that are better when larger; for thresholds.
LARGER_IS_BETTER = frozenset({"balancedness", "entropy", "min_vio"})


def all_metrics(load_LB: npt.ArrayLike) -> dict[str, FloatArray]:
    """Return every metric of ``METRICS`` [L] by name."""
    return {name: function(load_LB) for name, function in METRICS.items()}


def percentiles(
    values_L: npt.ArrayLike, at: tuple[int, ...] = (50, 75, 90, 95)
) -> dict[str, float]:
    """Return {"p50": ...} over layers, NaN rows left out; NaN where nothing is left."""
    values = _float(values_L)
    values = values[~np.isnan(values)]
    if values.size == 0:
        return {f"p{q}": float("nan") for q in at}
    return {f"p{q}": float(v) for q, v in zip(at, np.percentile(values, at), strict=True)}


def _float(load: npt.ArrayLike) -> FloatArray:
    return np.asarray(load, dtype=np.float64)


def _over(top: FloatArray, bottom: FloatArray) -> FloatArray:
    with np.errstate(divide="ignore", invalid="ignore"):
        result: FloatArray = np.where(bottom > 0, top / bottom, np.nan)
    return result


def _deviation(load_LB: npt.ArrayLike) -> FloatArray:
    load = _float(load_LB)
    deviation: FloatArray = load.shape[-1] * _over(load, load.sum(-1, keepdims=True)) - 1.0
    return deviation


def _share(load_LB: npt.ArrayLike) -> FloatArray:
    load = _float(load_LB)
    return _over(load, load.sum(-1, keepdims=True))


def _kullback_leibler(p: FloatArray, q: FloatArray) -> FloatArray:
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(p > 0, p * np.log2(p / q), 0.0)
    total: FloatArray = np.where(np.isnan(p).any(-1) | np.isnan(q).any(-1), np.nan, terms.sum(-1))
    return total

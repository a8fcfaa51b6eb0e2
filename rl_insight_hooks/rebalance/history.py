# SPDX-License-Identifier: Apache-2.0
"""Loads of the past -> what to expect of the next window: mean, and how the experts vary together.

Shape letters: W windows, L layers, E experts, B blocks of consecutive windows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_insight_hooks.errors import UsageError
from rl_insight_hooks.rebalance.placement import FloatArray

_MOST_BLOCKS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a layer's experts will get: ``mean_LE`` tokens, give or take ``deviation_LEB``.

    The covariance of two experts' loads is the dot product of their deviations; B is 0 without a history.
    """

    mean_LE: FloatArray
    deviation_LEB: FloatArray


def as_history(load: npt.ArrayLike) -> npt.NDArray[Any]:
    """Return ``load`` [L, E] or [W, L, E] as an array of numbers [W, L, E].

    Raises:
        UsageError: ``load`` has another shape, is empty, or holds a negative or non-finite value.
    """
    try:
        raw: npt.NDArray[Any] = np.asarray(load)
    except ValueError:
        raw = np.empty(0, dtype=object)
    if (
        raw.dtype == object and raw.ndim == 1
    ):  # numpy before 1.24 makes such an array of ragged rows
        raise UsageError("load rows differ in length; give tokens [layers, experts]")
    if raw.dtype.kind not in "iufbO":
        raise UsageError(f"load is {raw.dtype}; give numbers of tokens [layers, experts]")
    if raw.ndim not in (2, 3):
        raise UsageError(
            f"load has the shape {list(raw.shape)}; give [layers, experts] or [windows, layers, experts]"
        )
    if 0 in raw.shape:
        raise UsageError(f"load is empty: {list(raw.shape)}; every size must be at least 1")
    try:
        values = np.asarray(raw, dtype=np.float64)
    except (TypeError, ValueError):
        raise UsageError("load holds something that is no number") from None
    bad = np.argwhere(~np.isfinite(values) | (values < 0))
    if len(bad):
        where = bad[0].tolist()
        raise UsageError(f"load{where} is {values[tuple(where)]}; loads are finite, not negative")
    return raw if raw.ndim == 3 else raw[None]


def total(history_WLE: npt.NDArray[Any]) -> FloatArray:
    """Return the sum over windows, float [L, E]; whole numbers are added exactly and rounded once."""
    if history_WLE.dtype.kind in "iub":
        if int(history_WLE.max(initial=0)) * len(history_WLE) < 2**63:
            return np.asarray(history_WLE.sum(axis=0, dtype=np.int64), dtype=np.float64)
        return np.asarray(history_WLE.astype(object).sum(axis=0), dtype=np.float64)
    return np.asarray(history_WLE.sum(axis=0), dtype=np.float64)


def forecast(history_WLE: npt.NDArray[Any], half_life: float | None = None) -> Forecast:
    """Return what to expect of as many windows again as there were.

    The mean is the sum over windows, each weighted by ``0.5 ** (age / half_life)``. Windows (or blocks of
    consecutive ones, 32 at most) are taken as independent samples of the layer's shares: a block with t tokens
    deviates by ``c - t * share``. Both the past sum and the coming one vary by that, hence the factor
    sqrt(2); the factor sqrt(B / (B - 1)) makes the variance unbiased. Tokens add up over windows, so a
    window counts by its tokens.

    Raises:
        UsageError: ``half_life`` is not positive.
    """
    if half_life is not None and not half_life > 0:
        raise UsageError(f"half_life is {half_life}; give a number of windows above 0")
    num_windows = len(history_WLE)
    if half_life is None:
        weight_W = np.ones(num_windows)
        mean_LE = total(history_WLE)
    else:
        weight_W = 0.5 ** (np.arange(num_windows - 1, -1, -1) / half_life)
        mean_LE = np.tensordot(weight_W, history_WLE.astype(np.float64), axes=1)
    if num_windows == 1:
        return Forecast(mean_LE=mean_LE, deviation_LEB=np.zeros((*mean_LE.shape, 0)))
    starts = np.linspace(0, num_windows, min(num_windows, _MOST_BLOCKS) + 1).astype(int)[:-1]
    weighted_WLE = history_WLE.astype(np.float64) * weight_W[:, None, None]
    block_BLE = np.add.reduceat(weighted_WLE, starts, axis=0)
    num_blocks = len(block_BLE)
    tokens_BL = block_BLE.sum(axis=2)
    sum_L1 = np.maximum(tokens_BL.sum(axis=0), np.finfo(np.float64).tiny)[:, None]
    deviation_BLE = block_BLE - tokens_BL[:, :, None] * (block_BLE.sum(axis=0) / sum_L1)
    deviation_BLE *= math.sqrt(2.0 * num_blocks / (num_blocks - 1))
    return Forecast(
        mean_LE=mean_LE, deviation_LEB=np.ascontiguousarray(np.moveaxis(deviation_BLE, 0, 2))
    )

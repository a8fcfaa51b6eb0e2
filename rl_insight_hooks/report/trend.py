# SPDX-License-Identifier: Apache-2.0
"""How a metric goes over steps, and the step at which it turned. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_MIN_STEPS = 6
_MIN_SIDE = 3
_MIN_T = 4.0  # shift over its standard error
_MIN_SHIFT = 0.05  # of the value before


@dataclass(frozen=True, slots=True)
class Trend:
    """First and last value, and a shift of level if there is one."""

    first: float
    last: float
    turned_at: int | None  # the first step of the new level
    before: float | None  # mean before the turn
    after: float | None


def trend(steps_S: npt.ArrayLike, values_S: npt.ArrayLike) -> Trend | None:
    """Return the trend of ``values_S`` over ``steps_S`` (ascending); None without a number.

    A turn is the split into two levels with the least squared error, told only where the levels differ by
    more than 5 % and by more than 4 standard errors (Welch); fewer than 6 steps tell none.
    """
    steps = np.asarray(steps_S, dtype=np.int64)
    values = np.asarray(values_S, dtype=np.float64)
    known = ~np.isnan(values)
    steps, values = steps[known], values[known]
    if values.size == 0:
        return None
    turn = _turn(values)
    first, last = float(values[0]), float(values[-1])
    if turn is None:
        return Trend(first, last, None, None, None)
    before, after = values[:turn], values[turn:]
    return Trend(first, last, int(steps[turn]), float(before.mean()), float(after.mean()))


def _turn(values: npt.NDArray[np.float64]) -> int | None:
    num = values.size
    if num < _MIN_STEPS:
        return None
    splits = np.arange(_MIN_SIDE, num - _MIN_SIDE + 1)
    cost = [values[:k].var() * k + values[k:].var() * (num - k) for k in splits]
    k = int(splits[int(np.argmin(cost))])
    before, after = values[:k], values[k:]
    shift = abs(after.mean() - before.mean())
    error = np.sqrt(before.var(ddof=1) / k + after.var(ddof=1) / (num - k))
    if shift <= _MIN_SHIFT * abs(before.mean()) or shift <= _MIN_T * error:
        return None
    return k

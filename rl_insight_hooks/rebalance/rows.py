# SPDX-License-Identifier: Apache-2.0
"""Row-wise indexing, without the index arrays that numpy's ``take_along_axis`` builds each time."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

_T = TypeVar("_T", bound=np.generic)


def take_rows(values_KN: npt.NDArray[_T], index_KM: npt.NDArray[np.int64]) -> npt.NDArray[_T]:
    """Return ``values_KN[k, index_KM[k, m]]`` as [K, M]; ``values_KN`` must be contiguous."""
    num_rows, width = values_KN.shape
    flat = index_KM + np.arange(0, num_rows * width, width)[:, None]
    return values_KN.reshape(-1)[flat]

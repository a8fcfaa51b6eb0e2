# SPDX-License-Identifier: Apache-2.0
"""vLLM's EPLB state, in memory only: no release reads a placement file.

``physical_to_logical_map`` [L, P], ``logical_to_physical_map`` [L, E, X] padded with -1,
``logical_replica_count`` [L, E], all int64, rows = MoE layers in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from rl_insight_hooks.errors import DataError, UsageError
from rl_insight_hooks.rebalance.placement import IntArray, Placement, make_placement

KEYS = ("physical_to_logical_map", "logical_to_physical_map", "logical_replica_count")


def to_arrays(placement: Placement, max_copies: int | None = None) -> dict[str, IntArray]:
    """Return vLLM's three arrays; ``max_copies`` pads the X of the second (vLLM keeps room for redundant + 1).

    Raises:
        UsageError: an expert has more than ``max_copies`` replicas.
    """
    log_LEX = placement.logical_to_physical
    num_copies = log_LEX.shape[2]
    width = num_copies if max_copies is None else max_copies
    if width < num_copies:
        raise UsageError(f"max_copies is {width}, but an expert has {num_copies} replicas")
    padded = np.full((*log_LEX.shape[:2], width), -1, dtype=np.int64)
    padded[:, :, :num_copies] = log_LEX
    arrays = (placement.physical_to_logical.copy(), padded, placement.replica_count.copy())
    return dict(zip(KEYS, arrays, strict=True))


def from_arrays(
    arrays: Mapping[str, npt.ArrayLike],
    num_devices: int,
    *,
    num_groups: int = 1,
    num_nodes: int = 1,
    layer_ids: Sequence[int] | None = None,
) -> Placement:
    """Return the placement of vLLM's arrays; the second may be missing.

    Raises:
        DataError: an array is missing, or the three do not agree.
        UsageError: the sizes do not fit each other.
    """
    for key in (KEYS[0], KEYS[2]):
        if key not in arrays:
            raise DataError(f"vLLM's EPLB state has no {key}")
    count_LE = np.asarray(arrays[KEYS[2]])
    placement = make_placement(
        arrays[KEYS[0]],
        num_experts=count_LE.shape[-1],
        num_devices=num_devices,
        num_groups=num_groups,
        num_nodes=num_nodes,
        layer_ids=layer_ids,
    )
    if not np.array_equal(count_LE, placement.replica_count):
        raise DataError(f"{KEYS[2]} is not how often {KEYS[0]} holds each expert")
    if KEYS[1] in arrays:
        given = np.sort(np.asarray(arrays[KEYS[1]]), axis=2)[:, :, ::-1]
        own = np.sort(placement.logical_to_physical, axis=2)[:, :, ::-1]
        width = own.shape[2]
        if given.shape[2] < width or not (
            np.array_equal(given[:, :, :width], own) and (given[:, :, width:] == -1).all()
        ):
            raise DataError(f"{KEYS[1]} does not list the slots of each expert in {KEYS[0]}")
    return placement

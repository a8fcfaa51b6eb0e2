# SPDX-License-Identifier: Apache-2.0
"""Placement: which logical expert lies in which physical slot, for every MoE layer.

Slots are device-major: device d holds slots ``d * S`` to ``d * S + S - 1``. Devices are node-major.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_insight_hooks.errors import DataError, UsageError
from rl_insight_hooks.rebalance.shape import Shape, make_shape

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """Experts on devices, layer by layer; made by :func:`make_placement`.

    ``layer_ids`` are the decoder layers (or what the load data numbers layers by) of the rows, ascending;
    the row's index is the MoE layer's index.
    """

    physical_to_logical: IntArray  # [L, P]
    logical_to_physical: IntArray  # [L, E, X], slots of each expert ascending, padded with -1
    replica_count: IntArray  # [L, E]
    layer_ids: tuple[int, ...]
    shape: Shape

    @property
    def num_layers(self) -> int:
        """Number of MoE layers L."""
        return int(self.physical_to_logical.shape[0])

    @property
    def num_experts(self) -> int:
        """Number of logical experts E."""
        return self.shape.num_experts

    @property
    def num_replicas(self) -> int:
        """Number of physical slots P."""
        return self.shape.num_replicas

    @property
    def num_devices(self) -> int:
        """Number of devices D."""
        return self.shape.num_devices

    @property
    def per_device(self) -> IntArray:
        """Experts of each device, int [L, D, S]."""
        return self.physical_to_logical.reshape(self.num_layers, self.num_devices, -1)


def make_placement(
    physical_to_logical: npt.ArrayLike,
    *,
    num_experts: int,
    num_devices: int,
    num_groups: int = 1,
    num_nodes: int = 1,
    layer_ids: Sequence[int] | None = None,
) -> Placement:
    """Return the placement of a device-major ``physical_to_logical`` int [L, P], its other two maps filled in.

    Raises:
        UsageError: the sizes do not fit each other.
        DataError: the map is no rectangle of expert ids 0..E-1, or leaves an expert out.
    """
    try:
        raw: Any = np.asarray(physical_to_logical)
    except ValueError:
        raw = np.empty(0, dtype=object)
    if (
        raw.dtype == object and raw.ndim == 1
    ):  # numpy before 1.24 makes such an array of ragged rows
        raise DataError("the placement's layers differ in length; all need the same slots")
    if raw.ndim != 2 or raw.dtype.kind not in "iu":
        raise DataError(
            f"a placement must be whole numbers [layers, slots]; this is {raw.dtype} {list(raw.shape)}"
        )
    phy_LP: IntArray = np.ascontiguousarray(raw, dtype=np.int64)
    shape = make_shape(num_experts, phy_LP.shape[1], num_groups, num_nodes, num_devices)
    num_layers = phy_LP.shape[0]
    ids = tuple(range(num_layers)) if layer_ids is None else tuple(int(i) for i in layer_ids)
    if len(ids) != num_layers:
        raise UsageError(f"{len(ids)} layer_ids for {num_layers} layers; give one for each")
    if any(b <= a for a, b in itertools.pairwise(ids)):
        raise UsageError(f"layer_ids must ascend without repeats; they are {list(ids)[:8]}")
    if phy_LP.size and (phy_LP.min() < 0 or phy_LP.max() >= num_experts):
        row, slot = np.argwhere((phy_LP < 0) | (phy_LP >= num_experts))[0].tolist()
        raise DataError(
            f"layer {ids[row]}, slot {slot}: expert {phy_LP[row, slot]} is not one of 0..{num_experts - 1}"
        )
    count_LE = replica_count_of(phy_LP, num_experts)
    if (count_LE == 0).any():
        row, expert = np.argwhere(count_LE == 0)[0].tolist()
        raise DataError(f"layer {ids[row]}: expert {expert} is in no slot; each needs at least one")
    placement = Placement(
        physical_to_logical=phy_LP,
        logical_to_physical=_logical_to_physical(phy_LP, count_LE),
        replica_count=count_LE,
        layer_ids=ids,
        shape=shape,
    )
    for array in (phy_LP, placement.logical_to_physical, count_LE):
        array.setflags(write=False)
    return placement


def linear_placement(
    num_layers: int, num_experts: int, num_devices: int, layer_ids: Sequence[int] | None = None
) -> Placement:
    """Return what servers do without a map: experts in order, E/D on each device, no replicas.

    Where E does not divide by D, the last slots repeat the first experts (as padding slots do), so that all
    devices have the same number of slots.
    """
    slots = -(-num_experts // num_devices) * num_devices
    row = np.arange(slots, dtype=np.int64) % num_experts
    return make_placement(
        np.tile(row, (num_layers, 1)),
        num_experts=num_experts,
        num_devices=num_devices,
        layer_ids=layer_ids,
    )


def replica_count_of(phy_LP: IntArray, num_experts: int) -> IntArray:
    """Return how often each expert occurs in each layer, int [L, E]."""
    num_layers = phy_LP.shape[0]
    flat = phy_LP + np.arange(num_layers, dtype=np.int64)[:, None] * num_experts
    counts = np.bincount(flat.ravel(), minlength=num_layers * num_experts)
    return counts.reshape(num_layers, num_experts).astype(np.int64)


def _logical_to_physical(phy_LP: IntArray, count_LE: IntArray) -> IntArray:
    num_layers, num_slots = phy_LP.shape
    num_copies = int(count_LE.max(initial=1))
    order_LP = np.argsort(phy_LP, axis=1, kind="stable")
    sorted_LP = np.take_along_axis(phy_LP, order_LP, axis=1)
    first_LE = np.cumsum(count_LE, axis=1) - count_LE
    copy_LP = np.arange(num_slots) - np.take_along_axis(first_LE, sorted_LP, axis=1)
    out = np.full((num_layers, count_LE.shape[1], num_copies), -1, dtype=np.int64)
    out[np.arange(num_layers)[:, None], sorted_LP, copy_LP] = order_LP
    return out

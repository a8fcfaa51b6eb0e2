# SPDX-License-Identifier: Apache-2.0
"""How well a placement balances a load. Replicas of an expert share its load evenly.

Shape letters: L layers, E experts, D devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rl_insight_hooks.errors import UsageError
from rl_insight_hooks.rebalance.placement import FloatArray, Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Max/mean of the device loads, layer by layer: 1 is perfect, D is all load on one device."""

    max_over_mean_L: FloatArray

    @property
    def mean(self) -> float:
        """Mean over layers of max/mean."""
        return float(self.max_over_mean_L.mean())

    @property
    def worst(self) -> float:
        """Max/mean of the worst layer."""
        return float(self.max_over_mean_L.max())

    @property
    def worst_row(self) -> int:
        """Row (MoE layer index) of the worst layer."""
        return int(self.max_over_mean_L.argmax())


def device_load(load_LE: npt.ArrayLike, placement: Placement) -> FloatArray:
    """Return the tokens of each device, float [L, D], for ``load_LE`` tokens of each logical expert.

    Raises:
        UsageError: the load has other layers or experts than the placement.
    """
    weight_LE = np.asarray(load_LE, dtype=np.float64)
    wanted = (placement.num_layers, placement.num_experts)
    if weight_LE.shape != wanted:
        raise UsageError(
            f"the load is {list(weight_LE.shape)} [layers, experts], the placement {list(wanted)}; "
            "use data of the same model and layers"
        )
    each_LE = weight_LE / placement.replica_count
    each_LP = np.take_along_axis(each_LE, placement.physical_to_logical, axis=1)
    return np.asarray(each_LP.reshape(*placement.per_device.shape).sum(axis=2))


def max_over_mean(load_LD: npt.ArrayLike) -> FloatArray:
    """Return ``max_d x_d / mean_d x_d`` of each layer, float [L], in [1, D]; 1 for a layer without load."""
    device_LD = np.asarray(load_LD, dtype=np.float64)
    mean_L = device_LD.mean(axis=1)
    heaviest_L = device_LD.max(axis=1)
    return np.asarray(np.divide(heaviest_L, mean_L, out=np.ones_like(mean_L), where=mean_L > 0))


def score(load_LE: npt.ArrayLike, placement: Placement) -> Score:
    """Return the :class:`Score` of a placement on a load [L, E]."""
    return Score(max_over_mean_L=max_over_mean(device_load(load_LE, placement)))


def total_variation(load_LE: npt.ArrayLike, other_LE: npt.ArrayLike) -> FloatArray:
    """Return ``0.5 * sum_e abs(p_e - q_e)`` of the shares of two loads, float [L], in [0, 1].

    A layer without load in one of them counts as even shares there.
    """
    shares = []
    for load in (load_LE, other_LE):
        weight_LE = np.asarray(load, dtype=np.float64)
        sum_L1 = weight_LE.sum(axis=1, keepdims=True)
        even = np.full_like(weight_LE, 1.0 / weight_LE.shape[1])
        shares.append(np.divide(weight_LE, sum_L1, out=even, where=sum_L1 > 0))
    return np.asarray(0.5 * np.abs(shares[0] - shares[1]).sum(axis=1))

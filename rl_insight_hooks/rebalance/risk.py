# SPDX-License-Identifier: Apache-2.0
"""Local search against tomorrow: lower the heaviest device's load plus its spread.

A device's load is expected to be m, give or take s; of D devices with normal loads the largest comes out about
z(D) spreads above the mean, z being the expected largest of D standard normal numbers. So the heaviest
``m + z s`` is lowered. Experts whose loads rise together thus part, which no planner of the sums alone can see.

Shape letters: K rows (a layer, or one node of a layer), D devices, S slots, B deviations, Q pairs of devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from rl_insight_hooks.rebalance.history import Forecast
from rl_insight_hooks.rebalance.placement import FloatArray, IntArray, replica_count_of
from rl_insight_hooks.rebalance.shape import Shape

_MOST_ROUNDS = 32
_SHRINK = 0.2
_GAIN = 1 - 1e-9


def expected_largest(num: int) -> float:
    """Return about the expected largest of ``num`` standard normal numbers (Blom, 1958); 0 for one."""
    return NormalDist().inv_cdf((num - 0.375) / (num + 0.25)) if num > 1 else 0.0


@dataclass(frozen=True, slots=True)
class _State:
    """Devices of all rows, numbered through (X)."""

    held_XS: IntArray  # experts, numbered through over all layers
    mean_X: FloatArray
    deviation_XB: FloatArray
    own_X: FloatArray  # sum of its replicas' own variances
    expert_mean: FloatArray  # of one replica, by expert numbered through
    expert_deviation_B: FloatArray
    expert_own: FloatArray
    spread: float

    def risk(self) -> FloatArray:
        """Return ``m + z s`` of each device, float [X]."""
        square_X = np.einsum("xb,xb->x", self.deviation_XB, self.deviation_XB) + self.own_X
        return np.asarray(self.mean_X + self.spread * np.sqrt(np.maximum(square_X, 0.0)))


def lower_risk(held_LDS: IntArray, expected: Forecast, shape: Shape) -> FloatArray:
    """Swap replicas between devices (of one node, where groups stay on nodes), in place, while that lowers
    risk.

    The covariance of the forecast is shrunk by a fifth towards its diagonal, as few windows estimate it badly
    (Ledoit and Wolf, 2004, with a fixed share).

    Args:
        held_LDS: experts of each device; changed, still without twins.
        expected: what to expect of the next window.
        shape: sizes.

    Returns:
        The largest ``m + z s`` of each layer, float [L].
    """
    mean_LE = expected.mean_LE
    deviation_LEB = expected.deviation_LEB * math.sqrt(1.0 - _SHRINK)
    own_LE = (expected.deviation_LEB**2).sum(axis=2) * _SHRINK
    num_layers, num_devices, num_slots = held_LDS.shape
    num_experts = mean_LE.shape[1]
    count_LE = replica_count_of(held_LDS.reshape(num_layers, -1), num_experts)
    layer_base = np.arange(num_layers) * num_experts
    held_XS = (held_LDS + layer_base[:, None, None]).reshape(-1, num_slots)
    expert_mean = (mean_LE / count_LE).ravel()
    expert_deviation_B = (deviation_LEB / count_LE[:, :, None]).reshape(
        num_layers * num_experts, -1
    )
    expert_own = (own_LE / count_LE**2).ravel()
    state = _State(
        held_XS=held_XS,
        mean_X=expert_mean[held_XS].sum(axis=1),
        deviation_XB=expert_deviation_B[held_XS].sum(axis=1),
        own_X=expert_own[held_XS].sum(axis=1),
        expert_mean=expert_mean,
        expert_own=expert_own,
        expert_deviation_B=expert_deviation_B,
        spread=expected_largest(num_devices),
    )
    idle, half = 0, num_devices // shape.num_domains // 2
    for turn in range(_MOST_ROUNDS if half else 0):
        heavy_Q, light_Q = _pairs(state.risk(), num_layers, shape, turn)
        idle = 0 if len(heavy_Q) and _swap(state, heavy_Q, light_Q) else idle + 1
        if idle >= half:
            break
    held_LDS[:] = held_XS.reshape(held_LDS.shape) - layer_base[:, None, None]
    return np.asarray(state.risk().reshape(num_layers, -1).max(axis=1))


def _pairs(
    risk_X: FloatArray, num_layers: int, shape: Shape, turn: int
) -> tuple[IntArray, IntArray]:
    """Return devices not below their layer's mean risk, each with a lighter one of the same row."""
    risk_KD = risk_X.reshape(num_layers * shape.num_domains, -1)
    mean_K = np.repeat(risk_X.reshape(num_layers, -1).mean(axis=1), shape.num_domains)
    num_rows, size = risk_KD.shape
    half = size // 2
    order_KD = np.argsort(risk_KD, axis=1, kind="stable")
    shift = (np.arange(half) + turn) % half
    heavy_KH, light_KH = order_KD[:, : size - half - 1 : -1], order_KD[:, shift]
    base = np.arange(num_rows)[:, None] * size
    use_KH = np.take_along_axis(risk_KD, heavy_KH, axis=1) >= mean_K[:, None] * _GAIN
    return (heavy_KH + base)[use_KH], (light_KH + base)[use_KH]


def _swap(state: _State, heavy_Q: IntArray, light_Q: IntArray) -> bool:
    """Do the swap of each pair that lowers its larger risk most; return True if any did."""
    held_QS, held_QT = state.held_XS[heavy_Q], state.held_XS[light_Q]
    num_slots = held_QS.shape[1]
    risk_QST = _risk_after(state, heavy_Q, light_Q, held_QS, held_QT)
    same_QST = held_QS[:, :, None] == held_QT[:, None, :]
    twin_QST = same_QST.any(axis=2, keepdims=True) | same_QST.any(axis=1, keepdims=True)
    flat_QM = np.where(twin_QST, np.inf, risk_QST).reshape(len(heavy_Q), -1)
    best_Q = flat_QM.argmin(axis=1)
    now_X = state.risk()
    now_Q = np.maximum(now_X[heavy_Q], now_X[light_Q])
    good = np.flatnonzero(flat_QM[np.arange(len(best_Q)), best_Q] < now_Q * _GAIN)
    if not len(good):
        return False
    heavy, light = heavy_Q[good], light_Q[good]
    out, into = np.divmod(best_Q[good], num_slots)
    leaves, comes = held_QS[good, out], held_QT[good, into]
    state.held_XS[heavy, out] = comes
    state.held_XS[light, into] = leaves
    moved = state.expert_mean[comes] - state.expert_mean[leaves]
    moved_B = state.expert_deviation_B[comes] - state.expert_deviation_B[leaves]
    state.mean_X[heavy] += moved
    state.mean_X[light] -= moved
    state.deviation_XB[heavy] += moved_B
    state.deviation_XB[light] -= moved_B
    moved_own = state.expert_own[comes] - state.expert_own[leaves]
    state.own_X[heavy] += moved_own
    state.own_X[light] -= moved_own
    return True


def _risk_after(
    state: _State, heavy_Q: IntArray, light_Q: IntArray, held_QS: IntArray, held_QT: IntArray
) -> FloatArray:
    """Return the larger risk of both devices after each swap, float [Q, S, T]."""
    mean_QS, mean_QT = state.expert_mean[held_QS], state.expert_mean[held_QT]
    a_QSB, b_QTB = state.expert_deviation_B[held_QS], state.expert_deviation_B[held_QT]
    heavy_QB, light_QB = state.deviation_XB[heavy_Q], state.deviation_XB[light_Q]
    gain_QST = mean_QT[:, None, :] - mean_QS[:, :, None]
    # |x - a + b|^2 = |x|^2 - 2 x.(a - b) + |a - b|^2
    apart_QST = (
        (a_QSB**2).sum(axis=2)[:, :, None]
        + (b_QTB**2).sum(axis=2)[:, None, :]
        - 2 * (a_QSB @ b_QTB.transpose(0, 2, 1))
    )

    def along(x_QB: FloatArray) -> FloatArray:
        a_QS = (a_QSB @ x_QB[:, :, None])[:, :, 0]
        b_QT = (b_QTB @ x_QB[:, :, None])[:, :, 0]
        return np.asarray(a_QS[:, :, None] - b_QT[:, None, :])

    own_QST = state.expert_own[held_QT][:, None, :] - state.expert_own[held_QS][:, :, None]
    heavy_Q11 = ((heavy_QB**2).sum(axis=1) + state.own_X[heavy_Q])[:, None, None]
    light_Q11 = ((light_QB**2).sum(axis=1) + state.own_X[light_Q])[:, None, None]
    heavy_square = heavy_Q11 - 2 * along(heavy_QB) + apart_QST + own_QST
    light_square = light_Q11 + 2 * along(light_QB) + apart_QST - own_QST
    heavy_QST = state.mean_X[heavy_Q][:, None, None] + gain_QST
    light_QST = state.mean_X[light_Q][:, None, None] - gain_QST
    heavy_QST = heavy_QST + state.spread * np.sqrt(np.maximum(heavy_square, 0.0))
    light_QST = light_QST + state.spread * np.sqrt(np.maximum(light_square, 0.0))
    return np.asarray(np.maximum(heavy_QST, light_QST))

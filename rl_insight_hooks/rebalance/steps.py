# SPDX-License-Identifier: Apache-2.0
"""Improve layers one small change at a time, and remember every state on the way.

A change relieves the layer's heaviest device: one of its experts swaps places with one of another device (two
transfers), or a slot elsewhere gives up a replica for another copy of one of its experts (one transfer). The
change is chosen by its gain per transfer in ``sum_d (x_d / x_max)**32``, which follows the maximum and still
sees the devices just below it.

Shape letters: A layers at work, E experts, P slots, D devices, S slots of one device, C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rl_insight_hooks.rebalance.placement import FloatArray, IntArray, replica_count_of
from rl_insight_hooks.rebalance.shape import Shape

_POWER = 32
_MOST_STEPS = 256
_DONORS = 16  # slots whose replica is missed least, tried as the place of a new copy
_CLOSE = 1e-4

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Point:
    """A state that a layer can take: transfers from the old map, heaviest device over mean, experts [D, S]."""

    num_moves: int
    max_over_mean: float
    held_DS: IntArray


def improve_stepwise(
    old_LDS: IntArray, weight_LE: FloatArray, shape: Shape, num_moves: int
) -> list[list[Point]]:
    """Return for each layer the states that it went through, the old one first.

    Args:
        old_LDS: experts of each device.
        weight_LE: tokens of each expert.
        shape: sizes.
        num_moves: a layer stops when it has used this many transfers.
    """
    state = _State(old_LDS.copy(), weight_LE, shape)
    paths = [[state.point(row, 0)] for row in range(len(old_LDS))]
    active = np.flatnonzero(state.load_LD.max(axis=1) > state.mean_L * (1 + _CLOSE))
    held_before = state.holds_LDE.copy()
    for _ in range(min(_MOST_STEPS, num_moves)):
        if not len(active):
            break
        active = active[state.step(active)]
        moved_A = (state.holds_LDE[active] & ~held_before[active]).sum(axis=(1, 2))
        for row, moved in zip(active.tolist(), moved_A.tolist(), strict=True):
            paths[row].append(state.point(row, moved))
        over_A = state.load_LD[active].max(axis=1) > state.mean_L[active] * (1 + _CLOSE)
        active = active[over_A & (moved_A < num_moves)]
    return paths


class _State:
    """The layers' placements and what follows from them, kept up to date."""

    def __init__(self, held_LDS: IntArray, weight_LE: FloatArray, shape: Shape) -> None:
        self.held_LDS = held_LDS
        self.weight_LE = weight_LE
        self.shape = shape
        num_layers, num_devices, num_slots = held_LDS.shape
        self.device_P = np.repeat(np.arange(num_devices), num_slots)
        self.domain_D = np.arange(num_devices) // (num_devices // shape.num_domains)
        self.count_LE = replica_count_of(held_LDS.reshape(num_layers, -1), shape.num_experts)
        self.holds_LDE = np.zeros((num_layers, num_devices, shape.num_experts), dtype=bool)
        self.load_LD = np.zeros((num_layers, num_devices))
        self.mean_L = weight_LE.sum(axis=1) / num_devices
        self._refresh(np.arange(num_layers))

    def _refresh(self, rows: IntArray) -> None:
        held = self.held_LDS[rows]
        each = self.weight_LE[rows] / self.count_LE[rows]
        self.load_LD[rows] = each[np.arange(len(rows))[:, None, None], held].sum(axis=2)
        self.holds_LDE[rows] = False
        self.holds_LDE[rows[:, None, None], np.arange(held.shape[1])[None, :, None], held] = True

    def point(self, row: int, num_moves: int) -> Point:
        """Return the layer's state as a :class:`Point`."""
        mean = self.mean_L[row]
        ratio = float(self.load_LD[row].max() / mean) if mean > 0 else 1.0
        return Point(num_moves, ratio, self.held_LDS[row].copy())

    def step(self, rows: IntArray) -> BoolArray:
        """Change each layer of ``rows`` for the better where there is a way; return where there was."""
        heavy_A = self.load_LD[rows].argmax(axis=1)
        swap_gain, swap_out, swap_into = self._best_swap(rows, heavy_A)
        copy_gain, copy_slot, copy_expert = self._best_copy(rows, heavy_A)
        swaps = swap_gain > np.maximum(copy_gain, 1e-12)
        copies = ~swaps & (copy_gain > 1e-12)
        flat_LP = self.held_LDS.reshape(len(self.held_LDS), -1)
        a = rows[swaps]
        out, into = swap_out[swaps], swap_into[swaps]
        flat_LP[a, out], flat_LP[a, into] = flat_LP[a, into], flat_LP[a, out]
        b = rows[copies]
        self.count_LE[b, flat_LP[b, copy_slot[copies]]] -= 1
        self.count_LE[b, copy_expert[copies]] += 1
        flat_LP[b, copy_slot[copies]] = copy_expert[copies]
        done = swaps | copies
        self._refresh(rows[done])
        return done

    def _best_swap(
        self, rows: IntArray, heavy_A: IntArray
    ) -> tuple[FloatArray, IntArray, IntArray]:
        """Return gain per transfer, slot of the heavy device and slot elsewhere of each layer's best swap."""
        num_rows, num_slots = len(rows), self.held_LDS.shape[2]
        at = np.arange(num_rows)
        held_AP = self.held_LDS[rows].reshape(num_rows, -1)
        own_AS = self.held_LDS[rows, heavy_A]
        each_AE = self.weight_LE[rows] / self.count_LE[rows]
        load_AD = self.load_LD[rows]
        top_A = load_AD[at, heavy_A]
        moved_ASP = (
            np.take_along_axis(each_AE, own_AS, axis=1)[:, :, None]
            - np.take_along_axis(each_AE, held_AP, axis=1)[:, None, :]
        )
        after = _power(top_A[:, None, None] - moved_ASP, top_A)
        after += _power(load_AD[:, self.device_P][:, None, :] + moved_ASP, top_A)
        before_AP = 1.0 + _power(load_AD[:, self.device_P], top_A)
        twin_AP = self.holds_LDE[rows, heavy_A][at[:, None], held_AP]
        apart_AP = self.domain_D[self.device_P] != self.domain_D[heavy_A][:, None]
        same_AP = self.device_P == heavy_A[:, None]
        twin_ASD = self.holds_LDE[rows][at[:, None], :, own_AS]
        gain_ASP = before_AP[:, None, :] - after
        gain_ASP[np.broadcast_to((twin_AP | apart_AP | same_AP)[:, None, :], gain_ASP.shape)] = -1.0
        gain_ASP[twin_ASD[:, :, self.device_P]] = -1.0
        flat = gain_ASP.reshape(num_rows, -1)
        best_A = flat.argmax(axis=1)
        slot_A, into_A = np.divmod(best_A, held_AP.shape[1])
        return flat[at, best_A] / 2, heavy_A * num_slots + slot_A, into_A

    def _best_copy(
        self, rows: IntArray, heavy_A: IntArray
    ) -> tuple[FloatArray, IntArray, IntArray]:
        """Return gain, slot given up and expert copied into it, of each layer's best new copy."""
        num_rows = len(rows)
        at = np.arange(num_rows)
        held_AP = self.held_LDS[rows].reshape(num_rows, -1)
        weight_AE, count_AE = self.weight_LE[rows], self.count_LE[rows]
        spare_AE = np.where(
            count_AE > 1, weight_AE / np.maximum(count_AE * (count_AE - 1), 1), np.inf
        )
        missed_AP = np.take_along_axis(spare_AE, held_AP, axis=1)
        apart_AP = self.domain_D[self.device_P] != self.domain_D[heavy_A][:, None]
        missed_AP = np.where(apart_AP | (self.device_P == heavy_A[:, None]), np.inf, missed_AP)
        donor_AC = np.argsort(missed_AP, axis=1, kind="stable")[:, :_DONORS]
        own_AS = self.held_LDS[rows, heavy_A]
        load_AD = self.load_LD[rows]
        top_A = load_AD[at, heavy_A]
        gone_AC = np.take_along_axis(held_AP, donor_AC, axis=1)
        # What each candidate does to every device: b gets a copy, a loses one.
        b_weight = np.take_along_axis(weight_AE, own_AS, axis=1)
        b_count = np.take_along_axis(count_AE, own_AS, axis=1)
        a_weight = np.take_along_axis(weight_AE, gone_AC, axis=1)
        a_count = np.take_along_axis(count_AE, gone_AC, axis=1)
        holds_ADE = self.holds_LDE[rows]
        has_b_ASD = holds_ADE[at[:, None], :, own_AS]
        has_a_ACD = holds_ADE[at[:, None], :, gone_AC]
        device_AC = self.device_P[donor_AC]
        relief_AS = b_weight / (b_count * (b_count + 1))
        extra_AC = a_weight / np.maximum(a_count * (a_count - 1), 1)
        here_ACD = np.arange(load_AD.shape[1]) == device_AC[:, :, None]
        arrives_AS = b_weight / (b_count + 1)
        leaves_AC = a_weight / a_count
        load_ASCD = (
            load_AD[:, None, None, :]
            - (has_b_ASD * relief_AS[:, :, None])[:, :, None, :]
            + np.where(here_ACD, -leaves_AC[:, :, None], has_a_ACD * extra_AC[:, :, None])[:, None]
            + here_ACD[:, None] * arrives_AS[:, :, None, None]
        )
        gain_ASC = _power(load_AD, top_A).sum(axis=1)[:, None, None] - _power(load_ASCD, top_A).sum(
            axis=3
        )
        twin_ASC = np.take_along_axis(
            has_b_ASD, device_AC[:, None, :].repeat(own_AS.shape[1], 1), 2
        )
        full_AS = b_count >= self.shape.max_copies
        none_AC = ~np.isfinite(np.take_along_axis(missed_AP, donor_AC, axis=1))
        same_ASC = own_AS[:, :, None] == gone_AC[:, None, :]
        gain_ASC[twin_ASC | full_AS[:, :, None] | none_AC[:, None, :] | same_ASC] = -1.0
        flat = gain_ASC.reshape(num_rows, -1)
        best_A = flat.argmax(axis=1)
        expert_A, donor_A = np.divmod(best_A, donor_AC.shape[1])
        return flat[at, best_A], donor_AC[at, donor_A], own_AS[at, expert_A]


def _power(load: FloatArray, top_A: FloatArray) -> FloatArray:
    """Return ``(load / top)**32``, by squaring."""
    ratio = load / top_A.reshape((-1,) + (1,) * (load.ndim - 1))
    for _ in range(_POWER.bit_length() - 1):
        ratio = ratio * ratio
    return np.asarray(ratio)

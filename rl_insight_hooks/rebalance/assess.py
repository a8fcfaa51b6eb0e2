# SPDX-License-Identifier: Apache-2.0
"""What a placement brings: before, after, bound, forecast, and what it costs. Pure; nothing is printed here.

Shape letters: W windows, L layers, E experts, D devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_insight_hooks.errors import UsageError
from rl_insight_hooks.rebalance.bounds import bound_of_shape
from rl_insight_hooks.rebalance.history import total
from rl_insight_hooks.rebalance.incremental import replan
from rl_insight_hooks.rebalance.placement import FloatArray, Placement, linear_placement
from rl_insight_hooks.rebalance.planner import plan
from rl_insight_hooks.rebalance.score import Score, device_load, score, total_variation
from rl_insight_hooks.rebalance.shape import Shape, make_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """A plan made from the first windows, scored on those it was made from and on the rest."""

    num_planned: int  # windows planned on
    num_scored: int  # windows scored on, later than the others
    before: Score  # on the later windows
    fitted: Score  # on the windows planned on
    held_out: Score  # on the later windows
    total_variation_L: FloatArray  # between both parts, [0, 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """A placement on the load that it was planned from."""

    before: Score
    after: Score
    bound_L: FloatArray  # least possible max/mean
    before_LD: FloatArray  # device loads in tokens
    after_LD: FloatArray
    held_out: HeldOut | None

    @property
    def gap(self) -> float:
        """Mean over layers of max/mean over its lower bound, less 1."""
        return float((self.after.max_over_mean_L / self.bound_L).mean() - 1.0)

    @property
    def forecast(self) -> Score:
        """What to expect: the held-out score if there is one, else the fitted one."""
        return self.held_out.held_out if self.held_out is not None else self.after

    @property
    def gain(self) -> float:
        """Share by which the heaviest device gets lighter, by the forecast; mean over layers."""
        before = self.held_out.before if self.held_out is not None else self.before
        return 1.0 - self.forecast.mean / before.mean


def assess(
    history_WLE: npt.NDArray[Any],
    placement: Placement,
    before: Placement | None = None,
    *,
    held_out: HeldOut | None = None,
) -> Assessment:
    """Return the :class:`Assessment` of ``placement`` on the sum of a history.

    Args:
        history_WLE: tokens.
        placement: what was planned.
        before: what is in use; experts in order without replicas if not given.
        held_out: of :func:`hold_out`.
    """
    load_LE = total(history_WLE)
    if before is None:
        before = linear_of(placement.shape, placement.num_layers)
    return Assessment(
        before=score(load_LE, before),
        after=score(load_LE, placement),
        bound_L=bound_ratio(load_LE, placement.shape),
        before_LD=device_load(load_LE, before),
        after_LD=device_load(load_LE, placement),
        held_out=held_out,
    )


def linear_of(shape: Shape, num_layers: int) -> Placement:
    """Return what a server of this shape does without a map."""
    return linear_placement(num_layers, shape.num_experts, shape.num_devices)


def bound_ratio(load_LE: FloatArray, shape: Shape) -> FloatArray:
    """Return the lower bound of max/mean, float [L], at least 1; 1 for a layer without load."""
    mean_L = load_LE.sum(axis=1) / shape.num_devices
    bound_L = bound_of_shape(load_LE, shape)
    return np.asarray(np.divide(bound_L, mean_L, out=np.ones_like(mean_L), where=mean_L > 0))


def hold_out(
    history_WLE: npt.NDArray[Any],
    shape: Shape,
    fraction: float = 0.5,
    *,
    before: Placement | None = None,
    max_moves: float | None = None,
    half_life: float | None = None,
    robust: bool = True,
) -> HeldOut:
    """Plan on the first windows, score on the last ones.

    Args:
        history_WLE: tokens, oldest first; at least two windows.
        shape: of the placement.
        fraction: share of the windows that is held out, in (0, 1); at least one window each way.
        before: a map in use, which the plan then starts from; experts in order if not given.
        max_moves: most transfers from the map in use.
        half_life: as in :func:`~rl_insight_hooks.rebalance.planner.plan`.
        robust: as there.

    Raises:
        UsageError: there are fewer than two windows, or ``fraction`` is out of range.
    """
    num_windows = len(history_WLE)
    if not 0 < fraction < 1:
        raise UsageError(f"holdout is {fraction}; give the share of windows to hold out, as 0.5")
    if num_windows < 2:
        raise UsageError("holdout needs a history of at least two steps; this data has one")
    num_scored = min(max(int(num_windows * fraction + 0.5), 1), num_windows - 1)
    first, second = history_WLE[: num_windows - num_scored], history_WLE[-num_scored:]
    if before is not None:
        planned, _ = replan(before, first, max_moves, half_life=half_life)
    else:
        planned = plan(
            first,
            shape.num_replicas,
            shape.num_groups,
            shape.num_nodes,
            shape.num_devices,
            half_life=half_life,
            robust=robust,
        )
    now = before if before is not None else linear_of(shape, history_WLE.shape[1])
    first_LE, second_LE = total(first), total(second)
    return HeldOut(
        num_planned=len(first),
        num_scored=len(second),
        before=score(second_LE, now),
        fitted=score(first_LE, planned),
        held_out=score(second_LE, planned),
        total_variation_L=total_variation(first_LE, second_LE),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """Balance and memory with a number of replicas."""

    num_replicas: int
    slots_per_device: int
    fitted: Score
    held_out: Score | None
    bound: float  # mean over layers of the least possible max/mean
    extra_slots: int  # on each device and layer, beyond those of no redundancy
    extra_bytes: int | None  # on each device, over all layers

    @property
    def forecast(self) -> Score:
        """The held-out score if there is one, else the fitted one."""
        return self.held_out if self.held_out is not None else self.fitted


def sweep(
    history_WLE: npt.NDArray[Any],
    replicas: Sequence[int],
    num_groups: int,
    num_nodes: int,
    num_devices: int,
    *,
    holdout: float = 0.5,
    expert_size_bytes: int | None = None,
    half_life: float | None = None,
) -> list[SweepRow]:
    """Return balance against memory for each number of replicas, ascending.

    Raises:
        UsageError: a number is impossible; the message says the nearest that are not.
    """
    _, num_layers, num_experts = history_WLE.shape
    load_LE = total(history_WLE)
    least = -(-num_experts // num_devices)
    rows = []
    for num_replicas in sorted(set(replicas)):
        shape = make_shape(num_experts, num_replicas, num_groups, num_nodes, num_devices)
        placement = plan(
            history_WLE, num_replicas, num_groups, num_nodes, num_devices, half_life=half_life
        )
        held = None
        if len(history_WLE) > 1:
            held = hold_out(history_WLE, shape, holdout, half_life=half_life).held_out
        extra = shape.slots_per_device - least
        rows.append(
            SweepRow(
                num_replicas=num_replicas,
                slots_per_device=shape.slots_per_device,
                fitted=score(load_LE, placement),
                held_out=held,
                bound=float(bound_ratio(load_LE, shape).mean()),
                extra_slots=extra,
                extra_bytes=None
                if expert_size_bytes is None
                else extra * num_layers * expert_size_bytes,
            )
        )
    return rows

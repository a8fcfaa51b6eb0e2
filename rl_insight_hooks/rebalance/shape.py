# SPDX-License-Identifier: Apache-2.0
"""What a placement has to look like: numbers of experts, slots, groups, nodes, devices, checked together."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from rl_insight_hooks.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a placement, the same in every layer.

    ``hierarchical``: expert groups stay whole on a node, which is so when the groups divide evenly over the
    nodes (DeepSeek's EPLB decides the same way). Otherwise any expert may go to any device.
    """

    num_experts: int
    num_replicas: (
        int  # physical slots of all devices together, as DeepSeek and MindSpeed-RL name it
    )
    num_groups: int
    num_nodes: int
    num_devices: int

    @property
    def hierarchical(self) -> bool:
        """True if groups are kept on a node."""
        return self.num_nodes > 1 and self.num_groups % self.num_nodes == 0

    @property
    def num_domains(self) -> int:
        """Number of parts that are planned apart: the nodes if hierarchical, else 1."""
        return self.num_nodes if self.hierarchical else 1

    @property
    def slots_per_device(self) -> int:
        """Experts that one device holds."""
        return self.num_replicas // self.num_devices

    @property
    def max_copies(self) -> int:
        """Most replicas that one expert can have: one on each device that it may be on."""
        return self.num_devices // self.num_domains


def make_shape(
    num_experts: int, num_replicas: int, num_groups: int, num_nodes: int, num_devices: int
) -> Shape:
    """Return the checked :class:`Shape`.

    Raises:
        UsageError: no placement has these sizes; the message gives the reason and the nearest that work.
    """
    given = {
        "num_experts": num_experts,
        "num_replicas": num_replicas,
        "num_groups": num_groups,
        "num_nodes": num_nodes,
        "num_devices": num_devices,
    }
    for name, value in given.items():
        try:
            given[name] = operator.index(value)
        except TypeError:
            raise UsageError(f"{name} is {value!r}; give a whole number") from None
        if value < 1:
            raise UsageError(f"{name} is {value}; it must be at least 1")
    shape = Shape(**given)
    if shape.hierarchical:
        if num_experts % num_groups:
            raise UsageError(
                f"{num_experts} experts cannot form {num_groups} equal groups; num_groups can be "
                f"{_nearest(num_groups, _divisors(num_experts))} (1 ignores groups and nodes)"
            )
        if num_devices % num_nodes:
            raise UsageError(
                f"{num_devices} devices cannot spread evenly over {num_nodes} nodes; num_nodes can be "
                f"{_nearest(num_nodes, _divisors(num_devices))}, or num_devices "
                f"{_nearest_multiples(num_devices, num_nodes, num_nodes)}"
            )
    most = num_experts * shape.max_copies
    possible = (
        f"num_replicas can be {_nearest_multiples(num_replicas, num_devices, num_experts, most)}"
    )
    if num_replicas % num_devices:
        raise UsageError(
            f"{num_replicas} replicas cannot fill {num_devices} devices with equal slots; {possible}"
        )
    if num_replicas < num_experts:
        raise UsageError(
            f"{num_replicas} replicas cannot hold {num_experts} experts, each at least once; {possible}"
        )
    if num_replicas > most:
        where = "on each device of its node" if shape.hierarchical else "on each device"
        raise UsageError(
            f"{num_replicas} replicas are more than {most}: {num_experts} experts with one replica {where} "
            f"({shape.max_copies}); {possible}"
        )
    return shape


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _nearest(value: int, allowed: list[int]) -> str:
    below = [candidate for candidate in allowed if candidate < value]
    above = [candidate for candidate in allowed if candidate > value]
    return " or ".join(str(candidate) for candidate in [*below[-1:], *above[:1]])


def _nearest_multiples(value: int, step: int, least: int, most: int | None = None) -> str:
    low = max(value // step * step, -(-least // step) * step)
    candidates = {low, low + step} - {value}
    kept = sorted(c for c in candidates if c >= least and (most is None or c <= most))
    if not kept and most is not None:
        kept = [most // step * step]
    return " or ".join(str(candidate) for candidate in kept)

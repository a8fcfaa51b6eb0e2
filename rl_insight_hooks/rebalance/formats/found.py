# SPDX-License-Identifier: Apache-2.0
"""What a map file says, before it is made a placement; what it leaves open is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_insight_hooks.errors import DataError, UsageError
from rl_insight_hooks.rebalance.placement import IntArray, Placement, make_placement


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundMap:
    """Rows int [L, P] of a map file, and what else the format states (None: it does not)."""

    format: str
    physical_to_logical: IntArray
    num_devices: int | None = None
    layer_ids: tuple[int, ...] | None = None
    num_experts: int | None = None

    def placement(
        self,
        num_experts: int | None,
        num_devices: int | None,
        num_groups: int,
        num_nodes: int,
        layer_ids: Sequence[int] | None,
    ) -> Placement:
        """Return the placement, with what the file leaves open taken from the arguments.

        Raises:
            DataError: the file and the arguments differ, or the map is not valid.
            UsageError: the number of devices is neither in the file nor given.
        """
        devices = self.num_devices if self.num_devices is not None else num_devices
        if devices is None:
            raise UsageError(
                f"a {self.format} map does not state the number of devices; give it (--num-npus)"
            )
        if num_devices is not None and num_devices != devices:
            raise DataError(
                f"the {self.format} map is for {devices} devices, not {num_devices}; use the map of this server"
            )
        num_layers, num_slots = self.physical_to_logical.shape
        if num_slots % devices:
            raise DataError(
                f"the {self.format} map has {num_slots} slots, which {devices} devices cannot share evenly"
            )
        ids = tuple(layer_ids) if layer_ids is not None else self.layer_ids
        if self.layer_ids is not None and ids != self.layer_ids:
            raise DataError(
                f"the {self.format} map is for layers {_few(self.layer_ids)}, not {_few(ids or ())}"
            )
        if ids is not None and len(ids) != num_layers:
            raise DataError(f"the {self.format} map has {num_layers} layers, not {len(ids)}")
        named = int(self.physical_to_logical.max()) + 1
        if num_experts and named > num_experts:
            raise DataError(
                f"the {self.format} map names expert {named - 1}, the data has {num_experts} experts; "
                "use the map of this model"
            )
        experts = num_experts or self.num_experts or named
        return make_placement(
            self.physical_to_logical,
            num_experts=experts,
            num_devices=devices,
            num_groups=num_groups,
            num_nodes=num_nodes,
            layer_ids=ids,
        )


def int_rows(value: Any, what: str) -> list[list[int]]:
    """Return ``value`` as a list of equally long lists of whole numbers, none empty.

    Raises:
        DataError: it is none; the message names ``what`` and the bad row.
    """
    if not isinstance(value, list) or not value:
        raise DataError(f"{what} is no list of rows, or empty")
    for index, row in enumerate(value):
        if not isinstance(row, list) or not row:
            raise DataError(f"{what}[{index}] is no list of expert ids, or empty")
        for item in row:
            if type(item) is not int:
                raise DataError(f"{what}[{index}] holds {item!r}; expert ids are whole numbers")
            if not 0 <= item < 1 << 31:
                raise DataError(f"{what}[{index}] holds {item}; no expert has that id")
        if len(row) != len(value[0]):
            raise DataError(
                f"equal-slots: {what}[{index}] has {len(row)} entries, {what}[0] has {len(value[0])}; "
                "all need the same number"
            )
    return value


def _few(numbers: Sequence[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:6])
    return f"[{shown}{', ...' if len(numbers) > 6 else ''}]"

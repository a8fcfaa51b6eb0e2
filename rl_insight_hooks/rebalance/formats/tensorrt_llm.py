# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM's offline EPLB (``moe_config.load_balancer``), YAML.

``num_slots``, ``initial_global_assignments: {absolute decoder layer: [expert of each slot]}``, rank-major, and
``layer_updates_per_iter: 0``, which makes it static.
"""

from __future__ import annotations

import numpy as np

from rl_insight_hooks.errors import DataError
from rl_insight_hooks.rebalance.formats.found import FoundMap, int_rows
from rl_insight_hooks.rebalance.placement import Placement

RULES: dict[str, str] = {
    "num-slots": "every layer's list has num_slots entries",
    "layer-keys": "keys are decoder layer numbers, each once",
    "static": "layer_updates_per_iter is 0: the map is not changed while serving",
}


def encode(placement: Placement) -> bytes:
    """Return the YAML file, one line per layer."""
    lines = [f"num_slots: {placement.num_replicas}", "initial_global_assignments:"]
    for layer, row in zip(placement.layer_ids, placement.physical_to_logical.tolist(), strict=True):
        lines.append(f"  {layer}: [{', '.join(map(str, row))}]")
    lines.append("layer_updates_per_iter: 0")
    return ("\n".join(lines) + "\n").encode("ascii")


def decode(data: bytes) -> FoundMap:
    """Return what the file says.

    Raises:
        DataError: it is no such file, or breaks one of :data:`RULES`.
    """
    import yaml  # it comes with omegaconf

    try:
        value = yaml.load(data, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DataError(f"the tensorrt-llm map is no YAML: {error}") from None
    table = value.get("initial_global_assignments") if isinstance(value, dict) else None
    if not isinstance(table, dict) or not table:
        raise DataError(
            "the tensorrt-llm map has no table initial_global_assignments, or an empty one"
        )
    for layer in table:
        if type(layer) is not int or layer < 0:
            raise DataError(f"layer-keys: {layer!r} is no decoder layer number")
    layer_ids = tuple(sorted(table))
    rows = int_rows([table[layer] for layer in layer_ids], "initial_global_assignments")
    if value.get("num_slots", len(rows[0])) != len(rows[0]):
        raise DataError(
            f"num-slots: num_slots is {value['num_slots']!r}, the layers have {len(rows[0])} entries"
        )
    if value.get("layer_updates_per_iter", 0) != 0:
        raise DataError(
            f"static: layer_updates_per_iter is {value['layer_updates_per_iter']!r}; a fixed map needs 0"
        )
    return FoundMap(
        format="tensorrt-llm",
        physical_to_logical=np.array(rows, dtype=np.int64),
        layer_ids=layer_ids,
    )

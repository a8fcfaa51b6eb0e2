# SPDX-License-Identifier: Apache-2.0
"""SGLang's ``--init-expert-location X.json``: ``{"physical_to_logical_map": [[expert of each slot], ...]}``.

The keys are passed on as keyword arguments, so there are no others. There is a row for every decoder layer;
those of dense layers are never read and hold the trivial map (slot s holds expert s modulo E).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from rl_insight_hooks.errors import DataError, UsageError
from rl_insight_hooks.rebalance.formats.found import FoundMap, int_rows
from rl_insight_hooks.rebalance.placement import Placement

KEY = "physical_to_logical_map"

RULES: dict[str, str] = {
    "one-key": f"{KEY} is the only key: keys are passed as keyword arguments",
    "all-layers": "there is a row for every decoder layer, dense ones included",
    "equal-slots": "all rows have the same number of slots",
}


def encode(placement: Placement, num_hidden_layers: int | None = None) -> bytes:
    """Return the JSON file, one line per decoder layer.

    Raises:
        UsageError: ``num_hidden_layers`` is less than the last MoE layer needs.
    """
    least = placement.layer_ids[-1] + 1
    num_layers = least if num_hidden_layers is None else num_hidden_layers
    if num_layers < least:
        raise UsageError(
            f"num_hidden_layers is {num_layers}, but there is an MoE layer {least - 1}; give at least {least}"
        )
    rows = np.tile(np.arange(placement.num_replicas) % placement.num_experts, (num_layers, 1))
    rows[list(placement.layer_ids)] = placement.physical_to_logical
    lines = ",\n".join(json.dumps(row) for row in rows.tolist())
    return f'{{"{KEY}": [\n{lines}]}}\n'.encode("ascii")


def decode(data: bytes, layer_ids: Sequence[int] | None = None) -> FoundMap:
    """Return what the file says of ``layer_ids``, or of all rows if they are not given.

    Raises:
        DataError: it is no such file, or breaks one of :data:`RULES`.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the sglang map is no JSON: {error}") from None
    if not isinstance(value, dict) or KEY not in value:
        raise DataError(f"the sglang map has no key {KEY!r}")
    if len(value) > 1:
        extra = sorted(set(value) - {KEY})[0]
        raise DataError(f"one-key: the sglang map has a key {extra!r}, which its reader refuses")
    rows = np.array(int_rows(value[KEY], KEY), dtype=np.int64)
    if layer_ids is None:
        return FoundMap(format="sglang", physical_to_logical=rows)
    if layer_ids[-1] >= len(rows):
        raise DataError(
            f"all-layers: the sglang map has {len(rows)} rows, none for decoder layer {layer_ids[-1]}"
        )
    return FoundMap(
        format="sglang", physical_to_logical=rows[list(layer_ids)], layer_ids=tuple(layer_ids)
    )

# SPDX-License-Identifier: Apache-2.0
"""Static expert map of vllm-ascend (``expert_map_path``), which MindSpeed-RL writes too.

``{"moe_layer_count": L, "layer_list": [{"layer_id", "device_count", "device_list": [{"device_id",
"device_expert"}]}]}``. The loaders ignore ``layer_id`` and ``device_id`` and go by the order of the lists; a
row's place is the MoE layer's index from 0 (of the pipeline stage). So rows are written in order and files
in any other order are refused.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from rl_insight_hooks.errors import DataError
from rl_insight_hooks.rebalance.formats.found import FoundMap, int_rows
from rl_insight_hooks.rebalance.placement import Placement

RULES: dict[str, str] = {
    "layer-order": "layer_id is the place in layer_list: loaders go by the order",
    "device-order": "device_id is the place in device_list: loaders go by the order",
    "counts-agree": "moe_layer_count and device_count are the lengths of their lists",
    "equal-slots": "all devices of all layers hold the same number of experts",
    "equal-devices": "all layers have the same number of devices",
}


def encode(placement: Placement) -> bytes:
    """Return the JSON file, one line per device."""
    layers = []
    for row, devices in enumerate(placement.per_device.tolist()):
        lines = ",\n".join(
            f'    {{"device_id": {device}, "device_expert": {json.dumps(experts)}}}'
            for device, experts in enumerate(devices)
        )
        layers.append(
            f'  {{"layer_id": {row}, "device_count": {len(devices)}, "device_list": [\n{lines}]}}'
        )
    body = ",\n".join(layers)
    text = f'{{"moe_layer_count": {placement.num_layers},\n "layer_list": [\n{body}]}}\n'
    return text.encode("ascii")


def decode(data: bytes) -> FoundMap:
    """Return what the file says.

    Raises:
        DataError: it is no such file, or breaks one of :data:`RULES`.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the vllm-ascend map is no JSON: {error}") from None
    layers = _list(value, "layer_list", "the map")
    _agree(value, "moe_layer_count", layers, "the map", "counts-agree")
    rows: list[list[int]] = []
    num_devices = 0
    for index, layer in enumerate(layers):
        where = f"layer_list[{index}]"
        devices = _list(layer, "device_list", where)
        _place(layer, "layer_id", index, where, "layer-order")
        _agree(layer, "device_count", devices, where, "counts-agree")
        if index and len(devices) != num_devices:
            raise DataError(
                f"equal-devices: {where} has {len(devices)} devices, layer_list[0] has {num_devices}"
            )
        num_devices = len(devices)
        for number, device in enumerate(devices):
            at = f"{where}.device_list[{number}]"
            experts = _list(device, "device_expert", at)
            _place(device, "device_id", number, at, "device-order")
            rows.append(experts)
    flat = np.array(int_rows(rows, "device_expert of device"), dtype=np.int64)
    return FoundMap(
        format="vllm-ascend",
        physical_to_logical=flat.reshape(len(layers), -1),
        num_devices=num_devices,
    )


def _list(value: Any, key: str, where: str) -> list[Any]:
    found = value.get(key) if isinstance(value, dict) else None
    if not isinstance(found, list) or not found:
        raise DataError(f"{where} has no list {key!r}, or an empty one")
    return found


def _agree(value: Any, key: str, items: list[Any], where: str, rule: str) -> None:
    if value.get(key, len(items)) != len(items):
        raise DataError(
            f"{rule}: {where}.{key} is {value[key]!r}, the list has {len(items)} entries"
        )


def _place(value: Any, key: str, place: int, where: str, rule: str) -> None:
    if value.get(key, place) != place:
        raise DataError(
            f"{rule}: {where}.{key} is {value[key]!r}; loaders ignore it and go by the order, "
            f"so it must be {place}"
        )

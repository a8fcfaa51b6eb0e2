# SPDX-License-Identifier: Apache-2.0
"""Map formats, one file each, and how to tell, write and read them.

All are projections of one thing, the experts by layer and device-major slot; they differ in which layers
have a row:

* ``vllm-ascend``: MoE layers in order, from 0, whatever their decoder layer number (JSON; MindSpeed-RL's too);
* ``sglang``: all decoder layers, dense ones filled with the trivial map (JSON);
* ``tensorrt-llm``: MoE layers, keyed by absolute decoder layer (YAML);
* ``deepseek``: MoE layers in order, as the arrays of DeepSeek's EPLB (npz; with the layer numbers beside them).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl_insight_hooks.errors import DataError, UsageError
from rl_insight_hooks.rebalance.formats import deepseek, sglang, tensorrt_llm, vllm_ascend
from rl_insight_hooks.rebalance.placement import Placement
from rl_insight_hooks.rebalance.rules import validate

FORMATS = ("vllm-ascend", "sglang", "tensorrt-llm", "deepseek")
_ENDINGS = {
    "vllm-ascend": (".json",),
    "sglang": (".json",),
    "tensorrt-llm": (".yaml", ".yml"),
    "deepseek": (".npz",),
}


def format_of(path: str | Path, format: str | None = None) -> str:
    """Return the format to write to ``path``: the one given, else by the name's ending.

    Raises:
        UsageError: the format is unknown, or the name's ending is not one that the format's reader accepts.
    """
    suffix = Path(path).suffix.lower()
    if format is None:
        by_ending = {".json": "vllm-ascend", ".yaml": "tensorrt-llm", ".yml": "tensorrt-llm"}
        format = {**by_ending, ".npz": "deepseek"}.get(suffix)
        if format is None:
            raise UsageError(
                f"{path}: no map format has this ending; use .json, .yaml or .npz, or give --format "
                f"{'|'.join(FORMATS)}"
            )
    if format not in FORMATS:
        raise UsageError(f"map format {format!r} is unknown; choose one of {', '.join(FORMATS)}")
    if suffix not in _ENDINGS[format]:
        raise UsageError(
            f"{path}: the reader of {format} needs a name that ends in {' or '.join(_ENDINGS[format])}"
        )
    return format


def encode(placement: Placement, format: str, *, num_hidden_layers: int | None = None) -> bytes:
    """Return the map file of ``placement``, checked: rules before, and read back and compared after.

    Args:
        placement: what to write.
        format: one of :data:`FORMATS`.
        num_hidden_layers: sglang only: decoder layers of the model; up to the last MoE layer if not given.

    Raises:
        DataError: the placement breaks a rule.
        UsageError: the format is unknown.
    """
    validate(placement)
    if format == "vllm-ascend":
        data = vllm_ascend.encode(placement)
    elif format == "sglang":
        data = sglang.encode(placement, num_hidden_layers)
    elif format == "tensorrt-llm":
        data = tensorrt_llm.encode(placement)
    elif format == "deepseek":
        data = deepseek.encode(placement)
    else:
        raise UsageError(f"map format {format!r} is unknown; choose one of {', '.join(FORMATS)}")
    again = decode(
        data,
        num_experts=placement.num_experts,
        num_devices=placement.num_devices,
        num_groups=placement.shape.num_groups,
        num_nodes=placement.shape.num_nodes,
        layer_ids=placement.layer_ids,
    )
    if not (again.physical_to_logical == placement.physical_to_logical).all():
        raise DataError(
            f"the {format} map does not read back as it was written; nothing was written"
        )
    return data


def sniff(data: bytes) -> str:
    """Return the format of a map file's bytes.

    Raises:
        DataError: it is none of :data:`FORMATS`.
    """
    if data.startswith(b"PK\x03\x04"):
        return "deepseek"
    head = data.lstrip()
    if head.startswith(b"{"):
        if b'"layer_list"' in data:
            return "vllm-ascend"
        if b'"physical_to_logical_map"' in data:
            return "sglang"
    if b"initial_global_assignments" in data:
        return "tensorrt-llm"
    raise DataError(
        "this is no expert map: it has neither layer_list (vllm-ascend), physical_to_logical_map (sglang) nor "
        "initial_global_assignments (tensorrt-llm), and is no npz (deepseek)"
    )


def decode(
    data: bytes,
    *,
    num_experts: int | None = None,
    num_devices: int | None = None,
    num_groups: int = 1,
    num_nodes: int = 1,
    layer_ids: Sequence[int] | None = None,
) -> Placement:
    """Return the placement of a map file's bytes; the format is recognised.

    Args:
        data: the file.
        num_experts: logical experts, which no format states; highest id + 1 if not given.
        num_devices: devices; needed where the format does not state it (sglang, tensorrt-llm).
        num_groups: groups that are to stay on a node.
        num_nodes: nodes.
        layer_ids: decoder layer numbers of the MoE layers; needed to tell dense rows of sglang apart, checked
            against the keys of tensorrt-llm.

    Raises:
        DataError: the file is broken or breaks a rule of its format, named.
        UsageError: something that the format does not state was not given.
    """
    format = sniff(data)
    if format == "vllm-ascend":
        found = vllm_ascend.decode(data)
    elif format == "sglang":
        found = sglang.decode(data, layer_ids)
    elif format == "tensorrt-llm":
        found = tensorrt_llm.decode(data)
    else:
        found = deepseek.decode(data)
    return found.placement(num_experts, num_devices, num_groups, num_nodes, layer_ids)


__all__ = ["FORMATS", "decode", "encode", "format_of", "sniff"]

# SPDX-License-Identifier: Apache-2.0
# Paths are plain text here: Path objects cost a third more over 100,000 files.
# ruff: noqa: PTH118, PTH119, PTH120
"""Reader of TensorRT-LLM's expert statistics: ``rank<r>.safetensors`` beside ``meta_info.json``.

Keys are ``"{iteration}_{layer}"``, values the tokens of each logical expert. The safetensors header
is read here (8 bytes of length, a JSON, raw numbers), so that no further package is needed.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from rl_insight_hooks.report.load.context import SEVERITY_WARNING, ReadContext, read_bytes
from rl_insight_hooks.report.load.sink import MAX_EXPERTS, Block, Sink
from rl_insight_hooks.schema import PHASE_FORWARD

FORMAT = "tensorrt-llm"
ROLE = "rollout"

_RANK = re.compile(r"(\d{1,9})\.safetensors$")
_KEY = re.compile(r"(\d{1,18})_(\d{1,9})")
_DTYPES = {
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "<i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "<u1",
    "F64": "<f8",
    "F32": "<f4",
}
_MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors package


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_trtllm(paths: list[str], sink: Sink, context: ReadContext) -> None:
    """Put every file of ``paths`` into ``sink``, one step per iteration."""
    for number, path in enumerate(paths):
        match = _RANK.search(os.path.basename(path))
        rank = int(match[1]) if match is not None else number
        context.roles_seen.add(ROLE)
        top_k, num_experts = _meta(os.path.dirname(path), context)
        if context.selection.wants_role(ROLE) and context.selection.wants_rank(rank):
            try:
                loads = _by_step(read_tensors(read_bytes(path)))
                for step, rows in sorted(loads.items()):
                    if context.selection.wants_step(step):
                        sink.add(_block(path, step, rank, rows, num_experts, top_k))
            except OSError as error:
                context.problem("unreadable-file", path, str(error), "Give read permission.")
            except ValueError as error:
                rule = "empty-file" if str(error).startswith("empty") else "bad-tensor-file"
                context.problem(rule, path, str(error), "Copy it again; this rank is missing.")
        context.done()


def read_tensors(data: bytes) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors of a safetensors file by name.

    Raises:
        ValueError: damaged, cut off, or of a dtype that counts cannot have; says which.
    """
    if len(data) < 8:
        raise ValueError("empty file (0 bytes)" if not data else "cut off: no safetensors header")
    length = int.from_bytes(data[:8], "little")
    if length > min(_MAX_HEADER_BYTES, len(data) - 8):
        raise ValueError(f"cut off, or no safetensors file: the header claims {length} bytes")
    try:
        raw = msgspec.json.decode(data[8 : 8 + length], type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        infos = {name: msgspec.json.decode(text, type=_Tensor) for name, text in raw.items()}
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"the safetensors header cannot be read: {error}") from None
    tensors = {}
    body = memoryview(data)[8 + length :]
    for name, info in infos.items():
        kind = _DTYPES.get(info.dtype)
        if kind is None:
            raise ValueError(f"tensor {name!r} is of dtype {info.dtype}, which counts cannot have")
        begin, end = info.data_offsets
        num = 1
        for size in info.shape:
            num *= size
        fits = 0 <= begin <= end <= len(body) and min(info.shape, default=0) >= 0
        if not fits or end - begin != num * np.dtype(kind).itemsize:
            raise ValueError(
                f"tensor {name!r} of shape {info.shape} is cut off or overlaps the end"
            )
        tensors[name] = np.frombuffer(body[begin:end], dtype=kind).reshape(info.shape)
    return tensors


def _by_step(tensors: dict[str, npt.NDArray[Any]]) -> dict[int, dict[int, npt.NDArray[np.int64]]]:
    loads: dict[int, dict[int, npt.NDArray[np.int64]]] = {}
    for name, tensor in tensors.items():
        match = _KEY.fullmatch(name)
        if match is None:
            raise ValueError(f'key {name!r} is not "iteration_layer"')
        if tensor.ndim != 1:
            raise ValueError(
                f"key {name!r} has the shape {list(tensor.shape)}; counts are [experts]"
            )
        if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
            raise ValueError(f"key {name!r} has values that are no numbers")
        with np.errstate(invalid="ignore"):
            counts = tensor.astype(np.int64)
        if counts.size and (counts.min() < 0 or (counts != tensor).any()):
            raise ValueError(f"key {name!r} has counts that are negative or no whole numbers")
        loads.setdefault(int(match[1]), {})[int(match[2])] = counts
    return loads


_Number = Annotated[int, msgspec.Meta(ge=1, le=MAX_EXPERTS)]


class _Meta(msgspec.Struct):
    num_experts: _Number | None = None
    num_experts_per_token: _Number | None = None
    top_k: _Number | None = None


def _meta(folder: str, context: ReadContext) -> tuple[int | None, int | None]:
    path = os.path.join(folder, "meta_info.json")
    try:
        meta = msgspec.json.decode(read_bytes(path), type=_Meta)
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        context.problem(
            "no-meta-info",
            path,
            f"cannot be read ({error}): top-k and the number of experts are unknown",
            "Copy meta_info.json beside the rank files.",
            SEVERITY_WARNING,
        )
        return None, None
    top_k = meta.num_experts_per_token or meta.top_k
    return top_k, meta.num_experts


def _block(
    path: str,
    step: int,
    rank: int,
    rows: dict[int, npt.NDArray[np.int64]],
    num_experts: int | None,
    top_k: int | None,
) -> Block:
    layers = sorted(rows)
    width = max(row.size for row in rows.values())
    if num_experts is not None and width > num_experts:
        raise ValueError(f"{width} experts, but meta_info.json says {num_experts}")
    counts = np.zeros((len(layers), width), dtype=np.int64)
    for number, layer in enumerate(layers):
        counts[number, : rows[layer].size] = rows[layer]
    return Block(
        source=path,
        format=FORMAT,
        step=step,
        role=ROLE,
        rank=rank,
        layer_n=np.array(layers, dtype=np.int64),
        phases=(PHASE_FORWARD,) * len(layers),
        counts_ne=counts,
        num_experts=num_experts,
        top_k=top_k,
        layer_sources=frozenset({"module"}),
    )

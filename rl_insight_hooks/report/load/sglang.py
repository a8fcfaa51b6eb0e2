# SPDX-License-Identifier: Apache-2.0
"""Reader of SGLang's ``expert_distribution_recorder_<time>.pt``, without torch and without unpickling.

``stat`` modes: ``{"rank", "logical_count" [windows, layers, experts], ...}``, all-reduced over
ranks. The windows are a ring buffer, not in time order, unfilled ones zero: they are added up.
Layers are all decoder layers; those that are zero in every window are dense. Detail modes:
``{"records", "last_physical_to_logical_map"}``; the records' counts of physical slots are mapped to
logical experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rl_insight_hooks.report.load.context import ReadContext, read_bytes
from rl_insight_hooks.report.load.sink import Block, Sink
from rl_insight_hooks.report.load.torch_zip import TorchFileError, load
from rl_insight_hooks.report.table import ALL_RANKS, NO_STEP
from rl_insight_hooks.schema import PHASE_FORWARD

FORMAT = "sglang-recorder"
ROLE = "rollout"

IntArray = npt.NDArray[np.int64]


def read_sglang(paths: list[str], sink: Sink, context: ReadContext) -> None:
    """Put every dump of ``paths`` into ``sink``; several are numbered as steps, in order of their names."""
    if not paths:
        return
    if len(paths) > 1:
        context.assume(
            f"{len(paths)} SGLang dumps: numbered as steps 0 to {len(paths) - 1}, by name"
        )
    context.roles_seen.add(ROLE)
    for number, path in enumerate(paths):
        step = number if len(paths) > 1 else None
        try:
            if context.selection.wants_step(step) and context.selection.wants_role(ROLE):
                sink.add(_block(path, step, load(read_bytes(path)), context))
        except OSError as error:
            context.problem("unreadable-file", path, str(error), "Give read permission.")
        except TorchFileError as error:
            rule = "empty-file" if str(error).startswith("empty") else "bad-tensor-file"
            context.problem(rule, path, str(error), "Dump again, or leave the file out.")
        context.done()


def _block(path: str, step: int | None, dump: Any, context: ReadContext) -> Block:
    if not isinstance(dump, dict):
        raise TorchFileError(f"holds {type(dump).__name__}, not a recorder's dict")
    if "logical_count" in dump:
        counts_LE, num_windows = _of_windows(dump["logical_count"])
        rank = ALL_RANKS
    elif "records" in dump:
        counts_LE, num_windows, rank = _of_records(dump)
    else:
        keys = ", ".join(sorted(map(str, dump))[:8]) or "nothing"
        raise TorchFileError(f"has no logical_count and no records; it has {keys}")
    used = np.flatnonzero(counts_LE.any(axis=1))
    if used.size < counts_LE.shape[0]:
        context.assume(
            f"SGLang dump: {counts_LE.shape[0] - used.size} of {counts_LE.shape[0]} layers are zero "
            "throughout and taken for dense layers"
        )
    return Block(
        source=path,
        format=FORMAT,
        step=NO_STEP if step is None else step,
        role=ROLE,
        rank=rank,
        layer_n=used.astype(np.int64),
        phases=(PHASE_FORWARD,) * used.size,
        counts_ne=counts_LE[used],
        num_passes_n=np.full(used.size, num_windows, dtype=np.int64),
        layer_sources=frozenset({"module"}),
    )


def _of_windows(stored: Any) -> tuple[IntArray, int]:
    counts = _counts(stored, "logical_count")
    if counts.ndim == 2:
        return counts, 1
    if counts.ndim != 3:
        raise TorchFileError(
            f"logical_count has shape {counts.shape}, not [windows, layers, experts]"
        )
    filled = int(counts.any(axis=(1, 2)).sum())
    total: IntArray = counts.sum(axis=0)
    return total, filled


def _of_records(dump: dict[Any, Any]) -> tuple[IntArray, int, int]:
    records = dump["records"]
    if not isinstance(records, list) or not records:
        raise TorchFileError("records is empty: nothing was recorded")
    total: IntArray | None = None
    for record in records:
        if not isinstance(record, dict) or "global_physical_count" not in record:
            raise TorchFileError(
                "records hold no global_physical_count (mode per_token?); dump in mode stat or per_pass"
            )
        counts = _counts(record["global_physical_count"], "global_physical_count")
        if counts.ndim != 2 or (total is not None and counts.shape != total.shape):
            raise TorchFileError(f"global_physical_count has shape {counts.shape}")
        total = counts if total is None else total + counts
    assert total is not None
    placement = _counts(dump.get("last_physical_to_logical_map"), "last_physical_to_logical_map")
    if placement.shape != total.shape or (placement < 0).any():
        raise TorchFileError(f"the map has shape {placement.shape}, the counts {total.shape}")
    num_experts = int(placement.max()) + 1 if placement.size else 0
    if num_experts > total.shape[1]:
        raise TorchFileError(f"the map names expert {num_experts - 1} of {total.shape[1]} slots")
    logical = np.zeros((total.shape[0], num_experts), dtype=np.int64)
    np.add.at(logical, (np.arange(total.shape[0])[:, None], placement), total)
    rank = records[0].get("rank")
    return logical, len(records), rank if type(rank) is int and 0 <= rank < 1 << 31 else ALL_RANKS


def _counts(stored: Any, name: str) -> IntArray:
    if not isinstance(stored, np.ndarray) or stored.dtype.kind not in "iuf":
        raise TorchFileError(f"{name} is no tensor of numbers")
    if stored.dtype.kind == "f":
        if not np.isfinite(stored).all() or (stored != np.floor(stored)).any():
            raise TorchFileError(f"{name} has values that are no whole numbers")
        if stored.size and np.abs(stored).max() >= 1 << 62:
            raise TorchFileError(f"{name} has an absurd value")
    counts = stored.astype(np.int64)
    if counts.size and counts.min() < 0 and name != "last_physical_to_logical_map":
        raise TorchFileError(f"{name} has a negative count")
    return counts

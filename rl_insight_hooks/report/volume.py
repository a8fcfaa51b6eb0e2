# SPDX-License-Identifier: Apache-2.0
"""What a run will cost in files and bytes: a pure estimate for ``doctor --estimate``.

Sizes per count and per record are those of the writer on loads of 1,000 to 10,000 tokens an expert and a layer;
tests compare the estimate with files that are really written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rl_insight_hooks.errors import UsageError

# JSON: digits and a comma for each count, and what a record and a file say besides.
_JSON_BYTES_PER_COUNT = 5.0
_JSON_BYTES_PER_RECORD = 290.0
_JSON_BYTES_PER_FILE = 900.0
# Packed: the entropy of a count, and what is left of a record and a step after compression.
_PACK_BYTES_PER_COUNT = 1.65
_PACK_BYTES_PER_RECORD = 4.0
_PACK_BYTES_PER_STEP = 60.0
_PACK_BYTES_PER_FILE = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """What decides the volume of a run."""

    num_layers: int  # MoE layers of one rank
    num_experts: int  # experts that one rank holds (all of them in rollout and under FSDP)
    num_ranks: int  # ranks that write
    num_steps: int
    num_roles: int = 1
    num_phases: int = 1
    num_replicas: int = 1  # ranks that hold equal counts; one of them writes
    pack_every: int = 0  # 0: every step file stays


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """Files and bytes when the run is over."""

    num_files: int
    num_bytes: int
    json_bytes_per_step: int  # one step, role and rank
    packed_bytes_per_step: int

    def text(self) -> str:
        """Return the estimate in words."""
        return (
            f"{self.num_files:,} files, {size_text(self.num_bytes)} "
            f"({size_text(self.json_bytes_per_step)} a step, role and rank as JSON, "
            f"{size_text(self.packed_bytes_per_step)} packed)"
        )


def estimate(shape: RunShape) -> Volume:
    """Return files and bytes of a run of ``shape``.

    Raises:
        UsageError: a number is out of range; names it.
    """
    for name in RunShape.__slots__:
        low = 0 if name in ("pack_every", "num_steps") else 1
        if getattr(shape, name) < low:
            raise UsageError(f"{name} is {getattr(shape, name)}; it must be at least {low}")
    records = shape.num_layers * shape.num_phases
    counts = records * shape.num_experts
    json_step = (
        counts * _JSON_BYTES_PER_COUNT + records * _JSON_BYTES_PER_RECORD + _JSON_BYTES_PER_FILE
    )
    pack_step = (
        counts * _PACK_BYTES_PER_COUNT + records * _PACK_BYTES_PER_RECORD + _PACK_BYTES_PER_STEP
    )
    writers = math.ceil(shape.num_ranks / shape.num_replicas) * shape.num_roles
    packs = shape.num_steps // shape.pack_every if shape.pack_every else 0
    packed_steps = packs * shape.pack_every
    loose_steps = shape.num_steps - packed_steps
    per_writer = packed_steps * pack_step + packs * _PACK_BYTES_PER_FILE + loose_steps * json_step
    return Volume(
        num_files=writers * (packs + loose_steps),
        num_bytes=round(writers * per_writer),
        json_bytes_per_step=round(json_step),
        packed_bytes_per_step=round(pack_step),
    )


def size_text(num_bytes: float) -> str:
    """Return a size in words, decimal units: "1.2 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"

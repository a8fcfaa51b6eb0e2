# SPDX-License-Identifier: Apache-2.0
"""Device counters: rows of preallocated int64 buffers, added to in place and drained once a region.

A row is allocated when a layer is first seen (or before, by ``watch`` or a rollout integration) and never
moves, so that a captured graph keeps adding to it on replay. Draining copies and subtracts in place; nothing
is ever rebound.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rl_insight_hooks.layers import Layer

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

ROWS_PER_CHUNK = 64

# What the numbers of a row mean until the drain turns them into tokens per expert.
FORM_COUNTS = "counts"  # [E] tokens per expert
FORM_CUMULATIVE = "cumulative"  # [E] sums of cumulative lists
# [2 * (1 + E + extra)]: ids below 0, experts, ids >= E one by one and the rest; then the same of masked rows
FORM_IDS = "ids"


@dataclass(slots=True, eq=False)
class IdBins:
    """Constants of a row of routed ids, on its device, made before any graph is captured.

    The bin of id ``i`` is ``i + 1`` in a valid token's row, ``i + 1 + num_bins`` in a masked one.
    """

    num_bins: int  # of either kind
    one: torch.Tensor  # [1] int64
    first_masked: torch.Tensor  # [1] int64: num_bins + 1
    flags: torch.Tensor | None = None  # [T * top_k] int64: the enabled flags, as of the last call
    num_flags: int = -1


@dataclass(slots=True, eq=False)
class Slot:
    """One accumulator: a (layer, phase, form) and its row on the device.

    ``buf`` is the row [width]; the int fields are host-side counts of what eager Python saw. A graph replay
    adds to ``buf`` only.
    """

    layer: Layer
    phase: str
    form: str
    seam: str
    num_experts: int
    buf: torch.Tensor
    chunk: int
    row: int
    id_space: str | None = None
    draft: bool = False
    id_bins: IdBins | None = None  # of FORM_IDS
    shape: torch.Size = field(init=False)  # of buf; at hand for the hot path
    is_cpu: bool = field(init=False)
    num_calls: int = 0
    num_passes: int = 0
    num_rows: int = 0
    num_tokens: int = 0

    def __post_init__(self) -> None:
        self.shape, self.is_cpu = self.buf.shape, self.buf.is_cpu


@dataclass(slots=True)
class SlotReading:
    """What one slot gathered since the last drain; ``values`` [width] int64, raw in the slot's form."""

    slot: Slot
    values: npt.NDArray[np.int64]
    num_calls: int
    num_passes: int
    num_rows: int
    num_tokens: int


class PendingReading:
    """A drain under way: device copies that may still be in flight. ``resolve`` waits for them."""

    def __init__(
        self,
        copies: list[tuple[torch.Tensor, Any]],
        ints: list[tuple[Slot, tuple[int, int, int, int]]],
    ):
        self._copies = copies
        self._ints = ints

    @property
    def nbytes(self) -> int:
        """Host bytes that the snapshot holds."""
        return sum(copy.numel() * copy.element_size() for copy, _ in self._copies)

    def resolve(self) -> list[SlotReading]:
        """Return the readings of all slots that saw something; blocks until the copies are there."""
        host = []
        for copy, event in self._copies:
            if event is not None:
                event.synchronize()
            host.append(copy.numpy())
        readings = []
        for slot, ints in self._ints:
            values = host[slot.chunk][slot.row, : slot.buf.shape[0]]
            if any(ints) or values.any():
                readings.append(SlotReading(slot, values, *ints))
        return readings


@dataclass(slots=True, eq=False)
class _Chunk:
    """Rows of one width on one device, and how many are given out."""

    rows: torch.Tensor  # [ROWS_PER_CHUNK, width] int64
    num_used: int = 0


class CounterPool:
    """Owns the chunks. ``allocate`` is called at a layer's first sight, never in the steady hot path."""

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []
        self._slots: list[Slot] = []

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All slots, in order of allocation."""
        return tuple(self._slots)

    @property
    def nbytes(self) -> int:
        """Device bytes held."""
        return sum(chunk.rows.numel() * chunk.rows.element_size() for chunk in self._chunks)

    def allocate(
        self,
        layer: Layer,
        phase: str,
        form: str,
        seam: str,
        num_experts: int,
        width: int,
        device: torch.device,
        *,
        id_space: str | None = None,
        draft: bool = False,
    ) -> Slot:
        """Return a new slot whose row is zero, on ``device``.

        Raises:
            ValueError: tensors that hold no data (meta or fake ones): there is nothing to count.
        """
        import torch

        if device.type == "meta":
            raise ValueError("meta tensors hold no counts")

        index = next(
            (
                i
                for i, chunk in enumerate(self._chunks)
                if chunk.rows.shape[1] == width
                and chunk.rows.device == device
                and chunk.num_used < ROWS_PER_CHUNK
            ),
            None,
        )
        if index is None:
            # inference_mode would make a tensor that a later training step may not add to
            with torch.inference_mode(False), torch.no_grad():
                rows = torch.zeros((ROWS_PER_CHUNK, width), dtype=torch.int64, device=device)
            if type(rows) is not torch.Tensor:
                raise ValueError(f"{type(rows).__name__}s hold no counts")
            self._chunks.append(_Chunk(rows))
            index = len(self._chunks) - 1
        chunk = self._chunks[index]
        row = chunk.num_used
        chunk.num_used += 1
        with torch.inference_mode(False), torch.no_grad():
            buf = chunk.rows[row]
        slot = Slot(layer, phase, form, seam, num_experts, buf, index, row, id_space, draft)
        self._slots.append(slot)
        return slot

    def drain(self) -> PendingReading:
        """Snapshot and subtract every chunk in place; one asynchronous copy a chunk, no wait."""
        import torch

        copies: list[tuple[torch.Tensor, Any]] = []
        with torch.inference_mode(False), torch.no_grad():
            for chunk in self._chunks:
                used = chunk.rows[: chunk.num_used]
                # subtract what was copied, not zero_(): an add between the two lines stays
                snapshot = used.clone()
                used.sub_(snapshot)
                copies.append(_to_host(snapshot))
        ints = []
        for slot in self._slots:
            taken = (slot.num_calls, slot.num_passes, slot.num_rows, slot.num_tokens)
            if any(taken):
                slot.num_calls -= taken[0]
                slot.num_passes -= taken[1]
                slot.num_rows -= taken[2]
                slot.num_tokens -= taken[3]
            ints.append((slot, taken))
        return PendingReading(copies, ints)


_pinned_ok = True


def _to_host(snapshot: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Start the copy of ``snapshot`` to the host; return it and the event to wait for (None: it is there)."""
    global _pinned_ok
    import torch

    if snapshot.device.type == "cpu":
        return snapshot, None
    if _pinned_ok:
        try:
            host = torch.empty(snapshot.shape, dtype=snapshot.dtype, device="cpu", pin_memory=True)
            host.copy_(snapshot, non_blocking=True)
            event = torch.get_device_module(snapshot.device).Event()
            event.record()
            return host, event
        except Exception:
            _pinned_ok = False
            _log.info(
                "no pinned memory or events on %s: drains copy synchronously", snapshot.device.type
            )
    return snapshot.cpu(), None

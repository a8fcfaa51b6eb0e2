# SPDX-License-Identifier: Apache-2.0
"""Readings of counters -> the load of one (step, role) -> our file. Runs on the writer thread; no torch."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rl_insight_hooks import topology
from rl_insight_hooks._version import __version__
from rl_insight_hooks.counters import FORM_CUMULATIVE, FORM_IDS, SlotReading
from rl_insight_hooks.group_list import counts_from_cumulative
from rl_insight_hooks.layers import Layer
from rl_insight_hooks.schema import (
    ID_LOGICAL,
    ID_PHYSICAL,
    PHASE_COMPILED,
    PHASE_EVAL,
    PHASE_FORWARD,
    PHASES,
    SCHEMA_VERSION,
    CallRecord,
    LoadFile,
    Producer,
    Record,
)
from rl_insight_hooks.topology import Place

IntArray = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class LayerLoad:
    """Sum over readings of one (layer, phase, seam)."""

    layer: Layer
    phase: str
    seam: str
    counts_E: IntArray
    id_space: str | None
    draft: bool
    num_calls: int = 0
    num_passes: int = 0
    num_rows: int = 0
    num_tokens: int = 0
    num_other_ids: int = 0


@dataclass(slots=True)
class CallCounts:
    """Counts of one call, in order."""

    layer: Layer
    phase: str
    counts_E: IntArray


@dataclass(slots=True, eq=False)
class RoleStep:
    """Everything gathered for one (step, role) of this process."""

    step: int | None
    step_source: str
    role: str
    started_unix_s: float
    ended_unix_s: float
    place: Place
    num_regions: int = 0
    failed_unix_s: float = math.inf  # end of the last region that an error left
    loads: dict[tuple[Layer, str, str, int, str | None, bool], LayerLoad] = field(
        default_factory=dict
    )
    calls: list[CallCounts] | None = None
    dropped: dict[str, int] = field(default_factory=dict)
    masked: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    stamps: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def has_calls(self) -> bool:
        """True when a seam, or a replayed graph, counted something."""
        return any(load.num_calls or load.counts_E.any() for load in self.loads.values())

    @property
    def phase_of_eval(self) -> str:
        """Phase of passes in eval mode: their own beside passes in train mode, else forward.

        A log-prob pass or a rollout runs in eval mode throughout: there it is the forward that counts.
        """
        trains = any(
            load.num_passes or load.counts_E.any()
            for load in self.loads.values()
            if load.phase in (PHASE_FORWARD, PHASE_COMPILED)
        )
        return PHASE_EVAL if trains else PHASE_FORWARD

    def add(self, readings: Iterable[SlotReading]) -> None:
        """Add what a drain read."""
        for reading in readings:
            slot = reading.slot
            counts_E, num_other_ids, masked = _decode(reading)
            key = (slot.layer, slot.phase, slot.seam, slot.num_experts, slot.id_space, slot.draft)
            load = self.loads.get(key)
            if load is None:
                load = self.loads[key] = LayerLoad(
                    slot.layer,
                    slot.phase,
                    slot.seam,
                    np.zeros(slot.num_experts, dtype=np.int64),
                    slot.id_space,
                    slot.draft,
                )
            load.counts_E += counts_E
            load.num_calls += reading.num_calls
            load.num_passes += reading.num_passes
            load.num_rows += reading.num_rows
            load.num_tokens += reading.num_tokens
            load.num_other_ids += num_other_ids
            for cause, num in masked.items():
                self.masked[cause] = self.masked.get(cause, 0) + num


def _decode(reading: SlotReading) -> tuple[IntArray, int, dict[str, int]]:
    """Return (tokens per expert [E], ids that are no routed experts, masked ids by cause) of a reading."""
    slot, values = reading.slot, reading.values
    if slot.form == FORM_CUMULATIVE:
        return counts_from_cumulative(values), 0, {}
    if slot.form == FORM_IDS:
        num_experts = slot.num_experts
        values, masked_values = np.split(values, 2)
        masked = {"padding_ids": int(values[0]), "masked_ids": int(masked_values.sum())}
        others = int(values[1 + num_experts :].sum())
        return values[1 : 1 + num_experts], others, {cause: n for cause, n in masked.items() if n}
    return values, 0, {}


class LayerNumbers:
    """Numbers of a role's call-order layers: order of first sight within the role, kept over steps."""

    def __init__(self) -> None:
        self._order: dict[Layer, int] = {}

    def number(self, layers: Iterable[Layer]) -> dict[Layer, int]:
        """Return the number of each layer: its own, else its order among the role's unnumbered ones."""
        layers = list(layers)
        for layer in sorted(
            (lay for lay in layers if lay.number is None), key=lambda lay: lay.serial
        ):
            self._order.setdefault(layer, len(self._order))
        return {lay: self._order[lay] if lay.number is None else lay.number for lay in layers}


def build_load_file(
    gathered: RoleStep, numbers: LayerNumbers, *, run_id: str, writer: str, phases: list[str] | None
) -> LoadFile:
    """Return the file of ``gathered``."""
    number_of = numbers.number([load.layer for load in gathered.loads.values()])
    place = gathered.place
    renamed = {PHASE_EVAL: gathered.phase_of_eval}
    all_loads = [
        dataclasses.replace(load, phase=renamed.get(load.phase, load.phase))
        for load in gathered.loads.values()
    ]
    loads = [load for load in all_loads if phases is None or load.phase in phases]
    loads.sort(
        key=lambda load: (
            number_of[load.layer],
            PHASES.index(load.phase),
            load.seam,
            load.layer.serial,
        )
    )
    widest = max((load.counts_E.shape[0] for load in loads), default=0)
    layers = [load.layer for load in loads]
    return LoadFile(
        schema_version=SCHEMA_VERSION,
        producer=Producer("rl_insight_hooks", __version__),
        run_id=run_id,
        writer=writer,
        step=gathered.step,
        step_source=gathered.step_source,
        role=gathered.role,
        rank=place.rank,
        world_size=place.world_size,
        parallel=place.parallel,
        num_experts=place.num_experts
        or max((lay.num_experts or 0 for lay in layers), default=0)
        or None,
        top_k=place.top_k or next((lay.top_k for lay in layers if lay.top_k), None),
        first_expert=topology.first_local_expert(place, widest),
        id_space=ID_LOGICAL,
        tokens_layout=place.tokens_layout,
        num_regions=gathered.num_regions,
        started_unix_s=gathered.started_unix_s,
        ended_unix_s=gathered.ended_unix_s,
        records=[_record(load, number_of[load.layer]) for load in loads],
        calls=None if gathered.calls is None else _call_records(gathered.calls, number_of, renamed),
        dropped={cause: n for cause, n in sorted(gathered.dropped.items()) if n},
        masked={c: n for c, n in sorted((gathered.masked | _padding(loads)).items()) if n},
        failed={where: n for where, n in sorted(gathered.failed.items()) if n},
        stamps=dict(sorted(gathered.stamps.items())),
        notes=list(gathered.notes),
    )


def _padding(loads: list[LayerLoad]) -> dict[str, int]:
    """Rows of the forward calls that belong to no expert: the tail behind the last group."""
    tails = [
        load.num_rows - int(load.counts_E.sum()) for load in loads if load.phase == PHASE_FORWARD
    ]
    return {"padding_rows": sum(tail for tail in tails if tail > 0)}


def _record(load: LayerLoad, number: int) -> Record:
    num_assignments = int(load.counts_E.sum())
    num_tokens = load.num_tokens
    if not num_tokens and load.layer.top_k and load.num_rows == 0:
        # a seam of ids sees every assignment of its tokens
        num_tokens = (num_assignments + load.num_other_ids) // load.layer.top_k
    return Record(
        layer=number,
        layer_name=load.layer.name,
        layer_source=load.layer.source,
        phase=load.phase,
        seam=load.seam,
        num_calls=load.num_calls,
        num_passes=load.num_passes,
        num_assignments=num_assignments,
        num_rows=load.num_rows or None,
        num_tokens=num_tokens or None,
        counts=load.counts_E.tolist(),
        id_space=load.id_space,
        draft=load.draft,
        extra_counts={"other_ids": load.num_other_ids} if load.num_other_ids else None,
    )


def _call_records(
    calls: list[CallCounts], number_of: dict[Layer, int], renamed: dict[str, str]
) -> list[CallRecord]:
    return [
        CallRecord(
            layer=number_of.get(call.layer, -1),
            phase=renamed.get(call.phase, call.phase),
            index=i,
            counts=call.counts_E.tolist(),
        )
        for i, call in enumerate(calls)
    ]


@functools.cache
def _expert_keys(num_experts: int) -> tuple[str, ...]:
    return tuple(map(str, range(num_experts)))


class Collects:
    """Running total of forward counts of a process: ``eplb_token_collects_<rank>.json``.

    The file's layer keys are MindSpeed-RL's: order among the MoE layers of the rank, dense ones skipped.
    Draft layers and counts of a compiled backward are left out.
    """

    def __init__(self) -> None:
        self._totals: dict[Layer, IntArray] = {}
        self._base: dict[int, dict[int, int]] = {}

    def resume_from(self, base: dict[int, dict[int, int]]) -> None:
        """Start from the counts {layer: {expert: tokens}} of an earlier run."""
        self._base = base

    def add(
        self, readings: Iterable[SlotReading], first_expert: int, *, phase_of_eval: str
    ) -> None:
        """Add the forward counts of ``readings``; column 0 is expert ``first_expert``."""
        phases = {PHASE_FORWARD, PHASE_COMPILED}
        if phase_of_eval == PHASE_FORWARD:
            phases.add(PHASE_EVAL)
        for reading in readings:
            slot = reading.slot
            if (
                slot.phase not in phases
                or slot.draft
                or slot.layer.number == -1
                or slot.id_space == ID_PHYSICAL  # the file's ids are logical
            ):
                continue
            counts_E = _decode(reading)[0]
            total = self._totals.get(slot.layer)
            num_needed = first_expert + counts_E.shape[0]
            if total is None:
                total = self._totals[slot.layer] = np.zeros(num_needed, dtype=np.int64)
            elif total.shape[0] < num_needed:
                total = self._totals[slot.layer] = np.pad(total, (0, num_needed - total.shape[0]))
            total[first_expert:num_needed] += counts_E

    def as_json_dict(self) -> dict[str, dict[str, int]]:
        """Return {"layer": {"expert": tokens}}, base included."""
        ordered = sorted(
            self._totals,
            key=lambda lay: (lay.number if lay.number is not None else lay.serial, lay.serial),
        )
        rows: dict[int, dict[str, int]] = {}
        for index, layer in enumerate(ordered):
            tokens_E = self._totals[layer].tolist()
            rows[index] = dict(zip(_expert_keys(len(tokens_E)), tokens_E, strict=True))
        for index, base in self._base.items():
            row = rows.get(index, {})
            experts = sorted(base.keys() | set(map(int, row)))
            rows[index] = {str(e): base.get(e, 0) + row.get(str(e), 0) for e in experts}
        return {str(index): rows[index] for index in sorted(rows)}

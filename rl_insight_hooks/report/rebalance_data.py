# SPDX-License-Identifier: Apache-2.0
"""LoadTable -> the history that the planner takes: the one place where both meet.

Shape letters: W windows (steps), L layers, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rl_insight_hooks.errors import DataError, UsageError
from rl_insight_hooks.loadstats import headline_phase
from rl_insight_hooks.report.table import NO_STEP, UNKNOWN_LAYER, IntArray, LoadTable


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanData:
    """Tokens of logical experts, and what they are."""

    history_WLE: IntArray  # one window per step, oldest first; one window if there are no steps
    layer_ids: tuple[int, ...]
    layers_are_absolute: bool  # decoder layer numbers, not the order among MoE layers
    steps: tuple[int, ...]  # of the windows; empty if the data has none
    roles: tuple[str, ...]
    phase: str
    remarks: tuple[str, ...] = ()

    @property
    def steps_text(self) -> str:
        """The steps in words."""
        if not self.steps:
            return "no steps"
        if len(self.steps) == 1:
            return f"step {self.steps[0]}"
        return f"{len(self.steps)} steps, {self.steps[0]} to {self.steps[-1]}"

    @property
    def text(self) -> str:
        """Role, phase and steps in words."""
        return f"role {', '.join(self.roles)}, phase {self.phase}, {self.steps_text}"


def plan_data(
    table: LoadTable, *, several_roles: bool = False, first_moe_layer: int | None = None
) -> PlanData:
    """Return the loads of a table that is merged over ranks.

    Args:
        table: rows of one role, unless ``several_roles``; of several phases, the headline one is taken.
        several_roles: add up roles, as the user named them.
        first_moe_layer: added to layer numbers that count MoE layers from 0.

    Raises:
        UsageError: there are several roles and none was chosen, or they have different experts.
        DataError: there is nothing to plan on: no rows, no load, no layer numbers, or physical expert ids.
    """
    if table.id_space != "logical":
        raise DataError(
            f"the data counts {table.id_space} experts (slots of some placement); a plan needs logical ones: "
            "record before the mapping to slots"
        )
    roles = tuple(table.roles[role] for role in np.unique(table.role_N).tolist())
    if len(roles) > 1 and not several_roles:
        raise UsageError(
            f"the data has the roles {', '.join(roles)}; a plan fits the one it was made from: give --role, "
            "for a server's map that of the rollout (or several, a,b, to add them up)"
        )
    ends = {
        table.roles[role]: int((table.first_N + table.held_N)[table.role_N == role].max())
        for role in np.unique(table.role_N).tolist()
    }
    if len(set(ends.values())) > 1:
        sizes = ", ".join(f"{role}: {end}" for role, end in ends.items())
        raise UsageError(f"the roles have different experts ({sizes}); plan for each model alone")
    phases = {table.phases[phase] for phase in np.unique(table.phase_N).tolist()}
    phase = headline_phase(phases) if len(phases) != 1 else next(iter(phases))
    if not table.num_rows or phase is None:
        raise DataError(
            f"the data has no forward counts to plan on (phases: {', '.join(sorted(phases)) or 'none'})"
        )
    keep_N = table.phase_N == table.phases.index(phase)
    remarks = []
    if (table.layer_N[keep_N] == UNKNOWN_LAYER).any():
        remarks.append("rows whose layer is unknown are left out of the plan")
    table = table.take(keep_N & (table.layer_N != UNKNOWN_LAYER))
    if not table.num_rows or not table.counts_NE.any():
        raise DataError("the data holds no tokens in any known layer; there is nothing to plan on")
    steps, step_N = np.unique(table.step_N, return_inverse=True)
    layers, layer_N = np.unique(table.layer_N, return_inverse=True)
    num_experts = max(ends.values())  # of these roles: others of the table may have more
    history_WLE = np.zeros((len(steps), len(layers), num_experts), dtype=np.int64)
    np.add.at(history_WLE, (step_N, layer_N), table.counts_NE[:, :num_experts])
    seen_WL = np.zeros(history_WLE.shape[:2], dtype=bool)
    seen_WL[step_N, layer_N] = True
    if not seen_WL.all():
        missing = int((~seen_WL).sum())
        remarks.append(
            f"{missing} of {seen_WL.size} (step, layer) pairs have no rows: taken as no load"
        )
    empty_L = history_WLE.sum(axis=(0, 2)) == 0
    if empty_L.any():
        named = ", ".join(str(layer) for layer in layers[empty_L].tolist()[:8])
        remarks.append(
            f"layers without a single token are placed as if all experts were alike: {named}"
        )
    absolute = set(table.layer_sources) == {"module"} or first_moe_layer is not None
    shift = first_moe_layer or 0
    return PlanData(
        history_WLE=history_WLE,
        layer_ids=tuple(layer + shift for layer in layers.tolist()),
        layers_are_absolute=absolute,
        steps=tuple(step for step in steps.tolist() if step != NO_STEP),
        roles=roles,
        phase=phase,
        remarks=tuple(remarks),
    )


def only_layers(data: PlanData, layer_ids: tuple[int, ...], num_experts: int) -> IntArray:
    """Return the history of ``data`` for the layers of a plan, to judge the plan on it.

    Raises:
        DataError: it has other experts, or lacks some of the layers.
    """
    if data.history_WLE.shape[2] != num_experts:
        raise DataError(
            f"the data to evaluate on has {data.history_WLE.shape[2]} experts, the plan {num_experts}; "
            "use data of the same model"
        )
    at = {layer: row for row, layer in enumerate(data.layer_ids)}
    missing = [layer for layer in layer_ids if layer not in at]
    if missing:
        raise DataError(
            f"the data to evaluate on has no layer {missing[0]}; use data of the same model"
        )
    chosen: IntArray = data.history_WLE[:, [at[layer] for layer in layer_ids]]
    return chosen

# SPDX-License-Identifier: Apache-2.0
"""The few numbers of a step that go into a trainer's own metrics. Pure; bounded in number."""

from __future__ import annotations

import numpy as np

from rl_insight_hooks.schema import PHASE_COMPILED, PHASE_EVAL, PHASE_FORWARD, LoadFile

# The phase whose counts speak for a role: the first of these that it has.
HEADLINE_PHASES = (PHASE_FORWARD, PHASE_COMPILED, PHASE_EVAL)


def headline_phase(phases: set[str]) -> str | None:
    """Return the phase that speaks for a role that saw ``phases``, or None."""
    return next((phase for phase in HEADLINE_PHASES if phase in phases), None)


def summary(load_file: LoadFile) -> dict[str, float]:
    """Return at most ten metrics of one (step, role) on this rank, by the name ``moe_load/<role>/...``.

    ``max_over_mean``: worst over layers of max_e c / mean_e c (1 is even, E is one hot expert);
    ``max_over_mean_avg``: mean over layers; ``cv``: worst over layers of std / mean; ``dead_experts``: largest
    share of experts without a token; ``worst_layer``; ``assignments``: sum of counts; ``passes``; and
    ``failed``, ``dropped``, ``notes``: what went wrong in the recording itself. Experts are this rank's.
    """
    prefix = f"moe_load/{load_file.role}/"
    values: dict[str, float] = {
        "failed": float(sum(load_file.failed.values())),
        "dropped": float(sum(load_file.dropped.values())),
        "notes": float(len(load_file.notes)),
    }
    phase = headline_phase({r.phase for r in load_file.records})
    records = [r for r in load_file.records if r.phase == phase and r.num_assignments > 0]
    values["assignments"] = float(sum(r.num_assignments for r in records))
    values["passes"] = float(sum(r.num_passes for r in records))
    if records:
        loads = [np.asarray(r.counts, dtype=np.float64) for r in records]
        ratios = [float(c.max() / c.mean()) for c in loads]
        values["max_over_mean"] = max(ratios)
        values["max_over_mean_avg"] = float(np.mean(ratios))
        values["worst_layer"] = float(records[int(np.argmax(ratios))].layer)
        values["cv"] = max(float(c.std() / c.mean()) for c in loads)
        values["dead_experts"] = max(float((c == 0).mean()) for c in loads)
    return {prefix + name: value for name, value in values.items()}

# SPDX-License-Identifier: Apache-2.0
"""A live snapshot in words, for a terminal of any size or a log. Pure."""

from __future__ import annotations

from rl_insight_hooks.report.live import RoleView, Snapshot
from rl_insight_hooks.report.load.completeness import ranks_text, step_text

_NUM_TREND = 8


def snapshot_lines(snapshot: Snapshot, *, num_layers: int, width: int | None = None) -> list[str]:
    """Return the lines of ``snapshot``; ``num_layers`` worst layers of each role, cut at ``width`` columns."""
    lines: list[str] = []
    if not snapshot.roles and not snapshot.problems:
        lines.append(f"{snapshot.folder}: no step is finished yet")
    for view in snapshot.roles:
        lines += ["", *_role_lines(view, num_layers)] if lines else _role_lines(view, num_layers)
    lines += [f"problem: {text}" for text in snapshot.problems[:5]]
    if len(snapshot.problems) > 5:
        lines.append(f"problem: {len(snapshot.problems)} in all; see rl-insight-report check")
    return [line[:width] for line in lines]


def _role_lines(view: RoleView, num_layers: int) -> list[str]:
    shown = view.shown
    step = step_text(shown.step) if shown.step >= 0 else "since the start of the run"
    head = f"{shown.role}  {step}  ({shown.phase})  worst max/mean {shown.worst:.2f}"
    lines = [f"{head}  {_ranks_text(view)}"]
    if len(view.trend) > 1:
        values = " ".join(f"{value:.2f}" for value in view.trend[-_NUM_TREND:])
        lines.append(f"  trend of the worst: {values}  {view.direction}".rstrip())
    if view.missing:
        lines.append(f"  MISSING: {ranks_text(view.missing)} did not write {step}")
    elif view.newest_missing:
        lines.append(
            f"  {step_text(view.newest_step)} is not finished: {ranks_text(view.newest_missing)} missing so far"
        )
    lines.append(
        f"  {'layer':<24} {'max/mean':>8} {'CV':>6} {'dead':>5} {'hottest':>8} {'share':>6}"
    )
    lines += [
        f"  {load.label[-24:]:<24} {load.max_over_mean:>8.2f} {load.cv:>6.2f} {load.num_dead:>5} "
        f"{load.hottest:>8} {load.hottest_share:>6.1%}"
        for load in shown.layers[:num_layers]
    ]
    if len(shown.layers) > num_layers:
        lines.append(f"  ... {len(shown.layers) - num_layers} more layers, more even than these")
    return lines


def _ranks_text(view: RoleView) -> str:
    num = len(view.shown.ranks)
    world = view.shown.world_size
    return f"{num} of {world} ranks" if world else f"{num} ranks"

# SPDX-License-Identifier: Apache-2.0
"""The summary as aligned text."""

from __future__ import annotations

from rl_insight_hooks.report.summary import LayerSummary, RoleSummary, Summary
from rl_insight_hooks.steps import IntRanges

_COLUMNS = ("max/mean", "balance", "cv", "entropy", "dead")


def summary_lines(summary: Summary, *, num_layers: int) -> list[str]:
    """Return the lines to print; at most ``num_layers`` layers a role (0: all)."""
    if not summary.roles:
        return ["no forward loads in this data"]
    lines: list[str] = []
    for role in summary.roles:
        lines += [*_role_lines(role, num_layers), ""]
    return lines[:-1]


def _role_lines(role: RoleSummary, num_layers: int) -> list[str]:
    steps = f"steps {_ranges(role.steps)}" if role.steps else "no steps"
    lines = [
        f"{role.role}  ({role.phase}; {steps}; {role.num_layers} layers x {role.num_experts} experts; "
        f"{role.assignments:,} assignments)",
        "  " + verdict_line(role),
    ]
    shown = role.layers[: num_layers or None]
    lines += ["  " + line for line in _table(shown, on_devices=role.num_devices is not None)]
    if len(shown) < len(role.layers):
        lines.append(
            f"  ... {len(role.layers) - len(shown)} better layers (--layers-shown 0 for all)"
        )
    lines.append("  " + _percentiles(role))
    if role.hottest:
        hot = ", ".join(f"L{h.layer} E{h.expert} {h.over_mean:.1f}x" for h in role.hottest)
        lines.append(f"  hottest experts (tokens over the layer's mean): {hot}")
    if role.trend is not None:
        lines.append("  " + trend_line(role))
    return lines


def verdict_line(role: RoleSummary) -> str:
    """Return the verdict on a role in one sentence."""
    if role.max_over_mean is None:
        return "no token was routed"
    where = f"{role.num_devices} devices" if role.num_devices else "experts"
    worst = role.device_max_over_mean if role.num_devices else role.max_over_mean
    mean = role.device_max_over_mean_mean if role.num_devices else role.max_over_mean_mean
    saves = f"an even load would save up to {100 * (role.even_load_saves or 0):.0f}% of the expert part's time"
    dead = f"; {role.dead_experts} experts got no token" if role.dead_experts else ""
    return (
        f"max/mean over {where}: worst {worst:.2f} (layer {role.worst_layer}), mean over layers {mean:.2f}; "
        f"{saves}{dead}"
    )


def _table(layers: list[LayerSummary], *, on_devices: bool) -> list[str]:
    heads = ["layer", "assignments", *_COLUMNS, "hottest"]
    if on_devices:
        heads.insert(2, "dev max/mean")
    rows = [heads]
    for layer in layers:
        m = layer.experts
        cells = [
            layer.name if len(layer.name) <= 28 else f"..{layer.name[-26:]}",
            f"{layer.assignments:,}",
            _cell(m["max_over_mean"]),
            _cell(m["balancedness"]),
            _cell(m["cv"]),
            _cell(m["entropy"]),
            _cell(m["dead"], digits=0),
            f"E{layer.hottest_expert} {layer.hottest_tokens:,}",
        ]
        if on_devices and layer.devices is not None:
            cells.insert(2, _cell(layer.devices["max_over_mean"]))
        rows.append(cells)
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    return [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)),
            ]
        ).rstrip()
        for row in rows
    ]


def _percentiles(role: RoleSummary) -> str:
    parts = [f"{name} {_cell(value)}" for name, value in role.percentiles.items()]
    return "max/mean over layers: " + ", ".join(parts)


def trend_line(role: RoleSummary) -> str:
    """Return the trend of a role in one sentence; it needs ``role.trend``."""
    t = role.trend or {}
    line = f"trend of max/mean (mean over layers): {_cell(t['first'])} -> {_cell(t['last'])}"
    if t["turned_at"] is not None:
        return f"{line}; turned at step {t['turned_at']}: {_cell(t['before'])} before, {_cell(t['after'])} since"
    return line + "; no turn"


def _cell(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _ranges(steps: list[int]) -> str:
    ranges: list[tuple[int, int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], step)
        else:
            ranges.append((step, step))
    return str(IntRanges(tuple(ranges)))

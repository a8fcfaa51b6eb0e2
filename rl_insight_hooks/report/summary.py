# SPDX-License-Identifier: Apache-2.0
"""The verdict of a LoadTable: per role its layers, worst first. Pure; printing is in ``summary_text``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rl_insight_hooks.errors import RlInsightError, UsageError
from rl_insight_hooks.loadstats import headline_phase
from rl_insight_hooks.rebalance.placement import Placement, linear_placement
from rl_insight_hooks.rebalance.score import device_load
from rl_insight_hooks.report import metrics
from rl_insight_hooks.report.table import NO_STEP, IntArray, LoadTable
from rl_insight_hooks.report.trend import Trend, trend

SUMMARY_VERSION = 1  # of the keys of --json, see docs/commands/summary.md

_NUM_HOTTEST = 5


class LayerSummary(msgspec.Struct, kw_only=True, frozen=True):
    """One layer of one role, added up over the chosen steps and ranks."""

    layer: int
    name: str
    assignments: int
    experts: dict[str, float | None]  # metrics over experts
    devices: dict[str, float | None] | None  # the same over devices, where a placement is given
    hottest_expert: int
    hottest_tokens: int


class HotExpert(msgspec.Struct, kw_only=True, frozen=True):
    """One (layer, expert) with many tokens."""

    layer: int
    expert: int
    tokens: int
    over_mean: float


class RoleSummary(msgspec.Struct, kw_only=True, frozen=True):
    """One role."""

    role: str
    phase: str
    steps: list[int]
    num_layers: int
    num_experts: int
    num_devices: int | None
    assignments: int
    worst_layer: int
    max_over_mean: float | None  # of the worst layer, over experts
    max_over_mean_mean: float | None  # mean over layers
    percentiles: dict[str, float | None]  # of max/mean over layers
    device_max_over_mean: float | None
    device_max_over_mean_mean: float | None
    even_load_saves: (
        float | None
    )  # share of the expert part's time: 1 - sum mean / sum max over layers
    dead_experts: int
    hottest: list[HotExpert]
    trend: dict[str, float | int | None] | None
    layers: list[LayerSummary]  # worst first


class Summary(msgspec.Struct, kw_only=True, frozen=True):
    """What ``summary --json`` prints."""

    summary_version: int
    roles: list[RoleSummary]
    problems: list[dict[str, str]]
    assumptions: list[str]


@dataclass(frozen=True, slots=True)
class Devices:
    """How experts sit on devices: a placement, or so many devices with experts in a row."""

    num_devices: int | None = None
    placement: Placement | None = None

    def load(self, load_LE: IntArray) -> np.ndarray | None:
        """Return the load of each device [L, D], or None when nothing is known of devices.

        Raises:
            UsageError: the experts cannot be spread over the devices.
        """
        num_layers, num_experts = load_LE.shape
        if self.placement is not None:
            return device_load(load_LE, self.placement)
        if self.num_devices is None:
            return None
        if num_experts % self.num_devices:
            raise UsageError(
                f"{num_experts} experts do not spread evenly over {self.num_devices} devices; "
                "give a divisor to --num-devices, or --map"
            )
        return device_load(load_LE, linear_placement(num_layers, num_experts, self.num_devices))


def devices_of(
    num_devices: int | None, expert_map: Path | None, num_experts: int, *, ep_size: int | None
) -> Devices | None:
    """Return what ``--map``, else ``--num-devices`` or ``--ep-size``, says of devices; None without any.

    With a map, ``num_devices`` is what maps of sglang and tensorrt-llm leave open.

    Raises:
        UsageError: the map cannot be read, or does not say how many devices there are.
        DataError: it is no map, or is one of other experts or devices.
    """
    if expert_map is None and (num_devices or ep_size):
        return Devices(num_devices=num_devices or ep_size)
    if expert_map is None:
        return None
    from rl_insight_hooks.rebalance.formats import decode

    try:
        raw = expert_map.read_bytes()
    except OSError as error:
        raise UsageError(
            f"--map {expert_map}: cannot be read ({error.strerror}); give an expert map"
        ) from error
    try:
        return Devices(placement=decode(raw, num_experts=num_experts, num_devices=num_devices))
    except RlInsightError as error:
        raise type(error)(f"--map {expert_map}: {error}") from None


def summarize(table: LoadTable, devices: Devices | None = None) -> Summary:
    """Return the summary of a table that was merged over ranks.

    Args:
        table: rows of (step, role, layer, phase).
        devices: where experts sit, for metrics over devices.
    """
    devices = devices or Devices()
    roles = [
        s for role in range(len(table.roles)) if (s := _role(table, role, devices)) is not None
    ]
    roles.sort(key=lambda r: -(r.max_over_mean or 0.0))
    return Summary(
        summary_version=SUMMARY_VERSION,
        roles=roles,
        problems=[
            {"rule": p.rule, "severity": p.severity, "where": p.where, "what": p.what, "fix": p.fix}
            for p in table.problems
        ],
        assumptions=list(table.assumptions),
    )


def headline_rows(table: LoadTable, role: int) -> tuple[str, IntArray] | None:
    """Return (phase, rows) that speak for a role: forward, else eval, else compiled; None without any."""
    mine = table.role_N == role
    phase = headline_phase({table.phases[p] for p in np.unique(table.phase_N[mine])})
    if phase is None:
        return None
    rows = np.flatnonzero(mine & (table.phase_N == table.phases.index(phase)))
    return phase, rows


def fold_layers(table: LoadTable, rows: IntArray) -> tuple[IntArray, IntArray]:
    """Return (layers [L] ascending, load [L, E]) of ``rows`` added up over steps."""
    layers_L = np.unique(table.layer_N[rows])
    return layers_L, _load_of(table, rows, layers_L, _num_held(table, rows))


def _load_of(table: LoadTable, rows: IntArray, layers_L: IntArray, num_experts: int) -> IntArray:
    """Return the load [L, E] of ``rows``; a layer of ``layers_L`` without rows has none."""
    load_LE = np.zeros((layers_L.size, num_experts), dtype=np.int64)
    index_N = np.searchsorted(layers_L, table.layer_N[rows])
    np.add.at(load_LE, index_N, table.counts_NE[rows, :num_experts])
    return load_LE


def _num_held(table: LoadTable, rows: IntArray) -> int:
    """Return the end of the experts that a role's ranks hold: another role may have more experts."""
    return int((table.first_N[rows] + table.held_N[rows]).max(initial=1))


def _role(table: LoadTable, role: int, devices: Devices) -> RoleSummary | None:
    found = headline_rows(table, role)
    if found is None:
        return None
    phase, rows = found
    layers_L, load_LE = fold_layers(table, rows)
    used = load_LE.sum(1) > 0
    over_experts = metrics.all_metrics(load_LE)
    load_LD = devices.load(load_LE)
    over_devices = None if load_LD is None else metrics.all_metrics(load_LD)
    judged = (
        over_experts["max_over_mean"] if over_devices is None else over_devices["max_over_mean"]
    )
    order = np.argsort(-np.nan_to_num(judged, nan=-1.0), kind="stable")
    steps = np.unique(table.step_N[rows])
    steps = steps[steps != NO_STEP]
    worst = int(order[0])
    busiest = load_LE if load_LD is None else load_LD
    return RoleSummary(
        role=table.roles[role],
        phase=phase,
        steps=steps.tolist(),
        num_layers=int(layers_L.size),
        num_experts=int(load_LE.shape[1]),
        num_devices=None if load_LD is None else int(load_LD.shape[1]),
        assignments=int(load_LE.sum()),
        worst_layer=int(layers_L[worst]),
        max_over_mean=_number(np.nanmax(over_experts["max_over_mean"]) if used.any() else np.nan),
        max_over_mean_mean=_number(
            np.nanmean(over_experts["max_over_mean"]) if used.any() else np.nan
        ),
        percentiles={
            k: _number(v) for k, v in metrics.percentiles(over_experts["max_over_mean"]).items()
        },
        device_max_over_mean=_worst(over_devices),
        device_max_over_mean_mean=_mean(over_devices),
        even_load_saves=_number(1.0 - busiest.mean(1).sum() / busiest.max(1).sum())
        if used.any()
        else None,
        dead_experts=int(np.nansum(over_experts["dead"])),
        hottest=_hottest(layers_L, load_LE),
        trend=_trend(table, rows, devices),
        layers=[
            LayerSummary(
                layer=int(layers_L[i]),
                name=table.layer_label(int(layers_L[i])),
                assignments=int(load_LE[i].sum()),
                experts={k: _number(v[i]) for k, v in over_experts.items()},
                devices=None
                if over_devices is None
                else {k: _number(v[i]) for k, v in over_devices.items()},
                hottest_expert=int(load_LE[i].argmax()),
                hottest_tokens=int(load_LE[i].max()),
            )
            for i in order.tolist()
        ],
    )


def _hottest(layers_L: IntArray, load_LE: IntArray) -> list[HotExpert]:
    mean_L = load_LE.mean(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        over = np.where(mean_L[:, None] > 0, load_LE / mean_L[:, None], 0.0)
    flat = np.argsort(-over, axis=None, kind="stable")[:_NUM_HOTTEST]
    return [
        HotExpert(
            layer=int(layers_L[i // load_LE.shape[1]]),
            expert=int(i % load_LE.shape[1]),
            tokens=int(load_LE.flat[i]),
            over_mean=float(over.flat[i]),
        )
        for i in flat.tolist()
        if over.flat[i] > 0
    ]


def per_step(table: LoadTable, rows: IntArray, devices: Devices) -> tuple[IntArray, np.ndarray]:
    """Return (steps [S], mean over layers of max/mean [S]) of ``rows``; without steps both are empty."""
    steps = np.unique(table.step_N[rows])
    steps = steps[steps != NO_STEP]
    values = np.full(steps.size, np.nan)
    layers_L = np.unique(table.layer_N[rows])  # of all steps: a map has a row for each
    num_held = _num_held(table, rows)
    for s, step in enumerate(steps.tolist()):
        load_LE = _load_of(table, rows[table.step_N[rows] == step], layers_L, num_held)
        load_LD = devices.load(load_LE)
        ratio_L = metrics.max_over_mean(load_LE if load_LD is None else load_LD)
        if not np.isnan(ratio_L).all():
            values[s] = np.nanmean(ratio_L)
    return steps, values


def _trend(
    table: LoadTable, rows: IntArray, devices: Devices
) -> dict[str, float | int | None] | None:
    steps, values = per_step(table, rows, devices)
    found: Trend | None = trend(steps, values) if steps.size > 1 else None
    if found is None:
        return None
    return {
        "first": _number(found.first),
        "last": _number(found.last),
        "turned_at": found.turned_at,
        "before": None if found.before is None else _number(found.before),
        "after": None if found.after is None else _number(found.after),
    }


def _number(value: float | np.floating[Any]) -> float | None:
    """NaN has no place in JSON: it becomes null."""
    return None if np.isnan(value) else float(value)


def _worst(values: dict[str, np.ndarray] | None) -> float | None:
    if values is None or np.isnan(values["max_over_mean"]).all():
        return None
    return float(np.nanmax(values["max_over_mean"]))


def _mean(values: dict[str, np.ndarray] | None) -> float | None:
    if values is None or np.isnan(values["max_over_mean"]).all():
        return None
    return float(np.nanmean(values["max_over_mean"]))


def parse_thresholds(texts: list[str]) -> dict[str, float]:
    """Return {metric: limit} of ``metric=value`` texts.

    Raises:
        UsageError: an unknown metric, or no number.
    """
    limits = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in metrics.METRICS:
            known = ", ".join(metrics.METRICS)
            raise UsageError(f"--fail-above {text}: write metric=value with a metric of {known}")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = math.nan
        if math.isnan(limits[name]):
            raise UsageError(f"--fail-above {text}: {value!r} is no number")
    return limits


def exceeded(summary: Summary, limits: dict[str, float]) -> list[str]:
    """Return one sentence for each (role, metric) whose worst layer is beyond its limit.

    Over devices where they are known, else over experts. Metrics that are better when larger (balancedness,
    entropy, min_vio) exceed a limit downwards.
    """
    found = []
    for role in summary.roles:
        for name, limit in limits.items():
            values = [((la.devices or la.experts)[name], la.layer) for la in role.layers]
            known = [(v, layer) for v, layer in values if v is not None]
            if not known:
                continue
            lower = name in metrics.LARGER_IS_BETTER
            value, layer = min(known) if lower else max(known)
            if value < limit if lower else value > limit:
                word = "below" if lower else "above"
                found.append(
                    f"{role.role}: {name} of layer {layer} is {value:.4g}, {word} {limit:g}"
                )
    return found

# SPDX-License-Identifier: Apache-2.0
"""How far apart two loads are, layer by layer: two runs, two steps, or two roles. Pure.

Above all rollout against training of the same step: a router that chooses other experts in the inference
engine than in the trainer makes RL with MoE unstable.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from rl_insight_hooks.errors import UsageError
from rl_insight_hooks.report import metrics
from rl_insight_hooks.report.summary import fold_layers, headline_rows
from rl_insight_hooks.report.table import IntArray, LoadTable

COMPARE_VERSION = 1  # of the keys of --json, see docs/commands/compare.md

_NUM_MOVED = 5


class ExpertChange(msgspec.Struct, kw_only=True, frozen=True):
    """An expert whose place in the order of loads changed."""

    layer: int
    expert: int
    rank_a: int  # 0: the most loaded of its layer
    rank_b: int
    share_a: float  # of its layer's assignments
    share_b: float


class LayerDistance(msgspec.Struct, kw_only=True, frozen=True):
    """One layer of both sides."""

    layer: int
    name: str
    total_variation: float | None
    jensen_shannon: float | None
    max_over_mean_a: float | None
    max_over_mean_b: float | None


class Comparison(msgspec.Struct, kw_only=True, frozen=True):
    """What ``compare --json`` prints."""

    compare_version: int
    a: str
    b: str
    num_experts: int
    total_variation_mean: float | None
    total_variation_worst: float | None
    worst_layer: int | None
    noise: float  # total variation that two samples of these sizes show though nothing differs
    layers: list[LayerDistance]  # farthest first
    moved: list[ExpertChange]
    only_in_a: list[int]  # layers
    only_in_b: list[int]


def role_load(table: LoadTable, role: str | None = None) -> tuple[str, IntArray, IntArray]:
    """Return (role, layers [L], load [L, E]) of one role's headline phase; the only role if None.

    Raises:
        UsageError: no such role with forward loads, or several and none named.
    """
    names = [name for i, name in enumerate(table.roles) if headline_rows(table, i) is not None]
    if role is None:
        if len(names) != 1:
            raise UsageError(
                f"there are loads of {len(names)} roles ({', '.join(names)}); name one with --roles"
            )
        role = names[0]
    if role not in names:
        raise UsageError(
            f"there is no load of role {role!r}; there are {', '.join(names) or 'none'}"
        )
    found = headline_rows(table, table.roles.index(role))
    assert found is not None
    layers_L, load_LE = fold_layers(table, found[1])
    return role, layers_L, load_LE


def compare(
    a: tuple[str, IntArray, IntArray],
    b: tuple[str, IntArray, IntArray],
    layer_names: dict[int, str] | None = None,
) -> Comparison:
    """Return the distances of two loads.

    Args:
        a: (label, layers [L], load [L, E]).
        b: the same; only layers of both sides are compared.
        layer_names: names of layers, where known.

    Raises:
        UsageError: the sides have no layer in common, or different numbers of experts.
    """
    (label_a, layers_a, load_a), (label_b, layers_b, load_b) = a, b
    if load_a.shape[1] != load_b.shape[1]:
        raise UsageError(
            f"{label_a} has {load_a.shape[1]} experts and {label_b} has {load_b.shape[1]}: they are not of one model"
        )
    common, index_a, index_b = np.intersect1d(layers_a, layers_b, return_indices=True)
    if common.size == 0:
        raise UsageError(f"{label_a} and {label_b} have no layer in common")
    pa, pb = load_a[index_a], load_b[index_b]
    tv = metrics.total_variation(pa, pb)
    js = metrics.jensen_shannon(pa, pb)
    ratio_a, ratio_b = metrics.max_over_mean(pa), metrics.max_over_mean(pb)
    order = np.argsort(-np.nan_to_num(tv, nan=-1.0), kind="stable")
    names = layer_names or {}
    known = tv[~np.isnan(tv)]
    return Comparison(
        compare_version=COMPARE_VERSION,
        a=label_a,
        b=label_b,
        num_experts=int(load_a.shape[1]),
        total_variation_mean=float(known.mean()) if known.size else None,
        total_variation_worst=float(known.max()) if known.size else None,
        worst_layer=int(common[order[0]]) if known.size else None,
        noise=sampling_noise(pa, pb),
        layers=[
            LayerDistance(
                layer=int(common[i]),
                name=names.get(int(common[i]), str(int(common[i]))),
                total_variation=_number(tv[i]),
                jensen_shannon=_number(js[i]),
                max_over_mean_a=_number(ratio_a[i]),
                max_over_mean_b=_number(ratio_b[i]),
            )
            for i in order.tolist()
        ],
        moved=_moved(common, pa, pb),
        only_in_a=sorted(set(layers_a.tolist()) - set(common.tolist())),
        only_in_b=sorted(set(layers_b.tolist()) - set(common.tolist())),
    )


def sampling_noise(load_a: IntArray, load_b: IntArray) -> float:
    """Return the expected total variation (mean over layers) of two independent samples of one distribution.

    Expert e's share differs by a normal of variance p(1 - p)(1/n + 1/m), whose absolute value has the mean
    sigma sqrt(2/pi); half the sum over experts. Assignments of one token are not independent, so this is a
    guide, not a test.
    """
    total_a, total_b = load_a.sum(1, keepdims=True), load_b.sum(1, keepdims=True)
    used = ((total_a > 0) & (total_b > 0))[:, 0]
    if not used.any():
        return 0.0
    n, m = total_a[used].astype(float), total_b[used].astype(float)
    p = (load_a[used] + load_b[used]) / (n + m)
    sigma = np.sqrt(p * (1 - p) * (1 / n + 1 / m))
    return float((0.5 * np.sqrt(2 / np.pi) * sigma.sum(1)).mean())


def _moved(layers: IntArray, load_a: IntArray, load_b: IntArray) -> list[ExpertChange]:
    """Experts whose place changed most; ties by the change of share."""
    rank_a = np.argsort(np.argsort(-load_a, axis=1, kind="stable"), axis=1)
    rank_b = np.argsort(np.argsort(-load_b, axis=1, kind="stable"), axis=1)
    share_a = load_a / np.maximum(load_a.sum(1, keepdims=True), 1)
    share_b = load_b / np.maximum(load_b.sum(1, keepdims=True), 1)
    change = np.abs(rank_a - rank_b) + np.abs(
        share_a - share_b
    )  # shares are below 1: they only break ties
    flat = np.argsort(-change, axis=None, kind="stable")[:_NUM_MOVED]
    num_experts = load_a.shape[1]
    return [
        ExpertChange(
            layer=int(layers[i // num_experts]),
            expert=int(i % num_experts),
            rank_a=int(rank_a.flat[i]),
            rank_b=int(rank_b.flat[i]),
            share_a=float(share_a.flat[i]),
            share_b=float(share_b.flat[i]),
        )
        for i in flat.tolist()
        if rank_a.flat[i] != rank_b.flat[i]
    ]


def comparison_lines(found: Comparison, *, num_layers: int) -> list[str]:
    """Return the comparison as text; at most ``num_layers`` layers (0: all)."""
    if found.total_variation_mean is None:
        return [f"{found.a} against {found.b}: one side has no tokens in the layers of both"]
    lines = [
        f"{found.a} against {found.b}  ({len(found.layers)} layers x {found.num_experts} experts)",
        f"  {_verdict(found)}",
        "  layer        total variation  Jensen-Shannon  max/mean a  max/mean b",
    ]
    shown = found.layers[: num_layers or None]
    for layer in shown:
        name = layer.name if len(layer.name) <= 12 else f"..{layer.name[-10:]}"
        lines.append(
            f"  {name:<12} {_cell(layer.total_variation):>15}  {_cell(layer.jensen_shannon):>14}"
            f"  {_cell(layer.max_over_mean_a):>10}  {_cell(layer.max_over_mean_b):>10}"
        )
    if len(shown) < len(found.layers):
        lines.append(
            f"  ... {len(found.layers) - len(shown)} nearer layers (--layers-shown 0 for all)"
        )
    if found.moved:
        moved = ", ".join(
            f"L{m.layer} E{m.expert} {m.rank_a + 1} -> {m.rank_b + 1}" for m in found.moved
        )
        lines.append(f"  experts whose place changed most (1: most loaded): {moved}")
    for label, layers in ((found.a, found.only_in_a), (found.b, found.only_in_b)):
        if layers:
            lines.append(f"  layers only in {label}: {', '.join(map(str, layers))}")
    return lines


def _verdict(found: Comparison) -> str:
    mean, noise = found.total_variation_mean or 0.0, found.noise
    text = (
        f"{100 * mean:.1f}% of assignments go elsewhere (total variation, mean over layers; worst "
        f"{100 * (found.total_variation_worst or 0):.1f}% in layer {found.worst_layer}); sampling alone gives about "
        f"{100 * noise:.1f}%"
    )
    if mean <= 1.5 * noise:
        return f"{text}: no difference beyond sampling"
    return f"{text}: the routing differs"


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _number(value: np.floating[Any]) -> float | None:
    return None if np.isnan(value) else float(value)

# SPDX-License-Identifier: Apache-2.0
"""Pictures of ``rebalance``: device loads before and after, and balance against memory. PNG bytes,
no arithmetic.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_insight_hooks.rebalance.assess import Assessment, SweepRow
from rl_insight_hooks.rebalance.placement import FloatArray, Placement

_DPI = 150


def before_after_png(placement: Placement, result: Assessment) -> bytes:
    """Return device loads over the layer's mean, [layer, device], before and after on one scale,
    and max/mean.
    """
    from matplotlib.figure import Figure

    layers = [str(layer) for layer in placement.layer_ids]
    height = min(max(4.0, 1.5 + 0.16 * len(layers)), 14.0)
    figure = Figure(figsize=(13.0, height), dpi=_DPI, layout="constrained")
    axes = figure.subplots(1, 3, width_ratios=(1.0, 1.0, 0.8), sharey=True)
    panels = [_over_mean(result.before_LD), _over_mean(result.after_LD)]
    top = max(float(np.nanmax(panel)) for panel in panels)
    image: Any = None
    for axis, panel, title in zip(axes[:2], panels, ("before", "after"), strict=True):
        image = axis.imshow(
            panel, aspect="auto", interpolation="nearest", vmin=0.0, vmax=top, cmap="viridis"
        )
        axis.set_title(title)
        axis.set_xlabel("device")
    figure.colorbar(
        image, ax=axes[:2], label="tokens / mean of the layer", location="bottom", shrink=0.6
    )
    axes[0].set_ylabel("layer")
    rows = np.arange(len(layers))
    shown = rows[:: max(1, -(-len(rows) // 40))]
    axes[0].set_yticks(shown, [layers[row] for row in shown])
    axes[2].plot(result.before.max_over_mean_L, rows, color="tab:red", label="before")
    axes[2].plot(result.after.max_over_mean_L, rows, color="tab:blue", label="after")
    axes[2].plot(result.bound_L, rows, color="black", linestyle=":", label="bound")
    if result.held_out is not None:
        axes[2].plot(
            result.held_out.held_out.max_over_mean_L, rows, color="tab:green", label="held out"
        )
    axes[2].set_xlabel("max / mean")
    axes[2].grid(alpha=0.3)
    figure.legend(loc="outside lower right", ncols=4)
    shape = placement.shape
    figure.suptitle(
        f"{shape.num_experts} experts in {shape.num_replicas} slots on {shape.num_devices} devices: "
        f"max/mean {result.before.mean:.3f} before, {result.after.mean:.3f} after"
    )
    return _png(figure)


def sweep_png(rows: Sequence[SweepRow]) -> bytes:
    """Return max/mean against replicas: fitted, held out, bound."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 5.0), dpi=_DPI, layout="constrained")
    axis = figure.subplots()
    replicas = [row.num_replicas for row in rows]
    axis.plot(replicas, [row.fitted.mean for row in rows], marker="o", label="fitted")
    held = [(row.num_replicas, row.held_out.mean) for row in rows if row.held_out is not None]
    if held:
        axis.plot(*zip(*held, strict=True), marker="s", label="held out")
    axis.plot(replicas, [row.bound for row in rows], color="black", linestyle=":", label="bound")
    axis.set_xticks(replicas, [f"{r.num_replicas}\n{r.slots_per_device}/device" for r in rows])
    axis.set_xlabel("physical slots")
    axis.set_ylabel("max / mean of device loads, mean over layers")
    axis.grid(alpha=0.3)
    axis.legend()
    return _png(figure)


def _over_mean(load_LD: FloatArray) -> FloatArray:
    mean_L1 = load_LD.mean(axis=1, keepdims=True)
    blank = np.full_like(load_LD, np.nan)
    return np.asarray(np.divide(load_LD, mean_L1, out=blank, where=mean_L1 > 0))


def _png(figure: Any) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()

# SPDX-License-Identifier: Apache-2.0
"""Renumber the devices of a new placement so that it keeps as much of an old one as can be.

Devices are alike, so a placement may give its device 3's experts to device 5 without any change of balance.
Shape letters: L layers, D devices, S slots of one device, N nodes, I devices of one node.
"""

from __future__ import annotations

import numpy as np

from rl_insight_hooks.rebalance.placement import IntArray
from rl_insight_hooks.rebalance.shape import Shape


def align(new_LDS: IntArray, old_LDS: IntArray, shape: Shape) -> IntArray:
    """Return ``new_LDS`` with devices and slots reordered to match ``old_LDS``.

    Nodes are matched first where groups stay on nodes, then the devices of matched nodes; each time the two
    with most experts in common, then the next (greedy). A slot that keeps its expert keeps its position.
    """
    common_LDD = overlap(old_LDS, new_LDS, shape.num_experts)
    num_layers, num_devices, _ = new_LDS.shape
    size = num_devices // shape.num_domains
    shaped = common_LDD.reshape(num_layers, shape.num_domains, size, shape.num_domains, size)
    node_LN = match(shaped.sum(axis=(2, 4)))
    rows = np.arange(num_layers)[:, None]
    in_node_LNII = shaped.transpose(0, 1, 3, 2, 4)[rows, np.arange(shape.num_domains), node_LN]
    inner = match(in_node_LNII.reshape(-1, size, size)).reshape(num_layers, -1, size)
    device_LD = (node_LN[:, :, None] * size + inner).reshape(num_layers, num_devices)
    renumbered_LDS: IntArray = new_LDS[rows, device_LD]
    return keep_slots(renumbered_LDS, old_LDS)


def overlap(old_LDS: IntArray, new_LDS: IntArray, num_experts: int) -> IntArray:
    """Return how many experts each old device has in common with each new one, int [L, D, D]."""
    num_layers, num_devices, _ = old_LDS.shape
    held = np.zeros((2, num_layers, num_devices, num_experts), dtype=np.float32)
    layers, devices = np.arange(num_layers)[:, None, None], np.arange(num_devices)[None, :, None]
    held[0, layers, devices, old_LDS] = 1
    held[1, layers, devices, new_LDS] = 1
    common_LDD: IntArray = np.rint(held[0] @ held[1].transpose(0, 2, 1)).astype(np.int64)
    return common_LDD


def match(common_KII: IntArray) -> IntArray:
    """Return for each old number the new one that it gets, int [K, I]: greedy, most in common first."""
    num_rows, size, _ = common_KII.shape
    left = common_KII.reshape(num_rows, -1).copy().reshape(num_rows, size, size)
    out = np.zeros((num_rows, size), dtype=np.int64)
    rows = np.arange(num_rows)
    for _ in range(size):
        old, new = np.divmod(left.reshape(num_rows, -1).argmax(axis=1), size)
        out[rows, old] = new
        left[rows, old, :] = -1
        left[rows, :, new] = -1
    return out


def keep_slots(new_LDS: IntArray, old_LDS: IntArray) -> IntArray:
    """Return ``new_LDS`` with the slots of each device reordered: kept experts in their old slots,
    others fill up.
    """
    same = old_LDS[..., :, None] == new_LDS[..., None, :]  # [L, D, old slot, new slot]
    kept_new = same.any(axis=2)
    kept_old = same.any(axis=3)
    out = np.where(kept_old, old_LDS, -1)
    # The k-th free old slot takes the k-th new expert; both lists are as long on every device.
    out[~kept_old] = new_LDS[~kept_new]
    return out

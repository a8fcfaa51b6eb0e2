# SPDX-License-Identifier: Apache-2.0
"""Loads, random shapes and plain-loop truths for the tests and the benchmark of the rebalancer."""

from __future__ import annotations

import itertools
import json
import pathlib

import numpy as np

SHARED = pathlib.Path(__file__).resolve().parents[2].parent / "shared" / "data"


def zipf_load(seed: int, num_layers: int, num_experts: int) -> np.ndarray:
    """Tokens [L, E]: per layer a random permutation of a Zipf(s) law, s in 0.4..1.1, 131,072 tokens x 8."""
    rng = np.random.default_rng(seed)
    out = np.empty((num_layers, num_experts), dtype=np.int64)
    for layer in range(num_layers):
        law = np.arange(1, num_experts + 1) ** -rng.uniform(0.4, 1.1)
        out[layer] = rng.multinomial(131_072 * 8, rng.permutation(law / law.sum()))
    return out


def esft_history(domain: str) -> np.ndarray | None:
    """Real counts [sequences, 26, 64] of the shared ESFT data, each sequence a window; None where
    it is absent.
    """
    path = SHARED / f"esft_{domain}_topk_ids.npz"
    if not path.exists():
        return None
    with np.load(path) as data:
        ids, offsets = data["topk_ids"], data["seq_offsets"]
    return np.stack(
        [
            np.stack([np.bincount(layer[a:b].ravel(), minlength=64) for layer in ids])
            for a, b in itertools.pairwise(offsets)
        ]
    )


def write_collects(folder, load_LE, num_ranks=2):
    """Write tokens [L, E] as MindSpeed-RL does, spread over ranks; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(num_ranks):
        part = load_LE // num_ranks + (rank < load_LE % num_ranks)
        counts = {
            str(layer): {str(e): int(c) for e, c in enumerate(row)}
            for layer, row in enumerate(part)
        }
        (folder / f"eplb_token_collects_{rank}.json").write_text(json.dumps(counts))
    return folder


def write_steps(
    root,
    history_WLE,
    role="rollout",
    first_layer=3,
    first_step=1,
    id_space="logical",
    phases=("forward",),
):
    """Write tokens [W, L, E] as our own step files, one rank; return the root."""
    from rl_insight_hooks.paths import load_file_path
    from rl_insight_hooks.schema import LoadFile, Parallel, Producer, Record, encode_load_file

    for offset, load_LE in enumerate(history_WLE):
        records = [
            Record(
                layer=first_layer + row,
                layer_name=f"model.layers.{first_layer + row}.mlp.experts",
                layer_source="module",
                phase=phase,
                seam="test",
                num_calls=1,
                num_passes=1,
                num_assignments=int(counts.sum()),
                counts=counts.tolist(),
            )
            for row, counts in enumerate(load_LE)
            for phase in phases
        ]
        load_file = LoadFile(
            schema_version=1,
            producer=Producer("rl_insight_hooks", "test"),
            run_id="test",
            writer="test",
            step=first_step + offset,
            step_source="given",
            role=role,
            rank=0,
            world_size=1,
            parallel=Parallel(),
            num_experts=int(load_LE.shape[1]),
            top_k=None,
            first_expert=0,
            id_space=id_space,
            tokens_layout="disjoint",
            num_regions=1,
            started_unix_s=0.0,
            ended_unix_s=1.0,
            records=records,
        )
        path = load_file_path(str(root), first_step + offset, role, 0)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_load_file(load_file))
    return root


def plain_device_loads(load, rows, num_devices: int) -> list[list[float]]:
    """Load of each device, by loops: an expert's tokens are shared evenly by its copies."""
    out = []
    for weights, row in zip(load, rows, strict=True):
        row = [int(expert) for expert in row]
        slots = len(row) // num_devices
        devices = [0.0] * num_devices
        for slot, expert in enumerate(row):
            devices[slot // slots] += float(weights[expert]) / row.count(expert)
        out.append(devices)
    return out


def plain_ratios(load, rows, num_devices: int) -> list[float]:
    """max/mean of each layer, by loops."""
    found = []
    for devices in plain_device_loads(load, rows, num_devices):
        mean = sum(devices) / len(devices)
        found.append(max(devices) / mean if mean > 0 else 1.0)
    return found


def assert_valid(rows, num_experts: int, num_devices: int, num_groups: int = 1, num_nodes: int = 1):
    """Check by loops: every expert there, none twice on a device, groups whole where they divide over nodes."""
    for row in rows:
        row = [int(expert) for expert in row]
        assert len(row) % num_devices == 0
        slots = len(row) // num_devices
        assert set(row) == set(range(num_experts))
        for device in range(num_devices):
            held = row[device * slots : (device + 1) * slots]
            assert len(set(held)) == slots, f"twins on device {device}: {held}"
        if num_nodes > 1 and num_groups % num_nodes == 0:
            group_size = num_experts // num_groups
            node_size = len(row) // num_nodes
            nodes_of: dict[int, set[int]] = {}
            for slot, expert in enumerate(row):
                nodes_of.setdefault(expert // group_size, set()).add(slot // node_size)
            assert all(len(nodes) == 1 for nodes in nodes_of.values()), nodes_of
            per_node = [0] * num_nodes
            for nodes in nodes_of.values():
                per_node[next(iter(nodes))] += 1
            assert set(per_node) == {num_groups // num_nodes}


def greedy_plan(load, num_replicas: int, num_groups: int, num_nodes: int, num_devices: int):
    """The baseline, in plain Python: replicate the most loaded, heaviest first into the lightest device with
    room.

    Groups are packed onto nodes in the same way (heaviest first into the lightest node with room), as
    DeepSeek's EPLB does. It may put an expert twice on a device.
    """
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    plans = []
    for weights in np.asarray(load).tolist():
        num_experts = len(weights)
        size = num_experts // num_groups
        groups = [sum(weights[g * size : (g + 1) * size]) for g in range(num_groups)]
        node_groups = _lightest_with_room(groups, num_nodes)
        row: list[int] = []
        for held in node_groups:
            experts = [g * size + i for g in held for i in range(size)]
            row += _greedy_node(
                weights, experts, num_replicas // num_nodes, num_devices // num_nodes
            )
        plans.append(row)
    return plans


def _greedy_node(weights, experts, num_slots, num_devices):
    count = dict.fromkeys(experts, 1)
    each = {e: float(weights[e]) for e in experts}
    for _ in range(num_slots - len(experts)):
        top = max(each, key=each.__getitem__)
        count[top] += 1
        each[top] = weights[top] / count[top]
    slots = [e for e in experts for _ in range(count[e])]
    devices = _lightest_with_room([each[e] for e in slots], num_devices)
    return [slots[index] for device in devices for index in device]


def _lightest_with_room(items, num_bins):
    room = len(items) // num_bins
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [0.0] * num_bins
    for index in sorted(range(len(items)), key=items.__getitem__, reverse=True):
        target, least = -1, float("inf")
        for number in range(num_bins):
            if loads[number] < least and len(bins[number]) < room:
                target, least = number, loads[number]
        bins[target].append(index)
        loads[target] += items[index]
    return bins

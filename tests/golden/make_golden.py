# SPDX-License-Identifier: Apache-2.0
"""How the golden files were made: with torch and safetensors themselves, never with our own writers.

Run with a folder to write to. ``packed_v1`` alone is our own writer's, of the version that made the format.
The expected rows in ``expected.json`` are spelled out here, not computed by us.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Row = list[Any]  # [step, role, rank, layer, phase, first expert, counts]


def load_file(
    step: int | None, role: str, rank: int, first: int, records: list[dict[str, Any]]
) -> Any:
    return {
        "schema_version": 1,
        "producer": {"name": "rl_insight_hooks", "version": "0.1.0"},
        "run_id": "golden",
        "writer": "host-1-1",
        "step": step,
        "step_source": "given",
        "role": role,
        "rank": rank,
        "world_size": 2,
        "parallel": {"ep_size": 2, "ep_rank": rank},
        "num_experts": 4,
        "top_k": 2,
        "first_expert": first,
        "id_space": "logical",
        "tokens_layout": "disjoint",
        "num_regions": 1,
        "started_unix_s": 1.5,
        "ended_unix_s": 2.5,
        "records": records,
        "calls": None,
        "dropped": {},
        "masked": {"padding_rows": 3},
        "failed": {},
        "stamps": {},
        "notes": [],
    }


def record(layer: int, phase: str, counts: list[int]) -> Any:
    return {
        "layer": layer,
        "layer_name": f"model.layers.{layer}.mlp",
        "layer_source": "module",
        "phase": phase,
        "seam": "npu_grouped_matmul",
        "num_calls": 3,
        "num_passes": 1,
        "num_assignments": sum(counts),
        "num_rows": None,
        "num_tokens": None,
        "counts": counts,
        "id_space": None,
        "draft": False,
        "extra_counts": None,
    }


def native_v1(root: Path) -> list[Row]:
    rows: list[Row] = []
    for rank, first, forward, recompute in ((0, 0, [5, 1], [5, 1]), (1, 2, [0, 2], [0, 2])):
        folder = root / "step_3" / "actor_update" / f"rank{rank}"
        folder.mkdir(parents=True)
        records = [record(1, "forward", forward), record(1, "recompute", recompute)]
        text = json.dumps(load_file(3, "actor_update", rank, first, records))
        (folder / "group_list.json").write_text(text)
        rows += [
            [3, "actor_update", rank, 1, "forward", first, forward],
            [3, "actor_update", rank, 1, "recompute", first, recompute],
        ]
    return rows


def collects(root: Path) -> list[Row]:
    root.mkdir(parents=True)
    (root / "eplb_token_collects_0.json").write_text(
        json.dumps({"0": {"0": 7, "1": 0, "2": 1}, "1": {"0": 2, "1": 2, "2": 4}}, indent=2)
    )
    (root / "eplb_token_collects_10.json").write_text(
        json.dumps({"0": {"0": 1, "1": 1, "2": 1}, "1": {"2": 3, "0": 0, "1": 0}}, indent=2)
    )
    return [
        [None, "rollout", 0, 0, "forward", 0, [7, 0, 1]],
        [None, "rollout", 0, 1, "forward", 0, [2, 2, 4]],
        [None, "rollout", 10, 0, "forward", 0, [1, 1, 1]],
        [None, "rollout", 10, 1, "forward", 0, [0, 0, 3]],
    ]


def collects_all(root: Path) -> list[Row]:
    root.mkdir(parents=True)
    (root / "token_collects_all.json").write_text(json.dumps({"0": {"0": 8, "1": 1, "2": 2}}))
    return [[None, "rollout", None, 0, "forward", 0, [8, 1, 2]]]


def dump(folder: Path, calls: list[dict[str, Any]], *, jsons: bool = True) -> None:
    """Write calls ``{values, type, group, x, weight, stack}`` as msprobe does (level L1, task tensor)."""
    import torch

    tensors = folder / "dump_tensor_data"
    tensors.mkdir(parents=True)
    data: dict[str, Any] = {}
    stacks: dict[str, tuple[list[str], list[str]]] = {}
    for index, call in enumerate(calls):
        api = f"NPU.npu_grouped_matmul.{index}.forward"
        name = f"{api}.kwargs.group_list.pt"
        values = call["values"]
        kwargs: dict[str, Any] = {"bias": None}
        if call.get("as_list"):
            kwargs["group_list"] = [{"type": "int", "value": value} for value in values]
        else:
            torch.save(torch.tensor(values), tensors / name)
            kwargs["group_list"] = {
                "type": "torch.Tensor",
                "dtype": "torch.int64",
                "data_name": name,
            }
        if call["group"] is not None:
            kwargs["group_type"] = {"type": "int", "value": call["group"]}
        if call["type"] is not None:
            kwargs["group_list_type"] = {"type": "int", "value": call["type"]}
        args = [[{"type": "torch.Tensor", "shape": call[name]}] for name in ("x", "weight")]
        data[api] = {"input_args": args, "input_kwargs": kwargs}
        stacks.setdefault(call["stack"][0], ([], call["stack"]))[0].append(api)
    if jsons:
        (folder / "dump.json").write_text(
            json.dumps({"task": "tensor", "level": "L1", "data": data})
        )
        (folder / "stack.json").write_text(
            json.dumps(
                {str(n): [names, frames] for n, (names, frames) in enumerate(stacks.values())}
            )
        )
        (folder / "construct.json").write_text("{}")


UP = ["File /m.py, line 1, in forward, \n up"]
DOWN = ["File /m.py, line 2, in forward, \n down"]


def layer(values: list[int], kind: int | None = 1, group: int | None = 0) -> list[dict[str, Any]]:
    """Two calls: 8 -> 6 and 6 -> 8."""
    up = {
        "values": values,
        "type": kind,
        "group": group,
        "x": [9, 8],
        "weight": [2, 8, 6],
        "stack": UP,
    }
    down = {**up, "x": [9, 6], "weight": [2, 6, 8], "stack": DOWN}
    return [up, down]


def msprobe_native(root: Path) -> list[Row]:
    # cumulative lists (no group_list_type key), a list of ints, and two neighbours with equal counts
    calls = [*layer([4, 9], None, None), *layer([4, 9], None, None)]
    dump(root / "step4" / "rank0", calls)
    dump(
        root / "step4" / "rank1",
        [dict(call, as_list=True) for call in [*layer([0, 9]), *layer([2, 9])]],
    )
    return [
        [4, "msprobe", 0, 0, "forward", 0, [4, 5]],
        [4, "msprobe", 0, 1, "forward", 0, [4, 5]],
        [4, "msprobe", 1, 0, "forward", 0, [0, 9]],
        [4, "msprobe", 1, 1, "forward", 0, [2, 7]],
    ]


def msprobe_verl(root: Path) -> list[Row]:
    dump(root / "step_2" / "ref_compute_log_prob" / "step0" / "rank0", layer([3, 6]))
    return [[2, "ref_compute_log_prob", 0, 0, "forward", 0, [3, 6]]]


def msprobe_mindspeed_rl(root: Path) -> list[Row]:
    dump(root / "actor_update" / "step7" / "rank1", layer([8, 1]))
    return [[7, "actor_update", 1, 0, "forward", 0, [8, 1]]]


def msprobe_flat(root: Path) -> list[Row]:
    """Tensors alone: three calls to a layer, two layers."""
    import torch

    root.mkdir(parents=True)
    for index, values in enumerate([[3, 1], [3, 1], [3, 1], [0, 4], [0, 4], [0, 4]]):
        torch.save(
            torch.tensor(values),
            root / f"NPU.npu_grouped_matmul.{index}.forward.kwargs.group_list.pt",
        )
    return [
        [None, "msprobe", 0, 0, "forward", 0, [3, 1]],
        [None, "msprobe", 0, 1, "forward", 0, [0, 4]],
    ]


def megatron(root: Path) -> list[Row]:
    folder = root / "tokens_per_expert"
    folder.mkdir(parents=True)
    lines = [
        {"iter": 5, "block": "decoder", "layer": 1, "tpe": [[1, 2], [3, 4]]},
        {"iter": 5, "block": "decoder", "layer": 2, "tpe": [[0, 3], [5, 2]]},
    ]
    (folder / "rank0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [[5, "train", 0, 1, "forward", 0, [4, 6]], [5, "train", 0, 2, "forward", 0, [5, 5]]]


def sglang(root: Path) -> list[Row]:
    import torch

    root.mkdir(parents=True)
    windows = torch.zeros(4, 3, 2, dtype=torch.int32)  # windows, layers, experts; layer 0 is dense
    windows[0, 1:] = torch.tensor([[1, 2], [3, 0]])
    windows[2, 1:] = torch.tensor([[4, 4], [0, 8]])
    stored = {"rank": 0, "logical_count": windows, "average_utilization_rate_over_window": 0.75}
    torch.save(stored, root / "expert_distribution_recorder_1700000000.5.pt")
    return [
        [None, "rollout", None, 1, "forward", 0, [5, 6]],
        [None, "rollout", None, 2, "forward", 0, [3, 8]],
    ]


def trtllm(root: Path) -> list[Row]:
    import torch
    from safetensors.torch import save_file

    root.mkdir(parents=True)
    save_file(
        {
            "100_3": torch.tensor([1, 2, 3], dtype=torch.int32),
            "101_3": torch.tensor([0, 0, 6], dtype=torch.int32),
        },
        root / "rank0.safetensors",
    )
    (root / "meta_info.json").write_text(json.dumps({"num_experts": 3, "num_experts_per_token": 2}))
    return [
        [100, "rollout", 0, 3, "forward", 0, [1, 2, 3]],
        [101, "rollout", 0, 3, "forward", 0, [0, 0, 6]],
    ]


FORMATS = (
    native_v1,
    collects,
    collects_all,
    msprobe_native,
    msprobe_verl,
    msprobe_mindspeed_rl,
    msprobe_flat,
    megatron,
    sglang,
    trtllm,
)


def main() -> None:
    out = Path(sys.argv[1])
    expected = {make.__name__: make(out / make.__name__) for make in FORMATS}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(rows)}" for name, rows in expected.items())
    (out / "expected.json").write_text("{" + lines + "}\n")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Helpers of the recording tests: torch_npu on CPU, one layer pass with known counts, reading files back."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec

from rl_insight_hooks.schema import LoadFile, decode_load_file

REPO = Path(__file__).resolve().parents[2]


def torch_npu():
    """Return torch_npu: the real one where it is imported already, else the stand-in."""
    if "torch_npu" not in sys.modules:
        from rl_insight_hooks import cpu_fallback

        cpu_fallback.install_stand_in()
    return sys.modules["torch_npu"]


def layer_pass(
    counts, *, hidden=4, width=6, list_type=1, calls="gate_up_down", requires_grad=False
):
    """Run the grouped matmuls of one layer with ``counts`` tokens per expert; return the output."""
    import torch

    npu = torch_npu()
    num_rows, num_experts = sum(counts), len(counts)
    x = torch.ones(num_rows, hidden, requires_grad=requires_grad)
    up = torch.ones(num_experts, hidden, width)
    down = torch.ones(num_experts, width, hidden)
    group_list = torch.tensor(counts, dtype=torch.int64)
    if list_type == 0:
        group_list = group_list.cumsum(0)
    options = {
        "group_list": group_list,
        "group_list_type": list_type,
        "group_type": 0,
        "split_item": 2,
    }
    mid = npu.npu_grouped_matmul([x], [up], **options)[0]
    if calls == "gate_up_down":
        mid = mid * npu.npu_grouped_matmul([x], [up], **options)[0]
    return npu.npu_grouped_matmul([mid], [down], **options)[0]


def read(root, step, role, rank=0) -> LoadFile:
    step_dir = "step_none" if step is None else f"step_{step}"
    return decode_load_file(
        (Path(root) / step_dir / role / f"rank{rank}" / "group_list.json").read_bytes()
    )


def counts_by_layer(load_file: LoadFile, phase="forward") -> list[list[int]]:
    return [r.counts for r in load_file.records if r.phase == phase]


def collects(root, rank=0) -> dict[str, dict[str, int]]:
    return json.loads((Path(root) / f"eplb_token_collects_{rank}.json").read_text())


def every_load_file(root) -> list[LoadFile]:
    return [decode_load_file(p.read_bytes()) for p in sorted(Path(root).rglob("group_list*.json"))]


def python(
    code: str, *, env=None, timeout=120, check=True, args=()
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process of its own that can import these helpers."""
    import os

    full = dict(os.environ)
    full["PYTHONPATH"] = os.pathsep.join([str(REPO / "tests/support"), str(REPO / "examples")])
    full.update(env or {})
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=full,
        cwd=REPO,
    )
    if check and done.returncode != 0:
        raise AssertionError(f"exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def is_complete_json(path: Path) -> bool:
    try:
        msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError:
        return False
    return True

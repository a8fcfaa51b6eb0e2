# SPDX-License-Identifier: Apache-2.0
"""One process: the real msprobe dumps a model's grouped matmuls, with us recording beside it or not.

    python msprobe_run.py OUT STYLE ORDER      (ORDER: alone, before, after)
Prints the routers' counts as JSON on its last line.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from models import HIDDEN, CallersMoe, RouterTruth
from msprobe.pytorch import PrecisionDebugger

import rl_insight_hooks as rih
from rl_insight_hooks import cpu_fallback


def main(out, style, order):
    torch.utils.checkpoint.DefaultDeviceType.set_device_type("cpu")
    torch.set_num_threads(1)
    cpu_fallback.register_cpu_kernels()
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=0, world_size=1)
    config = Path(out) / "msprobe.json"
    config.write_text(
        json.dumps(
            {
                "task": "tensor",
                "dump_path": f"{out}/dump",
                "rank": [],
                "step": [],
                "level": "L1",
                "async_dump": False,
                "tensor": {
                    "scope": [],
                    "list": ["npu_grouped_matmul"],
                    "data_mode": ["forward", "input"],
                },
            }
        )
    )
    model = CallersMoe(style)
    model.checkpointing = "reentrant"
    truth = RouterTruth(model)
    if order == "before":
        rih.install()
    debugger = PrecisionDebugger(config_path=str(config))
    debugger.start(model)
    if order != "alone":
        region = rih.record(f"{out}/ours", step=0, role="update")
        region.__enter__()
    for seed in range(2):
        torch.manual_seed(seed)
        truth.backward(model(torch.randn(11, HIDDEN, requires_grad=True)).square().sum())
    if order != "alone":
        region.__exit__(None, None, None)
    debugger.stop()
    debugger.step()
    rih.flush()
    print(json.dumps(truth.counts["forward"]))


if __name__ == "__main__":
    main(*sys.argv[1:])

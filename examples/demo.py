# SPDX-License-Identifier: Apache-2.0
"""make demo: record a tiny MoE in two processes on CPU, then picture, table and expert map.

Each step of each rank is RL-like: a log-prob pass (no gradients), then an update of two micro-batches with
gradient checkpointing. torch_npu's grouped matmul runs on the CPU fallback.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

NUM_RANKS = 2
NUM_STEPS = 3
MICRO_BATCHES = 2


def train(rank: int, out: str, port: int) -> None:
    """Run one rank."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(NUM_RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    import rl_insight_hooks as rih
    from rl_insight_hooks import cpu_fallback

    cpu_fallback.install_stand_in()  # torch_npu on CPU; on an NPU this line is not needed
    dist.init_process_group("gloo")
    sys.path.insert(0, str(Path(__file__).parent))
    from tiny_moe import TinyMoe

    torch.manual_seed(0)
    model = TinyMoe(checkpointing=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rih.watch(model)
    torch.manual_seed(1000 + rank)

    for step in range(1, NUM_STEPS + 1):
        batches = [torch.randint(0, 256, (4, 128)) for _ in range(MICRO_BATCHES)]
        with rih.record(out, step=step, role="actor_compute_log_prob"), torch.no_grad():
            for ids in batches:
                model(ids)
        with rih.record(out, step=step, role="actor_update"):
            for ids in batches:
                loss = torch.nn.functional.cross_entropy(model(ids), ids.roll(-1, 1).flatten())
                (loss / MICRO_BATCHES).backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
            optimizer.step()
            optimizer.zero_grad()
    rih.flush()
    if rank == 0:
        print("summary() for the trainer's own metrics, rank 0:")
        for name, value in rih.summary().items():
            print(f"  {name:<48} {value:.4g}")
    dist.destroy_process_group()


def report(*args: str) -> None:
    """Run one command of rl-insight-report, as a user would."""
    command = [sys.executable, "-m", "rl_insight_hooks.report.main", *args]
    print("\n$ rl-insight-report " + " ".join(args), flush=True)
    subprocess.run(command, check=True)


def free_port() -> int:
    """Return a free TCP port of this machine."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="demo_out", help="folder; emptied first")
    out = Path(parser.parse_args().out)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    data = out / "expert_load"
    began = time.perf_counter()

    import torch.multiprocessing as mp

    mp.spawn(train, args=(str(data), free_port()), nprocs=NUM_RANKS)
    print(
        f"recorded {NUM_STEPS} steps x 2 roles x {NUM_RANKS} ranks in {time.perf_counter() - began:.1f} s"
    )

    picture, table, expert_map = (
        out / "gmm_heatmap.png",
        out / "summary.txt",
        out / "expert_map.json",
    )
    report("summary", str(data))
    with table.open("w") as file:
        subprocess.run(
            [sys.executable, "-m", "rl_insight_hooks.report.main", "summary", str(data)],
            stdout=file,
            check=True,
        )
    report("heatmap", str(data), "--role", "actor_update", "--rank", "all", "-o", str(picture))
    report(
        "rebalance", str(data), "--role", "actor_update",
        "--num-replicas", "40", "--num-groups", "1", "--num-nodes", "1", "--num-npus", "8", "-o", str(expert_map),
    )  # fmt: skip
    print(f"\npicture     {picture}\nsummary     {table}\nexpert map  {expert_map}")


if __name__ == "__main__":
    main()

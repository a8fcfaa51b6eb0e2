# SPDX-License-Identifier: Apache-2.0
"""An exception at every line of our hook in the real Megatron-Core: python fault_main.py OUT CHECKPOINT

Prints, as JSON on its last line, what was broken: {"file name": number of lines}.
"""

from __future__ import annotations

import collections
import json
import logging
import os
import sys
from pathlib import Path

import rank_main
import torch
import torch.distributed as dist
from fault_injection import Entries, Tracer, break_every_line

import rl_insight_hooks as rih
from rl_insight_hooks import guard
from rl_insight_hooks.schema import decode_load_file

HOOK = Path(rih.__file__).resolve().parents[1] / "integrations/megatron.py"
FILES = [HOOK, *(Path(rih.__file__).with_name(f"{name}.py") for name in ("recorder", "session"))]
ENTRIES = Entries({HOOK: {"forward", "record"}})


def main(out: str, kind: str) -> None:
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    logging.disable(logging.WARNING)  # hundreds of tracebacks
    rank_main.cpu_only()
    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=0, world_size=1)
    layers = rank_main.make_layers()
    inputs = torch.randn(2, rank_main.TOKENS, 1, rank_main.HIDDEN)
    chosen: list[int] = []
    for layer in layers:
        layer.router.register_forward_hook(
            lambda _, args, output: chosen.append(int(output[1].sum()))
        )

    def train() -> list[torch.Tensor]:
        layers.zero_grad(set_to_none=True)
        results = []
        for batch in inputs:
            y = rank_main.run_layers(layers, batch.clone().requires_grad_(), kind)
            y.square().sum().backward()
            results.append(y.detach())
        return results + [p.grad for p in layers.parameters()]

    expected = train()
    step = 0

    def run(tracer: Tracer) -> None:
        nonlocal step
        step += 1
        rih.install(["megatron"])
        chosen.clear()
        with tracer, rih.record(f"{out}/data", step=step, role="r"):
            results = train()
        assert rih.flush()
        rih.uninstall()  # layers are found anew
        rih.session.get_session().stack.clear()
        for ours, theirs in zip(results, expected, strict=True):
            assert torch.equal(ours, theirs)
        files = [
            decode_load_file(p.read_bytes()) for p in Path(out).glob(f"data/step_{step}/*/*/*")
        ]
        num_failed = sum(sum(file.failed.values()) for file in files)
        num_failed += sum(guard.take_failures().values())
        if not tracer.raised:
            assert not num_failed
            counted = sum(record.num_assignments for record in files[0].records)
            assert counted == sum(chosen)  # forward and recompute
        else:
            # a place or an input that could not be read is asked for again
            assert num_failed >= 1

    broken = break_every_line(FILES, ENTRIES, run)
    run(Tracer(FILES, ENTRIES))  # and afterwards it counts as if nothing had been
    names = collections.Counter(Path(path).name for path, _ in broken)
    print(json.dumps({**names, "unguarded": sorted(ENTRIES.unguarded_calls())}))


if __name__ == "__main__":
    main(*sys.argv[1:])

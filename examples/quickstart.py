# SPDX-License-Identifier: Apache-2.0
"""Two lines more in a training loop. Runs on CPU: python examples/quickstart.py OUT"""

from __future__ import annotations

import sys

import torch
from tiny_moe import TinyMoe

import rl_insight_hooks as rih
from rl_insight_hooks import cpu_fallback

cpu_fallback.install_stand_in()  # torch_npu on CPU; leave this out on an NPU

out = sys.argv[1] if len(sys.argv) > 1 else "quickstart_out"
torch.manual_seed(0)
model = TinyMoe()
rih.watch(model)  # line one, optional: exact layer names

for step in range(3):
    ids = torch.randint(0, 256, (2, 64))
    with rih.record(out, step=step, role="actor_update"):  # line two
        torch.nn.functional.cross_entropy(model(ids), ids.roll(-1, 1).flatten()).backward()

rih.flush()
print(rih.summary())

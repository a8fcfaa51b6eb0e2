# SPDX-License-Identifier: Apache-2.0
"""Roles as decorators, the step from set_step: python examples/decorator.py OUT"""

from __future__ import annotations

import sys

import torch
from tiny_moe import TinyMoe

import rl_insight_hooks as rih
from rl_insight_hooks import cpu_fallback

cpu_fallback.install_stand_in()

OUT = sys.argv[1] if len(sys.argv) > 1 else "decorator_out"
torch.manual_seed(0)
model = TinyMoe(checkpointing=True)


@rih.record(OUT, role="actor_compute_log_prob")
def compute_log_prob(ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).log_softmax(-1)


@rih.record(OUT, role="actor_update")
def update(ids: torch.Tensor) -> None:
    torch.nn.functional.cross_entropy(model(ids), ids.roll(-1, 1).flatten()).backward()


for step in range(2):
    rih.set_step(step)
    batch = torch.randint(0, 256, (2, 64))
    compute_log_prob(batch)
    update(batch)

rih.flush()

# SPDX-License-Identifier: Apache-2.0
"""No line in the loop but set_step: python examples/yaml_flag.py examples/config.yaml"""

from __future__ import annotations

import sys

import torch
from tiny_moe import TinyMoe

import rl_insight_hooks as rih
from rl_insight_hooks import cpu_fallback

cpu_fallback.install_stand_in()
rih.enable(sys.argv[1])  # does nothing unless the flag is on

torch.manual_seed(0)
model = TinyMoe()
for step in range(2):
    rih.set_step(step)
    with torch.no_grad():
        model(torch.randint(0, 256, (2, 64)))

# SPDX-License-Identifier: Apache-2.0
"""verl 0.7 and 0.8 on CPU: they know no platforms (0.9: cpu_platform.py), only the device that torch finds.

Import it after ``import verl`` and before its workers.
"""

from __future__ import annotations

import torch
from verl.workers.engine import EngineRegistry

# What verl asks of ``torch.<device>``, and torch.cpu does not have.
for _name, _answer in {
    "memory_reserved": 0,
    "memory_allocated": 0,
    "max_memory_reserved": 0,
    "max_memory_allocated": 0,
    "mem_get_info": (0, 0),
    "empty_cache": None,
    "ipc_collect": None,
    "set_device": None,
    "get_device_name": "CPU",
}.items():
    if not hasattr(torch.cpu, _name):
        setattr(torch.cpu, _name, lambda *args, _answer=_answer: _answer)
torch.cpu.get_rng_state, torch.cpu.set_rng_state = torch.get_rng_state, torch.set_rng_state

for _devices in (d for backends in EngineRegistry._engines.values() for d in backends.values()):
    if "npu" in _devices:
        _devices["cpu"] = _devices["npu"]  # the engine for NPU, on CPU tensors

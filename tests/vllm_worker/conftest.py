# SPDX-License-Identifier: Apache-2.0
"""The real vllm and vllm-ascend in processes of their own; see requirements.txt for what this session needs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]

_NEEDED = ("vllm", "vllm_ascend", "torch_npu")


@pytest.fixture(scope="session")
def npu_env(tmp_path_factory):
    """Environment in which the real torch_npu imports without a device; skips where it cannot."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (tests/vllm_worker/requirements.txt)")
    env = {k: v for k, v in os.environ.items() if not k.startswith("RL_INSIGHT_HOOKS")}
    env |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": str(HERE)}
    probe = [sys.executable, "-c", "import torch_npu"]
    if subprocess.run(probe, env=env, capture_output=True).returncode:
        stubs, make = tmp_path_factory.mktemp("stubs"), REPO / "tools/make_npu_stubs.py"
        if not make.exists() or subprocess.run([sys.executable, make, stubs], env=env).returncode:
            pytest.skip("torch_npu does not import here, and tools/make_npu_stubs.py made no stubs")
        env["LD_LIBRARY_PATH"] = str(stubs)
    return env

# SPDX-License-Identifier: Apache-2.0
"""The real torch_npu on CPU. The nox session ``npu`` sets up the environment (see noxfile.py)."""

from __future__ import annotations

import importlib.util

import pytest

pytestmark = pytest.mark.npu


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/npu" in str(item.path):
            item.add_marker(pytest.mark.npu)


@pytest.fixture(scope="session", autouse=True)
def real_torch_npu():
    """torch_npu with CPU kernels; a broken environment is an error, an absent package a skip."""
    if importlib.util.find_spec("torch_npu") is None:
        pytest.skip("torch_npu is not installed here: run the nox session npu")
    import torch
    import torch_npu

    from rl_insight_hooks import cpu_fallback

    # torch_npu makes "npu" the device of non-reentrant checkpoints; there is none here
    torch.utils.checkpoint.DefaultDeviceType.set_device_type("cpu")
    torch.set_num_threads(1)
    cpu_fallback.register_cpu_kernels()
    yield torch_npu
    cpu_fallback.unregister_cpu_kernels()

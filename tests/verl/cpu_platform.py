# SPDX-License-Identifier: Apache-2.0
"""A CPU platform for the real verl, by its own extension point: engines for NPU then run on CPU tensors.

Import it after ``import verl`` and before its workers.
"""

from __future__ import annotations

import contextlib
from types import ModuleType

import torch
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_base import PlatformBase


class _CpuModule(ModuleType):
    """What verl asks of ``torch.cuda`` or ``torch.npu``."""

    def __getattr__(self, name):
        return getattr(torch.cpu, name)

    max_memory_allocated = max_memory_reserved = memory_allocated = memory_reserved = staticmethod(
        lambda *a: 0
    )
    mem_get_info = staticmethod(lambda *a: (0, 0))
    empty_cache = synchronize = ipc_collect = set_device = staticmethod(lambda *a: None)
    get_rng_state = staticmethod(torch.get_rng_state)
    set_rng_state = staticmethod(torch.set_rng_state)
    is_available = staticmethod(lambda: True)
    current_device = staticmethod(lambda: "cpu")
    get_device_name = staticmethod(lambda *a: "CPU")


class PlatformCpu(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _CpuModule("cpu")

    def is_available(self):
        return True

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "ASCEND_RT_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg):
        yield

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def ray_resource_name(self):
        return "CPU"

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False

    def cudart(self):
        return None


set_platform(PlatformCpu())

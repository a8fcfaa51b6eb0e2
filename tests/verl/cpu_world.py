# SPDX-License-Identifier: Apache-2.0
"""For VERL_USE_EXTERNAL_MODULES: makes every process that imports verl a CPU one, Ray's workers too."""

from __future__ import annotations

import sys

import cpu_platform  # noqa: F401
import cpu_run  # noqa: F401
import wrapt


@wrapt.when_imported("verl.utils.torch_functional")
def _no_npu_cross_entropy(module):
    module.NPU_CROSS_ENTROPY_LOSS_AVAILABLE = False  # the one operator without a CPU kernel


@wrapt.when_imported("verl.workers.engine_workers")
def _npu_patches(module):
    from verl.models.transformers.npu_patch import apply_npu_patches

    apply_npu_patches()  # verl applies them itself where it finds a device


@wrapt.when_imported("verl.utils.distributed")
def _gloo(module):
    original = module.initialize_global_process_group_ray

    def initialize(timeout_second=None, backend=None):
        return original(timeout_second, "gloo")

    for other in list(sys.modules.values()):
        if vars(other).get("initialize_global_process_group_ray") is original:
            other.initialize_global_process_group_ray = initialize
    module.initialize_global_process_group_ray = initialize

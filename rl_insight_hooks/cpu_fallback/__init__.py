# SPDX-License-Identifier: Apache-2.0
"""The grouped-matmul family of torch_npu on CPU, with autograd: for demos, laptops and tests.

Two uses:

* :func:`register_cpu_kernels` - torch_npu imports (see docs/testing.md for a machine without a device): its real
  operators get CPU kernels, and the real dispatcher, autograd and compiler run.
* :func:`install_stand_in` - torch_npu does not import: a module ``torch_npu`` with the same operators, of the
  same schemas, takes its place in ``sys.modules``.

The kernels are written for clarity: a loop over experts. They check what the NPU's kernels check.
"""

from __future__ import annotations

from rl_insight_hooks.cpu_fallback.register import (
    install_stand_in,
    register_cpu_kernels,
    stand_in,
    uninstall_stand_in,
    unregister_cpu_kernels,
)

__all__ = [
    "install_stand_in",
    "register_cpu_kernels",
    "stand_in",
    "uninstall_stand_in",
    "unregister_cpu_kernels",
]

# SPDX-License-Identifier: Apache-2.0
"""Calls inside torch.compile: what Dynamo traces in place of the eager hot path.

Traced code may not look at the autograd engine, keep tensors, or touch a dict; it adds into a buffer that
``watch`` allocated for the layer before the trace. Without ``watch`` there is no buffer: nothing is counted,
and the file says so.
"""

from __future__ import annotations

from typing import Any

from rl_insight_hooks.group_list import WEIGHT_GROUP_TYPE
from rl_insight_hooks.state import STATE

try:  # torch may be absent, or older than torch.compiler
    from torch.compiler import is_compiling
except ImportError:  # pragma: no cover - exercised where torch is absent

    def is_compiling() -> bool:
        """Nothing is compiled without torch.compiler."""
        return False


try:
    from torch.compiler import is_exporting
except ImportError:  # pragma: no cover - torch before 2.7

    def is_exporting() -> bool:
        """Old releases do not tell."""
        return False


__all__ = ["is_compiling", "on_group_list"]


def on_group_list(group_list: Any, group_list_type: int, group_type: int | None) -> None:
    """Add the counts of the watched layer under way, once a pass. Traced by Dynamo, never run as such."""
    if group_type == WEIGHT_GROUP_TYPE or STATE.claims or is_exporting():
        return  # an exported program is the host's to keep: nothing of ours goes into it
    layer = STATE.layer
    if layer is None:
        STATE.compiled_unwatched = True
        return
    if not STATE.armed:
        return
    buf = layer.compiled_cumulative if group_list_type == 0 else layer.compiled_counts
    if (
        buf is None
        or group_list_type not in (0, 1)
        or group_list is None
        or isinstance(group_list, list)
        # an error here would be the host's: local experts, or a model that moved after watch
        or group_list.shape != buf.shape
        or group_list.device != buf.device
        or group_list.is_floating_point()
    ):
        STATE.compiled_unwatched = True
        return
    STATE.armed = False
    buf.add_(group_list)

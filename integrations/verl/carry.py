# SPDX-License-Identifier: Apache-2.0
"""The global step, sent along with a batch from the driver to the train workers.

V1 sends a KVBatchMeta (``extra_info``), V0 and the legacy trainer a DataProto (``meta_info``), from which verl
makes a TensorDict with non-tensor entries. KVBatchMeta.chunk and BatchMeta.chunk copy ``extra_info`` to every
rank.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from typing import Any

KEY = "rlih_step"

_HOLDERS = ("extra_info", "meta_info")


def put_step(batch: Any, step: Any) -> bool:
    """Write ``step`` into ``batch``; return False where it has no place for it."""
    if isinstance(step, bool) or not isinstance(step, int):
        return False
    for holder in _HOLDERS:
        info = getattr(batch, holder, None)
        if isinstance(info, MutableMapping):
            info[KEY] = step
            return True
    return False


def take_step(batch: Any) -> int | None:
    """Return the step that ``batch`` carries (None without), and take it out where that can be done."""
    for holder in _HOLDERS:
        info = getattr(batch, holder, None)
        if isinstance(info, MutableMapping) and KEY in info:
            return _whole(info.pop(KEY))
    utils = sys.modules.get("verl.utils.tensordict_utils")
    if utils is not None and hasattr(batch, "batch_size") and KEY in batch.keys():  # noqa: SIM118
        step = _whole(utils.get(batch, KEY))
        if not batch.is_locked:  # chunks that did not go through Ray are; there it stays, unused
            utils.pop(batch, KEY)
        return step
    return None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None

# SPDX-License-Identifier: Apache-2.0
"""The true expert load of every step, role, layer and rank, for RL post-training of MoE models.

``import rl_insight_hooks`` imports no torch and patches nothing; names are loaded at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_insight_hooks._version import __version__

if TYPE_CHECKING:
    from rl_insight_hooks.api import (
        configure,
        enable,
        flush,
        install,
        record,
        set_step,
        summary,
        uninstall,
        watch,
    )
    from rl_insight_hooks.topology import give as set_topology

__all__ = [
    "__version__",
    "configure",
    "enable",
    "flush",
    "install",
    "record",
    "set_step",
    "set_topology",
    "summary",
    "uninstall",
    "watch",
]


def __getattr__(name: str) -> Any:
    # MindSpeed calls hasattr() with foreign names on every loaded module: unknown names must be cheap
    if name == "set_topology":
        from rl_insight_hooks.topology import give

        return give
    if name in __all__:
        from rl_insight_hooks import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

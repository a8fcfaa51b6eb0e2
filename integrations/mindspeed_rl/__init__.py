# SPDX-License-Identifier: Apache-2.0
"""MindSpeed-RL: its flags, the stages of its workers, and its rollout adapter.

Target   ``set_EPLB_args`` and the MoE method of ``mindspeed_rl.models.rollout.vllm_adapter.fused_moe``; the
         base classes of its workers (the classes on top are Ray actors, pickled by value: those are left
         alone).
Why      ``eplb_token_collects`` is a switch that people have; its own collector rewrites a JSON file in every
         MoE layer of every forward. The workers know the step (their ``iteration``), which no seam can know.
How      flags.py hands the collecting over to us, same files; workers.py makes a region a stage; adapter.py
         counts.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from . import flags, workers

if TYPE_CHECKING:
    from rl_insight_hooks.installer import Context

SUPPORTED = "2.3.0 (its rollout adapter tested; its workers read, they need a device)"


def install(ctx: Context) -> None:
    """Hook what of MindSpeed-RL is imported; called again as its modules come."""
    workers.install(ctx, sys.modules)
    if flags.ADAPTER in sys.modules:
        from . import adapter

        adapter.install(ctx)
    flags.install(ctx, sys.modules)
    refresh(ctx)


def refresh(ctx: Context) -> None:
    """At region entry: what came with the model; whether their own collector counts beside us."""
    if flags.ADAPTER in sys.modules:
        from . import adapter

        adapter.refresh(ctx)


def uninstall(ctx: Context) -> None:
    """Take out what the adapter's seam added beyond the patches."""
    if flags.ADAPTER in sys.modules:
        from . import adapter

        adapter.uninstall(ctx)

# SPDX-License-Identifier: Apache-2.0
"""verl: roles, steps, topology and metrics; the counts come from the seams below (torch_npu, Megatron, ...).

Target   worker classes (``verl.workers.engine_workers``; before 0.8 ``fsdp_workers`` and ``megatron_workers``),
         engines, trainers, ``DistProfiler``'s stages and ``Tracking.log``.
Why      the trainer knows what no seam can know: which stage of which step runs on which engine.
How      class attributes, each replaced when its module is imported; in train workers a region a stage
         (stages.py), in the driver the step sent along with the batch (trainer.py), after an engine is built
         every hook asserted again and its module watched (engines.py).
Not covered  rollout servers run in processes of vLLM: integrations/vllm_worker.py.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from . import annotate, engines, trainer, workers
from .stages import Stages

if TYPE_CHECKING:
    from rl_insight_hooks.installer import Context

SUPPORTED = "0.7 to 0.9.1 (tested with 0.7.1 and 0.9.1)"

_stages: Stages | None = None


def install(ctx: Context) -> None:
    """Hook what of verl is imported; called again as its modules come."""
    global _stages
    if _stages is None or _stages.session is not ctx.session:
        _stages = Stages(ctx.session)
    for part in (workers, annotate, engines, trainer):
        part.install(ctx, _stages, sys.modules)


def uninstall(ctx: Context) -> None:
    """Take out what the patcher does not: added methods and the topology provider."""
    global _stages
    workers.uninstall()
    engines.uninstall()
    _stages = None

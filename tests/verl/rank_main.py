# SPDX-License-Identifier: Apache-2.0
"""One rank of a run of the real verl: its actor worker, two steps x (compute_log_prob, update_actor).

The plugin comes up by verl's entry point. Prints what the routers chose, by (step, stage, layer), as JSON.

    python rank_main.py MODEL RESULT.json [hydra override ...]
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys

import cpu_run
import torch
import torch_npu
from router_truth import RouterTruth

STEPS = (1, 2)
PRISTINE = [
    torch_npu.npu_grouped_matmul,
    torch.ops.npu.npu_grouped_matmul,
]  # a name would be rebound


def main() -> None:
    model, result = sys.argv[1:3]
    import verl  # its entry point (before 0.9: VERL_USE_EXTERNAL_MODULES) brings the hooks up, or not

    if importlib.util.find_spec("verl.plugin") is not None:
        import cpu_platform  # noqa: F401
    else:
        import cpu_older  # noqa: F401
    import verl.models.transformers.npu_patch as npu_patch
    import verl.utils.torch_functional as functional
    from verl.workers.engine_workers import ActorRolloutRefWorker

    if os.environ.get("TEST_REPATCH") == "1":
        _overwrite_while_the_engine_is_built()
    functional.NPU_CROSS_ENTROPY_LOSS_AVAILABLE = False  # the one operator without a CPU kernel
    torch.distributed.init_process_group("gloo")
    if hasattr(npu_patch, "apply_npu_patches"):  # before 0.9 its import applies them
        npu_patch.apply_npu_patches()
    worker = ActorRolloutRefWorker(
        cpu_run.compose(model, sys.argv[3:]).actor_rollout_ref, role="actor"
    )
    worker.init_model()
    hooked = hasattr(torch_npu.npu_grouped_matmul, "__rl_insight_hooks__")
    truth = RouterTruth(worker.actor.engine.module)
    batch = functools.partial(cpu_run.batch, padded=verl.__version__.startswith("0.7"))
    carry = os.environ.get("TEST_CARRY", "1") == "1"
    profile = os.environ.get("TEST_PROFILE") == "1"
    for step in STEPS:
        if profile:
            worker.start_profile(profile_step=step)
        with truth.stage(step, "actor_compute_log_prob"):
            out = worker.compute_log_prob(
                batch(step, worker.rank, rlih_step=step if carry else None)
            )
        with truth.stage(step, "actor_update"):
            worker.update_actor(
                batch(step, worker.rank, out["log_probs"], rlih_step=step if carry else None)
            )
        if profile:
            worker.stop_profile()
    metrics = worker.rl_insight_summary(STEPS[-1]) if hasattr(worker, "rl_insight_summary") else {}
    with open(f"{result}.{worker.rank}", "w") as file:
        json.dump(
            {"counts": truth.as_json(), "metrics": metrics, "hooked": hooked}
            | {"verl": verl.__version__},
            file,
        )
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _overwrite_while_the_engine_is_built() -> None:
    """As MindSpeed's repatch: what stands on the operator is thrown away while the model is made."""
    from verl.workers.engine import FSDPEngine

    build = FSDPEngine._build_model_optimizer

    def build_and_repatch(engine):
        build(engine)
        torch_npu.npu_grouped_matmul, torch.ops.npu.npu_grouped_matmul = PRISTINE

    FSDPEngine._build_model_optimizer = build_and_repatch


if __name__ == "__main__":
    main()

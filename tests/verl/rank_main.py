# SPDX-License-Identifier: Apache-2.0
"""One rank of a run of the real verl: its actor worker, two steps x (compute_log_prob, update_actor).

The plugin comes up by verl's entry point. Prints what the routers chose, by (step, stage, layer), as JSON.

    python rank_main.py MODEL RESULT.json [hydra override ...]
"""

from __future__ import annotations

import json
import os
import sys

import cpu_run
import torch
from router_truth import RouterTruth

STEPS = (1, 2)


def main() -> None:
    model, result = sys.argv[1:3]
    import cpu_platform  # noqa: F401
    import verl.utils.torch_functional as functional
    from verl.models.transformers.npu_patch import apply_npu_patches
    from verl.workers.engine_workers import ActorRolloutRefWorker

    import verl  # noqa: F401 - its entry point brings the hooks up, or not

    functional.NPU_CROSS_ENTROPY_LOSS_AVAILABLE = False  # the one operator without a CPU kernel
    torch.distributed.init_process_group("gloo")
    apply_npu_patches()
    worker = ActorRolloutRefWorker(
        cpu_run.compose(model, sys.argv[3:]).actor_rollout_ref, role="actor"
    )
    worker.init_model()
    truth = RouterTruth(worker.actor.engine.module)
    carry = os.environ.get("TEST_CARRY", "1") == "1"
    profile = os.environ.get("TEST_PROFILE") == "1"
    for step in STEPS:
        if profile:
            worker.start_profile(profile_step=step)
        with truth.stage(step, "actor_compute_log_prob"):
            out = worker.compute_log_prob(
                cpu_run.batch(step, worker.rank, rlih_step=step if carry else None)
            )
        with truth.stage(step, "actor_update"):
            worker.update_actor(
                cpu_run.batch(
                    step, worker.rank, out["log_probs"], rlih_step=step if carry else None
                )
            )
        if profile:
            worker.stop_profile()
    metrics = worker.rl_insight_summary(STEPS[-1]) if hasattr(worker, "rl_insight_summary") else {}
    with open(f"{result}.{worker.rank}", "w") as file:
        json.dump({"counts": truth.as_json(), "metrics": metrics}, file)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

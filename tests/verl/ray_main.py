# SPDX-License-Identifier: Apache-2.0
"""verl's own trainer methods drive two Ray workers: ``ray_main.py MODEL OUT RAY_TMP``."""

from __future__ import annotations

import json
import os
import sys

import cpu_run
import torch

import ray

STEPS = (1, 2)


def main() -> None:
    model, out, ray_tmp = sys.argv[1:]
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.single_controller.ray.base import create_colocated_worker_cls
    from verl.utils.tracking import Tracking
    from verl.workers.engine_workers import ActorRolloutRefWorker

    import verl  # noqa: F401

    names = ("PYTHONPATH", "LD_LIBRARY_PATH", "TORCH_DEVICE_BACKEND_AUTOLOAD", "VERL_ENGINE_DEVICE")
    names += ("VERL_USE_EXTERNAL_MODULES", "RL_INSIGHT_HOOKS")
    env = {name: os.environ[name] for name in names if name in os.environ}
    env |= {"RL_INSIGHT_HOOKS_PATH": out, "OMP_NUM_THREADS": "1"}
    if "TEST_DRIVER_ONLY" in os.environ:
        env["RL_INSIGHT_HOOKS"] = "0"
    quiet = {"include_dashboard": False, "log_to_driver": "TEST_LOG" in os.environ}
    ray.init(num_cpus=16, _temp_dir=ray_tmp, runtime_env={"env_vars": env}, **quiet)

    config = cpu_run.compose(model)
    init = RayClassWithInitArgs(
        cls=ray.remote(ActorRolloutRefWorker), config=config.actor_rollout_ref, role="actor"
    )
    # as the trainers do it: one process for all roles of a pool, a group for each role
    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
    colocated = create_colocated_worker_cls(class_dict={"actor_rollout": init})
    whole = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=colocated, device_name="cpu")
    group = whole.spawn(prefix_set={"actor_rollout"})["actor_rollout"]
    group.init_model()

    logged: list = []
    tracking = object.__new__(Tracking)
    tracking.logger = {"test": _Log(logged)}
    steps = _steps_of_v1 if os.environ.get("TEST_TRAINER") == "v1" else _steps_of_v0
    for step in steps(config, group):
        tracking.log(data={"actor/loss": 0.5}, step=step)
    print(json.dumps(logged))
    ray.shutdown()


def _steps_of_v0(config, group):
    """RayPPOTrainer: a DataProto, sent as a TensorDict."""
    from verl.protocol import DataProto
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    trainer = object.__new__(RayPPOTrainer)
    trainer.config = config
    trainer.actor_rollout_wg = group
    for step in STEPS:
        trainer.global_steps = step
        meta = {"temperature": 1.0, "global_token_num": [8] * 8}
        batch = DataProto.from_single_dict(_batch(step), meta_info=meta)
        log_probs, _ = trainer._compute_old_log_prob(batch)
        trainer._update_actor(batch.union(log_probs))
        yield step


def _steps_of_v1(config, group):
    """PPOTrainerSync: keys of a TransferQueue, from which the workers fetch their part."""
    import transfer_queue as tq
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    tq.init()
    trainer = object.__new__(PPOTrainerSync)
    trainer.config = config
    trainer.actor_rollout_wg = group
    for step in STEPS:
        trainer.global_steps = step
        fields = cpu_run.queue_fields(_batch(step))
        keys = [f"{step}-{i}" for i in range(8)]
        batch = tq.kv_batch_put(keys=keys, partition_id="train", fields=fields, tags=[{}] * 8)
        batch.extra_info["temperature"] = 1.0
        metrics: dict = {}
        batch = trainer._compute_old_log_prob(batch, metrics)
        trainer._update_actor(batch, metrics)
        yield step


class _Log:
    def __init__(self, logged):
        self.logged = logged

    def log(self, data, step):
        self.logged.append([step, data])


def _batch(step):
    generator = torch.Generator().manual_seed(step)
    num, prompt, response = 8, cpu_run.PROMPT, cpu_run.RESPONSE
    ids = torch.randint(3, 64, (num, prompt + response), generator=generator)
    mask = torch.ones(num, prompt + response, dtype=torch.long)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": torch.arange(prompt + response).expand(num, -1).contiguous(),
        "prompts": ids[:, :prompt],
        "responses": ids[:, prompt:],
        "response_mask": mask[:, prompt:],
        "advantages": torch.ones(num, response),
    }


if __name__ == "__main__":
    main()

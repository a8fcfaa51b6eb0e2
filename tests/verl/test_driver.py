# SPDX-License-Identifier: Apache-2.0
"""The driver's side with verl's own trainers, trackers and batch metadata; the worker group is a stand-in."""

from __future__ import annotations

_PREPARE = """
import json, sys
import cpu_run
import verl, cpu_platform
from rl_insight_hooks.integrations.verl.carry import KEY, take_step
seen = []
"""


def test_v1_sends_the_step_and_every_rank_gets_it(python, model):
    """KVBatchMeta -> chunk for each rank: extra_info is copied, and taking the step out is the worker's own."""
    code = (
        _PREPARE
        + """
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

class Workers:
    def update_actor(self, batch):
        chunks = batch.chunk(2)
        seen.append([take_step(chunk) for chunk in chunks] + [KEY in chunks[0].extra_info])
        return {"metrics": {"mfu": [0.5]}}

trainer = object.__new__(PPOTrainerSync)
trainer.config = cpu_run.compose(sys.argv[1])
trainer.global_steps = 7
trainer.actor_rollout_wg = Workers()
batch = KVBatchMeta(partition_id="train", keys=["a", "b"], tags=[{}, {}])
metrics = {}
trainer._update_actor(batch, metrics)
trainer.global_steps = 8
trainer._update_actor(batch, metrics)
print(json.dumps([seen, metrics["perf/mfu/actor"], batch.extra_info["temperature"]]))
"""
    )
    seen, mfu, temperature = python(code, model, RL_INSIGHT_HOOKS="1")
    assert seen == [[7, 7, False], [8, 8, False]]
    assert (mfu, temperature) == (0.5, 1.0)


def test_v0_sends_the_step(python, model):
    """DataProto.meta_info -> TensorDict -> chunks of each rank."""
    code = (
        _PREPARE
        + """
import torch
from verl.protocol import BatchData, DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

class Stop(Exception):
    pass

class Workers:
    def infer_batch(self, batch):
        seen.extend(take_step(chunk) for chunk in BatchData(batch).chunk(2))
        raise Stop

trainer = object.__new__(RayPPOTrainer)
trainer.global_steps = 3
trainer.critic_wg = Workers()
ones = torch.ones(4, 6, dtype=torch.long)
batch = DataProto.from_single_dict({
    "input_ids": ones, "attention_mask": ones, "position_ids": ones,
    "prompts": ones[:, :2], "responses": ones[:, 2:], "response_mask": ones[:, 2:],
})
try:
    trainer._compute_values(batch)
except Stop:
    pass
print(json.dumps(seen))
"""
    )
    assert python(code, model, RL_INSIGHT_HOOKS="1") == [3, 3]


_TRACKER = (
    _PREPARE
    + """
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.tracking import Tracking

class Workers:
    asked = 0
    def update_actor(self, batch):
        return {"metrics": {"mfu": [0.5]}}
    def rl_insight_summary(self, step):
        Workers.asked += 1
        FAIL
        return [{"moe_load/actor_update/max_over_mean": 1.5, "moe_load/actor_update/assignments": 10.0,
                 "moe_load/actor_update/worst_layer": 4.0},
                {"moe_load/actor_update/max_over_mean": 3.5, "moe_load/actor_update/assignments": 30.0,
                 "moe_load/actor_update/worst_layer": 9.0}]

class Logger:
    def log(self, data, step):
        seen.append([data, step])

tracking = object.__new__(Tracking)
tracking.logger = {"one": Logger(), "two": Logger()}
tracking.log({"val/score": 1.0}, 0)   # before training: nobody is asked
trainer = object.__new__(PPOTrainerSync)
trainer.config = cpu_run.compose(sys.argv[1])
trainer.global_steps = 7
trainer.actor_rollout_wg = trainer.ref_policy_wg = Workers()
class Batch:
    extra_info = {}
trainer._update_actor(Batch(), {})
metrics = {"actor/loss": 0.25}
tracking.log(data=metrics, step=7)
print(json.dumps([seen, Workers.asked, metrics]))
"""
)


def test_every_tracker_gets_the_merged_numbers(python, model):
    seen, asked, metrics = python(_TRACKER.replace("FAIL", ""), model, RL_INSIGHT_HOOKS="1")
    assert asked == 1  # a group shared by two roles is asked once
    assert seen[:2] == [[{"val/score": 1.0}, 0]] * 2
    merged = {
        "actor/loss": 0.25,
        "moe_load/actor_update/max_over_mean": 3.5,
        "moe_load/actor_update/assignments": 40.0,
        "moe_load/actor_update/worst_layer": 9.0,
    }
    assert seen[2:] == [[merged, 7]] * 2
    assert metrics == {"actor/loss": 0.25}  # the trainer's own dict is left alone


def test_a_failing_group_does_not_touch_the_log(python, model):
    code = _TRACKER.replace("FAIL", "raise RuntimeError('a worker died')")
    seen, asked, _ = python(code, model, RL_INSIGHT_HOOKS="1")
    assert asked == 1
    assert seen[2:] == [[{"actor/loss": 0.25}, 7]] * 2


def test_a_failing_group_does_not_hide_the_others(python, model):
    code = _TRACKER.replace("FAIL", "").replace(
        "trainer.actor_rollout_wg = trainer.ref_policy_wg = Workers()",
        """
class Broken(Workers):
    def rl_insight_summary(self, step):
        raise RuntimeError("a worker died")
trainer.actor_rollout_wg, trainer.critic_wg = Broken(), Workers()
""",
    )
    seen, _, _ = python(code, model, RL_INSIGHT_HOOKS="1")
    assert seen[2][0]["actor/loss"] == 0.25
    assert seen[2][0]["moe_load/actor_update/max_over_mean"] == 3.5

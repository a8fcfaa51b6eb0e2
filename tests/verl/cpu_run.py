# SPDX-License-Identifier: Apache-2.0
"""The real torch_npu on CPU, verl's configuration and a batch for its workers."""

from __future__ import annotations

import torch
import torch_npu  # noqa: F401 - the real one, on the stubs of tools/make_npu_stubs.py
from torch.utils.checkpoint import DefaultDeviceType

from rl_insight_hooks.cpu_fallback import register_cpu_kernels

register_cpu_kernels()
DefaultDeviceType.set_device_type("cpu")

_histc = torch.histc


def _histc_of_ints(values, *args, **kwargs):
    """``torch.histc`` takes ints on NPU, and not on CPU."""
    if values.is_floating_point():
        return _histc(values, *args, **kwargs)
    return _histc(values.double(), *args, **kwargs).long()


torch.histc = _histc_of_ints

SEQUENCES, PROMPT, RESPONSE = 4, 3, 5

_OVERRIDES = (
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.actor.use_dynamic_bsz=False",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
    "actor_rollout_ref.actor.fsdp_config.dtype=float32",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=False",
    "actor_rollout_ref.actor.optim.override_optimizer_config={foreach: false}",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.calculate_log_probs=False",
    "actor_rollout_ref.model.use_remove_padding=False",
    "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    "+actor_rollout_ref.model.override_config.attn_implementation=eager",
)


def compose(model, overrides=()):
    """verl's own PPO configuration for a tiny run."""
    import hydra

    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose(
            "ppo_trainer",
            overrides=[*_OVERRIDES, f"actor_rollout_ref.model.path={model}", *overrides],
        )


def batch(step, rank, old_log_probs=None, *, rlih_step=None, padded=False):
    """A batch of ``SEQUENCES`` sequences of unequal length, as the trainer sends it (nested tensors).

    padded: as verl 0.7 does: the responses and what belongs to them are padded, what the model reads is not.
    """
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = [PROMPT + RESPONSE - i % 2 for i in range(SEQUENCES)]
    ids = [torch.randint(3, 64, (n,), generator=generator) for n in lengths]

    def nested(parts):
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    fields = {
        "input_ids": nested(ids),
        "position_ids": nested([torch.arange(n) for n in lengths]),
        "loss_mask": nested([(torch.arange(n) >= PROMPT).long() for n in lengths]),
        "prompts": nested([i[:PROMPT] for i in ids]),
        "responses": nested([i[PROMPT:] for i in ids]),
        "response_mask": nested([torch.ones(n - PROMPT) for n in lengths]),
    }
    if old_log_probs is not None:
        fields["old_log_probs"] = nested([torch.zeros(n - PROMPT) for n in lengths])
        fields["advantages"] = nested([torch.ones(n - PROMPT) for n in lengths])
    others = {"temperature": 1.0, "calculate_entropy": False, "compute_loss": False}
    if old_log_probs is not None:
        size = SEQUENCES * torch.distributed.get_world_size()
        others |= {"global_batch_size": size, "mini_batch_size": size // 2, "epochs": 1, "seed": 1}
        others |= {"dataloader_kwargs": {"shuffle": False}, "compute_loss": True}
    if rlih_step is not None:
        others["rlih_step"] = rlih_step
    if padded:
        fields, others["max_response_len"] = _padded(fields, lengths), RESPONSE
    return tu.get_tensordict(fields, non_tensor_dict=others)


def _padded(fields, lengths):
    model_reads = ("input_ids", "position_ids")
    out = {
        name: value if name in model_reads else torch.nested.to_padded_tensor(value, 0)
        for name, value in fields.items()
    }
    out["attention_mask"] = torch.stack(
        [(torch.arange(PROMPT + RESPONSE) < n).long() for n in lengths]
    )
    out["loss_mask"] = out["response_mask"]
    return out


def queue_fields(padded):
    """The same batch without padding, as the agent loop puts it into the queue."""
    from tensordict import TensorDict

    def nested(name):
        return torch.nested.as_nested_tensor(list(padded[name]), layout=torch.jagged)

    mask = torch.cat([torch.zeros(PROMPT), torch.ones(RESPONSE)]).long()
    num = len(padded["input_ids"])
    fields = {
        name: nested(name)
        for name in ("input_ids", "position_ids", "prompts", "responses", "response_mask")
    }
    fields["advantages"] = nested("advantages")
    fields["loss_mask"] = torch.nested.as_nested_tensor([mask] * num, layout=torch.jagged)
    return TensorDict(fields, batch_size=[num])

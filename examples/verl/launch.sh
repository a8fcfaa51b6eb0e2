#!/usr/bin/env bash
# Train a MoE model with verl 0.9 and record its expert load.
#   MODEL=/models/Qwen3-30B-A3B TRAIN=train.parquet VAL=val.parquet bash launch.sh [hydra override ...]
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
: "${MODEL:?set MODEL to the folder of a MoE model}"
: "${TRAIN:?set TRAIN to a parquet file}" "${VAL:?set VAL to a parquet file}"
CONFIG=${RL_INSIGHT_HOOKS_CONFIG:-$here/rl_insight_hooks.yaml}
OUT=${RL_INSIGHT_HOOKS_PATH:-$PWD/expert_load}

# The driver comes up by its environment, the Ray workers by the job's runtime_env, vLLM's processes inherit.
export RL_INSIGHT_HOOKS_CONFIG=$CONFIG RL_INSIGHT_HOOKS_PATH=$OUT
env_vars=+ray_kwargs.ray_init.runtime_env.env_vars

python3 -m verl.trainer.main_ppo \
    "$env_vars.RL_INSIGHT_HOOKS_CONFIG=$CONFIG" \
    "$env_vars.RL_INSIGHT_HOOKS_PATH=$OUT" \
    data.train_files="$TRAIN" \
    data.val_files="$VAL" \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.rollout.name=vllm \
    trainer.device=npu \
    "$@"

# verl 0.7 and 0.8 know no plugins; add:
#   "$env_vars.VERL_USE_EXTERNAL_MODULES=rl_insight_hooks.autoload"

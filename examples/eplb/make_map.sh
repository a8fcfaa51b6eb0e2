#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make the expert map from collected loads, with the flags of MindSpeed-RL's map generator.
#   make_map.sh JSON_FOLDER MAP.json      e.g. DeepSeek-V3 on 32 devices of 4 nodes with 32 redundant experts
set -euo pipefail
if [ $# -ne 2 ]; then
    echo "usage: $0 JSON_FOLDER MAP.json" >&2
    exit 2
fi
rl-insight-report rebalance --json_folder "$1" --num_replicas "${NUM_REPLICAS:-288}" --num_groups "${NUM_GROUPS:-8}" \
    --num_nodes "${NUM_NODES:-4}" --num_gpus "${NUM_GPUS:-32}" --output_path "$2"

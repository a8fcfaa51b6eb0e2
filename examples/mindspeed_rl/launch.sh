#!/usr/bin/env bash
# Collect with MindSpeed-RL's own flags, make an expert map, and train on with it.
#   MINDSPEED_RL=/path/to/MindSpeed-RL CONFIG=grpo_deepseek_r1_671b_A3_eplb bash launch.sh collect
#   MINDSPEED_RL=... NUM_REPLICAS=320 NUM_GROUPS=8 NUM_NODES=16 NUM_NPUS=256 bash launch.sh map
#   MINDSPEED_RL=... CONFIG=... bash launch.sh train
set -euo pipefail

: "${MINDSPEED_RL:?set MINDSPEED_RL to the folder of MindSpeed-RL}"
FOLDER=${FOLDER:-$PWD/json_file}
MAP=${MAP:-$PWD/expert_map.json}

case ${1:?give collect, map or train} in
collect)
    cd "$MINDSPEED_RL"
    python3 cli/train_grpo.py --config-name "${CONFIG:?set CONFIG}" \
        "++generate_config.eplb_token_collects=true" \
        "++generate_config.eplb_token_save_path=$FOLDER"
    ;;
map)
    rl-insight-report rebalance --json_folder "$FOLDER" \
        --num_replicas "${NUM_REPLICAS:?}" --num_groups "${NUM_GROUPS:?}" \
        --num_nodes "${NUM_NODES:?}" --num_gpus "${NUM_NPUS:?}" --output_path "$MAP"
    ;;
train)
    cd "$MINDSPEED_RL"
    python3 cli/train_grpo.py --config-name "${CONFIG:?set CONFIG}" \
        "++generate_config.expert_map_path=$MAP"
    ;;
*)
    echo "give collect, map or train, not $1" >&2
    exit 2
    ;;
esac

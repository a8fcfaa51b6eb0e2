#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Bring the eplb_token_collects_*.json of all nodes together, as MindSpeed-RL's collect script does.
#   collect.sh HOSTS_FILE REMOTE_FOLDER LOCAL_FOLDER       (one host a line, user@host)
set -euo pipefail
if [ $# -ne 3 ]; then
    echo "usage: $0 HOSTS_FILE REMOTE_FOLDER LOCAL_FOLDER" >&2
    exit 2
fi
rl-insight-report collect --hosts "$1" --path "$2" -o "$3"

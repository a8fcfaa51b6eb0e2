# SPDX-License-Identifier: Apache-2.0
"""Reading back what rank_main.py and the hooks wrote."""

from __future__ import annotations

from rl_insight_hooks.schema import decode_load_file

NUM_EXPERTS = 8
STAGES = ("actor_compute_log_prob", "actor_update")


def truth_of(result):
    """{(step, stage, layer, phase): counts} from what the routers chose."""
    truth = {}
    for step, stage, layer, phase, row in result["counts"]:
        counts = [0] * NUM_EXPERTS
        for expert, num in row:
            counts[expert] += num
        truth[step, stage, layer, phase] = counts
    return truth


def recorded(root, rank):
    files = {}
    for path in sorted(root.rglob(f"rank{rank}/group_list.json")):
        files[path.parents[2].name, path.parents[1].name] = decode_load_file(path.read_bytes())
    return files

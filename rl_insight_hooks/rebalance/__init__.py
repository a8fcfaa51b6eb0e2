# SPDX-License-Identifier: Apache-2.0
"""Expert placement: planner, bounds, score, map formats (pure numpy).

``plan`` makes a :class:`Placement` of a load or a history of loads; ``replan`` improves one with few moves;
``score`` and ``lower_bound`` judge it; ``encode`` and ``decode`` write and read the servers' map files.
"""

from __future__ import annotations

from rl_insight_hooks.rebalance.bounds import lower_bound
from rl_insight_hooks.rebalance.formats import FORMATS, decode, encode
from rl_insight_hooks.rebalance.incremental import Move, moves_between, replan
from rl_insight_hooks.rebalance.placement import Placement, linear_placement, make_placement
from rl_insight_hooks.rebalance.planner import plan
from rl_insight_hooks.rebalance.rules import RULES, broken_rules, validate
from rl_insight_hooks.rebalance.score import (
    Score,
    device_load,
    max_over_mean,
    score,
    total_variation,
)

__all__ = [
    "FORMATS",
    "RULES",
    "Move",
    "Placement",
    "Score",
    "broken_rules",
    "decode",
    "device_load",
    "encode",
    "linear_placement",
    "lower_bound",
    "make_placement",
    "max_over_mean",
    "moves_between",
    "plan",
    "replan",
    "score",
    "total_variation",
    "validate",
]

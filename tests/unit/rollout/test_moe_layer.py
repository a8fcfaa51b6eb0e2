# SPDX-License-Identifier: Apache-2.0
"""How many routed experts a layer has, from what the versions hand to ``apply``."""

from __future__ import annotations

import types

import pytest
from rl_insight_hooks.integrations.vllm_ascend.moe_layer import experts_of


@pytest.mark.parametrize(
    ("given", "redundant", "width", "attributes", "logical", "extra"),
    [
        pytest.param(8, 0, 8, {}, 8, 1, id="nothing redundant"),
        pytest.param(8, 4, 8, {}, 8, 1, id="0.9.1: without the redundant"),
        pytest.param(12, 4, 8, {}, 8, 1, id="0.11 and later: with the redundant"),
        pytest.param(12, 0, 8, {}, 8, 1, id="redundant, and nobody says how many"),
        pytest.param(9, 0, 8, {"n_shared_experts": 1}, 8, 1, id="0.13: shared among the routed"),
        pytest.param(14, 4, 8, {"n_shared_experts": 2}, 8, 2, id="0.13: shared and redundant"),
        pytest.param(8, 0, 11, {"zero_expert_num": 3}, 8, 3, id="zero experts have a logit"),
        pytest.param(None, 0, 8, {}, 8, 1, id="only the logits tell"),
        pytest.param(12, 4, None, {}, 8, 1, id="no logits"),
    ],
)
def test_number_of_routed_experts(given, redundant, width, attributes, logical, extra):
    found = experts_of(types.SimpleNamespace(**attributes), given, redundant, width)
    assert (found.num_logical, found.num_extra) == (logical, extra)


def test_the_configuration_of_main_is_believed_first():
    config = types.SimpleNamespace(num_logical_experts=8)
    found = experts_of(types.SimpleNamespace(moe_config=config), 12, 4, None)
    assert (found.num_logical, found.num_physical) == (8, 12)


def test_nothing_told_is_no_number():
    assert experts_of(types.SimpleNamespace(), None, None, None) is None

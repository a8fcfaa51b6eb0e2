# SPDX-License-Identifier: Apache-2.0
"""Where this process stands: launcher, providers, what the user gives; global expert ids."""

from __future__ import annotations

import pytest

from rl_insight_hooks import guard, topology
from rl_insight_hooks.errors import ConfigError
from rl_insight_hooks.topology import Place, first_local_expert


@pytest.fixture(autouse=True)
def _clean():
    topology.reset()
    guard.take_failures()
    yield
    topology.reset()
    guard.take_failures()


def test_alone():
    place = topology.current_place()
    assert (place.rank, place.world_size) == (0, 1)
    assert place.parallel.ep_size is None


def test_launcher(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    place = topology.current_place()
    assert (place.rank, place.world_size) == (3, 8)


def test_what_the_user_gives_wins_over_a_provider():
    def provider(place):
        place.parallel.ep_rank, place.parallel.ep_size, place.num_experts = 1, 4, 64

    topology.add_provider("megatron", provider)
    topology.give(ep_rank=2, top_k=None)
    place = topology.current_place()
    assert (place.parallel.ep_rank, place.parallel.ep_size, place.num_experts) == (2, 4, 64)
    assert place.top_k is None
    topology.remove_provider("megatron")
    topology.remove_provider("megatron")
    assert topology.current_place().num_experts is None


def test_a_failing_provider_is_counted_and_left_out():
    def broken(place):
        raise RuntimeError("no groups yet")

    topology.add_provider("broken", broken)
    topology.add_provider("good", lambda place: setattr(place, "top_k", 6))
    assert topology.current_place().top_k == 6
    assert guard.take_failures() == {"topology.broken": 1}


def test_unknown_name():
    with pytest.raises(ConfigError, match="no 'ep_ranks'"):
        topology.give(ep_ranks=1)


@pytest.mark.parametrize(
    ("ep_rank", "ep_size", "num_experts", "num_local", "first"),
    [
        (0, 4, 64, 16, 0),
        (3, 4, 64, 16, 48),
        (3, 4, None, 16, 48),
        (3, 4, 64, 64, 0),  # a seam that sees all experts
        (None, 4, 64, 16, 0),
        (1, 1, 64, 16, 0),
        (2, None, 64, 16, 0),
    ],
)
def test_first_local_expert(ep_rank, ep_size, num_experts, num_local, first):
    place = Place(num_experts=num_experts)
    place.parallel.ep_rank, place.parallel.ep_size = ep_rank, ep_size
    assert first_local_expert(place, num_local) == first


def test_first_expert_given_wins():
    place = Place(first_expert=5)
    place.parallel.ep_rank, place.parallel.ep_size = 1, 2
    assert first_local_expert(place, 8) == 5

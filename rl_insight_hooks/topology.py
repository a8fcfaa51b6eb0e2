# SPDX-License-Identifier: Apache-2.0
"""This process's rank and its place in the parallel groups: given, or asked of whoever knows.

Integrations register a provider (Megatron's parallel_state, vLLM's groups); what the user gives wins. No
collective is ever issued: only ranks and sizes are read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from rl_insight_hooks import envs, guard
from rl_insight_hooks.errors import ConfigError
from rl_insight_hooks.schema import TOKENS_DISJOINT, TOKENS_REPLICATED, Parallel

_PARALLEL_FIELDS = tuple(Parallel.__struct_fields__)


@dataclass(kw_only=True, slots=True)
class Place:
    """Where this process stands; None where nobody knows."""

    rank: int = 0
    world_size: int = 1
    parallel: Parallel = field(default_factory=Parallel)
    num_experts: int | None = None  # logical, over all ranks
    top_k: int | None = None
    first_expert: int | None = (
        None  # global id of the first local expert; None: worked out from ep_rank
    )
    tokens_layout: str = TOKENS_DISJOINT

    @property
    def replica_rank(self) -> int | None:
        """Which of the ranks with the same counts this is; None where no other rank has them."""
        if self.tokens_layout != TOKENS_REPLICATED or self.parallel.replica_group is None:
            return None
        return self.parallel.etp_rank


Provider = Callable[[Place], None]

_given: dict[str, object] = {}
_providers: dict[str, Provider] = {}


def give(**values: object) -> None:
    """Set what the user knows: rank, world_size, num_experts, top_k, first_expert, or a Parallel field.

    Raises:
        ConfigError: an unknown name.
    """
    known = {
        "rank",
        "world_size",
        "num_experts",
        "top_k",
        "first_expert",
        "tokens_layout",
        *_PARALLEL_FIELDS,
    }
    for name in values:
        if name not in known:
            raise ConfigError(f"topology has no {name!r}; it has {', '.join(sorted(known))}")
    _given.update({name: value for name, value in values.items() if value is not None})


def add_provider(name: str, provider: Provider) -> None:
    """Register ``provider``, which fills in the fields of a :class:`Place` that it knows."""
    _providers[name] = provider


def remove_provider(name: str) -> None:
    """Forget a provider; unknown names are fine."""
    _providers.pop(name, None)


def reset() -> None:
    """Forget what was given and every provider."""
    _given.clear()
    _providers.clear()


def current_place() -> Place:
    """Return the place of this process now. Never raises: a failing provider is counted and left out."""
    place = Place()
    _from_launcher(place)
    for name, provider in list(_providers.items()):
        with guard.failsafe(f"topology.{name}"):
            provider(place)
    for name, value in _given.items():
        setattr(place.parallel if name in _PARALLEL_FIELDS else place, name, value)
    return place


def first_local_expert(place: Place, num_local_experts: int) -> int:
    """Return the global id of column 0 for a rank that holds ``num_local_experts`` experts.

    EP rank r owns [r * n, (r + 1) * n) where n is the number of local experts (Megatron-Core, vLLM linear
    placement). A seam that sees all experts starts at 0.
    """
    if place.first_expert is not None:
        return place.first_expert
    ep_size, ep_rank = place.parallel.ep_size, place.parallel.ep_rank
    if not ep_size or ep_size == 1 or ep_rank is None:
        return 0
    if place.num_experts is not None and num_local_experts >= place.num_experts:
        return 0
    return ep_rank * num_local_experts


def _from_launcher(place: Place) -> None:
    place.rank = envs.rank() or 0
    place.world_size = envs.world_size() or 1
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        place.rank = distributed.get_rank()
        place.world_size = distributed.get_world_size()

# SPDX-License-Identifier: Apache-2.0
"""Summaries of all ranks -> the numbers of a step for the trainer's metrics. Pure; at most ten a role."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_SUMMED = frozenset({"assignments", "failed", "dropped", "notes"})
_AVERAGED = frozenset({"max_over_mean_avg"})


def merge(of_ranks: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Merge ``loadstats.summary`` of several ranks, by name.

    ``assignments``, ``failed``, ``dropped`` and ``notes`` are summed; ``max_over_mean_avg`` is averaged;
    ``worst_layer`` is that of the rank with the largest ``max_over_mean``; everything else is the worst rank's.
    """
    values: dict[str, list[float]] = {}
    worst: dict[str, tuple[float, float]] = {}
    for summary in of_ranks:
        for name, value in summary.items():
            role, _, kind = name.rpartition("/")
            if kind == "worst_layer":
                ratio = summary.get(f"{role}/max_over_mean", 0.0)
                worst[name] = max(worst.get(name, (ratio, value)), (ratio, value), key=_ratio)
            else:
                values.setdefault(name, []).append(value)
    merged = {name: _merged(name.rpartition("/")[2], parts) for name, parts in values.items()}
    merged.update({name: layer for name, (_, layer) in worst.items()})
    return merged


def _ratio(candidate: tuple[float, float]) -> float:
    return candidate[0]


def _merged(kind: str, parts: list[float]) -> float:
    if kind in _SUMMED:
        return sum(parts)
    if kind in _AVERAGED:
        return sum(parts) / len(parts)
    return max(parts)

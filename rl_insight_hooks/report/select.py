# SPDX-License-Identifier: Apache-2.0
"""Which rows a user asked for: ``--step 1,3-7 --role R --rank 0,1|all --layer 3 --phase forward``."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rl_insight_hooks.errors import UsageError
from rl_insight_hooks.report.table import ALL_RANKS, LoadTable

NumberSpec = str | int | Iterable[int] | None
NameSpec = str | Iterable[str] | None

_EVERYTHING = ("", "all", "*", "null", "none")


@dataclass(frozen=True, slots=True)
class NumberSet:
    """Whole numbers as closed ranges; empty ``ranges`` means every number."""

    ranges: tuple[tuple[int, int], ...] = ()

    def __contains__(self, number: int) -> bool:
        return not self.ranges or any(low <= number <= high for low, high in self.ranges)

    def mask(self, numbers_N: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which of ``numbers_N`` [N] are in the set."""
        if not self.ranges:
            return np.ones(numbers_N.shape, dtype=bool)
        inside = np.zeros(numbers_N.shape, dtype=bool)
        for low, high in self.ranges:
            inside |= (numbers_N >= low) & (numbers_N <= high)
        return inside


def parse_numbers(spec: NumberSpec, what: str) -> NumberSet:
    """Return the set that ``spec`` names: ``None`` or "all" (every number), ``3``, ``[1, 3]`` or "1,3-7".

    Raises:
        UsageError: ``spec`` is none of these; the message names ``what`` and the bad part.
    """
    if spec is None:
        return NumberSet()
    if isinstance(spec, int):
        return NumberSet(((int(spec), int(spec)),))
    if not isinstance(spec, str):
        return NumberSet(tuple((int(number), int(number)) for number in spec))
    text = spec.strip().strip("[]()")
    if text.lower() in _EVERYTHING:
        return NumberSet()
    return NumberSet(
        tuple(_parse_range(part.strip(), what) for part in text.split(",") if part.strip())
    )


def _parse_range(part: str, what: str) -> tuple[int, int]:
    low_text, dash, high_text = part.partition("-")
    if not (low_text.isdecimal() and (high_text.isdecimal() or not dash)) or len(part) > 40:
        raise UsageError(f"{what}: {part!r} is no number or range; write for example 1,3-7 or all")
    low = int(low_text)
    high = int(high_text) if dash else low
    if high < low:
        raise UsageError(f"{what}: the range {part!r} is empty; write {high}-{low}")
    return low, high


def parse_names(spec: NameSpec) -> frozenset[str]:
    """Return the names in ``spec`` ("a,b", an iterable, or None or "all" for every name: the empty set)."""
    if spec is None:
        return frozenset()
    names = spec.split(",") if isinstance(spec, str) else list(spec)
    found = frozenset(name.strip() for name in names if name.strip())
    return frozenset() if found and all(name.lower() in _EVERYTHING for name in found) else found


@dataclass(frozen=True, slots=True)
class Selection:
    """The rows that a user asked for; readers skip what it cannot hold."""

    steps: NumberSet = NumberSet()
    roles: frozenset[str] = frozenset()
    ranks: NumberSet = NumberSet()
    layers: NumberSet = NumberSet()
    phases: frozenset[str] = frozenset()

    def wants(self, step: int | None, role: str, rank: int) -> bool:
        """Return True if some row of this step, role and rank can be in the selection."""
        return self.wants_step(step) and self.wants_role(role) and self.wants_rank(rank)

    def wants_step(self, step: int | None) -> bool:
        """Return True if ``step`` (None: a role without steps) is selected."""
        return step in self.steps if step is not None else not self.steps.ranges

    def wants_role(self, role: str) -> bool:
        """Return True if ``role`` is selected."""
        return not self.roles or role in self.roles

    def wants_rank(self, rank: int) -> bool:
        """Return True if ``rank`` is selected; rows merged over ranks always are."""
        return rank == ALL_RANKS or rank in self.ranks


def make_selection(
    *,
    steps: NumberSpec = None,
    roles: NameSpec = None,
    ranks: NumberSpec = None,
    layers: NumberSpec = None,
    phases: NameSpec = None,
) -> Selection:
    """Return the :class:`Selection` of the given specs.

    Raises:
        UsageError: a spec cannot be read.
    """
    return Selection(
        steps=parse_numbers(steps, "step"),
        roles=parse_names(roles),
        ranks=parse_numbers(ranks, "rank"),
        layers=parse_numbers(layers, "layer"),
        phases=parse_names(phases),
    )


def select(
    table: LoadTable,
    *,
    steps: NumberSpec = None,
    roles: NameSpec = None,
    ranks: NumberSpec = None,
    layers: NumberSpec = None,
    phases: NameSpec = None,
) -> LoadTable:
    """Return the rows of ``table`` that all of the given filters let through.

    Raises:
        UsageError: a filter cannot be read, or names a role or phase that the table does not have.
    """
    selection = make_selection(steps=steps, roles=roles, ranks=ranks, layers=layers, phases=phases)
    check_names(selection.roles, table.roles, "role")
    check_names(selection.phases, table.phases, "phase")
    return apply(table, selection)


def apply(table: LoadTable, selection: Selection) -> LoadTable:
    """Return the rows of ``table`` that are in ``selection``; a name that the table lacks selects none."""
    keep = selection.steps.mask(table.step_N) & selection.layers.mask(table.layer_N)
    keep &= selection.ranks.mask(table.rank_N) | (table.rank_N == ALL_RANKS)
    if selection.roles:
        keep &= np.isin(
            table.role_N, [n for n, role in enumerate(table.roles) if role in selection.roles]
        )
    if selection.phases:
        keep &= np.isin(
            table.phase_N, [n for n, phase in enumerate(table.phases) if phase in selection.phases]
        )
    return table if keep.all() else table.take(keep)


def check_names(wanted: Iterable[str], known: Collection[str], what: str) -> None:
    """Raise unless every name in ``wanted`` is in ``known``.

    Raises:
        UsageError: names the unknown one, the nearest known one and all that there are.
    """
    for name in sorted(wanted):
        if name not in known:
            nearest = difflib.get_close_matches(name, list(known), n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
            there = ", ".join(sorted(known)) or "none"
            raise UsageError(f"the data has no {what} {name!r}{hint} It has: {there}")

# SPDX-License-Identifier: Apache-2.0
"""Give the grouped-matmul calls of a dump to phases, layer passes and layers. Pure.

A *pass* is one run of one phase through one MoE layer: 2 or 3 calls (gate, up, down) that share one
group_list. What separates two passes is never the equality of their counts alone, so that two
neighbouring layers with equal counts stay two. Shape letters: c calls, p passes, e experts, L
layers.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from rl_insight_hooks.report.load.msprobe_calls import Calls, IntArray
from rl_insight_hooks.report.table import UNKNOWN_LAYER
from rl_insight_hooks.schema import PHASE_DW, PHASE_DX, PHASE_FORWARD, PHASE_RECOMPUTE

_BACKWARD = (PHASE_DX, PHASE_DW)
# Calls of one layer pass that occur in practice, the commonest first.
_USUAL_GMM_PER_LAYER = (3, 2, 1)


@dataclass(slots=True)
class Passes:
    """Passes of one dump in the order of their first call."""

    phase_p: list[str]
    counts_pe: IntArray
    first_call_p: IntArray
    forward_runs: list[int] = field(
        default_factory=list
    )  # forward passes between two backward parts
    has_backward: bool = False
    gmm_per_layer: int = 0  # calls of one forward pass; 0: they differ
    assumptions: list[str] = field(default_factory=list)
    equal_neighbours: int = 0  # forward passes with the counts of the one before, phases not known
    odd_passes: int = 0  # passes whose calls do not share one group_list, or have too few calls

    def count_equal_neighbours(self) -> None:
        """Note forward passes that repeat the one before: two layers that route alike, or a recompute."""
        forward = [n for n, phase in enumerate(self.phase_p) if phase == PHASE_FORWARD]
        counts = self.counts_pe[forward]
        self.equal_neighbours = int((counts[1:] == counts[:-1]).all(axis=1).sum())

    @property
    def num_forward(self) -> int:
        """Number of forward passes."""
        return self.phase_p.count(PHASE_FORWARD)


def passes_of(calls: Calls, gmm_per_layer: int | None) -> Passes:
    """Return the passes of ``calls``.

    Phases come from the stacks where they are known, else from ``group_type`` and the order of calls, else from
    the runs of equal lists alone. ``gmm_per_layer`` overrides how many calls make a forward pass.
    """
    if calls.has_stack and all(phase is not None for phase in calls.phase_c):
        assumptions: list[str] = []
        starts, phases = _split_known(
            calls, [phase or PHASE_FORWARD for phase in calls.phase_c], gmm_per_layer
        )
    elif calls.has_dump:
        assumptions = [
            "msprobe dump without stack.json: forward, recompute and backward told apart by group_type "
            "and order"
        ]
        starts, phases = _split_by_order(calls, gmm_per_layer)
    else:
        passes = _passes_of_runs(calls, gmm_per_layer)
        passes.count_equal_neighbours()
        return passes
    passes = _collect(calls, starts, phases, assumptions)
    if not calls.has_stack:
        passes.count_equal_neighbours()
    return passes


def _collect(
    calls: Calls, members: list[list[int]], phases: list[str], assumptions: list[str]
) -> Passes:
    order = sorted(range(len(members)), key=lambda number: members[number][0])
    members = [members[number] for number in order]
    phases = [phases[number] for number in order]
    first = np.array([group[0] for group in members], dtype=np.int64)
    sizes = Counter(
        len(group) for group, phase in zip(members, phases, strict=True) if phase == PHASE_FORWARD
    )
    usual = sizes.most_common(1)[0][0] if sizes else 0
    odd = 0
    for group in members:
        if (calls.counts_ce[group] != calls.counts_ce[group[0]]).any():
            odd += 1
    odd += sum(num for size, num in sizes.items() if size != usual)
    return Passes(
        phase_p=phases,
        counts_pe=calls.counts_ce[first],
        first_call_p=first,
        forward_runs=_forward_runs(phases),
        has_backward=any(phase != PHASE_FORWARD for phase in phases),
        gmm_per_layer=usual,
        assumptions=assumptions,
        odd_passes=odd,
    )


def _forward_runs(phases: list[str]) -> list[int]:
    """Return lengths of the runs of forward passes that a recompute or backward pass ends."""
    runs: list[int] = []
    length = 0
    for phase in phases:
        if phase == PHASE_FORWARD:
            length += 1
        elif length:
            runs.append(length)
            length = 0
    return runs


# --- phases known: split each phase into passes ----------------------------------------------------


def _split_known(
    calls: Calls, phases: list[str], gmm_per_layer: int | None
) -> tuple[list[list[int]], list[str]]:
    members: list[list[int]] = []
    names: list[str] = []
    numbers_of = {
        phase: [n for n, name in enumerate(phases) if name == phase] for phase in set(phases)
    }
    split = way_to_split(calls, numbers_of.get(PHASE_FORWARD, []), gmm_per_layer)
    forward = split(numbers_of.get(PHASE_FORWARD, []))
    usual = _usual_size(forward)
    for phase, numbers in numbers_of.items():
        if phase == PHASE_FORWARD:
            groups = forward
        elif phase == PHASE_RECOMPUTE:
            groups = split(numbers)
        else:
            groups = _split_equal_runs(calls.counts_ce, numbers, usual)
        members.extend(groups)
        names.extend([phase] * len(groups))
    return members, names


Groups = list[list[int]]  # call numbers of each pass
Split = Callable[[list[int]], Groups]

# Share of passes that must have the usual size for a way of splitting to be believed.
_REGULAR = 0.75


def way_to_split(calls: Calls, numbers: list[int], gmm_per_layer: int | None) -> Split:
    """Return how forward (or recompute) calls, given in order, are split into layer passes.

    ``gmm_per_layer`` where given. Else by place (a call from where the pass already has one begins
    a new pass) or by widths (a pass that came back to the width it began with is over), whichever
    gives passes of one size; of two that do, the one with more calls to a pass, since calls from one
    line, and square weights, make passes too short, never too long. Where only one of the two is
    known, runs of equal lists count as the other, if all are of one length. A change of the list
    begins a new pass in all ways.
    """
    if gmm_per_layer is not None:
        return partial(_split_equal_runs, calls.counts_ce, size=gmm_per_layer)
    ways: list[tuple[Split, bool]] = []  # with: whether a pass must come back to its first width
    if numbers and (calls.stack_c[numbers] >= 0).all():
        ways.append((partial(_split_by_place, calls), False))
    if numbers and (calls.out_width_c[numbers] >= 0).all():
        ways.append((partial(_split_by_widths, calls), True))
    size, _ = _calls_per_pass(_run_lengths(calls.counts_ce[numbers]), None)
    by_runs = partial(_split_equal_runs, calls.counts_ce, size=size)
    if len(ways) == 1 and (_run_lengths(calls.counts_ce[numbers]) == size).all():
        ways.append((by_runs, False))  # every run of equal lists is one pass
    best: tuple[int, Split] | None = None
    for way, must_close in ways:
        groups = way(numbers)
        usual = _usual_size(groups)
        good = [
            len(group) == usual and (_is_closed(calls, group) or not must_close) for group in groups
        ]
        if sum(good) >= _REGULAR * len(groups) and (best is None or usual > best[0]):
            best = (usual, way)
    if best is not None:
        return best[1]
    return ways[0][0] if ways else by_runs


def _usual_size(groups: Groups) -> int:
    return Counter(map(len, groups)).most_common(1)[0][0] if groups else 1


def _split_by_place(calls: Calls, numbers: list[int]) -> Groups:
    groups: Groups = []
    places: set[int] = set()
    for number in numbers:
        place = int(calls.stack_c[number])
        if not groups or place in places or not _same(calls.counts_ce, number, groups[-1][0]):
            groups.append([])
            places = set()
        groups[-1].append(number)
        places.add(place)
    return groups


def _split_by_widths(calls: Calls, numbers: list[int]) -> Groups:
    groups: Groups = []
    for number in numbers:
        if (
            not groups
            or _is_closed(calls, groups[-1])
            or not _same(calls.counts_ce, number, groups[-1][0])
        ):
            groups.append([])
        groups[-1].append(number)
    return groups


def _is_closed(calls: Calls, group: list[int]) -> bool:
    """Return True if the pass came back to the width that it began with."""
    return len(group) > 1 and calls.out_width_c[group[-1]] == calls.in_width_c[group[0]]


def _run_lengths(counts_ce: IntArray) -> npt.NDArray[np.int64]:
    """Return lengths of the runs of equal lists."""
    if not len(counts_ce):
        return np.zeros(0, dtype=np.int64)
    changes = np.flatnonzero((counts_ce[1:] != counts_ce[:-1]).any(axis=1)) + 1
    return np.diff(np.concatenate([[0], changes, [len(counts_ce)]])).astype(np.int64)


def _split_equal_runs(counts_ce: IntArray, numbers: list[int], size: int) -> list[list[int]]:
    """Split calls into runs of equal lists, and each run into groups of at most ``size``."""
    groups: list[list[int]] = []
    for number in numbers:
        same = bool(groups) and not (counts_ce[number] != counts_ce[groups[-1][0]]).any()
        if same and len(groups[-1]) < size:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


# --- dump.json without stack.json ------------------------------------------------------------------


def _split_by_order(calls: Calls, gmm_per_layer: int | None) -> tuple[list[list[int]], list[str]]:
    num = calls.num_calls
    phases = [PHASE_FORWARD] * num
    for number in np.flatnonzero(calls.is_dw_c).tolist():
        phases[number] = PHASE_DW
    for number in np.flatnonzero(calls.is_dw_c).tolist():
        partner = _dx_beside(calls, phases, number)
        if partner is not None:
            phases[partner] = PHASE_DX
    forward = [number for number in range(num) if phases[number] == PHASE_FORWARD]
    groups = way_to_split(calls, forward, gmm_per_layer)(forward)
    usual = _usual_size(groups)
    names = _tell_recompute(calls, groups, phases, usual)
    members = list(groups)
    for phase in _BACKWARD:
        numbers = [number for number in range(num) if phases[number] == phase]
        split = _split_equal_runs(calls.counts_ce, numbers, usual)
        members.extend(split)
        names.extend([phase] * len(split))
    return members, names


def _dx_beside(calls: Calls, phases: list[str], dw: int) -> int | None:
    """Return the dX call of the same matmul as ``dw``: its neighbour that takes the same gradient."""
    for number in (dw - 1, dw + 1):
        if not 0 <= number < calls.num_calls or phases[number] != PHASE_FORWARD:
            continue
        gradient, taken = calls.weight_shape_c[dw], calls.x_shape_c[number]
        if gradient is None or taken is None or gradient == taken:
            return number
    return None


def _tell_recompute(
    calls: Calls, groups: list[list[int]], phases: list[str], gmm_per_layer: int
) -> list[str]:
    """Return forward or recompute for each forward-like pass.

    The passes right before a backward part are recomputed if they repeat, with equal counts,
    earlier passes that have had no backward yet, in the order in which the backward part undoes
    them.
    """
    names = [PHASE_FORWARD] * len(groups)
    counts = calls.counts_ce
    backward = _split_equal_runs(
        counts, [n for n in range(calls.num_calls) if phases[n] == PHASE_DX], gmm_per_layer
    )
    if not backward:
        return names
    waiting: list[int] = []  # passes without a backward yet
    at = 0
    run: list[int] = []
    for number, group in enumerate(groups):
        run.append(number)
        next_start = groups[number + 1][0] if number + 1 < len(groups) else calls.num_calls
        undone = []
        while at < len(backward) and backward[at][0] < next_start:
            if backward[at][0] > group[0]:
                undone.append(backward[at][0])
            at += 1
        if not undone:
            continue
        again = run[-len(undone) :]
        earlier = waiting + run[: -len(undone)]
        repeats = len(again) == len(undone) and all(
            _same(counts, groups[p][0], b) for p, b in zip(again, reversed(undone), strict=True)
        )
        open_counts = Counter(counts[groups[p][0]].tobytes() for p in earlier)
        wanted = Counter(counts[groups[p][0]].tobytes() for p in again)
        if repeats and not wanted - open_counts:
            for p in again:
                names[p] = PHASE_RECOMPUTE
            run = run[: -len(undone)]
        waiting += run
        run = []
        for b in undone:
            for p in reversed(waiting):
                if _same(counts, groups[p][0], b):
                    waiting.remove(p)
                    break
    return names


def _same(counts: IntArray, first: int, second: int) -> bool:
    return not (counts[first] != counts[second]).any()


# --- tensors alone ---------------------------------------------------------------------------------


def _passes_of_runs(calls: Calls, gmm_per_layer: int | None) -> Passes:
    """Runs of equal lists are all there is: a forward pass is g calls, its backward 2g, with recompute 3g."""
    counts = calls.counts_ce
    lengths = _run_lengths(counts)
    starts = np.cumsum(lengths) - lengths
    size, how = _calls_per_pass(lengths, gmm_per_layer)
    units = -(-lengths // size)
    odd = int((lengths % size != 0).sum())
    plan = _plan_of_runs(units)
    phase_p: list[str] = []
    first_p: list[int] = []
    for start, unit, names in zip(starts.tolist(), units.tolist(), plan, strict=True):
        for at, name in enumerate(names[:unit]):
            phase_p.append(name)
            first_p.append(start + at * size)
    backward = any(name in _BACKWARD for name in phase_p)
    first = np.array(first_p, dtype=np.int64)
    return Passes(
        phase_p=phase_p,
        counts_pe=counts[first],
        first_call_p=first,
        forward_runs=_forward_runs(phase_p),
        has_backward=backward,
        gmm_per_layer=size,
        assumptions=[
            f"msprobe dump without dump.json and stack.json: {size} calls taken as one layer pass ({how})",
            *(
                [
                    "msprobe dump without dump.json and stack.json: backward calls told from forward by "
                    "run length"
                ]
                if backward
                else []
            ),
        ],
        odd_passes=odd,
    )


def _calls_per_pass(lengths: npt.NDArray[np.int64], given: int | None) -> tuple[int, str]:
    if given is not None:
        return given, "gmm_per_layer"
    divisor = math.gcd(*lengths.tolist())
    for size in _USUAL_GMM_PER_LAYER:
        if divisor % size == 0:
            return size, "it divides every run of equal lists"
    return 1, "no other number divides every run of equal lists"


def _plan_of_runs(units: npt.NDArray[np.int64]) -> list[list[str]]:
    """Return the phases of each run, given its length in passes (dX and dW calls are a pass each).

    With backward there are as many backward runs as forward passes, and forward passes that stand alone; if the
    lengths cannot be read so, every run is forward (equal neighbouring layers).
    """
    found = set(units.tolist())
    recompute = [PHASE_RECOMPUTE, PHASE_DX, PHASE_DW]
    plain = [PHASE_DX, PHASE_DW]
    for tail in (recompute, plain):
        long, joined = len(tail), len(tail) + 1
        if not found <= {1, long, joined} or not found & {long, joined} or 1 not in found:
            continue
        num = Counter(units.tolist())
        if num[1] + num[joined] == num[long] + num[joined]:
            plan = {1: [PHASE_FORWARD], long: tail, joined: [PHASE_FORWARD, *tail]}
            return [plan[unit] for unit in units.tolist()]
    return [[PHASE_FORWARD] * unit for unit in units.tolist()]


# --- layers ----------------------------------------------------------------------------------------


def number_of_layers(dumps: list[Passes], given: int | None) -> tuple[int, str | None]:
    """Return (L, assumption or None): MoE layers of one rank, from all dumps of that rank.

    A run of forward passes that a backward part ends is one micro-batch, or several where all
    forwards come before all backwards. These are told apart by the order in which backward undoes
    them, and by their token totals. Without any backward, L is the largest number that divides the
    passes of every dump (or of most of them, where lost calls spoil the rest).
    """
    if given is not None:
        return given, None
    ended = Counter(run for dump in dumps if dump.has_backward for run in dump.forward_runs)
    if ended:
        most = max(ended.values())
        number = max(run for run, num in ended.items() if num == most)
        hints = [hint for dump in dumps if dump.has_backward for hint in _undone_in_turn(dump)]
        hints += [hint for dump in dumps if dump.has_backward for hint in _token_stretches(dump)]
        return _divided(number, hints), None
    totals = [dump.num_forward for dump in dumps if dump.num_forward]
    if not totals:
        return 0, None
    number = _usual_divisor(totals)
    whole = [dump for dump in dumps if dump.num_forward and dump.num_forward % number == 0]
    number = _divided(number, [hint for dump in whole for hint in _token_stretches(dump)])
    return number, (
        f"msprobe dump without a backward pass: {number} MoE layers assumed (the largest number that divides "
        "the forward passes of the dumps); give num_moe_layers if that is wrong"
    )


def _usual_divisor(totals: list[int]) -> int:
    """Return the greatest common divisor of ``totals``; if a few spoil it (lost calls), that of the many."""
    number = math.gcd(*totals)
    if number > 1:
        return number
    best, most = 1, len(totals) // 2
    for candidate in sorted({math.gcd(a, b) for a in set(totals) for b in set(totals)} - {1}):
        divided = sum(total % candidate == 0 for total in totals)
        if divided > most or (divided == most and best > 1):
            best, most = candidate, divided
    return best


def _divided(number: int, hints: list[int]) -> int:
    """Return the greatest common divisor; hints that contradict ``number`` count for nothing."""
    return math.gcd(number, *hints) if all(number % hint == 0 for hint in hints) else number


def _undone_in_turn(dump: Passes) -> list[int]:
    """Return the number of layers, for each place where backward goes on with the next micro-batch.

    Backward undoes the layers of a micro-batch from last to first: its forward passes are met at
    falling positions. Where micro-batches are undone first to last, the position then rises by 2 L
    - 1.
    """
    position_of: dict[bytes, list[int]] = {}
    met: list[int] = []
    position = 0
    for number, phase in enumerate(dump.phase_p):
        key = dump.counts_pe[number].tobytes()
        if phase == PHASE_FORWARD:
            position_of.setdefault(key, []).append(position)
            position += 1
        elif phase == PHASE_DX:
            if len(position_of.get(key, ())) != 1:
                return []  # equal counts in two layers: the order says nothing for sure
            met.append(position_of[key][0])
    rises = [after - before for before, after in itertools.pairwise(met) if after > before]
    return [(rise + 1) // 2 for rise in rises if rise % 2]


def _token_stretches(dump: Passes) -> list[int]:
    """Return lengths of stretches of forward passes with one token total, where that says something.

    Where a rank holds all experts, every layer of a micro-batch routes the same number of tokens. Where it does
    not (expert parallelism), totals change from layer to layer, and nothing is returned.
    """
    forward = [number for number, phase in enumerate(dump.phase_p) if phase == PHASE_FORWARD]
    sums = dump.counts_pe[forward].sum(axis=1)
    changes = np.flatnonzero(sums[1:] != sums[:-1]) + 1
    lengths: list[int] = np.diff(np.concatenate([[0], changes, [sums.size]])).tolist()
    return lengths if min(lengths) > 1 else []


def layers_of(passes: Passes, num_layers: int) -> IntArray:
    """Return the layer [p] of each pass: forward passes in turn, the others by the forward pass they repeat.

    A pass of another phase goes to the latest forward pass with equal counts that has none of that phase yet;
    UNKNOWN_LAYER where there is none (msprobe lost it).
    """
    layer_p = np.full(len(passes.phase_p), UNKNOWN_LAYER, dtype=np.int64)
    waiting: dict[str, dict[bytes, list[int]]] = {}
    turn = 0
    for number, phase in enumerate(passes.phase_p):
        key = passes.counts_pe[number].tobytes()
        if phase == PHASE_FORWARD:
            layer_p[number] = turn % num_layers if num_layers else turn
            turn += 1
            for other in (PHASE_RECOMPUTE, *_BACKWARD):
                waiting.setdefault(other, {}).setdefault(key, []).append(int(layer_p[number]))
            continue
        candidates = waiting.get(phase, {}).get(key)
        if candidates:
            layer_p[number] = candidates.pop()
    return layer_p

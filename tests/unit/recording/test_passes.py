# SPDX-License-Identifier: Apache-2.0
"""Where layer passes begin, for every shape of caller in docs/truth.md, against the callers' own truth."""

from __future__ import annotations

import pytest
import torch

from rl_insight_hooks.passes import PassTracker

H, FF, E, T = 8, 12, 4, 10


def run(calls, gmm_per_layer=0, backward=False):
    """Feed (list object, x, weight, is first of its pass) and return (told, truth)."""
    tracker = PassTracker(backward=backward)
    told = [tracker.begins(g, x, w, gmm_per_layer) for g, x, w, _ in calls]
    return told, [first for *_, first in calls]


def weight(k, n):
    return torch.empty(E, k, n)


def gate_up_down(group_list, hidden=H, width=FF, rows=T):
    x, mid = torch.empty(rows, hidden), torch.empty(rows, width)
    lists = (
        [group_list] * 3
        if group_list is not None
        else [torch.ones(E), torch.ones(E), torch.ones(E)]
    )
    return [
        (lists[0], x, weight(hidden, width), True),
        (lists[1], x, weight(hidden, width), False),
        (lists[2], mid, weight(width, hidden), False),
    ]


def fused_gate_up_down(group_list, hidden=H, width=FF, gated=True):
    x, mid = torch.empty(T, hidden), torch.empty(T, width)
    lists = [group_list] * 2 if group_list is not None else [torch.ones(E), torch.ones(E)]
    return [
        (lists[0], x, weight(hidden, width * (2 if gated else 1)), True),
        (lists[1], mid, weight(width, hidden), False),
    ]


def down_only(group_list):
    return [(group_list, torch.empty(T, FF), weight(FF, H), True)]


@pytest.mark.parametrize("hidden", [H, FF], ids=["H!=F", "H==F"])
@pytest.mark.parametrize(
    "shared", [True, False], ids=["one list object a layer", "new object a call"]
)
@pytest.mark.parametrize("shape", ["gate_up_down", "fused", "down_only"])
def test_layers_in_a_row(shape, shared, hidden):
    calls = []
    for _ in range(5):
        group_list = torch.ones(E) if shared else None
        if shape == "gate_up_down":
            calls += gate_up_down(group_list, hidden)
        elif shape == "fused":
            calls += fused_gate_up_down(group_list, hidden)
        else:
            calls += down_only(torch.ones(E))
    if shape == "gate_up_down" and not shared and hidden == FF:
        # three square calls with three objects: only gmm_per_layer can tell
        told, truth = run(calls, gmm_per_layer=3)
    else:
        told, truth = run(calls)
    assert told == truth


def test_equal_counts_in_neighbouring_layers_stay_two_layers():
    told, truth = run(gate_up_down(torch.ones(E)) + gate_up_down(torch.ones(E)))
    assert told == truth == [True, False, False] * 2


def test_caller_that_reuses_one_list_object_for_all_layers():
    same = torch.ones(E)
    told, truth = run(gate_up_down(same) + gate_up_down(same) + gate_up_down(same))
    assert told == truth


def test_micro_batch_of_other_length_with_the_same_list_object():
    same = torch.ones(E)
    told, truth = run(gate_up_down(same) + gate_up_down(same, rows=T + 1))
    assert told == truth


@pytest.mark.parametrize("shared", [True, False])
def test_backward_of_gate_up_down(shared):
    calls = []
    for _ in range(3):
        lists = [torch.ones(E)] * 3 if shared else [torch.ones(E), torch.ones(E), torch.ones(E)]
        calls += [
            (lists[0], torch.empty(T, H), weight(H, FF), True),  # dX of down
            (lists[1], torch.empty(T, FF), weight(FF, H), False),  # dX of up
            (lists[2], torch.empty(T, FF), weight(FF, H), False),  # dX of gate
        ]
    told, truth = run(calls, backward=True)
    assert told == truth


def test_backward_of_fused_gate_up():
    calls = []
    for _ in range(3):
        calls += [
            (torch.ones(E), torch.empty(T, H), weight(H, FF), True),
            (torch.ones(E), torch.empty(T, 2 * FF), weight(2 * FF, H), False),
        ]
    told, truth = run(calls, backward=True)
    assert told == truth


def test_inputs_are_not_kept_alive():
    import weakref

    tracker = PassTracker()
    x = torch.empty(T, H)
    watched = weakref.ref(x)
    tracker.begins(torch.ones(E), x, weight(H, FF), 0)
    del x
    assert watched() is None

# SPDX-License-Identifier: Apache-2.0
"""Is this grouped matmul the first of a layer pass? Gate, up and down of one pass count once.

In this order:

1. ``gmm_per_layer`` given: every so many calls are one pass.
2. The chain of shapes: a pass that came back to the width it began with (down projection) is over.
3. The same ``group_list`` object as the call before: the same pass (verl's patches, vLLM).
4. A new ``group_list`` object: still the same pass if rows and widths continue the chain (MindSpeed's TE
   path makes a new tensor for every call), else a new one.

In backward (dx) the order of 2 and 3 is turned round: up and gate both come back to the width of the pass.

Values are never compared: two layers with equal counts stay two.
"""

from __future__ import annotations

import weakref
from typing import Any


class PassTracker:
    """Watches the calls of one phase; knows where layer passes begin."""

    __slots__ = (
        "_backward",
        "_closed",
        "_first_width",
        "_last_list",
        "_last_widths",
        "_num_calls",
        "_num_rows",
        "_shared",
        "_x",
        "num_passes",
        "slot",
    )

    def __init__(self, *, backward: bool = False) -> None:
        self._backward = backward
        self.num_passes = 0
        self.slot: Any = None  # the accumulator of the pass under way
        self.reset()

    def reset(self) -> None:
        """Forget the pass under way."""
        self.slot = None
        self._last_list: Any = None
        self._num_calls = 0
        self._shared = False
        self._closed = True
        self._first_width = -1
        self._last_widths = (-1, -1)
        self._num_rows = -1
        self._x: Any = None

    def begins(self, group_list: Any, x: Any, weight: Any, gmm_per_layer: int) -> bool:
        """Return True when this call begins a pass; remembers the call.

        Args:
            group_list: the object itself, compared by identity and kept until the next call.
            x: first input [T, K].
            weight: first weight [..., K, N].
            gmm_per_layer: calls of one pass, 0 when unknown.
        """
        shape = x.shape
        in_width, out_width, num_rows = shape[-1], weight.shape[-1], shape[0]
        if gmm_per_layer:
            begins = not 0 < self._num_calls < gmm_per_layer
        elif num_rows != self._num_rows:
            begins = True
        elif group_list is not None and group_list is self._last_list:
            begins = self._closed and not self._backward
        elif self._closed:
            begins = not (self._backward and (in_width, out_width) == self._last_widths)
        else:
            # a caller that passed one object twice in this pass makes one object a pass
            begins = self._shared or not self._continues(x, in_width, out_width)
        if begins:
            self.num_passes += 1
            self._num_calls = 0
            self._shared = False
            self._first_width = in_width
            self._num_rows = num_rows
        else:
            self._shared = self._shared or (
                group_list is not None and group_list is self._last_list
            )
        self._num_calls += 1
        self._last_list = group_list
        self._last_widths = (in_width, out_width)
        self._x = weakref.ref(x)
        # a square projection says nothing about where the pass ends
        self._closed = out_width == self._first_width != in_width and self._num_calls > 1
        return begins

    def _continues(self, x: Any, in_width: int, out_width: int) -> bool:
        last = self._last_widths[1]
        if in_width == self._first_width and out_width == last and self._x() is x:
            return True  # up after gate
        # down after gate_up (gated: half the width) or after up; in backward the way back doubles it
        return out_width == self._first_width and in_width in (last, last // 2, last * 2)

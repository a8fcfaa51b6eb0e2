# SPDX-License-Identifier: Apache-2.0
"""Process-wide state of the hooks: one object, not thread-local and not a ContextVar.

On an accelerator backward and recompute run on autograd's own threads, where neither would be seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_insight_hooks.layers import Layer, LayerRef

if TYPE_CHECKING:
    from rl_insight_hooks.counters import Slot

__all__ = ["STATE", "LayerRef", "State"]


class State:
    """What the hooks read on every call.

    Attributes:
        on: a region is active and wanted: hooks record.
        claims: how many outer seams speak for the layer pass under way; inner seams keep quiet then.
        claimed: the layer of the innermost outer seam, for the gradients of inner calls; None where unknown.
        layer: the watched layer whose forward runs now, or None.
        armed: that layer's pass has not been counted yet.
        evaluating: the module of the pass under way is in eval mode.
        num_tokens: tokens that entered the watched layer under way.
        counted: the accumulator that pass was counted in, for its later calls; None before and outside.
        compiled_unwatched: a compiled graph called a seam for a layer that nobody watches.
        step: the step set by ``set_step``; None before.
    """

    __slots__ = (
        "armed",
        "claimed",
        "claims",
        "compiled_unwatched",
        "counted",
        "evaluating",
        "layer",
        "num_tokens",
        "on",
        "step",
        "step_source",
    )

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Back to the state of a fresh process."""
        self.on = False
        self.claims = 0
        self.claimed: Layer | None = None
        self.layer: Layer | None = None
        self.armed = False
        self.counted: Slot | None = None
        self.evaluating = False
        self.num_tokens = 0
        self.compiled_unwatched = False
        self.step: int | None = None
        self.step_source = "given"

    def snapshot(self) -> dict[str, Any]:
        """Return the fields by name, for ``doctor`` and tests."""
        return {name: getattr(self, name) for name in self.__slots__}


STATE = State()

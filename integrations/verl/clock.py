# SPDX-License-Identifier: Apache-2.0
"""Which global step a train worker is in. Pure.

verl's V1 trainer does not send the step with its calls. Sources, best first: the step that our driver hook
sends along; ``start_profile(profile_step=N)``; ``update_weights(global_steps=N)``, after which stages belong
to N + 1; the number of finished actor updates, set right by ``save_checkpoint(global_step=N)``.
"""

from __future__ import annotations

from dataclasses import dataclass

GIVEN = "given"
INFERRED = "inferred"


@dataclass(slots=True)
class StepClock:
    """Turns what a worker hears into (step, where it came from)."""

    step: int = 1
    source: str = INFERRED
    _heard_sync: bool = False  # update_weights told a step once: updates need not be counted

    def carried(self, step: int) -> None:
        """Take the step that came with the batch."""
        self.step, self.source = step, GIVEN

    def profiled(self, step: int) -> None:
        """``start_profile`` told the step that begins."""
        self.carried(step)

    def synced(self, step: int) -> None:
        """Weights of ``step`` go to the rollout: what comes next is the step after it."""
        self._heard_sync = True
        self._infer(step + 1)

    def updated(self) -> None:
        """An actor update is over."""
        if not self._heard_sync:
            self._infer(self.step + 1)

    def saved(self, step: int) -> None:
        """A checkpoint of ``step`` is written, between that step's update and the next step."""
        if not self._heard_sync:
            self._infer(step + 1)

    def _infer(self, step: int) -> None:
        self.step, self.source = step, INFERRED

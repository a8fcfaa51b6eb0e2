# SPDX-License-Identifier: Apache-2.0
"""A train worker's answer to the driver: its summary of one step."""

from __future__ import annotations

from rl_insight_hooks import guard
from rl_insight_hooks.session import existing_session

_WAIT_S = (
    10.0  # for the writer, which is milliseconds behind; no worker computes while the driver logs
)


def of_step(step: int) -> dict[str, float]:
    """Return ``loadstats.summary`` of the roles whose last written step is ``step``; {} if we are off."""
    session = existing_session()
    if session is None:
        return {}
    with guard.failsafe("verl.summary"):
        session.writer.flush(_WAIT_S)
        return session.writer.summary(step)
    return {}

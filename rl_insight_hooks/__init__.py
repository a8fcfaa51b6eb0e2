# SPDX-License-Identifier: Apache-2.0
"""rl_insight_hooks: the true expert load of every step, role, layer and rank."""

from __future__ import annotations

from rl_insight_hooks._version import __version__

__all__ = ["__version__"]

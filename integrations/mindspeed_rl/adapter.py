# SPDX-License-Identifier: Apache-2.0
"""MindSpeed-RL's own MoE method, put over vllm-ascend's: hooked as every other method of that seam.

Its collector is switched over to us by :mod:`.flags`. Where it stays on, the file says so: it makes the device
wait in every layer, breaks graph capture, and counts profile, dummy and padding rows.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from .. import vllm_ascend
from . import flags

if TYPE_CHECKING:
    from rl_insight_hooks.installer import Context

_STAMP = "mindspeed_rl_collector"


def install(ctx: Context) -> None:
    """Hook the adapter's method, and what of vllm-ascend it stands on."""
    with ctx.session.installer.replacing("vllm_ascend"):
        vllm_ascend.install(ctx)


def refresh(ctx: Context) -> None:
    """Hook what came since; stamp the files while MindSpeed-RL's own collector is on beside us."""
    with ctx.session.installer.replacing("vllm_ascend"):
        vllm_ascend.refresh(ctx)
    ask = getattr(sys.modules.get(flags.ADAPTER), "get_EPLB_args", None)
    if ask is not None and ask()[0] is True:
        ctx.recorder.stamps[_STAMP] = (
            "MindSpeed-RL's own collector is on too (eplb_token_collects): its files hold profile, dummy and "
            "padding rows; the counts here do not"
        )
    else:
        ctx.recorder.stamps.pop(_STAMP, None)


def uninstall(ctx: Context) -> None:
    """Take out what the patcher does not."""
    vllm_ascend.uninstall(ctx)

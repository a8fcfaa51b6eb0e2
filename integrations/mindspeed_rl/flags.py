# SPDX-License-Identifier: Apache-2.0
"""``generate_config: {eplb_token_collects, eplb_token_save_path}`` switch us on in place of the adapter's
collector.

MindSpeed-RL hands the two to ``set_EPLB_args`` of its adapter when it makes its engine, before the model is
built.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rl_insight_hooks import guard
from rl_insight_hooks.config import BLOCK, DEFAULT_PATH, changed
from rl_insight_hooks.patching import Gate

if TYPE_CHECKING:
    from rl_insight_hooks.installer import Context
    from rl_insight_hooks.session import Session

_log = logging.getLogger(__name__)

ADAPTER = "mindspeed_rl.models.rollout.vllm_adapter.fused_moe"
GENERATE = "actor_generate_sequences"


def settings(modules: Mapping[str, ModuleType]) -> dict[str, Any] | None:
    """Return a configuration made of the flags alone, or None where they are off.

    They ask for the rollout's collects; training is recorded when our own switch is on.
    """
    path = _path_asked_for(modules.get(ADAPTER))
    if path is None:
        return None
    flags = {"eplb_token_collects": True, "eplb_token_save_path": path}
    return {"generate_config": flags, BLOCK: {"roles": [GENERATE]}}


def install(ctx: Context, modules: Mapping[str, ModuleType]) -> None:
    """Hook the setter of the flags; take over at once where they are set already."""
    adapter = modules.get(ADAPTER)
    if adapter is None or not hasattr(adapter, "set_EPLB_args"):
        return
    path = _path_asked_for(adapter)
    factory = functools.partial(_set_eplb_args, ctx.session)
    ctx.patcher.replace(adapter, "set_EPLB_args", factory)
    if path is not None:
        adapter.set_EPLB_args(True, path)


def _path_asked_for(adapter: ModuleType | None) -> str | None:
    ask = getattr(adapter, "get_EPLB_args", None)
    if ask is None:
        return None
    collects, path = ask()
    return str(path or "./") if collects is True else None


def _set_eplb_args(session: Session, original: Any, gate: Gate) -> Any:
    @functools.wraps(original)
    def set_eplb_args(
        eplb_token_collects: Any, eplb_token_save_path: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if gate.live and eplb_token_collects:
            with guard.failsafe("mindspeed_rl.flags"):
                if _take_over(session, str(eplb_token_save_path or "./")):
                    eplb_token_collects = False
        return original(eplb_token_collects, eplb_token_save_path, *args, **kwargs)

    return set_eplb_args


def _take_over(session: Session, path: str) -> bool:
    """Collect to ``path`` ourselves; False, and theirs stays on, where no MoE method is hooked."""
    if not any(p.name == "apply" for p in session.installer.patcher.patches):
        _log.warning(
            "eplb_token_collects: no MoE method is hooked here, so MindSpeed-RL's own collector stays on"
        )
        return False
    config = session.config
    path = path if config.path == DEFAULT_PATH else config.path  # a path of our own settings wins
    session.config = changed(config, {"enable": True, "path": path, "collects": True})
    _log.info("eplb_token_collects: collecting to %s in place of MindSpeed-RL's collector", path)
    return True

# SPDX-License-Identifier: Apache-2.0
"""Comes up by itself in the processes that verl, vLLM and Ray start.

Carriers, all shipped in the wheel, all inert unless ``RL_INSIGHT_HOOKS=1`` or ``RL_INSIGHT_HOOKS_CONFIG`` names
a YAML that is switched on:

* entry point ``verl.plugins`` and ``VERL_USE_EXTERNAL_MODULES=rl_insight_hooks.autoload``: importing this
  module;
* entry point ``vllm.general_plugins``: :func:`vllm_plugin`, in every process of vLLM, more than once;
* Ray's ``worker_process_setup_hook: rl_insight_hooks.autoload.setup``, first thing in every worker process.

Switched off, this module imports nothing but ``envs`` (which is stdlib only). Switched on, the hooks are
installed when a framework that we know is imported, so that Ray workers without one pay for a finder and
nothing else.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from rl_insight_hooks import envs

_log = logging.getLogger(__name__)

# Importing one of these brings the hooks up. Tops of packages only: a finder is asked for every import.
FRAMEWORKS = frozenset(
    {"torch_npu", "verl", "vllm_ascend", "megatron", "mindspeed", "mindspeed_llm", "mindspeed_rl"}
)


_MINDSPEED_RL_ADAPTER = "mindspeed_rl.models.rollout.vllm_adapter.fused_moe"
_MINDSPEED_RL_FLAGS = "rl_insight_hooks.integrations.mindspeed_rl.flags"

_TORCH_NPU = "torch_npu"

_started = False
_told: set[str] = set()  # what was logged: carriers call more than once in a process


def setup() -> None:
    """Bring the hooks up now if a framework is there, else as soon as one is imported; twice is fine.

    Never raises: a setting that is wrong is logged as an error, and the run goes on without us.
    """
    try:
        if not _asked_for():
            return
        if not FRAMEWORKS.isdisjoint(sys.modules):
            start()
        elif not any(isinstance(finder, _Waiter) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Waiter())
    except Exception as error:
        _tell_failure(error)


def vllm_plugin() -> None:
    """Bring the hooks up in a process of vLLM; vLLM calls it in each of them, more than once. Never raises."""
    try:
        if _asked_for():
            start()
        elif _MINDSPEED_RL_ADAPTER in sys.modules and not envs.switched_off():
            _start_by_flags_of_mindspeed_rl()
    except Exception as error:
        _tell_failure(error)


def _start_by_flags_of_mindspeed_rl() -> None:
    """Its engine runs in this process: ``eplb_token_collects`` is a switch too."""
    flags = importlib.import_module(_MINDSPEED_RL_FLAGS)
    settings = flags.settings(sys.modules)
    if settings is not None:
        start(settings)


def start(settings: Mapping[str, object] | None = None) -> bool:
    """Install the hooks with ``settings`` (None: those of the environment); return True when they are in.

    Opens no ambient region: in a framework's process the stages say what belongs where, and most of its
    processes (driver, servers, agent loops) run no model at all. Says in one line that they are in, or why not.
    """
    global _started
    if _started:
        return True
    try:
        from rl_insight_hooks.api import switch_on
        from rl_insight_hooks.config import load_config

        config = load_config(settings)
        _started = switch_on(config, ambient=False)
        if _started:
            # a warning, since nobody configures our logger in a framework's processes
            _log.warning(
                "rl_insight_hooks is on in this process: expert load goes to %s%s",
                os.path.abspath(config.path),  # noqa: PTH100 - the path may be one of another machine
                "" if _is_torch_npu_there() else f"; {_NO_TORCH_NPU}",
            )
    except Exception as error:
        _tell_failure(error)
    return _started


_NO_TORCH_NPU = (
    "torch_npu is not installed here, so no grouped matmul of training will be seen "
    "(rl-insight-report doctor)"
)


def _is_torch_npu_there() -> bool:
    return _TORCH_NPU in sys.modules or importlib.util.find_spec(_TORCH_NPU) is not None


def _tell_failure(error: Exception) -> None:
    """Log why the hooks are not in, once a process. Call it from an ``except`` block; it never raises."""
    try:
        words = f"{type(error).__name__}: {error}"
        if words in _told:
            return
        _told.add(words)
        if isinstance(
            error, ValueError
        ):  # a setting: the message says which, the bad value and the fix
            _log.error("rl_insight_hooks is off in this process: %s", error)
        elif isinstance(error, ImportError):
            _log.error(
                "rl_insight_hooks is off in this process: %s; is it installed with its dependencies?",
                error,
            )
        else:
            _log.error(
                "rl_insight_hooks is off in this process; the run goes on without it",
                exc_info=error,
            )
    except Exception:  # logging itself is broken: nothing is left to try
        return


def _asked_for() -> bool:
    return not envs.switched_off() and (envs.switched_on() or envs.config_path() is not None)


class _Waiter:
    """A finder that finds nothing itself: it calls :func:`start` when a framework is about to be imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Bring the hooks up before ``name`` is imported, if it is a framework."""
        if name not in FRAMEWORKS:
            return None
        try:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            start()
            # the import under way walks the old list: ask those that start() has put before us
            for finder in list(sys.meta_path):
                find_spec = getattr(finder, "find_spec", None)
                spec: ModuleSpec | None = find_spec and find_spec(name, path, target)
                if spec is not None:
                    return spec
        except Exception as error:  # a finder's own comes again when the import asks it
            _tell_failure(error)
        return None


setup()

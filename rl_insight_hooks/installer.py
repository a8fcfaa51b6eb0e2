# SPDX-License-Identifier: Apache-2.0
"""Installs integrations: named by strings, imported only when their target is there.

An integration is a module with::

    SUPPORTED: str                      # versions, for doctor and the docs
    def install(ctx: Context) -> None   # called again after further targets came; idempotent
    def uninstall(ctx: Context) -> None # optional; what ctx.patcher replaced comes back by itself
    def refresh(ctx: Context) -> None   # optional; at region entry: hook what has come since
    def uncovered(ctx: Context) -> list[str]   # optional; paths in use here that no hook can see
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rl_insight_hooks import guard
from rl_insight_hooks.errors import ConfigError, DidNotInstall
from rl_insight_hooks.patching import Patcher

if TYPE_CHECKING:
    from rl_insight_hooks.recorder import Recorder
    from rl_insight_hooks.session import Session

_log = logging.getLogger(__name__)

# Name -> module, as strings: nothing is imported before its target is.
INTEGRATIONS: dict[str, str] = {
    "torch_npu": "rl_insight_hooks.integrations.torch_npu",
    "mindspeed": "rl_insight_hooks.integrations.mindspeed",
    "megatron": "rl_insight_hooks.integrations.megatron",
    "vllm_ascend": "rl_insight_hooks.integrations.vllm_ascend",
    "vllm_worker": "rl_insight_hooks.integrations.vllm_worker",
    "mindspeed_rl": "rl_insight_hooks.integrations.mindspeed_rl",
    "verl": "rl_insight_hooks.integrations.verl",
}

# Integrations that tell stages, steps and topology and count nothing themselves.
_OF_FRAMEWORKS = frozenset({"verl", "vllm_worker", "mindspeed_rl"})

# install() runs when one of these is imported; here, so that no integration is imported to know it.
TARGETS: dict[str, tuple[str, ...]] = {
    "torch_npu": ("torch_npu",),
    "mindspeed": ("mindspeed.ops.gmm", "mindspeed.op_builder"),
    "megatron": ("megatron.core.transformer.moe.experts", "megatron.core.parallel_state"),
    "vllm_ascend": (
        "vllm_ascend.ops.fused_moe.fused_moe",
        "vllm_ascend.ops.common_fused_moe",
        "vllm_ascend.ops.fused_moe.routed_experts",
        "vllm_ascend.ops.fused_moe",
        "vllm_ascend.worker.model_runner_v1",
        "vllm_ascend.worker.v2.model_runner",
    ),
    "vllm_worker": (
        "vllm_ascend.worker.worker",
        "vllm_ascend.worker.worker_v1",
        "verl.workers.rollout.vllm_rollout.utils",
        "verl.workers.rollout.vllm_rollout.vllm_async_server",
    ),
    "mindspeed_rl": (
        "mindspeed_rl.models.rollout.vllm_adapter.fused_moe",
        "mindspeed_rl.workers.actor_hybrid_worker",
        "mindspeed_rl.workers.reference_worker",
        "mindspeed_rl.workers.critic_worker",
    ),
    "verl": (
        "verl.utils.tracking",
        "verl.utils.profiler.profile",
        "verl.workers.engine_workers",
        "verl.workers.fsdp_workers",
        "verl.workers.megatron_workers",
        "verl.workers.engine.base",
        "verl.workers.engine.fsdp.transformer_impl",
        "verl.workers.engine.megatron.transformer_impl",
        "verl.workers.engine.veomni.transformer_impl",
        "verl.workers.engine.torchtitan.transformer_impl",
        "verl.workers.engine.automodel.transformer_impl",
        "verl.trainer.ppo.ray_trainer",
        "verl.trainer.ppo.v1.trainer_base",
        "verl.trainer.ppo.v1.trainer_sync",
        "verl.trainer.ppo.v1.trainer_colocate_async",
        "verl.trainer.ppo.v1.trainer_separate_async",
    ),
}


@dataclass(slots=True)
class Context:
    """What an integration works with."""

    session: Session
    patcher: Patcher

    @property
    def recorder(self) -> Recorder:
        """The recorder of the session, for closures to bind once."""
        return self.session.recorder


class Installer:
    """Knows what is installed and keeps it so."""

    def __init__(self, session: Session) -> None:
        self.patcher = Patcher()
        self.context = Context(session, self.patcher)
        self.wanted: dict[str, bool] = {}  # name -> asked for by name
        self.reasons: dict[str, str] = {}  # why an integration is not in, for doctor
        self._modules: dict[str, ModuleType] = {}
        self._registered: set[str] = set()

    @property
    def installed(self) -> bool:
        """True between install and uninstall."""
        return bool(self.wanted)

    def install(self, names: list[str] | None = None) -> None:
        """Install the integrations ``names`` (all when None), now or as soon as their target is imported.

        Raises:
            ConfigError: an unknown name.
            DidNotInstall: an integration that was asked for by name, whose target is imported, failed.
        """
        for name in names or ():
            if name not in INTEGRATIONS:
                raise ConfigError(f"no integration {name!r}; known are {', '.join(INTEGRATIONS)}")
        for name in names or INTEGRATIONS:
            explicit = names is not None
            self.wanted[name] = explicit or self.wanted.get(name, False)
            if any(target in sys.modules for target in TARGETS[name]):
                error = self._install_one(name)
                if error is not None and explicit:
                    raise DidNotInstall(f"integration {name}: {error}") from error
            self._wait_for(name)

    def _install_one(self, name: str) -> Exception | None:
        try:
            module = self._modules.get(name)
            if module is None:
                module = importlib.import_module(INTEGRATIONS[name])
                self._modules[name] = module
            with self.replacing(name):
                module.install(self.context)
            self.patcher.rebind()
        except Exception as error:
            self.reasons[name] = f"{type(error).__name__}: {error}"
            if isinstance(error, DidNotInstall):
                _log.info("integration %s: %s", name, error)
            else:
                guard.failed(f"install {name}")
            return error
        self.reasons.pop(name, None)
        return None

    @contextlib.contextmanager
    def replacing(self, name: str) -> Iterator[None]:
        """What is replaced within the block belongs to the integration ``name``."""
        before, self.patcher.integration = self.patcher.integration, name
        try:
            yield
        finally:
            self.patcher.integration = before

    def _wait_for(self, name: str) -> None:
        """Ask to be called when a target is imported. The hook never raises and imports no target."""
        import wrapt

        for target in TARGETS[name]:
            if target in self._registered or target in sys.modules:
                continue
            self._registered.add(target)

            def on_import(_module: Any, name: str = name) -> None:
                if name in self.wanted:
                    self._install_one(name)

            wrapt.register_post_import_hook(on_import, target)

    def reassert(self) -> list[str]:
        """Hook again what somebody overwrote; install what has come since. Returns what was overwritten."""
        if not self.wanted:
            return []
        overwritten: list[str] = []
        with guard.failsafe("reassert"):
            for name in self.wanted:
                if name in self._modules:
                    refresh = getattr(self._modules[name], "refresh", None)
                    if refresh is not None:
                        with self.replacing(name):
                            refresh(self.context)
                elif name not in self.reasons and any(t in sys.modules for t in TARGETS[name]):
                    self._install_one(name)  # put into sys.modules without an import
            overwritten = self.patcher.reassert()
        return overwritten

    def uninstall(self) -> list[str]:
        """Take everything out; returns places where somebody stands on top of us."""
        for name, module in list(self._modules.items()):
            undo = getattr(module, "uninstall", None)
            if undo is not None:
                with guard.failsafe(f"uninstall {name}"):
                    undo(self.context)
        self.wanted.clear()
        self._modules.clear()
        return self.patcher.restore()

    def hooked(self) -> list[str]:
        """Seams that are in place now: where calls are counted."""
        return [
            patch.where for patch in self.patcher.patches if patch.integration not in _OF_FRAMEWORKS
        ]

    def uncovered(self) -> list[str]:
        """Known paths in use here that no hook can see."""
        found: list[str] = []
        for module in self._modules.values():
            ask = getattr(module, "uncovered", None)
            if ask is not None:
                with guard.failsafe("uncovered"):
                    found.extend(ask(self.context))
        return found

# SPDX-License-Identifier: Apache-2.0
"""vLLM's workers on Ascend: when a rollout process begins, pauses, gets new weights and ends.

Target   ``NPUWorker`` (``vllm_ascend.worker.worker``; up to 0.13 ``worker_v1``), verl's worker extension and
         server.
Why      the counts come from integrations/vllm_ascend; somebody must say to whom they belong and write them
         before the engine sleeps, changes its weights, or ends.
How      after load_model a region of role "rollout" is open for everything outside other regions. It is
         written every ``flush_interval`` (asked at each execute_model, the safe point of the engine's stream),
         and on sleep, weight update and shutdown. An engine that runs inside a train worker leaves the counts
         to that worker's stages, whose regions are inside this one; the empty rest is not written.
Steps    a vLLM worker hears no step. Each weight update begins the next one; under verl the server tells the
         number of the weights, and rollouts of weights N belong to step N + 1. Both are marked "inferred".
Ranks    torch.distributed counts within one engine; under verl the ranks of replica r begin at r x its size.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rl_insight_hooks import envs, guard, topology
from rl_insight_hooks.patching import Gate

if TYPE_CHECKING:
    from rl_insight_hooks.installer import Context
    from rl_insight_hooks.session import Session

SUPPORTED = "vllm-ascend 0.9.1 to 0.26 (tested with 0.18.0)"

ROLE = "rollout"
SET_STEP_METHOD = "rl_insight_set_step"

_WORKERS = (
    ("vllm_ascend.worker.worker", "NPUWorker"),
    ("vllm_ascend.worker.worker_v1", "NPUWorker"),
)
_EXTENSION = ("verl.workers.rollout.vllm_rollout.utils", "vLLMColocateWorkerExtension")
_SERVER = ("verl.workers.rollout.vllm_rollout.vllm_async_server", "vLLMHttpServer")

_REPLICA = "VERL_REPLICA_RANK"
_PROVIDER = "vllm_worker"
_FLUSH_WAIT_S = 10.0
_EXIT_WAIT_S = 3.0  # vLLM kills a worker 4 s after it asked it to end

_added: list[type] = []


def install(ctx: Context) -> None:
    """Hook what of the workers is imported."""
    session = ctx.session
    for place in _WORKERS:
        worker = _class_at(place)
        if worker is None:
            continue
        for method, before, after in (
            ("load_model", None, _begin),
            ("execute_model", _new_pass, _tick),
            ("sleep", _pause, None),
            ("shutdown", _end, None),
        ):
            ctx.patcher.replace(worker, method, functools.partial(_around, session, before, after))
        _add_set_step(worker, session)
        topology.add_provider(_PROVIDER, _provide)
    extension = _class_at(_EXTENSION)
    if extension is not None:
        factory = functools.partial(_around, session, _pause, _next_weights)
        ctx.patcher.replace(extension, "update_weights_from_ipc", factory)
    server = _class_at(_SERVER)
    if server is not None:
        ctx.patcher.replace(server, "set_global_steps", _tell_step)


def uninstall(ctx: Context) -> None:
    """Take out what the patcher does not: the added method and the topology provider."""
    topology.remove_provider(_PROVIDER)
    while _added:
        delattr(_added.pop(), SET_STEP_METHOD)


def _class_at(place: tuple[str, str]) -> type | None:
    found = getattr(sys.modules.get(place[0]), place[1], None)
    return found if isinstance(found, type) else None


_Action = Callable[["Session"], None]


def _around(
    session: Session, before: _Action | None, after: _Action | None, original: Any, gate: Gate
) -> Any:
    """A method of a worker with something of ours before or after it."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before is not None and gate.live:
            with guard.failsafe(f"vllm_worker.{original.__name__}"):
                before(session)
        result = original(self, *args, **kwargs)
        if after is not None and gate.live:
            with guard.failsafe(f"vllm_worker.{original.__name__}"):
                after(session)
        return result

    return method


def _begin(session: Session) -> None:
    """The model is there, and no graph is captured yet."""
    session.installer.reassert()
    session.start_ambient(ROLE, write_empty=False)
    session.has_ticker = True


def _new_pass(session: Session) -> None:
    """Where no seam names the layers their order does; it begins anew at each step of the engine."""
    session.recorder.begin()


def _tick(session: Session) -> None:
    session.tick()


def _pause(session: Session) -> None:
    """The device memory of the engine goes, or its weights change: what was counted is written now."""
    session.flush(_FLUSH_WAIT_S)


def _end(session: Session) -> None:
    session.flush(_EXIT_WAIT_S)


def _next_weights(session: Session) -> None:
    from rl_insight_hooks.state import STATE

    session.set_step((STATE.step or 0) + 1, source="inferred")


def _add_set_step(worker: type, session: Session) -> None:
    """Give ``worker`` the method that the server's hook calls on every worker of its engine."""
    if SET_STEP_METHOD in vars(worker):
        return

    def rl_insight_set_step(self: Any, step: int) -> None:
        with guard.failsafe("vllm_worker.set_step"):
            session.set_step(step, source="inferred")

    setattr(worker, SET_STEP_METHOD, rl_insight_set_step)
    _added.append(worker)


def _tell_step(original: Any, gate: Gate) -> Any:
    """verl's server, told the number of its weights, tells its workers the step rolled out with them."""

    @functools.wraps(original)
    async def set_global_steps(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = await original(self, *args, **kwargs)
        if gate.live:
            with guard.failsafe("vllm_worker.tell_step"):
                version = inspect.signature(original).bind(self, *args, **kwargs).arguments
                step = version.get("global_steps")
                if isinstance(step, int):
                    await self.engine.collective_rpc(method=SET_STEP_METHOD, args=(step + 1,))
        return result

    return set_global_steps


def _provide(place: topology.Place) -> None:
    replica = envs.get(_REPLICA)
    if replica is None or not replica.isdigit():
        return
    place.rank += int(replica) * place.world_size
    # how many replicas there are is not known here; the last one's files say it
    place.world_size *= int(replica) + 1

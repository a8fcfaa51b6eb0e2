# SPDX-License-Identifier: Apache-2.0
"""The public calls. Each is safe to call twice, in any order, on or off."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import AsyncGenerator, Callable, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rl_insight_hooks import envs, guard
from rl_insight_hooks.config import Config, load_config
from rl_insight_hooks.errors import ConfigError

if TYPE_CHECKING:
    from rl_insight_hooks.session import Region, Session

_log = logging.getLogger(__name__)

_F = TypeVar("_F", bound=Callable[..., Any])


class record:  # noqa: N801 - used like a function
    """Record the expert load of a block or a function.

    As a context manager::

        with record("expert_load", step=step, role="actor_update"):
            actor.update(batch)

    or a decorator, on functions, async functions, generators and async generators; the region is the time
    the body runs: an async function's awaits are inside it, the time a generator is suspended is not.

    Regions nest: the inner one gets the counts, the outer one goes on when it ends. The first use installs the
    hooks. With ``RL_INSIGHT_HOOKS=0`` it does nothing at all.

    Args:
        path: folder for the files; None: the setting ``path``.
        step: training step; None: the one of :func:`set_step`. Without either the role has no steps.
        role: e.g. "actor_update"; None: the function's name as a decorator, else the setting ``role``.

    Raises:
        ConfigError: ``step`` is no int, or ``role`` or ``path`` no text.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        step: int | None = None,
        role: str | None = None,
    ) -> None:
        self._path = None if path is None else _text("path", path)
        self._step = _step(step)
        self._role = None if role is None else _text("role", role)
        self._entered: list[tuple[Session, Region] | None] = []

    def __enter__(self) -> record:
        self._entered.append(_begin(self._path, self._step, self._role))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        entered = self._entered.pop() if self._entered else None
        if entered is not None:
            _leave(entered)
            _finish(entered, error)

    async def __aenter__(self) -> record:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, trace)

    def __call__(self, function: _F) -> _F:
        """Return ``function`` with every call of it recorded."""
        role = self._role or getattr(function, "__name__", None)
        begin = functools.partial(_begin, self._path, self._step, role)
        if inspect.isasyncgenfunction(function):
            return cast(_F, _wrap_async_generator(function, begin))
        if inspect.isgeneratorfunction(function):
            return cast(_F, _wrap_generator(function, begin))
        if inspect.iscoroutinefunction(function):
            return cast(_F, _wrap_coroutine(function, begin))

        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            entered = begin()
            error: BaseException | None = None
            try:
                return function(*args, **kwargs)
            except BaseException as raised:
                error = raised
                raise
            finally:
                _leave(entered)
                _finish(entered, error)

        return cast(_F, recorded)


_Begin = Callable[[], "tuple[Session, Region] | None"]


def _wrap_coroutine(function: Callable[..., Any], begin: _Begin) -> Callable[..., Any]:
    @functools.wraps(function)
    async def recorded(*args: Any, **kwargs: Any) -> Any:
        entered = begin()
        error: BaseException | None = None
        try:
            return await function(*args, **kwargs)
        except BaseException as raised:
            error = raised
            raise
        finally:
            _leave(entered)
            _finish(entered, error)

    return recorded


def _wrap_generator(function: Callable[..., Any], begin: _Begin) -> Callable[..., Any]:
    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        generator = function(*args, **kwargs)
        entered = begin()
        resume: Callable[[], Any] = functools.partial(next, generator)
        error: BaseException | None = None
        try:
            while True:
                try:
                    item = resume()
                except StopIteration as stop:
                    return stop.value
                finally:
                    _leave(entered)
                try:
                    sent = yield item
                except GeneratorExit:
                    _enter(entered)
                    try:
                        generator.close()
                    finally:
                        _leave(entered)
                    raise
                except BaseException as thrown:
                    resume = functools.partial(generator.throw, thrown)
                else:
                    resume = functools.partial(generator.send, sent)
                _enter(entered)
        except GeneratorExit:
            raise
        except BaseException as raised:
            error = raised
            raise
        finally:
            _finish(entered, error)

    return recorded


def _wrap_async_generator(function: Callable[..., Any], begin: _Begin) -> Callable[..., Any]:
    @functools.wraps(function)
    async def recorded(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        generator = function(*args, **kwargs)
        entered = begin()
        resume: Callable[[], Any] = generator.__anext__
        error: BaseException | None = None
        try:
            while True:
                try:
                    item = await resume()
                except StopAsyncIteration:
                    return
                finally:
                    _leave(entered)
                try:
                    sent = yield item
                except GeneratorExit:
                    _enter(entered)
                    try:
                        await generator.aclose()
                    finally:
                        _leave(entered)
                    raise
                except BaseException as thrown:
                    resume = functools.partial(generator.athrow, thrown)
                else:
                    resume = functools.partial(generator.asend, sent)
                _enter(entered)
        except GeneratorExit:
            raise
        except BaseException as raised:
            error = raised
            raise
        finally:
            _finish(entered, error)

    return recorded


def _begin(path: str | None, step: int | None, role: str | None) -> tuple[Session, Region] | None:
    if envs.switched_off():
        return None
    entered = None  # what was made is finished, also where it could not be entered: its file tells
    with guard.failsafe("record"):
        session = _installed_session()
        entered = session, session.new_region(path, step, role)
        session.enter(entered[1])
    return entered


def _enter(entered: tuple[Session, Region] | None) -> None:
    if entered is not None:
        with guard.failsafe("record.enter"):
            entered[0].enter(entered[1])


def _leave(entered: tuple[Session, Region] | None) -> None:
    if entered is not None:
        with guard.failsafe("record.leave"):
            entered[0].leave(entered[1])


def _finish(entered: tuple[Session, Region] | None, error: BaseException | None) -> None:
    if entered is not None:
        with guard.failsafe("record.finish"):
            entered[0].finish(entered[1], error)


def _installed_session() -> Session:
    from rl_insight_hooks.session import get_session

    session = get_session()
    if not session.installer.installed:
        session.installer.install(session.config.integrations)
    return session


def install(integrations: list[str] | None = None) -> None:
    """Hook what is there, and what will be imported later. Records nothing by itself.

    Args:
        integrations: names (see ``doctor``); None: all. One that is named and cannot be installed is an error;
            one that was found automatically is only logged.

    Raises:
        ConfigError: an unknown name.
        DidNotInstall: a named integration failed although its library is imported.
    """
    if envs.switched_off():
        return
    from rl_insight_hooks.session import get_session

    get_session().installer.install(integrations)


def uninstall() -> None:
    """Close the ambient region, take every hook out and put back the identical objects."""
    from rl_insight_hooks.session import existing_session

    session = existing_session()
    if session is None:
        return
    with guard.failsafe("uninstall"):
        session.stop_ambient()
        session.watcher.unwatch()
        session.installer.uninstall()


def enable(cfg: Any = None) -> bool:
    """Switch on what ``cfg`` asks for; return True when recording is on.

    Args:
        cfg: path of a YAML, a mapping or a DictConfig with our block ``rl_insight_hooks`` or MindSpeed-RL's
            keys under ``generate`` or ``generate_config``; None: what ``RL_INSIGHT_HOOKS_CONFIG`` names.

    Raises:
        ConfigError: an unknown key in our block, or a bad value.
    """
    return switch_on(load_config(cfg), ambient=True)


def switch_on(config: Config, *, ambient: bool) -> bool:
    """Install the hooks with ``config``; return False, and do nothing, where it is off.

    Args:
        config: all settings of this process.
        ambient: open a region for calls outside every other; integrations of frameworks, which know the
            stages themselves, do not.
    """
    if not config.enable:
        return False
    from rl_insight_hooks import topology
    from rl_insight_hooks.session import get_session

    session = get_session()
    session.config = config
    topology.give(
        num_experts=config.num_experts,
        top_k=config.top_k,
        first_expert=config.first_expert,
        ep_size=config.ep_size,
        ep_rank=config.ep_rank,
    )
    session.installer.install(config.integrations)
    if ambient:
        with guard.failsafe("enable"):
            session.start_ambient()
    _log.info(
        "recording expert load to %s; hooked: %s",
        config.path,
        ", ".join(session.installer.hooked()) or "-",
    )
    return True


def configure(**settings: Any) -> Config:
    """Change single settings (see ``config.Config``) for regions begun from now on; return the settings.

    Raises:
        ConfigError: an unknown setting, or a bad value.
    """
    from rl_insight_hooks.config import changed
    from rl_insight_hooks.session import get_session

    session = get_session()
    session.config = changed(session.config, settings)
    return session.config


def set_step(step: int | None) -> None:
    """Set the training step of regions begun from now on.

    Raises:
        ConfigError: ``step`` is neither an int nor None.
    """
    step = _step(step)
    if envs.switched_off():
        return
    from rl_insight_hooks.session import get_session

    with guard.failsafe("set_step"):
        get_session().set_step(step)


def watch(model: Any, *, name_prefix: str = "", layer_offset: int = 0) -> int:
    """Give the MoE blocks of ``model`` their exact names and numbers; return how many there are.

    Args:
        model: an ``nn.Module``, or a list of virtual-pipeline chunks.
        name_prefix: put before qualified names, e.g. "ref.".
        layer_offset: added to the numbers in names, for a pipeline stage whose names start at 0.
    """
    if envs.switched_off():
        return 0
    from rl_insight_hooks.watching import watch_safely

    return watch_safely(
        _installed_session().watcher, model, name_prefix=name_prefix, layer_offset=layer_offset
    )


def flush(timeout_s: float | None = 60.0) -> bool:
    """Write what was gathered so far and wait for it; return False if it took longer than ``timeout_s``."""
    from rl_insight_hooks.session import existing_session

    session = existing_session()
    if session is None:
        return True
    with guard.failsafe("flush"):
        return session.flush(timeout_s)
    return False


def summary() -> dict[str, float]:
    """Return at most ten floats per role of its last written step, named ``moe_load/<role>/...``.

    Never waits: a region that has just ended may still be on its way to the writer; :func:`flush` first where
    that matters. See ``loadstats.summary`` for the names.
    """
    from rl_insight_hooks.session import existing_session

    session = existing_session()
    return {} if session is None else session.writer.summary()


def _step(step: Any) -> int | None:
    if step is None:
        return None
    try:
        return int(step.__index__())  # ints, numpy ints; not floats, not texts
    except (AttributeError, TypeError):
        raise ConfigError(f"step is {step!r}; give an int or None") from None


def _text(name: str, value: Any) -> str:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{name} is {value!r}; give a non-empty text")
    return text

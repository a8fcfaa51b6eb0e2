# SPDX-License-Identifier: Apache-2.0
"""Arguments of a hooked method by name, whatever their position in the version at hand."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


class Arguments:
    """Reads arguments of calls of one method without binding the whole signature each time."""

    __slots__ = ("_defaults", "_positions")

    def __init__(self, method: Callable[..., Any]) -> None:
        self._positions: dict[str, int] = {}
        self._defaults: dict[str, Any] = {}
        for position, (name, parameter) in enumerate(inspect.signature(method).parameters.items()):
            if (
                parameter.kind is parameter.VAR_KEYWORD
                or parameter.kind is parameter.VAR_POSITIONAL
            ):
                continue
            self._positions[name] = position - 1  # without self
            if parameter.default is not parameter.empty:
                self._defaults[name] = parameter.default

    def __contains__(self, name: str) -> bool:
        return name in self._positions

    def get(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the argument ``name`` of a call, its default, or None where the method has none such."""
        if name in kwargs:
            return kwargs[name]
        position = self._positions.get(name)
        if position is not None and 0 <= position < len(args):
            return args[position]
        return self._defaults.get(name)

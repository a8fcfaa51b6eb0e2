# SPDX-License-Identifier: Apache-2.0
"""Replace attributes of third parties and put them back: by identity, idempotent, verifiable.

A replacement is a plain function made by a factory from what it replaces, never a proxy object: Dynamo
takes a proxy round an operator for the operator itself, and the counts would be lost in silence.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

_log = logging.getLogger(__name__)

MARK = "__rl_insight_hooks__"  # attribute of every replacement of ours: its Gate

_ABSENT: Any = object()
_PYBIND = re.compile(
    r"pybind11_detail_\w+\."
)  # what pybind11 puts before the names of its functions


@dataclass(slots=True, eq=False)
class Gate:
    """Switch of one replacement: shut when it was taken out but somebody still calls it."""

    live: bool = True


Factory = Callable[[Any, Gate], Any]


@dataclass(slots=True, eq=False)
class Patch:
    """One replaced attribute."""

    owner: Any
    name: str
    factory: Factory
    original: Any  # what the attribute was, or _ABSENT if inherited
    first: Any  # the object that early-bound names held
    replacement: Any
    gate: Gate
    rebound: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    rebind_prefixes: tuple[str, ...] | None = None
    integration: str = ""  # who replaced it

    @property
    def where(self) -> str:
        """Readable place, e.g. ``torch_npu.npu_grouped_matmul``."""
        owner_name = getattr(self.owner, "__name__", type(self.owner).__name__)
        return f"{owner_name}.{self.name}"

    @property
    def owner_path(self) -> str:
        """The owner with its module, e.g. ``verl.utils.tracking.Tracking``."""
        if isinstance(self.owner, type):
            return f"{self.owner.__module__}.{self.owner.__qualname__}"
        return self.where.removesuffix(f".{self.name}")


class Patcher:
    """Holds the patches of this process."""

    def __init__(self) -> None:
        self._patches: list[Patch] = []
        self._scanned: set[str] = set()
        self.integration = ""  # the integration that replaces now; noted in its patches

    @property
    def patches(self) -> tuple[Patch, ...]:
        """Patches in place, oldest first."""
        return tuple(self._patches)

    def replace(
        self,
        owner: Any,
        name: str,
        factory: Factory,
        *,
        rebind: Sequence[str] | None = None,
    ) -> Patch | None:
        """Replace ``owner.name`` by ``factory(original, gate)``.

        Args:
            owner: module or class.
            name: attribute; a class attribute that is inherited is set on ``owner`` and later removed.
            factory: makes the replacement; it must call the original exactly once.
            rebind: :meth:`rebind` replaces the same object too where loaded modules bound it under any
                name; only modules whose name starts with one of these prefixes, ("",) for all.

        Returns:
            The patch; the one already there if the attribute is ours; None if there is no such attribute.
        """
        for patch in self._patches:
            if patch.owner is owner and patch.name == name:
                self._reassert(patch)
                return patch
        raw = vars(owner).get(name, _ABSENT)
        current = getattr(owner, name, _ABSENT) if raw is _ABSENT else raw
        if current is _ABSENT:
            return None
        gate = Gate()
        replacement = _make(factory, current, gate)
        patch = Patch(owner, name, factory, raw, current, replacement, gate)
        patch.rebind_prefixes = tuple(rebind) if rebind is not None else None
        patch.integration = self.integration
        setattr(owner, name, replacement)
        self._patches.append(patch)
        self._scanned.clear()
        return patch

    def reassert(self) -> list[str]:
        """Put back every replacement that somebody overwrote; return where.

        Where another tool stands on the attribute now, we wrap it anew and shut our older replacement, which
        that tool may still call: a call counts once.
        """
        overwritten = [patch.where for patch in self._patches if self._reassert(patch)]
        self.rebind()
        return overwritten

    def _reassert(self, patch: Patch) -> bool:
        current = vars(patch.owner).get(patch.name, _ABSENT)
        if current is patch.replacement or current is _ABSENT:
            return False
        while is_ours(current):  # somebody put back an older replacement of ours: never stack them
            current = original_of(current)
        patch.gate.live = False
        patch.gate = Gate()
        old, patch.original = patch.replacement, current
        patch.replacement = _make(patch.factory, current, patch.gate)
        setattr(patch.owner, patch.name, patch.replacement)
        for namespace, name in patch.rebound:
            bound = namespace.get(name)
            if bound is old or bound is current:  # who took us out may have done so here too
                namespace[name] = patch.replacement
        _log.info("%s was replaced by somebody else; hooked again on top of it", patch.where)
        return True

    def restore(self) -> list[str]:
        """Take out every patch, newest first; return the places where somebody stands on top of us.

        There our replacement stays in the chain, but shut: it only passes calls on.
        """
        buried = []
        while self._patches:
            patch = self._patches.pop()
            patch.gate.live = False
            if vars(patch.owner).get(patch.name, _ABSENT) is patch.replacement:
                if patch.original is _ABSENT:
                    delattr(patch.owner, patch.name)
                else:
                    setattr(patch.owner, patch.name, patch.original)
            else:
                buried.append(patch.where)
                _log.warning(
                    "%s was patched on top of rl_insight_hooks: left in place, it only passes calls on",
                    patch.where,
                )
            for namespace, name in patch.rebound:
                if namespace.get(name) is patch.replacement:
                    namespace[name] = patch.first
        return buried

    def rebind(self) -> None:
        """Rebind names that modules bound before us; looks only at modules that came since the last time.

        Reads module ``__dict__``s only, so that no lazy ``__getattr__`` fires.
        """
        names = set(sys.modules) - self._scanned
        if not names:
            return
        self._scanned |= names
        by_id = {
            id(original_of(p.replacement)): p
            for p in self._patches
            if p.rebind_prefixes is not None
        }
        if not by_id:
            return
        for module_name in names:
            module = sys.modules.get(module_name)
            if (
                not isinstance(module, ModuleType)
                or module_name.partition(".")[0] == "rl_insight_hooks"
            ):
                continue
            namespace = vars(module)
            for name, value in list(namespace.items()):
                patch = by_id.get(id(value))
                if patch is None or namespace is vars(patch.owner):
                    continue
                if module_name.startswith(patch.rebind_prefixes or ()):
                    namespace[name] = patch.replacement
                    patch.rebound.append((namespace, name))


def original_of(replacement: Any) -> Any:
    """Return what a replacement of ours calls (``__wrapped__``)."""
    return getattr(replacement, "__wrapped__", None)


def is_ours(function: Any) -> bool:
    """Return True for a replacement made by this package."""
    return isinstance(getattr(function, MARK, None), Gate)


def chain_of(owner: Any, name: str) -> list[str]:
    """Return who stands on ``owner.name``, outermost first, as far as ``__wrapped__`` tells; for doctor.

    A link is named by the module that its code is from: ``functools.wraps`` lends it the name of what it wraps.
    """
    chain: list[str] = []
    current = getattr(owner, name, None)
    while current is not None and len(chain) < 32:
        code = getattr(current, "__code__", None)
        if code is None:
            module = getattr(current, "__module__", None) or type(current).__module__
            name_here = getattr(current, "__qualname__", type(current).__qualname__)
        else:
            module = getattr(current, "__globals__", {}).get("__name__", current.__module__)
            name_here = getattr(code, "co_qualname", code.co_name)  # before 3.11 the bare name
        label = f"{module}.{_PYBIND.sub('', name_here).replace('.<locals>', '')}"
        if is_ours(current):
            gate: Gate = getattr(current, MARK)
            label = f"rl_insight_hooks ({'live' if gate.live else 'passed on'})"
        chain.append(label)
        current = getattr(current, "__wrapped__", None)
    return chain


def _make(factory: Factory, current: Any, gate: Gate) -> Any:
    replacement = factory(current, gate)
    replacement.__wrapped__ = current
    setattr(replacement, MARK, gate)
    return replacement

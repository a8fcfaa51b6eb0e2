# SPDX-License-Identifier: Apache-2.0
"""Patcher: replaces attributes, finds early-bound names, puts the identical objects back."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from rl_insight_hooks.patching import Patcher, chain_of, is_ours, original_of


@pytest.fixture
def calls():
    return []


@pytest.fixture
def factory(calls):
    def make(original, gate):
        def replacement(*args, **kwargs):
            if gate.live:
                calls.append(args)
            return original(*args, **kwargs)

        return replacement

    return make


@pytest.fixture
def library(monkeypatch):
    """A module ``lib_a`` with a function, and ``lib_b`` that did ``from lib_a import work as job``."""
    lib, user = ModuleType("lib_a"), ModuleType("lib_b")
    lib.work = lambda x: x + 1
    user.job = lib.work
    monkeypatch.setitem(sys.modules, "lib_a", lib)
    monkeypatch.setitem(sys.modules, "lib_b", user)
    return lib, user


def test_replaces_and_restores_by_identity(library, factory, calls):
    lib, _ = library
    original, patcher = lib.work, Patcher()
    patch = patcher.replace(lib, "work", factory)
    assert lib.work(1) == 2
    assert calls == [(1,)]
    assert is_ours(lib.work)
    assert not is_ours(original)
    assert original_of(lib.work) is original
    assert patch.where == "lib_a.work"
    assert patcher.patches == (patch,)
    assert patcher.restore() == []
    assert lib.work is original
    assert patcher.patches == ()
    assert patcher.restore() == []  # twice is fine


def test_replacing_twice_is_one_patch(library, factory, calls):
    lib, _ = library
    patcher = Patcher()
    assert patcher.replace(lib, "work", factory) is patcher.replace(lib, "work", factory)
    lib.work(1)
    assert len(calls) == 1


def test_no_such_attribute(library, factory):
    patcher = Patcher()
    assert patcher.replace(library[0], "missing", factory) is None
    assert patcher.patches == ()


def test_inherited_method_is_removed_again(factory, calls):
    class Base:
        def work(self, x):
            return x + 1

    class Child(Base):
        pass

    patcher, base_work = Patcher(), Base.work
    patcher.replace(Child, "work", factory)
    assert Child().work(1) == 2
    assert Base().work(1) == 2
    assert len(calls) == 1  # the child's call only
    assert patcher.restore() == []
    assert "work" not in vars(Child)
    assert Child.work is base_work


def test_own_method_is_put_back(factory, calls):
    class Owner:
        def work(self, x):
            return x * 2

    raw, patcher = vars(Owner)["work"], Patcher()
    patcher.replace(Owner, "work", factory)
    assert Owner().work(4) == 8
    assert len(calls) == 1
    patcher.restore()
    assert vars(Owner)["work"] is raw


def test_early_bound_names(library, factory, calls):
    lib, user = library
    original, patcher = lib.work, Patcher()
    patcher.replace(lib, "work", factory, rebind=("lib_",))
    assert user.job is original
    patcher.rebind()
    assert user.job is lib.work
    user.job(1)
    assert len(calls) == 1
    patcher.restore()
    assert user.job is original
    assert lib.work is original


def test_early_bound_names_of_other_packages_stay(library, factory):
    lib, user = library
    original, patcher = lib.work, Patcher()
    patcher.replace(lib, "work", factory, rebind=("other.",))
    patcher.rebind()
    assert user.job is original


def test_modules_that_come_later_are_rebound(library, factory, monkeypatch):
    lib, _ = library
    original, patcher = lib.work, Patcher()
    patcher.replace(lib, "work", factory, rebind=("",))
    patcher.rebind()
    late = ModuleType("lib_late")
    late.kept = original
    monkeypatch.setitem(sys.modules, "lib_late", late)
    patcher.reassert()
    assert late.kept is lib.work
    patcher.restore()
    assert late.kept is original


def test_rebinding_fires_no_lazy_getattr(library, factory, monkeypatch):
    class Lazy(ModuleType):
        def __getattr__(self, name):
            raise AssertionError(f"lazy import of {name}")

    monkeypatch.setitem(sys.modules, "lib_lazy", Lazy("lib_lazy"))
    patcher = Patcher()
    patcher.replace(library[0], "work", factory, rebind=("",))
    patcher.rebind()
    patcher.restore()


def test_reassert_after_somebody_wraps_us(library, factory, calls):
    """msprobe wraps the attribute that we stand on: hooked again on top, and a call counts once."""
    lib, _ = library
    original, patcher = lib.work, Patcher()
    patcher.replace(lib, "work", factory)
    ours = lib.work
    theirs = lib.work = lambda x: ours(x)
    assert patcher.reassert() == ["lib_a.work"]
    assert lib.work is not theirs
    assert lib.work(1) == 2
    assert len(calls) == 1
    assert patcher.reassert() == []
    patcher.restore()
    assert lib.work is theirs
    assert lib.work(1) == 2
    assert len(calls) == 1  # our replacement inside theirs is shut
    assert original(1) == 2


def test_reassert_after_somebody_puts_the_original_back(library, factory, calls):
    lib, _ = library
    original, patcher = lib.work, Patcher()
    patcher.replace(lib, "work", factory)
    lib.work = original
    lib.work(1)
    assert calls == []
    assert patcher.reassert() == ["lib_a.work"]
    lib.work(1)
    assert len(calls) == 1
    patcher.restore()
    assert lib.work is original


def test_an_old_replacement_of_ours_is_never_stacked(library, factory, calls):
    lib, _ = library
    original, patcher = lib.work, Patcher()
    patcher.replace(lib, "work", factory)
    old = lib.work
    lib.work = original
    patcher.reassert()
    lib.work = old  # somebody had kept it
    patcher.reassert()
    assert original_of(lib.work) is original
    lib.work(1)
    assert len(calls) == 1


def test_buried_replacement_passes_calls_on(library, factory, calls):
    lib, _ = library
    patcher = Patcher()
    patcher.replace(lib, "work", factory)
    ours = lib.work
    theirs = lib.work = lambda x: ours(x) * 10
    assert patcher.restore() == ["lib_a.work"]
    assert lib.work is theirs
    assert lib.work(1) == 20
    assert calls == []


def test_chain_names_everybody(library, factory):
    lib, _ = library
    patcher = Patcher()
    patcher.replace(lib, "work", factory)
    chain = chain_of(lib, "work")
    assert chain[0] == "rl_insight_hooks (live)"
    assert len(chain) == 2
    assert chain_of(lib, "missing") == []
    ours = lib.work
    patcher.restore()
    lib.work = ours
    assert chain_of(lib, "work")[0] == "rl_insight_hooks (passed on)"

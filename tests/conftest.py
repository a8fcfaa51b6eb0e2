# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures. Every test gets an environment without launcher variables and a session of its own."""

from __future__ import annotations

import sys

import pytest

_LAUNCHER = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "RL_INSIGHT_HOOKS", "RL_INSIGHT_HOOKS_CONFIG")


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch):
    for name in (*_LAUNCHER, "RL_INSIGHT_HOOKS_PATH", "RL_INSIGHT_HOOKS_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def rih():
    """The package with a fresh session; everything is taken out after the test."""
    import rl_insight_hooks
    from rl_insight_hooks import guard, topology
    from rl_insight_hooks.session import fresh_session

    guard.take_failures()
    with fresh_session():
        yield rl_insight_hooks
    topology.reset()
    guard.take_failures()


@pytest.fixture
def session(rih):
    from rl_insight_hooks.session import get_session

    return get_session()


@pytest.fixture
def npu():
    """torch_npu on CPU; a stand-in is taken out again after the test."""
    there_before = "torch_npu" in sys.modules
    from tiny_run import torch_npu

    yield torch_npu()
    if not there_before:
        sys.modules.pop("torch_npu", None)

# SPDX-License-Identifier: Apache-2.0
"""The presets and scripts in examples/ say what the code understands."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rl_insight_hooks.config import load_config

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("framework", ["verl", "mindspeed_rl"])
def test_a_preset_is_a_configuration_that_is_on(framework):
    config = load_config(str(EXAMPLES / framework / "rl_insight_hooks.yaml"))
    assert config.enable
    assert config.pack_every == 100
    assert config.phases == ["forward", "eval"]


@pytest.mark.parametrize("script", ["verl/launch.sh", "mindspeed_rl/launch.sh"])
def test_a_script_parses_and_asks_for_what_it_needs(script):
    assert subprocess.run(["bash", "-n", EXAMPLES / script]).returncode == 0
    bare = subprocess.run(
        ["bash", EXAMPLES / script], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert bare.returncode != 0
    assert ": set " in bare.stderr


def test_the_runtime_env_names_a_function_that_exists():
    from omegaconf import OmegaConf

    import rl_insight_hooks.autoload as autoload

    hook = OmegaConf.load(EXAMPLES / "mindspeed_rl/runtime_env.yaml").worker_process_setup_hook
    module, _, name = hook.rpartition(".")
    assert module == autoload.__name__
    assert callable(getattr(autoload, name))

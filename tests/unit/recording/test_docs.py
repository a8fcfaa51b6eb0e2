# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses

from tiny_run import REPO

from rl_insight_hooks import envs
from rl_insight_hooks.config import Config


def test_every_setting_is_documented_with_its_default():
    page = (REPO / "docs/configuration.md").read_text()
    for field in dataclasses.fields(Config):
        default = repr(field.default) if isinstance(field.default, str) else field.default
        assert f"| `{field.name}` | `{default}` |" in page


def test_every_variable_is_documented():
    page = (REPO / "docs/configuration.md").read_text()
    for name in (envs.SWITCH, envs.CONFIG, envs.PATH, envs.RUN_ID):
        assert f"`{name}`" in page

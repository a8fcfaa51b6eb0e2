# SPDX-License-Identifier: Apache-2.0
"""The carriers without any framework; tests/verl and tests/vllm_worker have the real ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# A framework for the finder: an empty package named torch_npu with one operator.
_FRAMEWORK = "def npu_grouped_matmul(*args, **kwargs):\n    return []\n"


@pytest.fixture
def python(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site/torch_npu.py").write_text(_FRAMEWORK)

    def run(code, **env):
        full = {k: v for k, v in os.environ.items() if not k.startswith("RL_INSIGHT_HOOKS")}
        full |= {"PYTHONPATH": str(tmp_path / "site"), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} | env
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=full,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        run.stderr = done.stderr
        return json.loads(done.stdout.strip().splitlines()[-1])

    return run


_IMPORTED = """
import json, sys
before = set(sys.modules)
import rl_insight_hooks.autoload as autoload
autoload.setup()
autoload.vllm_plugin()
new = set(sys.modules) - before
stdlib = sys.stdlib_module_names
print(json.dumps([
    sorted(n for n in new if n.startswith("rl_insight_hooks")),
    sorted(n for n in new if n.partition(".")[0] not in stdlib and not n.startswith("rl_insight_hooks")),
    [type(f).__module__ for f in sys.meta_path if type(f).__module__.startswith("rl_insight")],
]))
"""


@pytest.mark.parametrize("flag", [None, "0", "off", "maybe"])
def test_off_imports_nothing_but_itself(python, flag):
    ours, others, finders = python(
        _IMPORTED, **({} if flag is None else {"RL_INSIGHT_HOOKS": flag})
    )
    assert ours == [
        "rl_insight_hooks",
        "rl_insight_hooks._version",
        "rl_insight_hooks.autoload",
        "rl_insight_hooks.envs",
    ]
    assert others == []
    assert finders == []


def test_setup_is_stdlib_only_until_a_framework_is_imported(python):
    code = """
import json, sys
import rl_insight_hooks.autoload as autoload
autoload.setup()
autoload.setup()
waiting = [f for f in sys.meta_path if type(f).__module__ == "rl_insight_hooks.autoload"]
early = ["torch" in sys.modules, "numpy" in sys.modules, "rl_insight_hooks.session" in sys.modules]
import json.tool, colorsys  # imports of others go through
import torch_npu
hooked = hasattr(torch_npu.npu_grouped_matmul, "__rl_insight_hooks__")
left = [f for f in sys.meta_path if type(f).__module__ == "rl_insight_hooks.autoload"]
from rl_insight_hooks.session import get_session
print(json.dumps([len(waiting), early, hooked, len(left), get_session().ambient is None]))
"""
    assert python(code, RL_INSIGHT_HOOKS="1") == [1, [False, False, False], True, 0, True]


def test_a_framework_that_is_there_is_hooked_at_once(python):
    code = """
import json
import torch_npu
import rl_insight_hooks.autoload
print(json.dumps(hasattr(torch_npu.npu_grouped_matmul, "__rl_insight_hooks__")))
"""
    assert python(code, RL_INSIGHT_HOOKS="1") is True
    assert python(code) is False


def test_a_framework_that_cannot_be_imported_fails_as_without_us(python):
    code = """
import json
import rl_insight_hooks.autoload
try:
    import vllm_ascend
except ModuleNotFoundError as error:
    print(json.dumps([error.name, str(error)]))
"""
    assert python(code, RL_INSIGHT_HOOKS="1") == ["vllm_ascend", "No module named 'vllm_ascend'"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("rl_insight_hooks: {enable: true, pahts: x}", "did you mean rl_insight_hooks.path"),
        ("rl_insight_hooks: {enable: true, every: 0}", "rl_insight_hooks.every is 0"),
        ("rl_insight_hooks: [", "no valid YAML"),
        (None, "cannot read the configuration"),
    ],
)
def test_a_bad_configuration_is_named_and_the_process_goes_on(python, tmp_path, text, told):
    config = tmp_path / "config.yaml"
    if text is not None:
        config.write_text(text)
    code = """
import json
import torch_npu
import rl_insight_hooks.autoload as autoload
autoload.vllm_plugin()
print(json.dumps(hasattr(torch_npu.npu_grouped_matmul, "__rl_insight_hooks__")))
"""
    assert python(code, RL_INSIGHT_HOOKS_CONFIG=str(config)) is False
    assert told in python.stderr
    assert "Traceback" not in python.stderr


def test_the_plugin_may_be_called_many_times(python):
    code = """
import json
import torch_npu
import rl_insight_hooks.autoload as autoload
autoload.vllm_plugin()
first = torch_npu.npu_grouped_matmul
import rl_insight_hooks as rih
rih.configure(detail="calls")
for _ in range(3):
    autoload.vllm_plugin()
from rl_insight_hooks.session import get_session
same = [torch_npu.npu_grouped_matmul is first]
print(json.dumps([same[0], get_session().config.detail]))
"""
    assert python(code, RL_INSIGHT_HOOKS="1") == [True, "calls"]


def test_entry_points_of_the_installed_package():
    from importlib.metadata import entry_points

    (verl,) = (e for e in entry_points(group="verl.plugins") if e.name == "rl_insight_hooks")
    (vllm,) = (
        e for e in entry_points(group="vllm.general_plugins") if e.name == "rl_insight_hooks"
    )
    import rl_insight_hooks.autoload as autoload

    assert verl.load() is autoload
    assert vllm.load() is autoload.vllm_plugin
    assert verl.name == verl.name.lower()  # verl compares in lower case

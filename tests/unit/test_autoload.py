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


_MANY_CALLS = """
import json, logging, sys
import verl
import rl_insight_hooks.autoload as autoload
for _ in range(3):
    autoload.setup()
    autoload.vllm_plugin()
print(json.dumps(autoload.start()))
"""


def test_what_is_wrong_is_said_once_a_process(python, tmp_path):
    (tmp_path / "site/verl.py").write_text("")
    assert python(_MANY_CALLS, RL_INSIGHT_HOOKS_CONFIG="/not/there.yaml") is False
    (line,) = python.stderr.splitlines()
    assert line.startswith("rl_insight_hooks is off in this process: cannot read the configuration")
    assert "/not/there.yaml" in line


def test_that_it_is_on_is_said_once_with_the_folder(python, tmp_path):
    (tmp_path / "site/verl.py").write_text("")
    assert python(_MANY_CALLS, RL_INSIGHT_HOOKS="1", RL_INSIGHT_HOOKS_PATH="load") is True
    (line,) = python.stderr.splitlines()
    assert line == f"rl_insight_hooks is on in this process: expert load goes to {tmp_path}/load"


def test_without_torch_npu_it_goes_on_and_says_so(python, tmp_path):
    (tmp_path / "site/torch_npu.py").unlink()
    (tmp_path / "site/verl.py").write_text("")
    assert python(_MANY_CALLS, RL_INSIGHT_HOOKS="1") is True
    (line,) = python.stderr.splitlines()
    assert "torch_npu is not installed here, so no grouped matmul of training will be seen" in line
    # and a file that stays empty says why: hooks of stages are no seam
    code = """
import json, sys, types
verl = types.ModuleType("verl.workers.engine_workers")
class TrainingWorker:
    class config: model_type = "language_model"
    def infer_batch(self, data): return "host"
verl.TrainingWorker = TrainingWorker
sys.modules[verl.__name__] = verl
decorator = sys.modules["verl.single_controller.base.decorator"] = types.ModuleType("decorator")
decorator.MAGIC_ATTR = "magic"
decorator.Dispatch = decorator.Execute = types.SimpleNamespace(ONE_TO_ALL=0, ALL=0)
import verl
import rl_insight_hooks as rih
out = TrainingWorker().infer_batch({})
rih.flush()
(path,) = __import__("pathlib").Path("expert_load").rglob("group_list.json")
print(json.dumps([out, json.loads(path.read_bytes())["notes"]]))
"""
    out, (note,) = python(
        "import rl_insight_hooks.autoload\n" + code, RL_INSIGHT_HOOKS="1", RL_INSIGHT_HOOKS_PATH=""
    )
    assert out == "host"
    assert "nothing is hooked: no known library was imported in this process" in note


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("raise ImportError('libstdc++ is too old')", "libstdc++ is too old; is it installed"),
        ("raise RuntimeError('broken build')", "the run goes on without it"),
    ],
)
def test_a_broken_dependency_does_not_break_the_process(python, tmp_path, body, told):
    (tmp_path / "site/msgspec.py").write_text(body)
    (tmp_path / "site/verl.py").write_text("started = True")
    code = _MANY_CALLS.replace("print(", "assert verl.started; print(")
    assert python(code, RL_INSIGHT_HOOKS="1") is False
    assert told in python.stderr
    assert python.stderr.count("rl_insight_hooks is off in this process") == 1


_AT_EVERY_LINE = """
import json, linecache, sys
import rl_insight_hooks.autoload as autoload
from rl_insight_hooks import api, config, installer, session
FILES = {m.__file__ for m in (autoload, api, config, installer, session)}
class Injected(Exception): pass

def carriers():
    sys.modules.pop("verl", None)
    sys.meta_path[:] = [f for f in sys.meta_path if type(f).__module__ != "rl_insight_hooks.autoload"]
    autoload._started = False
    autoload._told.clear()
    session._session = None
    autoload.setup()
    import verl
    autoload.vllm_plugin()
    autoload.setup()
    return verl.started

def traced(target):
    seen, raised = set(), []
    def local(frame, event, arg):
        if event == "line":
            key = (frame.f_code.co_filename, frame.f_lineno)
            seen.add(key)
            if key == target and not raised:
                raised.append(key)
                raise Injected
        return local
    def tracer(frame, event, arg):
        # `_tell_failure` is the guard's own last line of defence; it has a test below
        if frame.f_code.co_filename in FILES and frame.f_code.co_name != "_tell_failure":
            return local
    sys.settrace(tracer)
    try:
        ok = carriers()
    finally:
        sys.settrace(None)
    return ok, seen, raised

_, lines, _ = traced(None)
broke = []
num = 0
for target in sorted(lines):
    try:
        ok, _, raised = traced(target)
    except Injected:
        broke.append(linecache.getline(*target).strip())
        continue
    num += bool(raised)
    assert ok
print(json.dumps([num, broke]))
"""


def test_an_exception_at_any_line_of_ours_does_not_break_the_start(python, tmp_path):
    (tmp_path / "site/verl.py").write_text("started = True")
    num, broke = python(_AT_EVERY_LINE, RL_INSIGHT_HOOKS="1")
    assert num > 100
    # nothing of ours stands outside a try but its own line and the question that every import is asked
    assert set(broke) <= {"try:", "if name not in FRAMEWORKS:", "return None"}


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

# SPDX-License-Identifier: Apache-2.0
"""How the hooks come up in the real verl, and that they do not when they are switched off."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

# Prints our modules, what is hooked, and what stands on the meta path.
_STATE = """
import json, sys
import torch, torch_npu
before = [torch_npu.npu_grouped_matmul]  # in a list: names of modules are rebound
import verl
import verl.workers.engine_workers as workers
from verl.utils.tracking import RLInsightLogger, Tracking
from verl.workers.engine import FSDPEngine
MARK = "__rl_insight_hooks__"
print(json.dumps({
    "ours": sorted(name for name in sys.modules if name.split(".")[0] == "rl_insight_hooks"),
    "wrapt": "wrapt" in sys.modules,
    "finders": [type(f).__module__ for f in sys.meta_path],
    "op": torch_npu.npu_grouped_matmul is before[0],
    "marked": [name for name, value in {
        "update_actor": workers.ActorRolloutRefWorker.update_actor,
        "infer_batch": workers.TrainingWorker.infer_batch,
        "initialize": FSDPEngine.initialize,
        "trace_state": RLInsightLogger.trace_state,
        "log": Tracking.log,
    }.items() if hasattr(value, MARK)],
    "method": hasattr(workers.ActorRolloutRefWorker, "rl_insight_summary"),
    "threads": [t.name for t in __import__("threading").enumerate()],
}))
"""

_ALL = ["update_actor", "infer_batch", "initialize", "trace_state", "log"]


@pytest.mark.parametrize("flag", [None, "0"])
def test_off_means_absent(python, flag, tmp_path):
    config = tmp_path / "on.yaml"
    config.write_text("rl_insight_hooks: {enable: true}\n")
    env = {} if flag is None else {"RL_INSIGHT_HOOKS": flag, "RL_INSIGHT_HOOKS_CONFIG": str(config)}
    state = python(_STATE, **env)
    # the entry point itself, and what it reads the flag with
    assert state["ours"] == [
        "rl_insight_hooks",
        "rl_insight_hooks._version",
        "rl_insight_hooks.autoload",
        "rl_insight_hooks.envs",
    ]
    assert state["op"]
    assert state["marked"] == []
    assert not state["method"]
    assert not any(name.startswith("rl_insight_hooks") for name in state["finders"])
    assert not any(name.startswith("rl_insight") for name in state["threads"])


def test_the_flag_hooks_everything(python):
    state = python(_STATE, RL_INSIGHT_HOOKS="1")
    assert state["marked"] == _ALL
    assert not state["op"]
    assert state["method"]


def test_a_yaml_switches_on(python, tmp_path):
    config = tmp_path / "on.yaml"
    config.write_text(f"rl_insight_hooks: {{enable: true, path: {tmp_path / 'load'}}}\n")
    assert python(_STATE, RL_INSIGHT_HOOKS_CONFIG=str(config))["marked"] == _ALL
    config.write_text("rl_insight_hooks: {enable: false}\n")
    assert python(_STATE, RL_INSIGHT_HOOKS_CONFIG=str(config))["marked"] == []


def test_external_modules_carry_too(python):
    """The way of verl 0.7 and 0.8, which know no plugins."""
    state = python(
        _STATE,
        RL_INSIGHT_HOOKS="1",
        VERL_USE_EXTERNAL_PLUGINS="none",
        VERL_USE_EXTERNAL_MODULES="rl_insight_hooks.autoload",
    )
    assert state["marked"] == _ALL


def test_a_wrong_setting_is_named_and_the_run_goes_on(python, tmp_path):
    config = tmp_path / "bad.yaml"
    config.write_text("rl_insight_hooks: {enable: true, stpes: 3}\n")
    state = python(_STATE, RL_INSIGHT_HOOKS_CONFIG=str(config))
    assert state["marked"] == []
    assert "stpes" in python.stderr
    assert "did you mean rl_insight_hooks.steps" in python.stderr
    assert "Traceback" not in python.stderr


def test_a_broken_installation_of_ours_is_one_line_and_verl_starts(python, tmp_path):
    (tmp_path / "msgspec.py").write_text("raise ImportError('built for another Python')")
    path = f"{tmp_path}:{HERE}"
    for carrier in ({}, {"VERL_USE_EXTERNAL_MODULES": "rl_insight_hooks.autoload"}):
        state = python(_STATE, RL_INSIGHT_HOOKS="1", PYTHONPATH=path, **carrier)
        assert state["marked"] == []
        assert state["op"]
        lines = [line for line in python.stderr.splitlines() if "rl_insight_hooks" in line]
        assert len(lines) == 1
        assert "built for another Python" in lines[0]


def test_uninstall_puts_back_the_identical_objects(python):
    code = """
import json, sys
import torch, torch_npu
import verl.utils.tracking
import verl.workers.engine_workers as workers
from verl.workers.engine import FSDPEngine
from verl.utils.tracking import RLInsightLogger, Tracking
places = [(workers.ActorRolloutRefWorker, "update_actor"), (workers.TrainingWorker, "infer_batch"),
          (FSDPEngine, "initialize"), (RLInsightLogger, "trace_state"), (Tracking, "log")]
before = [vars(owner)[name] for owner, name in places]
import rl_insight_hooks as rih
rih.install()
hooked = [vars(owner)[name] is not old for (owner, name), old in zip(places, before)]
rih.uninstall()
back = [vars(owner)[name] is old for (owner, name), old in zip(places, before)]
print(json.dumps([hooked, back, hasattr(workers.TrainingWorker, "rl_insight_summary")]))
"""
    hooked, back, method = python(code, VERL_USE_EXTERNAL_PLUGINS="none")
    assert all(hooked)
    assert all(back)
    assert not method


def test_ray_worker_setup_hook(python, tmp_path):
    """The hook runs first in a Ray worker; it costs a finder until a framework is imported."""
    code = """
import json, os, ray
quiet = {"include_dashboard": False, "log_to_driver": False}
ray.init(num_cpus=1, **quiet, _temp_dir=os.environ["RAY_TMP"], runtime_env={
    "worker_process_setup_hook": "rl_insight_hooks.autoload.setup",
    "env_vars": {"RL_INSIGHT_HOOKS": "1", "VERL_USE_EXTERNAL_PLUGINS": "none"},
})

@ray.remote
def look():
    import sys
    ours = [name for name in sys.modules if name.startswith("rl_insight_hooks.")]
    early = {"torch": "torch" in sys.modules, "session": "rl_insight_hooks.session" in sys.modules}
    early["armed"] = any(type(f).__module__ == "rl_insight_hooks.autoload" for f in sys.meta_path)
    import torch_npu
    import verl.workers.engine_workers as workers
    mark = "__rl_insight_hooks__"
    return early, hasattr(torch_npu.npu_grouped_matmul, mark), hasattr(workers.TrainingWorker.infer_batch, mark)

print(json.dumps(ray.get(look.remote())))
ray.shutdown()
"""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="rih", dir="/tmp") as short:  # socket paths are short
        early, op, method = python(code, RAY_TMP=short)
    assert early == {"torch": False, "session": False, "armed": True}
    assert op
    assert method


def test_torch_still_walks_the_namespace_of_the_operators(python):
    """Inductor's decomposition table asks every packet of every namespace for its overloads."""
    code = """
import json
import torch, torch_npu
import rl_insight_hooks as rih
rih.install()
from torch.export.decomp_utils import CustomDecompTable
hooked = hasattr(torch.ops.npu.npu_grouped_matmul, "__rl_insight_hooks__")
print(json.dumps([hooked, len(CustomDecompTable()) > 0]))
"""
    assert python(code) == [True, True]

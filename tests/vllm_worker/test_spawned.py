# SPDX-License-Identifier: Apache-2.0
"""The real vLLM plugin loader and the real vllm-ascend 0.18 in a spawned process, with our plugin active."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

_MAIN = """
import json, multiprocessing, sys
import spawned

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    child = context.Process(target=spawned.look, args=(answers,))
    child.start()
    found = answers.get(timeout=150)
    child.join(60)
    print(json.dumps([found, child.exitcode]))
"""


@pytest.fixture
def spawn(npu_env, tmp_path):
    def run(**env):
        script = tmp_path / "main.py"
        script.write_text(_MAIN)
        done = subprocess.run(
            [sys.executable, script],
            env=npu_env | env,
            capture_output=True,
            text=True,
            timeout=240,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        run.stderr = done.stderr
        return json.loads(done.stdout.strip().splitlines()[-1])

    return run


def test_a_spawned_worker_comes_up_hooked(spawn):
    found, exit_code = spawn(RL_INSIGHT_HOOKS="1")
    assert exit_code == 0
    assert found["platform"] == "NPUPlatform"
    assert found["op"]
    assert found["apply"]
    assert found["worker"] == ["load_model", "execute_model", "sleep", "shutdown"]
    assert found["set_step"]
    assert not found["ambient"]  # it begins when the model is loaded


@pytest.mark.parametrize("flag", [None, "0"])
def test_off_the_worker_is_untouched(spawn, flag):
    found, exit_code = spawn(**({} if flag is None else {"RL_INSIGHT_HOOKS": flag}))
    assert exit_code == 0
    assert found["platform"] == "NPUPlatform"
    assert (found["op"], found["apply"], found["worker"]) == (False, False, [])
    assert not found["set_step"]
    assert not found["session"]


def test_a_broken_plugin_does_not_break_the_worker(spawn, tmp_path):
    """Our dependency raises at import: vLLM's loader, which does not guard the call, and its worker go on."""
    (tmp_path / "omegaconf.py").write_text("raise RuntimeError('broken build')")
    (tmp_path / "on.yaml").write_text("rl_insight_hooks: {enable: true}")
    found, exit_code = spawn(
        RL_INSIGHT_HOOKS="1",
        RL_INSIGHT_HOOKS_CONFIG=str(tmp_path / "on.yaml"),
        PYTHONPATH=f"{tmp_path}:{HERE}",
    )
    assert exit_code == 0
    assert found["platform"] == "NPUPlatform"
    assert (found["op"], found["apply"], found["worker"]) == (False, False, [])
    assert spawn.stderr.count("rl_insight_hooks is off in this process") == 1
    assert "broken build" in spawn.stderr


def test_a_wrong_path_of_the_settings_is_one_line(spawn):
    found, exit_code = spawn(RL_INSIGHT_HOOKS_CONFIG="/not/there.yaml")
    assert exit_code == 0
    assert found["worker"] == []
    lines = [line for line in spawn.stderr.splitlines() if "rl_insight_hooks" in line]
    assert len(lines) == 1
    assert "cannot read the configuration /not/there.yaml" in lines[0]


_ROLLOUT = """
import json, multiprocessing, sys, time
import rollout

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    child = context.Process(target=rollout.live, args=(answers, sys.argv[1]))
    child.start()
    truth = answers.get(timeout=150)
    if sys.argv[1] == "sigterm":
        time.sleep(0.5)
        child.terminate()
    child.join(60)
    print(json.dumps([truth, child.exitcode]))
"""


@pytest.mark.parametrize(
    ("how", "exit_code"), [("sleep", 9), ("interval", 9), ("exit", 0), ("sigterm", -15)]
)
def test_collects_of_a_spawned_worker_are_written(npu_env, tmp_path, how, exit_code):
    """Before it sleeps and at the interval (it is killed after that), when it ends, and when it is told to."""
    (tmp_path / "main.py").write_text(_ROLLOUT)
    interval = 0.2 if how == "interval" else 3600
    settings = f"{{enable: true, path: {tmp_path / 'load'}, flush_interval: {interval}}}"
    (tmp_path / "on.yaml").write_text(f"rl_insight_hooks: {settings}")
    env = npu_env | {"RL_INSIGHT_HOOKS_CONFIG": str(tmp_path / "on.yaml"), "RANK": "3"}
    done = subprocess.run(
        [sys.executable, tmp_path / "main.py", how],
        env=env | {"WORLD_SIZE": "4"},
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    truth, code = json.loads(done.stdout.strip().splitlines()[-1])
    assert code == exit_code
    assert sum(truth) == 2 * 6 * 2  # steps x tokens x top-k
    written = json.loads((tmp_path / "load/eplb_token_collects_3.json").read_bytes())
    counts = [written["0"][str(expert)] for expert in range(len(truth))]
    assert counts == truth

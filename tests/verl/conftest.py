# SPDX-License-Identifier: Apache-2.0
"""The real verl 0.9.1 in processes of its own; see requirements.txt for what this session needs."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
sys.path.insert(0, str(HERE))

import tiny_model  # noqa: E402

_NEEDED = ("verl", "torch_npu", "transformers", "transfer_queue")


@pytest.fixture(scope="session")
def npu_env(tmp_path_factory):
    """Environment in which the real torch_npu imports without a device; skips where it cannot."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (tests/verl/requirements.txt)")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RL_INSIGHT_HOOKS", "VERL_"))}
    env |= {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "PYTHONPATH": str(HERE),
        "VERL_ENGINE_DEVICE": "npu",
    }
    probe = [sys.executable, "-c", "import torch_npu"]
    if subprocess.run(probe, env=env, capture_output=True).returncode:
        stubs = tmp_path_factory.mktemp("stubs")
        make = REPO / "tools/make_npu_stubs.py"
        if not make.exists() or subprocess.run([sys.executable, make, stubs], env=env).returncode:
            pytest.skip("torch_npu does not import here, and tools/make_npu_stubs.py made no stubs")
        env["LD_LIBRARY_PATH"] = os.pathsep.join(
            filter(None, [str(stubs), env.get("LD_LIBRARY_PATH")])
        )
        if subprocess.run(probe, env=env, capture_output=True).returncode:
            pytest.skip("torch_npu does not import here, even with stubs")
    return env


@pytest.fixture
def python(npu_env):
    """Run code in a process of its own; return what it printed last, from JSON."""

    def run(code, *args, timeout=180, **env):
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, args)],
            env=npu_env | env,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        run.stderr = done.stderr
        return json.loads(done.stdout.strip().splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def model(npu_env, tmp_path_factory):
    return tiny_model.save_in_process(tmp_path_factory.mktemp("model"), npu_env)


@pytest.fixture
def run_ranks(npu_env, model, tmp_path):
    """Run rank_main.py on ``num_ranks`` ranks (gloo); return each rank's result."""

    def run(num_ranks, *overrides, model=model, **env):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        processes = []
        for rank in range(num_ranks):
            full = npu_env | {
                "RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_RANK": str(rank),
            }
            full |= {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            } | env
            with open(tmp_path / f"log.{rank}", "w") as log:
                command = [
                    sys.executable,
                    HERE / "rank_main.py",
                    model,
                    tmp_path / "result",
                    *overrides,
                ]
                processes.append(
                    subprocess.Popen(command, env=full, stdout=log, stderr=log, cwd=tmp_path)
                )
        try:
            for rank, process in enumerate(processes):
                assert process.wait(240) == 0, (tmp_path / f"log.{rank}").read_text()[-4000:]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
        return [json.loads((tmp_path / f"result.{rank}").read_text()) for rank in range(num_ranks)]

    return run

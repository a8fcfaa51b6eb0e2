# SPDX-License-Identifier: Apache-2.0
"""The life of a rollout worker, with classes of vllm-ascend's and verl's names and shapes."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType

import pytest
from fault_injection import Entries, Tracer, break_every_line
from tiny_run import collects, counts_by_layer, every_load_file, layer_pass, read

import rl_insight_hooks
from rl_insight_hooks import guard

A, B, C = [1, 2, 3, 4], [5, 0, 0, 1], [0, 7, 0, 0]


class _Worker:
    """vllm-ascend's NPUWorker: shutdown is inherited."""

    def shutdown(self):
        self.log.append("shutdown")


@pytest.fixture
def engine(npu, rih, session, tmp_path, monkeypatch):
    """Modules with a worker, verl's extension and verl's server; installed, recording to tmp_path."""

    class NPUWorker(_Worker):
        def __init__(self):
            self.log = []

        def load_model(self):
            self.log.append("load_model")

        def execute_model(self, counts):
            layer_pass(counts)
            return "output"

        def sleep(self, level=1):
            self.log.append(f"sleep {level}")

    class vLLMColocateWorkerExtension:
        def update_weights_from_ipc(self, peft_config=None, base_sync_done=False):
            return "updated"

    class vLLMHttpServer:
        engine = None

        async def set_global_steps(self, global_steps):
            self.global_steps = global_steps
            return "set"

    places = {
        "vllm_ascend.worker.worker": NPUWorker,
        "verl.workers.rollout.vllm_rollout.utils": vLLMColocateWorkerExtension,
        "verl.workers.rollout.vllm_rollout.vllm_async_server": vLLMHttpServer,
    }
    for name, cls in places.items():
        module = ModuleType(name)
        setattr(module, cls.__name__, cls)
        monkeypatch.setitem(sys.modules, name, module)
    rih.configure(path=str(tmp_path))
    session.installer.install(["torch_npu", "vllm_worker"])
    return NPUWorker, vLLMColocateWorkerExtension, vLLMHttpServer


def test_nothing_is_recorded_before_the_model_is_loaded(engine, session, tmp_path):
    worker = engine[0]()
    assert worker.execute_model(A) == "output"
    assert session.ambient is None
    worker.load_model()
    assert session.ambient.role == "rollout"
    worker.execute_model(B)
    worker.shutdown()
    assert worker.log == ["load_model", "shutdown"]
    assert counts_by_layer(read(tmp_path, None, "rollout")) == [B]
    assert collects(tmp_path) == {"0": {"0": 5, "1": 0, "2": 0, "3": 1}}


def test_sleep_writes_first(engine, tmp_path):
    worker = engine[0]()
    worker.load_model()
    worker.execute_model(A)
    worker.execute_model(B)
    worker.sleep(level=2)
    assert worker.log[-1] == "sleep 2"
    assert counts_by_layer(read(tmp_path, None, "rollout")) == [
        [a + b for a, b in zip(A, B, strict=True)]
    ]


def test_each_weight_update_begins_a_step_that_is_marked(engine, tmp_path):
    worker, extension = engine[0](), engine[1]()
    worker.load_model()
    assert extension.update_weights_from_ipc() == "updated"  # the first: before step 1
    worker.execute_model(A)
    extension.update_weights_from_ipc()
    worker.execute_model(B)
    worker.shutdown()
    first, second = read(tmp_path, 1, "rollout"), read(tmp_path, 2, "rollout")
    assert (counts_by_layer(first), first.step_source) == ([A], "inferred")
    assert counts_by_layer(second) == [B]
    # an empty rollout (before the first update) writes no file; the collects add up over steps
    assert [f.step for f in every_load_file(tmp_path)] == [1, 2]
    assert sum(collects(tmp_path)["0"].values()) == sum(A) + sum(B)


def test_the_server_tells_the_step_of_its_weights(engine, session, tmp_path):
    worker, server = engine[0](), engine[2]()
    worker.load_model()

    class Engine:
        async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
            getattr(worker, method)(*args)

    server.engine = Engine()
    assert asyncio.run(server.set_global_steps(10)) == "set"
    assert server.global_steps == 10
    worker.execute_model(C)
    worker.shutdown()
    assert counts_by_layer(read(tmp_path, 11, "rollout")) == [C]


def test_a_server_whose_workers_do_not_know_us_goes_on(engine):
    server = engine[2]()

    class Engine:
        async def collective_rpc(self, **kwargs):
            raise RuntimeError("no such method")

    server.engine = Engine()
    assert asyncio.run(server.set_global_steps(global_steps=3)) == "set"


def test_the_interval_is_asked_at_every_step_of_the_engine(engine, session, rih, tmp_path):
    rih.configure(flush_interval=1e-9)
    worker = engine[0]()
    worker.load_model()
    worker.execute_model(A)
    assert session.writer.flush(10)
    assert counts_by_layer(read(tmp_path, None, "rollout")) == [A]
    assert session.has_ticker  # no timer thread touches the device


def test_ranks_of_a_replica(engine, tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_REPLICA_RANK", "3")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    worker = engine[0]()
    worker.load_model()
    worker.execute_model(A)
    worker.shutdown()
    assert read(tmp_path, None, "rollout", rank=13).rank == 13
    assert collects(tmp_path, rank=13)["0"]["3"] == 4


def test_a_stage_in_the_same_process_has_its_own_counts(engine, rih, tmp_path):
    """MindSpeed-RL's engine runs inside its train worker: the stage gets the counts."""
    worker = engine[0]()
    worker.load_model()
    with rih.record(tmp_path, step=4, role="actor_generate_sequences"):
        worker.execute_model(A)
    worker.shutdown()
    assert counts_by_layer(read(tmp_path, 4, "actor_generate_sequences")) == [A]
    assert [f.role for f in every_load_file(tmp_path)] == ["actor_generate_sequences"]


def test_uninstall_leaves_no_trace(engine, rih):
    worker, extension, server = engine
    rih.uninstall()
    assert "shutdown" not in vars(worker)  # inherited again
    assert not hasattr(worker, "rl_insight_set_step")
    for function in (worker.load_model, extension.update_weights_from_ipc, server.set_global_steps):
        assert not hasattr(function, "__rl_insight_hooks__")


REPO = Path(rl_insight_hooks.__file__).resolve().parents[1]
FILES = [REPO / "integrations/vllm_worker.py", REPO / "rl_insight_hooks/session.py"]
ENTRIES = Entries(
    {
        FILES[0]: {"method", "rl_insight_set_step", "set_global_steps"},
        FILES[1]: {"end"},
    }
)


def test_outside_their_guards_the_hooks_only_call_the_host():
    assert ENTRIES.unguarded_calls() <= {"original", "failsafe", "wraps"}


@pytest.mark.parametrize("host_fails", [False, True], ids=["host runs", "host fails"])
def test_an_exception_at_every_line_changes_nothing_for_the_engine(
    engine, rih, session, tmp_path, host_fails
):
    number = 0

    def life_of_an_engine():
        """What the host's functions return, raise and log, in order."""
        worker, extension, server = (cls() for cls in engine)

        class Engine:
            async def collective_rpc(self, method, args=()):
                getattr(worker, method)(*args)

        server.engine = Engine()
        seen = [worker.load_model(), asyncio.run(server.set_global_steps(10))]
        seen.append(worker.execute_model(A))
        if host_fails:
            try:
                worker.execute_model(None)  # not iterable: the host's own error
            except TypeError as error:
                seen += [str(error), error.__cause__, error.__context__]
        seen += [worker.sleep(2), extension.update_weights_from_ipc(), worker.execute_model(B)]
        return [*seen, worker.shutdown(), worker.log]

    rih.uninstall()
    expected = life_of_an_engine()

    def run(tracer):
        nonlocal number
        number += 1
        rih.configure(path=str(tmp_path / str(number)), flush_interval=1e-9)
        session.installer.install(["torch_npu", "vllm_worker"])
        with tracer:
            results = life_of_an_engine()
        rih.flush()
        rih.uninstall()
        session.stack.clear()
        assert results == expected
        files = every_load_file(tmp_path / str(number))
        in_files = sum(sum(load.failed.values()) for load in files)
        assert in_files + sum(guard.take_failures().values()) == tracer.raised
        if not tracer.raised:
            assert {load.step: counts_by_layer(load) for load in files} == {11: [A], 12: [B]}

    broken = break_every_line(FILES, ENTRIES, run)
    assert {Path(path).name for path, _ in broken} == {"vllm_worker.py", "session.py"}
    assert len(broken) > 60
    run(Tracer(FILES, ENTRIES))  # and afterwards it counts as if nothing had been

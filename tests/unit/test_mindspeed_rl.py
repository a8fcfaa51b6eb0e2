# SPDX-License-Identifier: Apache-2.0
"""MindSpeed-RL's flags and stages, with classes of its names and shapes (2.3.0); it needs a device itself."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from fault_injection import Entries, Tracer, break_every_line
from tiny_run import collects, counts_by_layer, every_load_file, layer_pass, read

import rl_insight_hooks
from rl_insight_hooks import guard

A, B, C = [1, 2, 3, 4], [5, 0, 0, 1], [0, 7, 0, 0]
ADAPTER = "mindspeed_rl.models.rollout.vllm_adapter.fused_moe"

_ADAPTER_CODE = """
_COLLECTS, _PATH = False, "./"

def set_EPLB_args(eplb_token_collects, eplb_token_save_path):
    global _COLLECTS, _PATH
    _COLLECTS, _PATH = eplb_token_collects, eplb_token_save_path

def get_EPLB_args():
    return _COLLECTS, _PATH
"""


class Method:
    def apply(self, x):
        return x


@pytest.fixture
def modules(npu, rih, session, tmp_path, monkeypatch):
    """A module of each kind; a MoE method that some integration hooked."""

    class ActorHybridWorkerBase:
        def __init__(self):
            self.iteration = 0

        def _build_model_optimizer(self):
            return ["chunk"], "optimizer", "scheduler"

        def generate_sequences(self):
            layer_pass(A)

        def compute_log_prob(self):
            layer_pass(B)

        def update(self, kl_ctrl=None, skip_actor_log_prob=False):
            layer_pass(C)
            self.iteration += 1
            return kl_ctrl

    class ReferenceWorkerBase:
        def compute_ref_log_prob(self):
            layer_pass(B)

    class CriticWorkerBase:
        iteration = 6

        def compute_values(self):
            layer_pass(A)

        def update(self, kl_ctrl=None):
            raise RuntimeError("host error")

    found = {}
    for name, cls in {
        "mindspeed_rl.workers.actor_hybrid_worker": ActorHybridWorkerBase,
        "mindspeed_rl.workers.reference_worker": ReferenceWorkerBase,
        "mindspeed_rl.workers.critic_worker": CriticWorkerBase,
    }.items():
        module = ModuleType(name)
        setattr(module, cls.__name__, cls)
        monkeypatch.setitem(sys.modules, name, module)
        found[cls.__name__] = cls
    adapter = ModuleType(ADAPTER)
    exec(_ADAPTER_CODE, vars(adapter))
    found["adapter"] = adapter
    rih.configure(path=str(tmp_path / "load"))
    session.installer.install(["torch_npu", "mindspeed_rl"])
    return found


@pytest.fixture
def flags(session):
    from rl_insight_hooks.integrations.mindspeed_rl import flags

    def install(adapter, *, hooked=True):
        if hooked:
            session.installer.patcher.replace(
                Method, "apply", lambda original, gate: lambda self, x: original(self, x)
            )
        flags.install(session.installer.context, {ADAPTER: adapter})

    return install


def test_stages_have_their_step_and_role(modules, session, tmp_path):
    worker = modules["ActorHybridWorkerBase"]()
    for _ in range(2):
        worker.generate_sequences()
        worker.compute_log_prob()
        assert worker.update("kl") == "kl"
    assert session.flush(10)
    root = tmp_path / "load"
    for step in (1, 2):  # MindSpeed-RL logs iteration + 1
        for role, counts in {
            "actor_generate_sequences": A,
            "actor_compute_log_prob": B,
            "actor_update": C,
        }.items():
            file = read(root, step, role)
            assert counts_by_layer(file) == [counts]
            assert file.step_source == "given"
    assert len(every_load_file(root)) == 6
    # the collects are the rollout's alone, as those of the collector they replace
    assert collects(root) == {"0": {str(e): 2 * n for e, n in enumerate(A)}}


def test_a_reference_worker_of_its_own_counts_its_calls(modules, session, tmp_path):
    worker = modules["ReferenceWorkerBase"]()
    worker.compute_ref_log_prob()
    worker.compute_ref_log_prob()
    assert session.flush(10)
    file = read(tmp_path / "load", 2, "reference_compute_log_prob")
    assert (counts_by_layer(file), file.step_source) == ([B], "inferred")


def test_an_error_of_the_host_passes_and_is_noted(modules, session, tmp_path):
    worker = modules["CriticWorkerBase"]()
    worker.compute_values()
    with pytest.raises(RuntimeError, match="host error"):
        worker.update()
    assert session.active is None
    assert session.flush(10)
    assert counts_by_layer(read(tmp_path / "load", 7, "critic_compute_values")) == [A]
    assert any("RuntimeError" in note for note in read(tmp_path / "load", 7, "critic_update").notes)


def test_the_flag_switches_us_on_and_their_collector_off(modules, flags, session, rih, tmp_path):
    adapter = modules["adapter"]
    rih.configure(path="expert_load")  # no path of our own
    flags(adapter)
    adapter.set_EPLB_args(True, str(tmp_path / "json_file"))
    assert adapter.get_EPLB_args() == (False, str(tmp_path / "json_file"))
    modules["ActorHybridWorkerBase"]().generate_sequences()
    assert session.flush(10)
    assert collects(tmp_path / "json_file") == {"0": {"0": 1, "1": 2, "2": 3, "3": 4}}
    beside = [p.name for p in (tmp_path / "json_file").glob("*.json")]
    assert beside == ["eplb_token_collects_0.json"]  # existing tools read every .json there


def test_a_path_of_our_own_wins(modules, flags, session, tmp_path):
    adapter = modules["adapter"]
    flags(adapter)
    adapter.set_EPLB_args(True, "json_file")
    assert session.config.path == str(tmp_path / "load")


def test_off_stays_off(modules, flags, session):
    adapter = modules["adapter"]
    before = session.config
    flags(adapter)
    adapter.set_EPLB_args(False, "json_file")
    assert adapter.get_EPLB_args() == (False, "json_file")
    assert session.config is before


def test_without_a_seam_their_collector_stays_on(modules, flags, caplog):
    adapter = modules["adapter"]
    flags(adapter, hooked=False)
    adapter.set_EPLB_args(True, "json_file")
    assert adapter.get_EPLB_args() == (True, "json_file")
    assert "own collector stays on" in caplog.text


def test_flags_set_before_us_are_taken_over(modules, flags, tmp_path):
    adapter = modules["adapter"]
    adapter.set_EPLB_args(True, str(tmp_path / "json_file"))
    flags(adapter)
    assert adapter.get_EPLB_args()[0] is False


def test_the_flags_alone_ask_for_the_rollout_only(modules, tmp_path):
    from rl_insight_hooks.integrations.mindspeed_rl import flags

    from rl_insight_hooks.config import load_config

    adapter = modules["adapter"]
    assert flags.settings({}) is None
    assert flags.settings({ADAPTER: adapter}) is None
    adapter.set_EPLB_args(True, "json_file")
    config = load_config(flags.settings({ADAPTER: adapter}))
    assert (config.enable, config.path, config.roles) == (
        True,
        "json_file",
        ["actor_generate_sequences"],
    )


def test_uninstall_puts_the_methods_back(modules, rih):
    rih.uninstall()
    for cls in (modules["ActorHybridWorkerBase"], modules["CriticWorkerBase"]):
        assert not hasattr(cls.update, "__rl_insight_hooks__")


def test_the_built_model_is_watched(modules, session, monkeypatch):
    watched = []
    monkeypatch.setattr(session.watcher, "watch", watched.append)
    built = modules["ActorHybridWorkerBase"]()._build_model_optimizer()
    assert built == (["chunk"], "optimizer", "scheduler")
    assert watched == [["chunk"]]


REPO = Path(rl_insight_hooks.__file__).resolve().parents[1]
WORKERS, FLAGS = (REPO / f"integrations/mindspeed_rl/{name}.py" for name in ("workers", "flags"))
FILES = [WORKERS, FLAGS, REPO / "rl_insight_hooks/session.py"]
ENTRIES = Entries(
    {
        WORKERS: {"stage", "_begin", "build_model_optimizer"},
        FLAGS: {"set_eplb_args"},
        FILES[2]: {"end"},
    }
)


def test_outside_their_guards_the_hooks_only_call_the_host():
    # _begin and Session.end guard themselves
    assert ENTRIES.unguarded_calls() <= {"original", "_begin", "end", "failsafe", "wraps"}


def test_an_exception_at_every_line_changes_nothing_for_the_workers(
    modules, flags, session, rih, tmp_path, monkeypatch
):
    monkeypatch.setattr(session.watcher, "watch", lambda model: 0)  # there is no model here
    number = 0

    def a_step():
        """What the host's functions return and raise, in order."""
        actor, critic = modules["ActorHybridWorkerBase"](), modules["CriticWorkerBase"]()
        modules["adapter"].set_EPLB_args(True, str(tmp_path / str(number)))
        seen = [
            actor._build_model_optimizer(),
            actor.generate_sequences(),
            actor.compute_log_prob(),
        ]
        seen += [actor.update("kl"), modules["ReferenceWorkerBase"]().compute_ref_log_prob()]
        seen.append(critic.compute_values())
        try:
            critic.update()
        except RuntimeError as error:
            seen += [str(error), error.__cause__, error.__context__]
        return [*seen, actor.iteration]

    rih.uninstall()
    expected = a_step()

    def run(tracer):
        nonlocal number
        number += 1
        rih.configure(path=str(tmp_path / str(number)))
        session.installer.install(["torch_npu", "mindspeed_rl"])
        flags(modules["adapter"])
        with tracer:
            results = a_step()
        rih.flush()
        rih.uninstall()
        session.stack.clear()
        assert results == expected
        files = every_load_file(tmp_path / str(number))
        in_files = sum(sum(load.failed.values()) for load in files)
        assert in_files + sum(guard.take_failures().values()) == tracer.raised
        if not tracer.raised:
            assert {load.role: counts_by_layer(load) for load in files} == {
                "actor_generate_sequences": [A],
                "actor_compute_log_prob": [B],
                "actor_update": [C],
                "reference_compute_log_prob": [B],
                "critic_compute_values": [A],
                "critic_update": [],
            }

    broken = break_every_line(FILES, ENTRIES, run)
    assert {Path(path).name for path, _ in broken} == {"workers.py", "flags.py", "session.py"}
    assert len(broken) > 60
    run(Tracer(FILES, ENTRIES))  # and afterwards it counts as if nothing had been

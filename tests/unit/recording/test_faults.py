# SPDX-License-Identifier: Apache-2.0
"""An exception of our own code, anywhere inside a hook, changes nothing for the model and is counted.

The places are not listed by hand: a trace function notes every line of ours that runs during a training step
(forward, backward, recompute), then the step is repeated once for each of them with an exception raised there.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
import torch
from fault_injection import Entries, InjectedError, Tracer, break_every_line
from tiny_moe import TinyMoe
from tiny_run import counts_by_layer, every_load_file, read

import rl_insight_hooks
from rl_insight_hooks import guard

PACKAGE = Path(rl_insight_hooks.__file__).resolve().parent
REPO = Path(__file__).resolve().parents[3]

CORE = [
    "recorder",
    "counters",
    "layers",
    "passes",
    "watching",
    "compiled",
    "state",
]  # group_list's functions run on the writer thread only
FILES = [*(PACKAGE / f"{name}.py" for name in CORE), REPO / "integrations/torch_npu.py"]

ENTRIES = Entries(
    {
        REPO / "integrations/torch_npu.py": {
            "npu_grouped_matmul",
            "grouped_matmul_op",
            "alltoallv_gmm",
        },
        PACKAGE / "watching.py": {"enter", "_leave"},
    }
)


def tracer_at(site=None, occurrence=1):
    return Tracer(FILES, ENTRIES, site, occurrence)


def test_outside_their_try_the_hooks_only_call_the_host():
    # on_group_list: that of compiled.py, which Dynamo traces and nobody runs
    allowed = {"original", "is_compiling", "failed", "on_group_list", "wraps", "get", "len"}
    assert ENTRIES.unguarded_calls() <= allowed | {"startswith", "_getframe"}


def make_model():
    torch.manual_seed(7)
    model = TinyMoe(
        vocab=16, hidden=8, width=6, num_layers=3, num_experts=4, top_k=2, checkpointing=True
    )
    ids = torch.randint(0, 16, (12,))
    return model, ids


def train_step(model, ids):
    """Return the output and every gradient of one step (forward, recompute, backward)."""
    model.zero_grad(set_to_none=True)
    out = model(ids)
    out.square().sum().backward()
    return [out.detach().clone(), *(p.grad.clone() for p in model.parameters())]


def assert_same_bits(results, expected):
    assert len(results) == len(expected)
    for ours, theirs in zip(results, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.fixture(autouse=True)
def _quiet(caplog):
    """Hundreds of tracebacks, formatted, are most of the time of this file."""
    caplog.set_level("ERROR", logger="rl_insight_hooks")


@pytest.fixture
def without_us(npu):
    """Model, input, and what the step gives where nothing of ours was ever installed."""
    model, ids = make_model()
    assert not hasattr(npu.npu_grouped_matmul, "__rl_insight_hooks__")
    return model, ids, train_step(model, ids)


@pytest.mark.parametrize("watched", [True, False], ids=["watch", "no watch"])
@pytest.mark.parametrize("which", ["first", "last"])
def test_exception_at_every_line(rih, without_us, tmp_path, watched, which):
    model, ids, expected = without_us
    rih.install()
    if watched:
        assert rih.watch(model) == 2

    def recorded_step(step, tracer):
        with rih.record(tmp_path, step=step, role="actor_update"), tracer:
            return train_step(model, ids)

    recorded_step(
        0, tracer_at()
    )  # the first sight of layers takes other lines than the steady state
    steady = tracer_at()
    assert_same_bits(recorded_step(0, steady), expected)
    assert rih.flush()
    sites = sorted(steady.seen)
    files = {Path(path).name for path, _ in sites}
    assert {"recorder.py", "torch_npu.py"} <= files
    assert len(sites) > 30

    for step, site in enumerate(sites, start=1):
        occurrence = 1 if which == "first" else steady.seen[site]
        tracer = tracer_at(site, occurrence)
        results = recorded_step(step, tracer)
        assert tracer.raised, site
        assert_same_bits(results, expected)
        assert rih.flush()  # failures go into the file that is written next
        failed = read(tmp_path, step, "actor_update").failed
        assert sum(failed.values()) == 1, (site, failed)
    # and afterwards it counts as if nothing had been
    last = len(sites) + 1
    recorded_step(last, tracer_at())
    rih.flush()
    clean = read(tmp_path, last, "actor_update")
    assert not clean.failed
    assert [sum(c) for c in counts_by_layer(clean)] == [24, 24]


@pytest.mark.parametrize("watched", [True, False], ids=["watch", "no watch"])
def test_exception_at_every_line_of_a_first_step(npu, tmp_path, watched):
    """The same for the lines that only a layer's first sight runs: each place in a fresh session."""
    from rl_insight_hooks import guard
    from rl_insight_hooks.session import fresh_session

    model, ids = make_model()
    expected = train_step(model, ids)

    def first_step(name, tracer):
        guard.take_failures()
        with fresh_session():  # hooks are taken out with it
            rl_insight_hooks.install(["torch_npu"])
            if watched:
                rl_insight_hooks.watch(model)
            with rl_insight_hooks.record(tmp_path / name, step=1, role="r"), tracer:
                results = train_step(model, ids)
            rl_insight_hooks.flush()
        assert_same_bits(results, expected)
        return read(tmp_path / name, 1, "r")

    found = tracer_at()
    assert not first_step("clean", found).failed
    sites = [key for key in sorted(found.seen) if "counters" in key[0] or found.seen[key] <= 2]
    assert any("counters" in path for path, _ in sites)
    for number, site in enumerate(sites):
        tracer = tracer_at(site)
        failed = first_step(str(number), tracer).failed
        assert tracer.raised, site
        assert sum(failed.values()) == 1, (site, failed)


API, SESSION = PACKAGE / "api.py", PACKAGE / "session.py"
REGION_ENTRIES = Entries(
    {API: {"__enter__", "__exit__", "recorded", "_begin", "_enter", "_leave", "_finish"}}
)


@pytest.mark.parametrize("host_fails", [False, True], ids=["host runs", "host fails"])
def test_exception_at_every_line_of_a_region(rih, without_us, tmp_path, host_fails):
    """As a context manager, a decorator and a generator's decorator; a region inside another."""
    model, ids, expected = without_us
    step = 0

    class HostError(Exception):
        pass

    def decorated():
        @rih.record(tmp_path, step=step, role="of a function")
        def run_step():
            return train_step(model, ids)

        @rih.record(tmp_path, step=step, role="of a generator")
        def run_steps():
            yield train_step(model, ids)
            yield train_step(model, ids)

        return rih.record(tmp_path, step=step, role="outer"), run_step, run_steps

    def host_run(outer, run_step, run_steps):
        with outer:
            results = [run_step(), *run_steps()]
            if host_fails:
                raise HostError(results)
        return results

    def run(tracer):
        nonlocal step
        step += 1
        rih.install(["torch_npu"])
        rih.watch(model)
        regions = decorated()  # told at once of a bad argument: that is no failure of ours
        with tracer:
            if host_fails:
                with pytest.raises(HostError) as caught:
                    host_run(*regions)
                assert caught.value.__cause__ is None
                assert caught.value.__context__ is None
                (results,) = caught.value.args
            else:
                results = host_run(*regions)
        for ours in results:
            assert_same_bits(ours, expected)
        rih.flush()
        rl_insight_hooks.session.get_session().stack.clear()
        files = [f for f in every_load_file(tmp_path) if f.step == step]
        in_files = sum(sum(load.failed.values()) for load in files)
        assert in_files + sum(guard.take_failures().values()) == tracer.raised
        if not tracer.raised:
            tokens = {load.role: [sum(c) for c in counts_by_layer(load)] for load in files}
            assert tokens == {"of a function": [24, 24], "of a generator": [48, 48], "outer": []}

    broken = break_every_line([API, SESSION], REGION_ENTRIES, run)
    assert {Path(path).name for path, _ in broken} == {"api.py", "session.py"}
    run(Tracer([API, SESSION], REGION_ENTRIES))  # and afterwards it counts as if nothing had been


def functions_of_ours():
    """Every function and method of the core modules: (owner, name)."""
    for name in CORE:
        module = sys.modules[f"rl_insight_hooks.{name}"]
        for member_name, member in vars(module).items():
            if getattr(member, "__module__", None) != module.__name__:
                continue
            if inspect.isfunction(member):
                yield module, member_name
            elif inspect.isclass(member):
                for method_name, method in vars(member).items():
                    if inspect.isfunction(method) and not method_name.startswith("__"):
                        yield member, method_name


def break_function(monkeypatch, owner, name, calls):
    original = vars(owner)[name]

    def broken(*args, **kwargs):
        calls.append(name)
        raise InjectedError(name)

    monkeypatch.setattr(owner, name, broken)
    if inspect.ismodule(owner):  # names bound by `from ... import ...`
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith("rl_insight_hooks"):
                for bound, value in list(vars(module).items()):
                    if value is original:
                        monkeypatch.setattr(module, bound, broken)


@pytest.mark.parametrize("watched", [True, False], ids=["watch", "no watch"])
def test_every_function_broken_for_good(rih, without_us, tmp_path, watched):
    model, ids, expected = without_us
    rih.install()
    if watched:
        rih.watch(model)
    broken_and_called = set()
    for number, (owner, name) in enumerate(list(functions_of_ours())):
        calls: list[str] = []
        with rih.record(tmp_path, step=number, role="r"):
            with pytest.MonkeyPatch.context() as patch:
                break_function(patch, owner, name, calls)
                results = train_step(model, ids)
            num_called = len(calls)
        assert_same_bits(results, expected)
        rih.flush()
        failed = read(tmp_path, number, "r").failed
        assert sum(failed.values()) == num_called, (owner, name, failed)
        if num_called:
            broken_and_called.add(name)
    assert "on_group_list" in broken_and_called
    assert ("_num_tokens" if watched else "begins") in broken_and_called


def test_host_exception_passes_once_and_untouched(rih, npu, monkeypatch, tmp_path):
    class HostError(Exception):
        pass

    raised = HostError("bad shapes")
    calls = []

    def host(x, weight, **options):
        calls.append(options)
        raise raised

    monkeypatch.setattr(npu, "npu_grouped_matmul", host)
    rih.install()
    with rih.record(tmp_path, step=1, role="r"):
        with pytest.raises(HostError) as caught:
            npu.npu_grouped_matmul([torch.ones(2, 3)], [torch.ones(1, 3, 4)], group_list=[2])
        assert caught.value is raised
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None
    assert len(calls) == 1
    rih.flush()
    load = read(tmp_path, 1, "r")
    assert not load.failed
    assert not load.records
    rih.uninstall()
    assert npu.npu_grouped_matmul is host


def test_host_is_called_once_even_when_we_fail(rih, npu, monkeypatch, tmp_path):
    calls, result = [], [torch.ones(2, 4)]

    def host(x, weight, **options):
        calls.append(options)
        return result

    monkeypatch.setattr(npu, "npu_grouped_matmul", host)
    rih.install()
    recorder = rl_insight_hooks.session.get_session().recorder
    monkeypatch.setattr(recorder.pool, "allocate", lambda *a, **k: 1 / 0)
    with rih.record(tmp_path, step=1, role="r"):
        out = npu.npu_grouped_matmul(
            [torch.ones(2, 3)],
            [torch.ones(2, 3, 4)],
            group_list=torch.tensor([1, 1]),
            group_list_type=1,
        )
    assert out is result
    assert len(calls) == 1
    rih.flush()
    assert read(tmp_path, 1, "r").failed == {"torch_npu.npu_grouped_matmul": 1}


def test_watched_block_with_odd_inputs_runs(rih, npu, tmp_path):
    """A block whose first argument is no tensor is none of our business, and no reason to fail."""

    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = torch.nn.Linear(2, 2)
            self.gate = torch.nn.Linear(2, 2)

        def forward(self, batch):
            return self.experts(batch["x"])

    block = Odd()
    rih.watch(block)
    with rih.record(tmp_path, step=1, role="r"):
        out = block({"x": torch.ones(3, 2)})
    assert out.shape == (3, 2)

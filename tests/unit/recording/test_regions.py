# SPDX-License-Identifier: Apache-2.0
"""What a region is: nesting, decorators, generators, async, steps, reruns, filters, off."""

from __future__ import annotations

import asyncio
import logging
import sys

import pytest
from tiny_run import collects, counts_by_layer, every_load_file, layer_pass, python, read

from rl_insight_hooks.errors import ConfigError

A, B, C = [1, 2, 3, 4], [4, 0, 0, 1], [0, 0, 7, 0]


def test_one_region_one_file(rih, npu, tmp_path):
    with rih.record(tmp_path, step=3, role="actor_update"):
        layer_pass(A)
        layer_pass(B)
    assert rih.flush()
    load = read(tmp_path, 3, "actor_update")
    assert counts_by_layer(load) == [A, B]
    assert (load.step, load.role, load.rank, load.world_size) == (3, "actor_update", 0, 1)
    assert [(r.num_calls, r.num_passes, r.num_assignments) for r in load.records] == [
        (3, 1, 10),
        (3, 1, 5),
    ]
    assert load.failed == {}
    assert load.notes == []
    assert collects(tmp_path) == {
        "0": {"0": 1, "1": 2, "2": 3, "3": 4},
        "1": {"0": 4, "1": 0, "2": 0, "3": 1},
    }


@pytest.mark.truth(scenario="nested regions", seam="torch_npu", version="stand-in", verdict="exact")
def test_inner_role_wins_and_outer_resumes(rih, npu, tmp_path):
    with rih.record(tmp_path, step=1, role="outer"):
        layer_pass(A)
        with rih.record(tmp_path, step=1, role="inner"):
            layer_pass(B)
        layer_pass(C)
    rih.flush()
    assert counts_by_layer(read(tmp_path, 1, "inner")) == [B]
    assert sum(map(sum, counts_by_layer(read(tmp_path, 1, "outer")))) == sum(A) + sum(C)


def test_calls_outside_every_region_are_not_counted(rih, npu, tmp_path):
    rih.install()
    layer_pass(A)
    with rih.record(tmp_path, step=1, role="r"):
        layer_pass(B)
    layer_pass(C)
    rih.flush()
    assert counts_by_layer(read(tmp_path, 1, "r")) == [B]


def test_decorator_takes_its_step_from_set_step(rih, npu, tmp_path):
    @rih.record(tmp_path, role="log_prob")
    def compute(counts):
        """Doc."""
        layer_pass(counts)
        return "value"

    rih.set_step(7)
    assert compute(A) == "value"
    rih.set_step(8)
    compute(B)
    rih.flush()
    assert counts_by_layer(read(tmp_path, 7, "log_prob")) == [A]
    assert counts_by_layer(read(tmp_path, 8, "log_prob")) == [B]
    assert compute.__name__ == "compute"
    assert compute.__doc__ == "Doc."


def test_generator_counts_its_body_and_not_its_consumer(rih, npu, tmp_path):
    @rih.record(tmp_path, step=1, role="gen")
    def produce():
        layer_pass(A)
        got = yield 1
        layer_pass(B)
        yield got
        return "end"

    with rih.record(tmp_path, step=1, role="consumer"):
        generator = produce()
        assert next(generator) == 1
        layer_pass(C)
        assert generator.send("sent") == "sent"
        with pytest.raises(StopIteration, match="end"):
            next(generator)
    rih.flush()
    assert sum(map(sum, counts_by_layer(read(tmp_path, 1, "gen")))) == sum(A) + sum(B)
    assert counts_by_layer(read(tmp_path, 1, "consumer")) == [C]


def test_generator_that_is_closed_or_thrown_into(rih, npu, tmp_path):
    closed = []

    @rih.record(tmp_path, step=1, role="gen")
    def produce():
        try:
            while True:
                layer_pass(A)
                try:
                    yield 1
                except KeyError:
                    yield "caught"
        finally:
            closed.append(True)

    generator = produce()
    next(generator)
    assert generator.throw(KeyError("x")) == "caught"
    generator.close()
    assert closed == [True]
    rih.flush()
    assert counts_by_layer(read(tmp_path, 1, "gen")) == [A]


def test_async_function_and_async_generator(rih, npu, tmp_path):
    @rih.record(tmp_path, step=1, role="coroutine")
    async def compute(counts):
        layer_pass(counts)
        await asyncio.sleep(0)
        layer_pass(B)
        return 5

    @rih.record(tmp_path, step=1, role="stream")
    async def stream():
        layer_pass(A)
        yield 1
        layer_pass(A)
        yield 2

    async def main():
        assert await compute(A) == 5
        seen = []
        async for item in stream():
            layer_pass(C)  # the consumer's
            seen.append(item)
        assert seen == [1, 2]
        async with rih.record(tmp_path, step=1, role="block"):
            layer_pass(C)

    asyncio.run(main())
    rih.flush()
    assert sum(map(sum, counts_by_layer(read(tmp_path, 1, "coroutine")))) == sum(A) + sum(B)
    assert sum(map(sum, counts_by_layer(read(tmp_path, 1, "stream")))) == 2 * sum(A)
    assert counts_by_layer(read(tmp_path, 1, "block")) == [C]


def test_regions_that_end_in_the_wrong_order(rih, npu, tmp_path):
    first, second = (
        rih.record(tmp_path, step=1, role="first"),
        rih.record(tmp_path, step=1, role="second"),
    )
    first.__enter__()
    layer_pass(A)
    second.__enter__()
    layer_pass(B)
    first.__exit__(None, None, None)
    layer_pass(C)
    second.__exit__(None, None, None)
    second.__exit__(None, None, None)  # once too often
    rih.flush()
    assert counts_by_layer(read(tmp_path, 1, "first")) == [A]
    assert sum(map(sum, counts_by_layer(read(tmp_path, 1, "second")))) == sum(B) + sum(C)


def test_same_step_again_is_more_of_it(rih, npu, tmp_path):
    for _ in range(2):
        with rih.record(tmp_path, step=1, role="r"):
            layer_pass(A)
    rih.flush()
    load = read(tmp_path, 1, "r")
    assert counts_by_layer(load) == [[2 * n for n in A]]
    assert load.num_regions == 2


def test_rerun_of_a_step_replaces_its_file(rih, npu, tmp_path):
    for step, counts in ((1, A), (2, A), (1, B)):
        with rih.record(tmp_path, step=step, role="r"):
            layer_pass(counts)
    rih.flush()
    assert counts_by_layer(read(tmp_path, 1, "r")) == [B]


def test_rerun_after_an_error_replaces_the_partial_counts(rih, npu, tmp_path):

    @rih.record(tmp_path, step=1, role="r")
    def fails():
        layer_pass(A)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fails()
    rih.flush()
    assert any("RuntimeError" in note for note in read(tmp_path, 1, "r").notes)
    with rih.record(tmp_path, step=1, role="r"):
        layer_pass(B)
    rih.flush()
    load = read(tmp_path, 1, "r")
    assert counts_by_layer(load) == [B]
    assert load.notes == []


def test_role_without_steps(rih, npu, tmp_path):
    with rih.record(tmp_path, role="serve"):
        layer_pass(A)
    rih.flush()
    load = read(tmp_path, None, "serve")
    assert load.step is None
    assert counts_by_layer(load) == [A]


def test_ambient_region_follows_set_step(rih, npu, tmp_path):
    assert rih.enable(
        {"rl_insight_hooks": {"enable": True, "path": str(tmp_path), "role": "train"}}
    )
    assert rih.enable(
        {"rl_insight_hooks": {"enable": True, "path": str(tmp_path), "role": "train"}}
    )
    rih.set_step(1)
    layer_pass(A)
    rih.set_step(2)
    layer_pass(B)
    with rih.record(step=2, role="inner"):
        layer_pass(C)
    rih.uninstall()
    rih.flush()
    assert counts_by_layer(read(tmp_path, 1, "train")) == [A]
    assert counts_by_layer(read(tmp_path, 2, "train")) == [B]
    assert counts_by_layer(read(tmp_path, 2, "inner")) == [C]


def test_filters_leave_out_and_resume(rih, npu, tmp_path):
    rih.configure(steps="1,3", roles=["keep", "keep_too"])
    for step in (1, 2, 3):
        for role in ("keep", "leave_out"):
            with rih.record(tmp_path, step=step, role=role):
                layer_pass(A)
    with rih.record(tmp_path, step=1, role="leave_out"):
        layer_pass(B)
        with rih.record(tmp_path, step=1, role="keep_too"):
            layer_pass(C)
        layer_pass(B)
    rih.flush()
    found = {(f.step, f.role) for f in every_load_file(tmp_path)}
    assert found == {(1, "keep"), (3, "keep"), (1, "keep_too")}
    assert counts_by_layer(read(tmp_path, 1, "keep_too")) == [C]


def test_phase_filter_is_for_the_file(rih, npu, tmp_path):
    rih.configure(phases=["recompute"])
    with rih.record(tmp_path, step=1, role="r"):
        layer_pass(A)
    rih.flush()
    assert read(tmp_path, 1, "r").records == []


def test_detail_calls(rih, npu, tmp_path):
    rih.configure(detail="calls")
    with rih.record(tmp_path, step=1, role="r"):
        layer_pass(A, list_type=0)
        layer_pass(B)
    rih.flush()
    calls = read(tmp_path, 1, "r").calls
    assert [(c.layer, c.phase, c.index, c.counts) for c in calls] == [
        (0, "forward", 0, A),
        (1, "forward", 1, B),
    ]


def test_interim_flush_and_the_end_add_up(rih, npu, tmp_path, session):
    with rih.record(tmp_path, role="serve"):
        layer_pass(A)
        session.flush(10)
        assert counts_by_layer(read(tmp_path, None, "serve")) == [A]
        layer_pass(A)
    rih.flush()
    load = read(tmp_path, None, "serve")
    assert sum(map(sum, counts_by_layer(load))) == 2 * sum(A)
    assert load.num_regions == 1


def test_zero_calls_are_said_with_a_cause(rih, npu, tmp_path):
    with rih.record(tmp_path, step=1, role="idle"):
        pass
    rih.flush()
    load = read(tmp_path, 1, "idle")
    assert load.records == []
    assert any(note.startswith("zero calls") for note in load.notes)
    assert rih.summary()["moe_load/idle/notes"] == 1.0


@pytest.mark.parametrize("bad", [{"step": "3"}, {"step": 1.5}, {"role": 3}, {"role": ""}])
def test_bad_arguments_are_named(rih, tmp_path, bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        rih.record(tmp_path, **bad)


def test_step_may_be_a_numpy_int(rih, npu, tmp_path):
    import numpy as np

    with rih.record(tmp_path, step=np.int64(4), role="r"):
        layer_pass(A)
    rih.flush()
    assert read(tmp_path, 4, "r").step == 4


def test_every_call_in_any_order_twice(rih, npu, tmp_path):
    original = npu.npu_grouped_matmul
    rih.uninstall()
    rih.flush()
    assert rih.summary() == {}
    rih.install()
    rih.install()
    rih.set_step(1)
    rih.uninstall()
    rih.uninstall()
    assert npu.npu_grouped_matmul is original
    with rih.record(tmp_path, step=1, role="r"):
        layer_pass(A)
    rih.uninstall()
    assert npu.npu_grouped_matmul is original
    rih.flush()
    assert counts_by_layer(read(tmp_path, 1, "r")) == [A]


def test_uninstall_inside_a_region_keeps_what_was_counted(rih, npu, tmp_path):
    with rih.record(tmp_path, step=1, role="r"):
        layer_pass(A)
        rih.uninstall()
        layer_pass(B)
    rih.flush()
    assert counts_by_layer(read(tmp_path, 1, "r")) == [A]


def test_off_means_absent(tmp_path):
    done = python(
        """
        import sys, threading
        import rl_insight_hooks as rih
        assert "torch" not in sys.modules and "numpy" not in sys.modules
        with rih.record("nowhere", step=1, role="r"):
            pass
        rih.install(); rih.set_step(1); rih.watch(object()); rih.flush(); rih.summary(); rih.uninstall()
        assert rih.enable({"rl_insight_hooks": {"enable": True}}) is False
        assert "torch" not in sys.modules, "torch was imported"
        assert threading.active_count() == 1
        print("ok")
        """,
        env={"RL_INSIGHT_HOOKS": "0"},
    )
    assert done.stdout.strip() == "ok"


def test_enable_without_the_flag_does_nothing():
    python(
        """
        import sys, threading
        import rl_insight_hooks as rih
        assert rih.enable({"trainer": {}}) is False
        assert "torch" not in sys.modules
        assert threading.active_count() == 1
        """
    )


def test_names_of_the_package_are_cheap():
    python(
        """
        import sys
        import rl_insight_hooks as rih
        assert not hasattr(rih, "npu_gmm")
        assert "rl_insight_hooks.api" not in sys.modules
        assert "record" in dir(rih)
        """
    )


def test_two_models_of_one_role_are_numbered_apart(rih, npu, tmp_path):
    """Without watch, layers are numbered by order of first sight in the role."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def forward(self, counts):
            return layer_pass(counts)

    first, second = nn.ModuleList([Block(), Block()]), nn.ModuleList([Block(), Block()])
    with torch.no_grad():
        for _ in range(2):  # micro-batches: the same modules again
            with rih.record(tmp_path, step=1, role="actor"):
                first[0](A)
                first[1](B)
            with rih.record(tmp_path, step=1, role="ref"):
                second[0](B)
                second[1](C)
    rih.flush()
    double = lambda counts: [2 * c for c in counts]  # noqa: E731
    assert counts_by_layer(read(tmp_path, 1, "actor")) == [double(A), double(B)]
    assert counts_by_layer(read(tmp_path, 1, "ref")) == [double(B), double(C)]
    assert [r.layer for r in read(tmp_path, 1, "ref").records] == [0, 1]
    assert {r.layer_source for r in read(tmp_path, 1, "ref").records} == {"call_order"}


def test_failures_are_logged_once(rih, npu, tmp_path, session, monkeypatch, caplog):
    def broken(*args, **kwargs):
        raise RuntimeError("ours")

    monkeypatch.setattr(session.recorder, "on_group_list", broken)
    with caplog.at_level(logging.WARNING), rih.record(tmp_path, step=1, role="r"):
        layer_pass(A)
        layer_pass(B)
    rih.flush()
    assert read(tmp_path, 1, "r").failed == {"torch_npu.npu_grouped_matmul": 6}
    assert len([r for r in caplog.records if "failed in torch_npu" in r.message]) == 1


def test_failures_belong_to_the_region_that_had_them(rih, npu, tmp_path, session, monkeypatch):
    import threading

    from rl_insight_hooks import writer

    gate = threading.Event()
    real = writer.write_atomic
    monkeypatch.setattr(writer, "write_atomic", lambda *a: (gate.wait(30), real(*a)))
    with rih.record(tmp_path, step=1, role="r"):
        layer_pass(A)  # its file waits for the gate while the next region fails
    monkeypatch.setattr(session.recorder, "on_group_list", None)
    with rih.record(tmp_path, step=2, role="r"):
        layer_pass(A)
    gate.set()
    rih.flush()
    assert read(tmp_path, 1, "r").failed == {}
    assert sum(read(tmp_path, 2, "r").failed.values()) == 3


def test_no_session_code_needs_the_report():
    python(
        """
        import sys
        import rl_insight_hooks.session
        bad = [m for m in sys.modules if m.startswith(("rl_insight_hooks.report", "rl_insight_hooks.rebalance",
               "matplotlib", "typer"))]
        assert not bad, bad
        """
    )
    assert "rl_insight_hooks" in sys.modules


def test_role_without_steps_is_written_at_flush_interval(rih, npu, tmp_path):
    import time

    settings = {"enable": True, "path": str(tmp_path), "role": "serve", "flush_interval": 0.1}
    rih.enable({"rl_insight_hooks": settings})
    layer_pass(A)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        written = (tmp_path / "eplb_token_collects_0.json").exists() and every_load_file(tmp_path)
        if written and counts_by_layer(read(tmp_path, None, "serve")) == [A]:
            break
        time.sleep(0.05)
    assert counts_by_layer(read(tmp_path, None, "serve")) == [A]
    assert collects(tmp_path)["0"] == {"0": 1, "1": 2, "2": 3, "3": 4}
    layer_pass(B)  # weights of its own: another layer
    rih.uninstall()
    rih.flush()
    assert counts_by_layer(read(tmp_path, None, "serve")) == [A, B]

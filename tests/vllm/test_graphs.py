# SPDX-License-Identifier: Apache-2.0
"""Graphs: what the hooks do on the device is in the graph, counts on each replay and never moves.

On CPU a graph is what make_fx traced of the real apply, replayed on new inputs: no Python of ours runs then.
On a GPU it is a CUDA graph, captured once and replayed 100 times.
"""

from __future__ import annotations

import types

import pytest

NAME = "model.layers.3.mlp.experts"
SEAM = "AscendUnquantizedFusedMoEMethod.apply"


def truth(scenario, verdict="exact", version="vllm-ascend 0.18.0"):
    return pytest.mark.truth(scenario=scenario, seam=SEAM, version=version, verdict=verdict)


def traced(call, logits):
    """The graph of ``call(logits)``, with our buffers as they are: real tensors that it adds into."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(call, tracing_mode="real", _allow_non_fake_inputs=True)(logits)


@truth("rollout: replay of a traced graph, dummy runs between")
def test_a_replayed_graph_goes_on_counting(
    runner, hooked, session, forward, moe, recorded, tmp_path
):
    layer = moe()
    size = 8
    engine = runner(None)
    call = lambda logits: layer.apply(size, 0, count=False, router_logits=logits).routed_out  # noqa: E731
    logits = layer.logits(size, 0)
    with hooked.record(str(tmp_path), step=1, role="rollout"):
        engine.forward = lambda _: call(logits)
        engine._dummy_run(size)  # the warm-up: rows are made, nothing counts
        buffers = [slot.buf.data_ptr() for slot in session.recorder.pool.slots]
        engine.forward = lambda _: traced(call, logits)
        graph = engine._dummy_run(
            size
        )  # captures do not execute on a device; on CPU the flag is shut
        calls_before = session.recorder.num_events

        def replay(num_tokens, seed):
            engine.forward = lambda _: graph(layer.logits(size, seed))
            step = types.SimpleNamespace(total_num_scheduled_tokens=num_tokens)
            engine.execute_model(step)
            chosen = layer.selected(layer.logits(size, seed))
            for row in range(num_tokens):
                layer.truth.update(chosen[row])

        for seed, num_tokens in enumerate((8, 5, 1), start=10):
            replay(num_tokens, seed)
        engine.forward = lambda _: graph(layer.logits(size, 99))
        engine._dummy_run(size)  # an idle rank's dummy step replays too
        replay(3, 50)
        assert session.recorder.num_events == calls_before  # no Python of ours ran in a replay
        assert [slot.buf.data_ptr() for slot in session.recorder.pool.slots] == buffers
    _, records = recorded()
    assert records[NAME].counts == layer.expected()
    assert sum(layer.truth.values()) == 2 * (8 + 5 + 1 + 3)


@truth("rollout: counters drained at sleep, graph replayed after")
def test_the_graph_counts_on_after_a_drain(
    runner, hooked, session, forward, moe, tmp_path, recorded
):
    layer = moe()
    engine = runner(None)
    call = lambda logits: layer.apply(4, 0, count=False, router_logits=logits).routed_out  # noqa: E731
    with hooked.record(str(tmp_path), step=1, role="rollout"):
        engine.forward = lambda _: call(layer.logits(4, 0))
        engine._dummy_run(4)
        engine.forward = lambda _: traced(call, layer.logits(4, 0))
        graph = engine._dummy_run(4)
        for seed in (1, 2, 3):
            logits = layer.logits(4, seed)
            engine.forward = lambda _, logits=logits: graph(logits)
            engine.execute_model(types.SimpleNamespace(total_num_scheduled_tokens=4))
            layer.truth.update(e for row in layer.selected(logits) for e in row)
            assert session.flush(30)  # what a worker does before its engine sleeps
    _, records = recorded()
    assert records[NAME].counts == layer.expected()


@truth("rollout: graph traced after the profile run, without a warm-up")
def test_rows_are_there_after_the_profile_run(
    runner, hooked, session, forward, moe, tmp_path, recorded
):
    layer = moe()
    engine = runner(None)

    def call(logits):
        return layer.apply(4, 0, count=False, router_logits=logits).routed_out

    engine.forward = lambda _: call(layer.logits(4, 0))
    forward.in_profile_run = True
    engine.profile_run()  # before any region
    forward.in_profile_run = False
    assert len(session.recorder.pool.slots) == 1
    engine.forward = lambda _: traced(call, layer.logits(4, 0))
    graph = engine._dummy_run(4)
    assert len(session.recorder.pool.slots) == 1
    with hooked.record(str(tmp_path), step=1, role="rollout"):
        logits = layer.logits(4, 1)
        engine.forward = lambda _: graph(logits)
        engine.execute_model(types.SimpleNamespace(total_num_scheduled_tokens=3))
        layer.truth.update(e for row in layer.selected(logits)[:3] for e in row)
    _, records = recorded()
    assert records[NAME].counts == layer.expected()

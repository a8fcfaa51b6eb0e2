# SPDX-License-Identifier: Apache-2.0
"""An exception of our own code at any line inside the rollout seam changes nothing for the engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import moe_eras
import pytest
import torch
from fault_injection import Entries, InjectedError, Tracer
from moe_eras import by_order_b, layer_object, logits, read
from rl_insight_hooks.integrations import vllm_ascend
from rl_insight_hooks.integrations.vllm_ascend.capture import CALL

from rl_insight_hooks.state import STATE

HERE = Path(vllm_ascend.__file__).resolve().parent
NAMES = ("apply", "capture", "context", "layout", "moe_layer", "signatures", "runner")
FILES = [HERE / f"{name}.py" for name in NAMES]

# What the host calls. Their lines outside a try only call the host, and are not injected into.
ENTRIES = Entries(
    {
        HERE / "apply.py": {"apply"},
        HERE / "capture.py": {"select_experts", "_compute_routing", "fused_experts"},
        HERE / "runner.py": {"method", "execute_model"},
    }
)


def test_exception_at_every_line(rih, session, monkeypatch, tmp_path):
    world = moe_eras.World(monkeypatch)

    class NPUModelRunner:
        def _dummy_run(self):
            return self.forward()

        def execute_model(self, scheduler_output):
            return self.forward()

    world.runner.NPUModelRunner = NPUModelRunner
    _, adapter, scheme = moe_eras.era_0_13(world)
    given = logits(9)
    world.context.dp_metadata = SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor([5, 4]))
    engine, step = NPUModelRunner(), SimpleNamespace(total_num_scheduled_tokens=5)

    def run(layer):
        method = adapter(scheme())
        engine.forward = lambda: by_order_b(method, layer, given, enable_force_load_balance=False)
        world.handed.clear()
        engine._dummy_run()
        out = engine.execute_model(step)
        return [out, *world.handed]

    expected = run(layer_object())
    assert len(expected) == 3
    rih.install(["vllm_ascend"])
    first = Tracer(FILES, ENTRIES)
    with rih.record(str(tmp_path), step=0, role="rollout"), first:
        run(layer_object())
    assert session.writer.flush(30)
    assert len(first.seen) > 80
    for number, site in enumerate(sorted(first.seen), start=1):
        vllm_ascend.layout.own_rows.cache_clear()
        tracer = Tracer(FILES, ENTRIES, site)
        with rih.record(str(tmp_path), step=number, role="rollout"), tracer:
            got = run(layer_object())
        assert session.writer.flush(30)  # its file takes the failures counted so far
        if not tracer.raised:
            continue  # a line of the first call of the process only
        for ours, theirs in zip(got, expected, strict=True):
            assert torch.equal(ours, theirs), site
        assert STATE.claims == 0, site
        assert CALL.get() is None, site
        assert sum(read(tmp_path, number, "rollout").failed.values()) == 1, site
        session.recorder.set_enabled(True)


@pytest.mark.parametrize("where", ["apply", "_dummy_run"])
def test_the_hosts_own_exception_passes(rih, session, monkeypatch, where):
    world = moe_eras.World(monkeypatch)
    unquantised = moe_eras.era_0_11(world)[0]

    def fails(*args, **kwargs):
        raise InjectedError("of the host")

    if where == "apply":
        unquantised.apply.__globals__["select_experts"] = fails
    world.runner.NPUModelRunner = type("NPUModelRunner", (), {"_dummy_run": fails})
    rih.install(["vllm_ascend"])
    engine = world.runner.NPUModelRunner()
    call = {
        "apply": lambda: moe_eras.by_order_a(unquantised(), layer_object(), logits(3)),
        "_dummy_run": engine._dummy_run,
    }[where]
    with pytest.raises(InjectedError, match="of the host"):
        call()
    assert STATE.claims == 0
    assert CALL.get() is None
    assert vllm_ascend.seam_of(session).steps.dummy == 0

# SPDX-License-Identifier: Apache-2.0
"""An exception at every line of ours in a step of the real verl worker: python fault_main.py MODEL OUT

Prints, as JSON on its last line, what was broken: {"file name": number of lines}.
"""

from __future__ import annotations

import collections
import copy
import json
import logging
import os
import shutil
import sys
from pathlib import Path

import cpu_run
import torch
from fault_injection import Entries, Tracer, break_every_line

# What the host calls: those guard themselves, or only set a field.
ENTRIES_OF = {
    "workers": {"stage", "_begin", "listen", "told", "init_model", "rl_insight_summary"},
    "stages": {"begin", "end"},
    "engines": {"initialize", "batch"},
    "annotate": {"trace_state", "__init__", "__enter__", "__exit__"},
    "summary": {"of_step"},
}


def main(model: str, out: str) -> None:
    os.environ |= {"RL_INSIGHT_HOOKS_PATH": f"{out}/data"}
    import cpu_platform  # noqa: F401
    import verl.utils.torch_functional as functional
    from verl.models.transformers.npu_patch import apply_npu_patches
    from verl.workers.engine_workers import ActorRolloutRefWorker

    import rl_insight_hooks as rih
    from rl_insight_hooks import guard
    from rl_insight_hooks.schema import decode_load_file

    logging.disable(logging.WARNING)  # hundreds of tracebacks
    package = Path(rih.__file__).resolve().parent
    ours = package.parent / "integrations/verl"
    entries = Entries({ours / f"{name}.py": names for name, names in ENTRIES_OF.items()})
    files = [*sorted(ours.glob("*.py")), package / "session.py"]

    functional.NPU_CROSS_ENTROPY_LOSS_AVAILABLE = False  # the one operator without a CPU kernel
    torch.distributed.init_process_group("gloo")
    apply_npu_patches()
    config = cpu_run.compose(model).actor_rollout_ref
    worker = ActorRolloutRefWorker(config, role="actor")
    worker.init_model()
    engine = worker.actor.engine
    parameters = list(engine.module.parameters())
    before = [p.detach().clone() for p in parameters]
    # no step was made: the optimizer's state is empty
    optimizer, scheduler = (
        copy.deepcopy(x.state_dict()) for x in (engine.optimizer, engine.lr_scheduler)
    )
    number = 0

    def a_step():
        """A step of the worker from the same start; what the host got from it."""
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)
        engine.optimizer.state.clear()
        engine.optimizer.load_state_dict(copy.deepcopy(optimizer))
        engine.lr_scheduler.load_state_dict(copy.deepcopy(scheduler))
        torch.manual_seed(1)
        worker.start_profile(profile_step=number)
        out = worker.compute_log_prob(cpu_run.batch(1, 0, rlih_step=number))
        update = cpu_run.batch(1, 0, out["log_probs"], rlih_step=number)
        keys = set(worker.update_actor(update).keys())
        worker.stop_profile()
        try:
            worker.compute_log_prob(None)
        except Exception as error:
            failure = [type(error), str(error), type(error.__cause__)]
        tensors = [out["log_probs"].values(), *(p.detach().full_tensor() for p in parameters)]
        return [t.clone() for t in tensors], keys, failure

    rih.uninstall()
    expected = a_step()
    assert not torch.equal(before[0].full_tensor(), expected[0][1])  # it does learn

    def run(tracer: Tracer) -> None:
        nonlocal number
        number += 1
        rih.install(["torch_npu", "verl"])
        with tracer:
            tensors, keys, failure = a_step()
            summary = getattr(worker, "rl_insight_summary", lambda step: {})(number)
        assert rih.flush()
        rih.uninstall()
        rih.session.get_session().stack.clear()
        for mine, theirs in zip(tensors, expected[0], strict=True):
            assert torch.equal(mine, theirs)
        assert (keys, failure) == expected[1:]
        written = [decode_load_file(p.read_bytes()) for p in Path(out).glob("data/*/*/*/*.json")]
        of_step = {f.role: f for f in written if f.step == number}
        num_failed = sum(sum(f.failed.values()) for f in of_step.values())
        num_failed += sum(guard.take_failures().values())
        for path in Path(out).glob("data/*"):
            shutil.rmtree(path)
        if tracer.raised:
            assert num_failed >= 1
            return
        assert not num_failed
        assert set(of_step) == {"actor_compute_log_prob", "actor_update"}
        assert summary["moe_load/actor_update/assignments"] > 0

    broken = break_every_line(files, entries, run)
    run(Tracer(files, entries))  # and afterwards it counts as if nothing had been
    names = collections.Counter(Path(path).name for path, _ in broken)
    print(json.dumps({**names, "unguarded": sorted(entries.unguarded_calls())}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

# SPDX-License-Identifier: Apache-2.0
"""verl's own Megatron and MindSpeed engines over the real Megatron-Core: hooks are back once one is built.

Runs where RLIH_VERL_ERAS names a folder whose ``megatron`` holds requirements-megatron.txt, unpacked as
test_older.py says. Building a model needs a device, so the parts of ``initialize`` that build are stand-ins;
counts of Megatron's layers are compared in tests/megatron.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
MEGATRON = Path(os.environ.get("RLIH_VERL_ERAS", "-"), "megatron")

_CODE = """
import json, types
import verl
from megatron.core.transformer.moe import experts
MARK = "__rl_insight_hooks__"
hooked = [hasattr(experts.SequentialMLP.forward, MARK)]
import verl.workers.engine.ENGINE.transformer_impl as module
from rl_insight_hooks.session import get_session

pristine = [experts.SequentialMLP.forward.__wrapped__]
watched = []
get_session().watcher.watch = lambda model, **kwargs: watched.append(model)
engine = object.__new__(module.CLASS)
chunks = ["chunk 0", "chunk 1"]

def build():
    experts.SequentialMLP.forward = pristine[0]  # as MindSpeed's repatch leaves it
    hooked.append(hasattr(experts.SequentialMLP.forward, MARK))
    return chunks

engine._build_tf_config = lambda: setattr(engine, "tf_config", None)
engine._build_megatron_module = build
engine._maybe_enable_fused_kernels = lambda: None
engine.to = lambda **kwargs: None
engine._qat_enabled = engine._is_offload_param = False
engine.engine_config = types.SimpleNamespace(forward_only=True, override_transformer_config={})
engine.model_config = types.SimpleNamespace(mtp=types.SimpleNamespace(enable=False))
import verl.workers.engine.megatron.transformer_impl as base
base._check_dcp_unsupported_features = base.log_gpu_memory_usage = lambda *args, **kwargs: None
engine.initialize()
hooked.append(hasattr(experts.SequentialMLP.forward, MARK))
print(json.dumps([hooked, watched]))
"""


@pytest.mark.parametrize(
    ("engine", "cls"),
    [("megatron", "MegatronEngineWithLMHead"), ("mindspeed", "MindspeedEngineWithLMHead")],
)
def test_hooks_are_back_and_the_chunks_are_watched(python, engine, cls):
    if not (MEGATRON / "megatron").is_dir():
        pytest.skip("RLIH_VERL_ERAS has no folder megatron: see this module's head")
    code = _CODE.replace("ENGINE", engine).replace("CLASS", cls)
    path = os.pathsep.join([str(HERE), str(MEGATRON)])
    hooked, watched = python(code, RL_INSIGHT_HOOKS="1", PYTHONPATH=path)
    assert hooked == [True, False, True]
    assert watched == [["chunk 0", "chunk 1"]]

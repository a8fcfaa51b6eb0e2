# SPDX-License-Identifier: Apache-2.0
"""What a vLLM worker process does first, in a spawned process: load the general plugins, import the worker."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from unittest.mock import MagicMock


class _Cann(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """CANN's Python module ``acl``, which no wheel brings."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "acl":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.memcpy = MagicMock()
        return module

    def exec_module(self, module):
        pass


def look(answers):
    """Put into ``answers`` what is hooked, step by step."""
    sys.meta_path.insert(0, _Cann())
    mark = "__rl_insight_hooks__"
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    runner = types.ModuleType(
        "vllm_ascend.worker.model_runner_v1"
    )  # needs torchair's CANN libraries
    runner.NPUModelRunner = type("NPUModelRunner", (), {})
    sys.modules[runner.__name__] = runner
    import torch_npu
    import vllm_ascend.worker.worker as worker
    from vllm.platforms import current_platform
    from vllm_ascend.ops.fused_moe import fused_moe

    from rl_insight_hooks import envs

    found = {
        "platform": type(current_platform).__name__,
        "op": hasattr(torch_npu.npu_grouped_matmul, mark),
        "apply": hasattr(fused_moe.AscendUnquantizedFusedMoEMethod.apply, mark),
        "worker": [
            name
            for name in ("load_model", "execute_model", "sleep", "shutdown")
            if hasattr(getattr(worker.NPUWorker, name), mark)
        ],
        "set_step": hasattr(worker.NPUWorker, "rl_insight_set_step"),
        "session": "rl_insight_hooks.session" in sys.modules,
        "switched_on": envs.switched_on(),
    }
    if found["session"]:
        from rl_insight_hooks.session import existing_session

        session = existing_session()
        found["ambient"] = session is not None and session.ambient is not None
    answers.put(found)

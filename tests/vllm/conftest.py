# SPDX-License-Identifier: Apache-2.0
"""The real vllm 0.18 and vllm-ascend 0.18 on CPU (nox session ``vllm``; tests/vllm_worker/requirements.txt).

Real: the method classes and their ``apply``, ``select_experts``, the layer arguments, the forward-context
proxy. Stand-ins: the weight prefetch, the forward context's object, and the communication method, which keeps
the ids it is handed.
"""

from __future__ import annotations

import importlib.util
import os
import types
from collections import Counter

import pytest

os.environ.setdefault(
    "TORCH_DEVICE_BACKEND_AUTOLOAD", "0"
)  # a plain import of torch would load torch_npu
_MISSING = [n for n in ("vllm", "vllm_ascend", "torch_npu") if importlib.util.find_spec(n) is None]
collect_ignore_glob = ["test_real*.py", "test_graphs.py"] if _MISSING else []


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/vllm/" in str(item.path):
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def ascend():
    """The module with the real unquantised method; its layers see two stand-ins."""
    if _MISSING:
        pytest.skip(f"not installed: {', '.join(_MISSING)}: run the nox session vllm")
    import torch

    try:
        import torch_npu  # noqa: F401
    except (ImportError, OSError) as error:
        pytest.skip(
            f"torch_npu does not import ({error}): tools/make_npu_stubs.py, LD_LIBRARY_PATH"
        )
    torch.set_num_threads(1)
    from vllm_ascend.ops.fused_moe import experts_selector, fused_moe

    def nothing(*args, **kwargs):
        return None

    prefetch = types.SimpleNamespace(maybe_prefetch_moe_weight_preprocess=nothing)
    experts_selector.get_weight_prefetch_method = lambda: prefetch
    return fused_moe


class Comm:
    """A communication method that keeps the ids it is handed and gives the hidden states back."""

    def __init__(self):
        self.ids = []

    def fused_experts(self, fused_experts_input):
        self.ids.append(fused_experts_input.topk_ids)
        return types.SimpleNamespace(
            routed_out=fused_experts_input.hidden_states, expert_tokens=None
        )


@pytest.fixture
def forward(ascend, monkeypatch):
    """The forward pass under way: attributes may be set."""
    import vllm.forward_context
    from vllm_ascend.ascend_forward_context import MoECommType

    context = types.SimpleNamespace(
        moe_comm_method=Comm(),
        moe_comm_type=MoECommType.ALLGATHER,
        in_profile_run=False,
        is_draft_model=False,
        capturing=False,
        mc2_mask=None,
        num_tokens=None,
        dp_metadata=None,
        additional_kwargs={},
    )
    monkeypatch.setattr(vllm.forward_context, "_forward_context", context)
    return context


class Moe:
    """One MoE layer: the real method over a layer object, routed by given logits."""

    def __init__(self, module, name, num_experts, top_k, **attributes):
        import torch

        self.method = object.__new__(module.AscendUnquantizedFusedMoEMethod)
        torch.nn.Module.__init__(self.method)
        self.method.moe = types.SimpleNamespace(has_bias=False)
        self.method.dynamic_eplb = False
        self.layer = torch.nn.Module()
        self.layer.layer_name = name
        self.layer.w13_weight = self.layer.w2_weight = torch.zeros(1)
        self.layer.vllm_config = types.SimpleNamespace(model_config=None)
        for key, value in attributes.items():
            setattr(self.layer, key, value)
        self.num_experts, self.top_k = num_experts, top_k
        self.truth = Counter()

    def logits(self, num_tokens, seed):
        import torch

        generator = torch.Generator().manual_seed(seed)
        skew = torch.linspace(1.0, -1.0, self.num_experts)
        return torch.randn(num_tokens, self.num_experts, generator=generator) + skew

    def selected(self, logits):
        """Ids by a plain loop: the top-k of each row."""
        rows = logits.tolist()
        return [
            sorted(range(self.num_experts), key=lambda e: -row[e])[: self.top_k] for row in rows
        ]

    def apply(self, num_tokens, seed, *, count=True, rows=None, **kwargs):
        """Call the real apply; add what ought to be counted, rows ``rows`` only if given, to the truth."""
        import torch

        logits = self.logits(num_tokens, seed)
        if count:
            chosen = self.selected(logits)
            for row in range(num_tokens) if rows is None else rows:
                self.truth.update(chosen[row])
        given = {
            "layer": self.layer,
            "x": torch.ones(num_tokens, 4),
            "use_grouped_topk": False,
            "top_k": self.top_k,
            "router_logits": logits,
            "renormalize": False,
            "scoring_func": "sigmoid",
            "global_num_experts": self.num_experts,
        }
        return self.method.apply(**(given | kwargs))

    def expected(self):
        return [self.truth.get(expert, 0) for expert in range(self.num_experts)]


@pytest.fixture
def moe(ascend):
    def make(name="model.layers.3.mlp.experts", num_experts=8, top_k=2, **attributes):
        return Moe(ascend, name, num_experts, top_k, **attributes)

    return make


@pytest.fixture
def hooked(rih, ascend):
    """The package with the integration installed."""
    rih.install(["vllm_ascend"])
    yield rih
    rih.uninstall()


@pytest.fixture
def recorded(tmp_path):
    """Read the file of a finished region, and its records by layer name."""

    def read(step=1, role="rollout"):
        from rl_insight_hooks.schema import decode_load_file
        from rl_insight_hooks.session import get_session

        assert get_session().writer.flush(30)
        path = tmp_path / f"step_{step}" / role / "rank0" / "group_list.json"
        load_file = decode_load_file(path.read_bytes())
        return load_file, {record.layer_name: record for record in load_file.records}

    return read


@pytest.fixture
def groups(ascend, monkeypatch):
    """Set this process's place in vLLM's groups: groups(tp=(rank, size), dp=...)."""
    import vllm.distributed.parallel_state as state

    def put(**places):
        for name in ("tp", "dp", "pp", "ep"):
            rank, size = places.get(name, (0, 1))
            group = types.SimpleNamespace(rank_in_group=rank, world_size=size)
            monkeypatch.setattr(state, f"_{name.upper()}", group)

    return put


@pytest.fixture
def runner(ascend, monkeypatch):
    """A class with the methods of NPUModelRunner: the real one needs CANN's torchair libraries."""
    import sys

    module = types.ModuleType("vllm_ascend.worker.model_runner_v1")

    class NPUModelRunner:
        def __init__(self, forward):
            self.forward = forward

        def _dummy_run(self, num_tokens):
            return self.forward(num_tokens)

        def profile_run(self):
            return self._dummy_run(64)

        def execute_model(self, scheduler_output, intermediate_tensors=None):
            return self.forward(scheduler_output.total_num_scheduled_tokens)

    module.NPUModelRunner = NPUModelRunner
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return NPUModelRunner

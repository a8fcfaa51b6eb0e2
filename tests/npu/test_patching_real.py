# SPDX-License-Identifier: Apache-2.0
"""Hooks on the real torch_npu: identity, order of imports, aliases, other tools, compile. In subprocesses."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tiny_run import REPO, counts_by_layer, read

HERE = Path(__file__).parent

PRELUDE = """
import sys, torch
import rl_insight_hooks as rih
root = sys.argv[1]
def kernels():
    from rl_insight_hooks import cpu_fallback
    cpu_fallback.register_cpu_kernels()
def call(function, counts=(1, 2, 3, 4)):
    n = sum(counts)
    return function([torch.ones(n, 4)], [torch.ones(4, 4, 6)], group_list=torch.tensor(counts),
                    group_list_type=1, group_type=0, split_item=2)
"""


def run(code, root, timeout=240):
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code), root],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{REPO / 'tests/support'}"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_uninstall_puts_back_the_identical_objects(tmp_path):
    run(
        """
        import torch_npu
        names = [n for n in dir(torch_npu) if n.startswith("npu_")]
        before = {n: getattr(torch_npu, n) for n in names}
        held = [torch.ops.npu.npu_grouped_matmul]  # a global of ours would be rebound, as is right
        rih.install(); rih.install()
        assert torch_npu.npu_grouped_matmul is not before["npu_grouped_matmul"]
        assert torch.ops.npu.npu_grouped_matmul is not held[0]
        assert torch.ops.npu.npu_grouped_matmul.default is held[0].default
        rih.uninstall(); rih.uninstall()
        assert {n: getattr(torch_npu, n) for n in names} == before
        assert all(getattr(torch_npu, n) is before[n] for n in names)
        assert torch.ops.npu.npu_grouped_matmul is held[0]
        """,
        tmp_path,
    )


@pytest.mark.parametrize("first", ["us", "torch_npu"])
@pytest.mark.truth(
    scenario="target imported before us and after us", seam="torch_npu.npu_grouped_matmul", version="2.13.0",
    verdict="exact",
)  # fmt: skip
def test_import_order(tmp_path, first):
    run(
        f"""
        if {first == "us"}:
            rih.install()
            import torch_npu
        else:
            import torch_npu
        kernels()
        with rih.record(root, step=1, role="r"):
            call(torch_npu.npu_grouped_matmul)
        rih.flush()
        """,
        tmp_path,
    )
    assert counts_by_layer(read(tmp_path, 1, "r")) == [[1, 2, 3, 4]]


@pytest.mark.parametrize(
    "spelling",
    [
        "torch_npu.npu_grouped_matmul",
        "torch_npu.npu_grouped_matmul.default",
        "torch.ops.npu.npu_grouped_matmul",
        "early.bound",
    ],
)
@pytest.mark.truth(
    scenario="every spelling of the operator",
    seam="torch_npu.npu_grouped_matmul",
    version="2.13.0",
    verdict="exact",
)
def test_spellings(tmp_path, spelling):
    run(
        f"""
        import types, torch_npu
        kernels()
        early = sys.modules["early"] = types.ModuleType("early")
        early.bound = torch_npu.npu_grouped_matmul
        bound = early.bound
        with rih.record(root, step=1, role="r"):
            call({spelling})
        rih.flush()
        rih.uninstall()
        assert early.bound is bound
        """,
        tmp_path,
    )
    assert counts_by_layer(read(tmp_path, 1, "r")) == [[1, 2, 3, 4]]


def test_another_tool_on_top(tmp_path):
    """It wraps us, later it is overwritten by a third: counts stay right, and uninstall leaves their work."""
    run(
        """
        import torch_npu
        kernels()
        rih.install()
        ours = torch_npu.npu_grouped_matmul
        def theirs(*args, **kwargs):
            return ours(*args, **kwargs)
        torch_npu.npu_grouped_matmul = theirs
        for step in (1, 2):
            with rih.record(root, step=step, role="r"):
                call(torch_npu.npu_grouped_matmul)
        rih.flush()
        assert torch_npu.npu_grouped_matmul is not theirs
        rih.uninstall()
        assert torch_npu.npu_grouped_matmul is theirs
        call(torch_npu.npu_grouped_matmul)
        """,
        tmp_path,
    )
    for step in (1, 2):
        (record,) = read(tmp_path, step, "r").records
        assert (record.counts, record.num_calls) == ([1, 2, 3, 4], 1)


def test_buried_under_a_tool_that_stays(tmp_path):
    done = run(
        """
        import torch_npu
        kernels()
        rih.install()
        ours = torch_npu.npu_grouped_matmul
        torch_npu.npu_grouped_matmul = lambda *a, **k: ours(*a, **k)
        rih.uninstall()
        with torch.no_grad():
            call(torch_npu.npu_grouped_matmul)
        """,
        tmp_path,
    )
    assert "patched on top of rl_insight_hooks" in done.stderr


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.truth(
    scenario="torch.compile, fullgraph, three backends, watched", seam="torch_npu.npu_grouped_matmul",
    version="2.13.0", verdict="exact",
)  # fmt: skip
def test_compiled_watched(tmp_path, backend):
    run(
        f"""
        import torch_npu
        kernels()
        from torch import nn
        class Experts(nn.Module):
            def forward(self, x, counts):
                return torch_npu.npu_grouped_matmul([x], [torch.ones(4, 4, 6)], group_list=counts,
                    group_list_type=1, group_type=0, split_item=2)[0]
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.gate = nn.Linear(4, 4)
                self.experts = Experts()
                self.num_experts, self.top_k = 4, 1
            def forward(self, x, counts):
                return self.experts(x, counts) + self.experts(x, counts)
        model = nn.ModuleDict({{"layers": nn.ModuleList([Block(), Block()])}})
        rih.watch(model)
        def step(x, a, b):
            return model["layers"][0](x, a).sum() + model["layers"][1](x, b).sum()
        compiled = torch.compile(step, backend={backend!r}, fullgraph=True)
        x = torch.ones(10, 4)
        a, b = torch.tensor([1, 2, 3, 4]), torch.tensor([4, 0, 0, 6])
        want = step(x, a, b)
        rih.install()
        for n in (1, 2):
            with rih.record(root, step=n, role="r"), torch.no_grad():
                for _ in range(3):
                    got = compiled(x, a, b)
                    assert torch.equal(got, want)
        rih.flush()
        """,
        tmp_path,
    )
    for n in (1, 2):
        load = read(tmp_path, n, "r")
        assert counts_by_layer(load, "compiled") == [[3, 6, 9, 12], [12, 0, 0, 18]]
        assert [r.layer for r in load.records] == [0, 1]


@pytest.mark.truth(
    scenario="torch.compile without watch",
    seam="torch_npu.npu_grouped_matmul",
    version="2.13.0",
    verdict="marked",
)
def test_compiled_unwatched_says_so(tmp_path):
    run(
        """
        import torch_npu
        kernels()
        def step(x, a):
            return call(torch_npu.npu_grouped_matmul)[0].sum() + x
        compiled = torch.compile(lambda x: torch_npu.npu_grouped_matmul([x], [torch.ones(4, 4, 6)],
            group_list=torch.tensor([1, 2, 3, 4]), group_list_type=1, group_type=0, split_item=2)[0],
            backend="eager", fullgraph=True)
        with rih.record(root, step=1, role="r"), torch.no_grad():
            compiled(torch.ones(10, 4))
        rih.flush()
        """,
        tmp_path,
    )
    load = read(tmp_path, 1, "r")
    assert load.records == []
    assert any("watch(model)" in note for note in load.notes)

# SPDX-License-Identifier: Apache-2.0
"""MindSpeed's extension and its patch manager, in their shape: MindSpeed is on no package index.

``GMMFunction``, ``MindSpeedOpBuilder`` and the manager's two loops behave as master's do; the extension computes
on CPU and never calls torch_npu.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from fault_injection import Entries, Tracer, break_every_line
from tiny_run import counts_by_layer, read

import rl_insight_hooks

FIRST, SECOND = [1, 2, 3, 4], [4, 0, 0, 1]
HIDDEN, WIDTH = 6, 10
SEAM = "MindSpeed's C++ extension"


def per_expert(group_list, list_type):
    ends = torch.as_tensor(group_list).tolist()
    return ends if list_type else [b - a for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def extension(name):
    """A module as ``torch.utils.cpp_extension.load`` returns it."""
    module = ModuleType(name)

    def npu_gmm(x, weight, bias, group_list, group_type, group_list_type):
        parts = x[0].split(per_expert(group_list, group_list_type))
        return [torch.cat([part @ w for part, w in zip(parts, weight[0], strict=True)])]

    def npu_gmm_backward(grad, x, weight, group_list, group_list_type):
        counts = per_expert(group_list, group_list_type)
        grads, rows = grad[0].split(counts), x[0].split(counts)
        dx = torch.cat([g @ w.T for g, w in zip(grads, weight[0], strict=True)])
        return [dx], [torch.stack([r.T @ g for r, g in zip(rows, grads, strict=True)])], []

    def npu_gmm_backward_fusion(grad, weight, group_list, group_list_type):
        grads = grad[0].split(per_expert(group_list, group_list_type))
        return [torch.cat([g @ w.T for g, w in zip(grads, weight[0], strict=True)])], [], []

    module.npu_gmm, module.npu_gmm_backward = npu_gmm, npu_gmm_backward
    module.npu_gmm_backward_fusion = npu_gmm_backward_fusion
    return module


@pytest.fixture
def gmm(monkeypatch):
    """``mindspeed.ops.gmm`` and ``mindspeed.op_builder.builder``; nothing is loaded yet."""
    builder = ModuleType("mindspeed.op_builder.builder")

    class MindSpeedOpBuilder:
        _loaded_ops = {}  # noqa: RUF012 - as there

        def __init__(self, name):
            self.name = name

        def load(self, verbose=True):
            loaded = MindSpeedOpBuilder._loaded_ops
            if self.name not in loaded:
                loaded[self.name] = extension(self.name)
            return loaded[self.name]

    builder.MindSpeedOpBuilder = MindSpeedOpBuilder
    module = ModuleType("mindspeed.ops.gmm")

    class GMMFunction(torch.autograd.Function):
        builders = (MindSpeedOpBuilder("grouped_matmul"), MindSpeedOpBuilder("grouped_matmul_v2"))

        @staticmethod
        def forward(ctx, x, weight, group_list, list_type, fusion):
            built = GMMFunction.builders[list_type].load()
            out = built.npu_gmm([x], [weight], [], group_list, 0, list_type)
            ctx.save_for_backward(x, weight, group_list)
            ctx.list_type, ctx.fusion = list_type, fusion
            return out[0]

        @staticmethod
        def backward(ctx, grad):
            x, weight, group_list = ctx.saved_tensors
            built = GMMFunction.builders[ctx.list_type].load()
            if ctx.fusion:
                dx, _, _ = built.npu_gmm_backward_fusion(
                    [grad], [weight], group_list, ctx.list_type
                )
                return dx[0], torch.zeros_like(weight), None, None, None
            dx, dw, _ = built.npu_gmm_backward([grad], [x], [weight], group_list, ctx.list_type)
            return dx[0], dw[0], None, None, None

    def npu_gmm(x, weight, *, bias=None, group_list=None, group_type=0, gemm_fusion=False):
        return GMMFunction.apply(x, weight, group_list, 0, gemm_fusion)

    def npu_gmm_v2(x, weight, *, bias=None, group_list=None, group_type=0, gemm_fusion=False):
        return GMMFunction.apply(x, weight, group_list, 1, gemm_fusion)

    module.npu_gmm, module.npu_gmm_v2, module.GMMFunction = npu_gmm, npu_gmm_v2, GMMFunction
    for each in (ModuleType("mindspeed"), ModuleType("mindspeed.ops"), module, builder):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    return module


def weights():
    torch.manual_seed(0)
    up = torch.randn(4, HIDDEN, WIDTH, requires_grad=True)
    return up, torch.randn(4, WIDTH, HIDDEN, requires_grad=True)


def layer(gmm, counts, list_type, fusion=False):
    """One layer pass by ``mindspeed.ops.gmm``; returns output, input and weights."""
    group_list = torch.tensor(counts)
    group_list = group_list if list_type else group_list.cumsum(0)
    function = gmm.npu_gmm_v2 if list_type else gmm.npu_gmm
    x, (up, down) = torch.ones(sum(counts), HIDDEN, requires_grad=True), weights()
    mid = function(x, up, group_list=group_list, gemm_fusion=fusion)
    out = function(mid.relu(), down, group_list=group_list, gemm_fusion=fusion)
    return out, (x, up, down)


def direct(gmm, counts, list_type):
    """One layer pass by the loaded extension, as overlap schedules do."""
    group_list = torch.tensor(counts)
    group_list = group_list if list_type else group_list.cumsum(0)
    up, down = weights()
    built = gmm.GMMFunction.builders[list_type].load()
    with torch.no_grad():
        x = torch.ones(sum(counts), HIDDEN)
        mid = built.npu_gmm([x], [up], [], group_list, 0, list_type)[0]
        return built.npu_gmm([mid], [down], [], group_list, 0, list_type)[0]


@pytest.mark.parametrize("list_type", [0, 1], ids=["cumulative", "counts"])
@pytest.mark.truth(
    scenario="direct callers of the loaded extension, from its first call on", seam=SEAM,
    version="its shape", verdict="exact",
)  # fmt: skip
def test_direct_callers(rih, gmm, tmp_path, list_type):
    rih.install()
    with rih.record(tmp_path, step=1, role="r"):
        for counts in (FIRST, SECOND):  # the extension is loaded in the first
            direct(gmm, counts, list_type)
    rih.flush()
    load = read(tmp_path, 1, "r")
    assert counts_by_layer(load) == [FIRST, SECOND]
    name = "grouped_matmul_v2" if list_type else "grouped_matmul"
    assert {r.seam for r in load.records} == {f"mindspeed.{name}.npu_gmm"}
    assert load.failed == {}


@pytest.mark.truth(
    scenario="the extension loaded before the hooks came", seam=SEAM, version="its shape",
    verdict="exact",
)  # fmt: skip
def test_loaded_before_the_hooks(rih, gmm, tmp_path):
    built = gmm.GMMFunction.builders[1].load()
    original = built.npu_gmm
    with rih.record(tmp_path, step=1, role="r"):
        direct(gmm, FIRST, 1)
    rih.flush()
    assert counts_by_layer(read(tmp_path, 1, "r")) == [FIRST]
    rih.uninstall()
    assert built.npu_gmm is original


@pytest.mark.parametrize("list_type", [0, 1], ids=["cumulative", "counts"])
@pytest.mark.truth(
    scenario="mindspeed.ops.gmm over the extension: one pass, forward, dx and dw", seam=SEAM,
    version="its shape", verdict="exact",
)  # fmt: skip
def test_gradients(rih, gmm, tmp_path, list_type):
    bare, leaves = layer(gmm, FIRST, list_type)
    expected = torch.autograd.grad(bare.sum(), leaves)
    with rih.record(tmp_path, step=1, role="r"):
        out, leaves = layer(gmm, FIRST, list_type)
        grads = torch.autograd.grad(out.sum(), leaves)
    rih.flush()
    load = read(tmp_path, 1, "r")
    for phase in ("forward", "dx", "dw"):
        assert counts_by_layer(load, phase) == [FIRST], phase
    assert len({r.layer for r in load.records}) == 1  # backward belongs to its forward's layer
    assert torch.equal(out, bare)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
    assert load.failed == {}


@pytest.mark.truth(
    scenario="fused weight gradient (gemm_fusion): dx alone", seam=SEAM, version="its shape",
    verdict="exact",
)  # fmt: skip
def test_fused_weight_gradient(rih, gmm, tmp_path):
    with rih.record(tmp_path, step=1, role="r"):
        out, _ = layer(gmm, FIRST, 1, fusion=True)
        out.sum().backward()
    rih.flush()
    load = read(tmp_path, 1, "r")
    assert counts_by_layer(load) == counts_by_layer(load, "dx") == [FIRST]
    assert counts_by_layer(load, "dw") == []


def test_what_no_hook_can_take_is_named(rih, gmm, tmp_path):
    loaded = sys.modules["mindspeed.op_builder.builder"].MindSpeedOpBuilder._loaded_ops
    loaded["grouped_matmul"] = object()
    with rih.record(tmp_path, step=1, role="r"):
        pass
    rih.flush()
    load = read(tmp_path, 1, "r")
    assert load.records == []
    assert any("C++ extension grouped_matmul" in note for note in load.notes)


def remove_and_apply(module, name, ours_of_mindspeed, original):
    """``MindSpeedPatchesManager.remove_patches`` and ``apply_patches`` for one attribute."""
    for value in list(sys.modules.values()):  # hasattr fires lazy module attributes, as there
        if hasattr(value, name) and getattr(value, name) is ours_of_mindspeed:
            setattr(value, name, original)
    current = getattr(module, name)
    setattr(module, name, ours_of_mindspeed)
    for value in list(sys.modules.values()):
        if hasattr(value, name) and getattr(value, name) is current:
            setattr(value, name, ours_of_mindspeed)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.truth(
    scenario="repatch with the manager's loops over every module", seam="mindspeed.ops.gmm",
    version="its shape", verdict="exact",
)  # fmt: skip
def test_repatch(rih, gmm, tmp_path, monkeypatch):
    user = ModuleType("mindspeed.user")  # bound the name before us
    user.npu_gmm_v2 = mindspeeds = gmm.npu_gmm_v2
    monkeypatch.setitem(sys.modules, "mindspeed.user", user)
    rih.install()
    assert user.npu_gmm_v2 is gmm.npu_gmm_v2 is not mindspeeds
    remove_and_apply(gmm, "npu_gmm_v2", mindspeeds, original=None)
    assert gmm.npu_gmm_v2 is mindspeeds  # we are out
    with rih.record(tmp_path, step=1, role="r"):
        layer(gmm, FIRST, 1)
        gmm_of_user = ModuleType("mindspeed.gmm_of_user")
        gmm_of_user.npu_gmm_v2 = user.npu_gmm_v2
        layer(gmm_of_user, SECOND, 1)
    rih.flush()
    load = read(tmp_path, 1, "r")
    assert counts_by_layer(load) == [FIRST, SECOND]
    assert {r.seam for r in load.records} == {"mindspeed.ops.gmm.npu_gmm_v2"}


def test_no_replacement_is_taken_for_a_decorator(rih, gmm):
    """The manager treats functions named ``...wrapper`` or ``...decorator`` as decorators of the original."""
    rih.install()
    gmm.GMMFunction.builders[0].load()
    from rl_insight_hooks.session import get_session

    patches = get_session().installer.patcher.patches
    assert len(patches) >= 6
    for patch in patches:
        assert not patch.replacement.__name__.endswith(("wrapper", "decorator"))


@pytest.mark.parametrize("broken", ["on_group_list", "_on_dw", "_add_any", "_slot"])
@pytest.mark.parametrize("list_type", [0, 1])
def test_a_failure_of_ours_changes_nothing(rih, gmm, tmp_path, monkeypatch, broken, list_type):
    def step():
        up, down = weights()
        x = torch.linspace(-1, 1, sum(FIRST) * HIDDEN).reshape(-1, HIDDEN).requires_grad_()
        counts = torch.tensor(FIRST)
        group_list = counts if list_type else counts.cumsum(0)
        function = gmm.npu_gmm_v2 if list_type else gmm.npu_gmm
        out = function(function(x, up, group_list=group_list).tanh(), down, group_list=group_list)
        out.square().sum().backward()
        return out.detach(), x.grad, up.grad, down.grad

    alone = step()
    rih.install()
    from rl_insight_hooks.recorder import Recorder

    def raises(*args, **kwargs):
        raise RuntimeError("injected")

    monkeypatch.setattr(Recorder, broken, raises)
    with rih.record(tmp_path, step=1, role="r"):
        beside_us = step()
    rih.flush()
    for mine, theirs in zip(beside_us, alone, strict=True):
        assert torch.equal(mine, theirs)
    assert sum(read(tmp_path, 1, "r").failed.values()) > 0


INTEGRATION = Path(rl_insight_hooks.__file__).resolve().parents[1] / "integrations/mindspeed.py"
ENTRIES = Entries({INTEGRATION: {"load", "npu_gmm", "extension_function"}})


def test_outside_their_guards_the_hooks_only_call_the_host():
    assert ENTRIES.unguarded_calls() <= {"original", "is_compiling", "failed", "id", "add", "wraps"}


@pytest.mark.parametrize("list_type", [0, 1], ids=["cumulative", "counts"])
def test_an_exception_at_every_line_changes_no_bit(rih, gmm, tmp_path, list_type):
    builder = sys.modules["mindspeed.op_builder.builder"].MindSpeedOpBuilder
    step = 0

    def pass_of_each_kind():
        builder._loaded_ops.clear()
        out, leaves = layer(gmm, FIRST, list_type)
        out.square().sum().backward()
        fused, fused_leaves = layer(gmm, FIRST, list_type, fusion=True)
        fused.square().sum().backward()
        given = [out, fused, *(leaf.grad for leaf in (*leaves, *fused_leaves))]
        return [*given, direct(gmm, SECOND, list_type)]

    expected = pass_of_each_kind()

    def run(tracer):
        nonlocal step
        step += 1
        rih.uninstall()  # the extension is loaded anew, with its hook
        rih.install(["mindspeed"])
        with rih.record(tmp_path, step=step, role="r"), tracer:
            results = pass_of_each_kind()
        rih.flush()
        for ours, theirs in zip(results, expected, strict=True):
            assert torch.equal(ours, theirs)
        load = read(tmp_path, step, "r")
        assert sum(load.failed.values()) == tracer.raised
        if not tracer.raised:
            total = [2 * a + b for a, b in zip(FIRST, SECOND, strict=True)]
            forward = counts_by_layer(load)
            assert [sum(column) for column in zip(*forward, strict=True)] == total

    broken = break_every_line([INTEGRATION], ENTRIES, run)
    assert len(broken) > 25
    run(Tracer([INTEGRATION], ENTRIES))  # and afterwards it counts as if nothing had been

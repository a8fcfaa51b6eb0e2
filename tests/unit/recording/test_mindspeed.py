# SPDX-License-Identifier: Apache-2.0
"""MindSpeed's grouped matmuls, in the shape of its modules (it is on no package index)."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from tiny_run import counts_by_layer, read

COUNTS = [[1, 2, 3, 4], [4, 0, 0, 1]]


@pytest.fixture
def mindspeed(monkeypatch):
    """``mindspeed.ops.gmm`` whose functions do what the C++ extension does, and never call torch_npu."""
    top, ops, gmm = (
        ModuleType("mindspeed"),
        ModuleType("mindspeed.ops"),
        ModuleType("mindspeed.ops.gmm"),
    )
    builder = ModuleType("mindspeed.op_builder.builder")

    class MindSpeedOpBuilder:
        _loaded_ops = {}  # noqa: RUF012 - as there

    builder.MindSpeedOpBuilder = MindSpeedOpBuilder

    def product(x, weight, counts):
        parts = x.split([*counts, x.shape[0] - sum(counts)])
        return torch.cat([part @ w for part, w in zip(parts, weight, strict=False)])

    def npu_gmm(
        x,
        weight,
        *,
        bias=None,
        group_list=None,
        group_type=0,
        gemm_fusion=False,
        original_weight=None,
    ):
        cumulative = group_list.tolist()
        return product(
            x, weight, [b - a for a, b in zip([0, *cumulative[:-1]], cumulative, strict=True)]
        )

    def npu_gmm_v2(
        x,
        weight,
        *,
        bias=None,
        group_list=None,
        group_type=0,
        gemm_fusion=False,
        original_weight=None,
    ):
        return product(x, weight, group_list.tolist())

    gmm.npu_gmm, gmm.npu_gmm_v2 = npu_gmm, npu_gmm_v2
    for module in (top, ops, gmm, builder):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return gmm


def layer(function, counts, cumulative):
    group_list = torch.tensor(counts).cumsum(0) if cumulative else torch.tensor(counts)
    up, down = torch.ones(4, 6, 10), torch.ones(4, 10, 6)
    mid = function(torch.ones(sum(counts), 6), up, group_list=group_list)
    return function(mid, down, group_list=group_list)


@pytest.mark.parametrize("name", ["npu_gmm", "npu_gmm_v2"])
@pytest.mark.truth(
    scenario="MindSpeed's extension, cumulative and counts", seam="mindspeed.ops.gmm", version="its shape",
    verdict="exact",
)  # fmt: skip
def test_counts(rih, mindspeed, tmp_path, name):
    original = getattr(mindspeed, name)
    with rih.record(tmp_path, step=1, role="r"):
        for counts in COUNTS:
            layer(getattr(mindspeed, name), counts, cumulative=name == "npu_gmm")
    rih.flush()
    load = read(tmp_path, 1, "r")
    assert counts_by_layer(load) == COUNTS
    assert {r.seam for r in load.records} == {f"mindspeed.ops.gmm.{name}"}
    assert load.failed == {}
    rih.uninstall()
    assert getattr(mindspeed, name) is original


@pytest.mark.truth(
    scenario="MindSpeed's repatch sets the attribute anew", seam="mindspeed.ops.gmm", version="its shape",
    verdict="exact",
)  # fmt: skip
def test_repatch_does_not_lose_us(rih, mindspeed, tmp_path):
    original = mindspeed.npu_gmm_v2
    rih.install()
    mindspeed.npu_gmm_v2 = original  # as repatch does
    with rih.record(tmp_path, step=1, role="r"):
        layer(mindspeed.npu_gmm_v2, COUNTS[0], cumulative=False)
    rih.flush()
    assert counts_by_layer(read(tmp_path, 1, "r")) == COUNTS[:1]

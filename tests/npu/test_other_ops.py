# SPDX-License-Identifier: Apache-2.0
"""The rest of the grouped-matmul family: the real operators with kernels that return tensors of the right shape.

What is tested is where each operator takes its list, and what the list means; so a kernel need not compute.
"""

from __future__ import annotations

import pytest
import torch
from tiny_run import counts_by_layer, layer_pass, read

from rl_insight_hooks import guard

FIRST, SECOND = [1, 2, 3, 4], [4, 0, 0, 1]
HIDDEN, WIDTH = 4, 6
NUM_EXPERTS = len(FIRST)


def swiglu_quant(x, weight, group_list, weight_scale, x_scale, *, bias=None, offset=None):
    out = x.new_full((x.shape[0], weight.shape[-1] // 2), 3)
    return out, torch.ones(x.shape[0]), torch.ones(x.shape[0])


def swiglu_quant_v2(x, weight, weight_scale, x_scale, group_list, **options):
    out = x.new_full((x.shape[0], weight[0].shape[-1] // 2), 3)
    return out, torch.ones(x.shape[0])


def finalize_routing(x, w, group_list, **options):
    return x.new_full((x.shape[0], w.shape[-1]), 3.0)


def quant_dequant(x, quantized_weight, weight_scale, group_list, **options):
    return x.new_full((x.shape[0], quantized_weight.shape[-1]), 3.0)


def alltoallv_gmm(gmm_x, gmm_weight, hcom, ep_world_size, send_counts, recv_counts, **options):
    return gmm_x.new_full((sum(recv_counts), gmm_weight.shape[-1]), 3.0), gmm_x[:0], gmm_x[:0]


def alltoallv_quant_gmm(
    gmm_x, gmm_weight, x_scale, weight_scale, hcom, ep_world_size, send, recv, y_dtype, **options
):
    return gmm_x.new_full((sum(recv), gmm_weight.shape[-1]), 3.0), gmm_x[:0], gmm_x[:0]


def matmul_add(input, x, weight, group_list, **options):
    return input + 1


KERNELS = {
    "npu_grouped_matmul_swiglu_quant": swiglu_quant,
    "npu_grouped_matmul_swiglu_quant_v2": swiglu_quant_v2,
    "npu_grouped_matmul_finalize_routing": finalize_routing,
    "npu_quant_grouped_matmul_dequant": quant_dequant,
    "npu_alltoallv_gmm": alltoallv_gmm,
    "npu_alltoallv_quant_gmm": alltoallv_quant_gmm,
    "npu_grouped_matmul_add": matmul_add,
}


@pytest.fixture(scope="module", autouse=True)
def kernels(real_torch_npu):
    library = torch.library.Library("npu", "IMPL")
    for name, kernel in KERNELS.items():
        library.impl(name, kernel, "CPU")
    yield
    library._destroy()


@pytest.fixture
def rih(tmp_path):
    import rl_insight_hooks

    rl_insight_hooks.uninstall()
    rl_insight_hooks.install(["torch_npu"])
    yield rl_insight_hooks
    rl_insight_hooks.uninstall()


def cumulative(counts):
    return torch.tensor(counts).cumsum(0)


def x_of(counts):
    return torch.ones(sum(counts), HIDDEN)


WEIGHT = torch.ones(NUM_EXPERTS, HIDDEN, 2 * WIDTH)
ONES = torch.ones(1)


def call_swiglu_quant(npu, counts, by_name):
    function = npu.npu_grouped_matmul_swiglu_quant
    if by_name:
        return function(
            x=x_of(counts),
            weight=WEIGHT,
            group_list=cumulative(counts),
            weight_scale=ONES,
            x_scale=ONES,
        )
    return function(x_of(counts), WEIGHT, cumulative(counts), ONES, ONES)


def call_swiglu_quant_v2(npu, counts, by_name):
    function = npu.npu_grouped_matmul_swiglu_quant_v2
    if by_name:
        return function(
            x=x_of(counts), weight=[WEIGHT], weight_scale=[ONES], x_scale=ONES, group_list=torch.tensor(counts),
            group_list_type=1,
        )  # fmt: skip
    return function(x_of(counts), [WEIGHT], [ONES], ONES, cumulative(counts))


def call_finalize_routing(npu, counts, by_name):
    function = npu.npu_grouped_matmul_finalize_routing
    if by_name:
        return function(x=x_of(counts), w=WEIGHT, group_list=cumulative(counts), group_list_type=0)
    return function(x_of(counts), WEIGHT, torch.tensor(counts))  # counts are the default here


def call_quant_dequant(npu, counts, by_name):
    function = npu.npu_quant_grouped_matmul_dequant
    if by_name:
        return function(
            x=x_of(counts),
            quantized_weight=WEIGHT,
            weight_scale=ONES,
            group_list=cumulative(counts),
        )
    return function(x_of(counts), WEIGHT, ONES, cumulative(counts))


def received(counts):
    """From two ranks: the first sends ``counts[e] // 3`` tokens to local expert e, the second the rest."""
    return [n // 3 for n in counts] + [n - n // 3 for n in counts]


def call_alltoallv(npu, counts, by_name):
    send = [1] * 8
    if by_name:
        return npu.npu_alltoallv_gmm(
            gmm_x=x_of(send), gmm_weight=WEIGHT, hcom="g", ep_world_size=2, send_counts=send,
            recv_counts=received(counts),
        )  # fmt: skip
    return npu.npu_alltoallv_gmm(x_of(send), WEIGHT, "g", 2, send, received(counts))


def call_alltoallv_quant(npu, counts, by_name):
    send = [1] * 8
    if by_name:
        return npu.npu_alltoallv_quant_gmm(
            gmm_x=x_of(send), gmm_weight=WEIGHT, gmm_x_scale=ONES, gmm_weight_scale=ONES, hcom="g",
            ep_world_size=2, send_counts=send, recv_counts=received(counts), gmm_y_dtype=1,
        )  # fmt: skip
    return npu.npu_alltoallv_quant_gmm(
        x_of(send), WEIGHT, ONES, ONES, "g", 2, send, received(counts), 1
    )


CALLS = {
    "npu_grouped_matmul_swiglu_quant": call_swiglu_quant,
    "npu_grouped_matmul_swiglu_quant_v2": call_swiglu_quant_v2,
    "npu_grouped_matmul_finalize_routing": call_finalize_routing,
    "npu_quant_grouped_matmul_dequant": call_quant_dequant,
    "npu_alltoallv_gmm": call_alltoallv,
    "npu_alltoallv_quant_gmm": call_alltoallv_quant,
}


def flat(out):
    return list(out) if isinstance(out, (tuple, list)) else [out]


@pytest.mark.truth(
    scenario="quantised and all-to-all members of the family, positional and by name", seam="torch_npu",
    version="2.13.0 (kernels of the test)", verdict="exact",
)  # fmt: skip
@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_counts(rih, real_torch_npu, tmp_path, name, by_name):
    with rih.record(tmp_path, step=1, role="r"):
        for counts in (FIRST, SECOND):
            CALLS[name](real_torch_npu, counts, by_name)
    rih.flush()
    load = read(tmp_path, 1, "r")
    assert counts_by_layer(load) == [FIRST, SECOND]
    assert {record.seam for record in load.records} == {f"torch_npu.{name}"}
    assert load.failed == {}


@pytest.mark.parametrize("overload", ["packet of torch.ops", "default"])
def test_other_spellings(rih, real_torch_npu, tmp_path, overload):
    packet = (
        torch.ops.npu.npu_grouped_matmul_finalize_routing
        if overload == "packet of torch.ops"
        else real_torch_npu.npu_grouped_matmul_finalize_routing.default
    )
    with rih.record(tmp_path, step=1, role="r"):
        packet(x_of(FIRST), WEIGHT, torch.tensor(FIRST))
    rih.flush()
    assert counts_by_layer(read(tmp_path, 1, "r")) == [FIRST]


@pytest.mark.truth(
    scenario="swiglu_quant for w13 and grouped matmul for w2: one pass a layer", seam="torch_npu",
    version="2.13.0 (kernels of the test)", verdict="exact",
)  # fmt: skip
def test_w13_and_w2_are_one_pass(rih, real_torch_npu, tmp_path):
    with rih.record(tmp_path, step=1, role="r"):
        for counts in (FIRST, FIRST, SECOND):
            ends = cumulative(counts)
            mid, *_ = real_torch_npu.npu_grouped_matmul_swiglu_quant(
                x_of(counts), torch.ones(NUM_EXPERTS, HIDDEN, 2 * WIDTH), ends, ONES, ONES
            )
            real_torch_npu.npu_grouped_matmul(
                [mid], [torch.ones(NUM_EXPERTS, WIDTH, HIDDEN)], group_list=ends, group_list_type=0,
                group_type=0, split_item=2,
            )  # fmt: skip
    rih.flush()
    load = read(tmp_path, 1, "r")
    assert sum(record.num_passes for record in load.records) == 3
    assert counts_by_layer(load) == [FIRST, FIRST, SECOND]


def test_square_alltoallv_calls_are_layers_of_their_own(rih, real_torch_npu, tmp_path):
    """Rows and widths continue from call to call; there is still one call a layer."""
    square, send = torch.ones(NUM_EXPERTS, HIDDEN, HIDDEN), [1] * 8
    with rih.record(tmp_path, step=1, role="r"):
        for counts in (FIRST, FIRST[::-1]):
            real_torch_npu.npu_alltoallv_gmm(x_of(send), square, "g", 2, send, received(counts))
    rih.flush()
    assert sum(r.num_passes for r in read(tmp_path, 1, "r").records) == 2


def test_added_weight_gradients_are_dw(rih, real_torch_npu, tmp_path):
    with rih.record(tmp_path, step=1, role="r"):
        layer_pass(FIRST)
        real_torch_npu.npu_grouped_matmul_add(
            torch.zeros(NUM_EXPERTS, HIDDEN, HIDDEN), x_of(FIRST), x_of(FIRST), cumulative(FIRST)
        )
    rih.flush()
    found = {record.phase: record.counts for record in read(tmp_path, 1, "r").records}
    assert found == {"forward": FIRST, "dw": FIRST}


@pytest.mark.parametrize("name", CALLS)
def test_a_failure_of_ours_changes_nothing(rih, real_torch_npu, tmp_path, monkeypatch, name):
    alone = flat(CALLS[name](real_torch_npu, FIRST, False))

    def broken(*args, **kwargs):
        raise RuntimeError("injected")

    from rl_insight_hooks.session import get_session

    monkeypatch.setattr(type(get_session().recorder), "on_group_list", broken)
    with rih.record(tmp_path, step=1, role="r"):
        out = flat(CALLS[name](real_torch_npu, FIRST, False))
    rih.flush()
    for mine, theirs in zip(out, alone, strict=True):
        assert torch.equal(mine, theirs)
    assert read(tmp_path, 1, "r").failed == {f"torch_npu.{name}": 1}
    assert guard.take_failures() == {}


@pytest.mark.parametrize("name", CALLS)
def test_errors_of_the_host_pass_through(rih, real_torch_npu, tmp_path, name):
    with rih.record(tmp_path, step=1, role="r"), pytest.raises((TypeError, RuntimeError)):
        getattr(real_torch_npu, name)()
    rih.flush()
    load = read(tmp_path, 1, "r")
    assert (load.records, load.failed) == ([], {})

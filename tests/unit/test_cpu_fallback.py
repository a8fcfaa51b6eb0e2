# SPDX-License-Identifier: Apache-2.0
"""The grouped matmul on CPU equals a plain loop over experts, values and gradients."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_insight_hooks import cpu_fallback

FEW = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
counts_strategy = st.lists(st.integers(0, 5), min_size=1, max_size=6)  # empty experts included


def as_group_list(counts, form):
    """Return (group_list, group_list_type) of ``counts`` in one of its forms."""
    cumulative = [sum(counts[: e + 1]) for e in range(len(counts))]
    if form == "cumulative":
        return torch.tensor(cumulative), 0
    if form == "counts":
        return torch.tensor(counts), 1
    if form == "pairs":
        used = [[e, n] for e, n in enumerate(counts) if n]
        return torch.tensor(used + [[0, 0]] * (len(counts) - len(used))), 2
    return cumulative, 0  # a list of ints


def rows_of(counts):
    """Yield (expert, first row, row behind the last)."""
    start = 0
    for expert, num in enumerate(counts):
        yield expert, start, start + num
        start += num


def plain_loop(x, weight, counts, bias=None):
    """out[t] = x[t] @ weight[e of t], one row after the other."""
    out = torch.zeros(x.shape[0], weight.shape[-1])
    for expert, first, last in rows_of(counts):
        for t in range(first, last):
            out[t] = x[t] @ weight[expert]
            if bias is not None:
                out[t] = out[t] + bias[expert]
    return out


def assert_close(ours, truth):
    torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-5)


FORMS = ["cumulative", "counts", "pairs", "list"]


@FEW
@given(
    counts=counts_strategy,
    form=st.sampled_from(FORMS),
    stacked=st.booleans(),
    as_tuple=st.booleans(),
    transposed=st.booleans(),
    tail=st.integers(0, 3),
    with_bias=st.booleans(),
    split_item=st.sampled_from([0, 2, 3]),
)
def test_forward_equals_a_plain_loop(
    npu, counts, form, stacked, as_tuple, transposed, tail, with_bias, split_item
):
    torch.manual_seed(len(counts))
    num_experts, hidden, width = len(counts), 4, 3
    x = torch.randn(sum(counts) + tail, hidden)
    weight = torch.randn(num_experts, width, hidden).transpose(1, 2)
    if not transposed:
        weight = weight.contiguous()
    bias = torch.randn(num_experts, width) if with_bias else None
    group_list, list_type = as_group_list(counts, form)
    sequence = tuple if as_tuple else list
    out = npu.npu_grouped_matmul(
        sequence([x]),
        sequence([weight] if stacked else weight.unbind(0)),
        bias=None if bias is None else ([bias] if stacked else list(bias.unbind(0))),
        group_list=group_list,
        group_list_type=list_type,
        group_type=0,
        split_item=split_item,
    )
    truth = plain_loop(x, weight, counts, bias)
    if split_item == 0:
        assert len(out) == num_experts
        for expert, first, last in rows_of(counts):
            assert_close(out[expert], truth[first:last])
    else:
        assert len(out) == 1
        assert_close(out[0], truth)


@FEW
@given(counts=counts_strategy, form=st.sampled_from(FORMS), split_item=st.sampled_from([0, 2, 3]))
def test_weight_gradient_call_equals_a_plain_loop(npu, counts, form, split_item):
    torch.manual_seed(len(counts))
    num_rows, hidden, width = sum(counts), 4, 3
    x, grad = torch.randn(hidden, num_rows), torch.randn(num_rows, width)
    group_list, list_type = as_group_list(counts, form)
    out = npu.npu_grouped_matmul(
        [x],
        [grad],
        group_list=group_list,
        group_list_type=list_type,
        group_type=2,
        split_item=split_item,
    )
    truth = torch.zeros(len(counts), hidden, width)
    for expert, first, last in rows_of(counts):
        for t in range(first, last):
            truth[expert] += torch.outer(x[:, t], grad[t])
    got = torch.stack(list(out)) if split_item == 0 else out[0]
    assert_close(got, truth)


@FEW
@given(
    counts=counts_strategy,
    form=st.sampled_from(FORMS),
    stacked=st.booleans(),
    tail=st.integers(0, 2),
    with_bias=st.booleans(),
)
def test_gradients_equal_those_of_a_plain_loop(npu, counts, form, stacked, tail, with_bias):
    torch.manual_seed(len(counts))
    num_experts, hidden, width = len(counts), 4, 3
    tensors = [torch.randn(sum(counts) + tail, hidden), torch.randn(num_experts, hidden, width)]
    if with_bias:
        tensors.append(torch.randn(num_experts, width))
    ours = [t.clone().requires_grad_() for t in tensors]
    theirs = [t.clone().requires_grad_() for t in tensors]
    x, weight, *bias = ours
    group_list, list_type = as_group_list(counts, form)
    out = npu.npu_grouped_matmul(
        [x],
        [weight] if stacked else list(weight.unbind(0)),
        bias=[bias[0]] if bias and stacked else list(bias[0].unbind(0)) if bias else None,
        group_list=group_list,
        group_list_type=list_type,
        group_type=0,
        split_item=2,
    )[0]
    truth = plain_loop(theirs[0], theirs[1], counts, theirs[2] if bias else None)
    assert_close(out, truth)
    factor = torch.randn_like(truth)
    if not truth.requires_grad:  # no row goes to any expert
        return
    (out * factor).sum().backward()
    (truth * factor).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        zero = torch.zeros_like(other)
        assert_close(
            mine.grad if mine.grad is not None else zero,
            other.grad if other.grad is not None else zero,
        )


def test_without_group_list_one_weight_an_x(npu):
    xs = [torch.randn(n, 4) for n in (2, 0, 3)]
    weights = [torch.randn(4, 5) for _ in xs]
    outs = npu.npu_grouped_matmul(xs, weights, split_item=0, group_type=-1)
    for out, x, weight in zip(outs, xs, weights, strict=True):
        assert_close(out, x @ weight)


BAD_CALLS = {
    "more rows named than there are": ({"group_list": [2, 9]}, "names 9 rows, x has 4"),
    "wrong number of groups": ({"group_list": [1, 2, 4]}, "3 groups, weight has 2 experts"),
    "decreasing list": ({"group_list": [3, 2]}, "decreases at expert 1"),
    "unknown type": (
        {"group_list": torch.tensor([2, 2]), "group_list_type": 7},
        "group_list_type 7 is unknown",
    ),
    "unknown group_type": ({"group_list": [2, 4], "group_type": 1}, "group_type 1 is not"),
    "quantised": ({"group_list": [2, 4], "scale": [torch.ones(1)]}, "no scale"),
    "act_type": ({"group_list": [2, 4], "act_type": 3}, "act_type 0 only, not 3"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls_say_what_is_wrong(npu, case):
    options, message = BAD_CALLS[case]
    options = {"split_item": 2, "group_type": 0, **options}
    with pytest.raises(ValueError, match=message):
        npu.npu_grouped_matmul([torch.ones(4, 3)], [torch.ones(2, 3, 5)], **options)


def test_a_weight_gradient_call_needs_a_group_list(npu):
    with pytest.raises(ValueError, match="group_type 2 takes"):
        npu.npu_grouped_matmul([torch.ones(3, 4)], [torch.ones(4, 5)], group_type=2)


def test_register_and_unregister_twice(npu):
    def call():
        return npu.npu_grouped_matmul(
            [torch.ones(2, 3)], [torch.ones(1, 3, 4)], group_list=[2], split_item=2, group_type=0
        )[0]

    try:
        cpu_fallback.register_cpu_kernels()
        cpu_fallback.register_cpu_kernels()
        assert call().sum() == 24
        cpu_fallback.unregister_cpu_kernels()
        cpu_fallback.unregister_cpu_kernels()
        with pytest.raises(NotImplementedError):
            call()
    finally:
        cpu_fallback.register_cpu_kernels()
    assert call().sum() == 24


def test_stand_in_comes_and_goes(npu):
    if not npu.__version__.endswith("stand_in"):
        pytest.skip("the real torch_npu is imported")
    assert cpu_fallback.install_stand_in() is npu
    cpu_fallback.uninstall_stand_in()
    assert "torch_npu" not in sys.modules
    cpu_fallback.uninstall_stand_in()
    assert cpu_fallback.install_stand_in() is npu


def test_swiglu_backward_is_the_gradient(npu):
    x = torch.randn(5, 8, requires_grad=True)
    grad = torch.randn(5, 4)
    gate, up = x[:, :4], x[:, 4:]
    (truth,) = torch.autograd.grad(gate * torch.sigmoid(gate) * up, x, grad)
    assert_close(npu.npu_swiglu(x.detach()), (gate * torch.sigmoid(gate) * up).detach())
    assert_close(npu.npu_swiglu_backward(grad, x.detach()), truth)


def test_permute_and_unpermute_go_there_and_back(npu):
    tokens = torch.randn(6, 3)
    ids = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0], [1, 2]])
    probs = torch.full((6, 2), 0.5)
    rows, where = npu.npu_moe_token_permute(tokens, ids)
    by_expert = [tokens[t] for e in range(3) for t in range(6) for k in range(2) if ids[t, k] == e]
    assert torch.equal(rows, torch.stack(by_expert))
    assert_close(npu.npu_moe_token_unpermute(rows, where, probs=probs), tokens)

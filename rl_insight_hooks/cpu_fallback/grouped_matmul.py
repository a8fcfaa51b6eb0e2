# SPDX-License-Identifier: Apache-2.0
"""Grouped matmul as a loop over experts, and its gradients. Plain torch, no dispatcher.

Shapes: T rows, K inner width, N output width, E experts. Semantics are those of the CANN operator as the
torch_npu schema states it:

* ``group_type`` 0 (M axis): x [T, K], weight [E, K, N] (or E of [K, N]); group e holds the next counts[e] rows;
  out [T, N]. Rows behind the last group are padding: zero here, undefined on the device.
* ``group_type`` 2 (K axis, dW): x [K, T], weight [T, N]; out[e] = x[:, rows of e] @ weight[rows of e]: [E, K, N].
* -1, or no group_list: one weight an x.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl_insight_hooks.group_list import WEIGHT_GROUP_TYPE, counts_of

Tensors = Sequence[torch.Tensor]


def counts_list(
    group_list: torch.Tensor | Sequence[int] | None, group_list_type: int | None, num_experts: int
) -> list[int]:
    """Return tokens per expert as ints; a list of ints is cumulative whatever the type says."""
    if isinstance(group_list, torch.Tensor):
        counts = counts_of(group_list.tolist(), group_list_type or 0, num_experts)
    else:
        counts = counts_of(list(group_list or ()), 0, num_experts)
    return [int(count) for count in counts]


def grouped_matmul(
    x: Tensors,
    weight: Tensors,
    *,
    bias: Tensors | None = None,
    group_list: torch.Tensor | Sequence[int] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
) -> list[torch.Tensor]:
    """Return the products as the operator does: one tensor for split_item 2 and 3, else one a group.

    Raises:
        ValueError: shapes or the group_list do not fit.
    """
    if group_type not in (None, -1, 0, 2):
        raise ValueError(f"group_type {group_type} is not supported; use -1, 0 or 2")
    if group_type == WEIGHT_GROUP_TYPE:
        outs = _along_k(x, weight, group_list, group_list_type)
        return [torch.stack(outs)] if split_item in (2, 3) else outs
    if group_list is None or group_type == -1:
        outs = [part @ _of_expert(weight, e) for e, part in enumerate(x)]
    elif len(x) == 1:
        num_experts = (
            weight[0].shape[0] if len(weight) == 1 and weight[0].dim() == 3 else len(weight)
        )
        counts = counts_list(group_list, group_list_type, num_experts)
        if len(counts) != num_experts:
            raise ValueError(
                f"group_list has {len(counts)} groups, weight has {num_experts} experts"
            )
        num_rows = x[0].shape[0]
        if sum(counts) > num_rows:
            raise ValueError(f"group_list names {sum(counts)} rows, x has {num_rows}")
        groups = x[0].split([*counts, num_rows - sum(counts)])[:num_experts]
        outs = [part @ _of_expert(weight, e) for e, part in enumerate(groups)]
        outs = [
            out if bias is None else out + _of_expert(bias, e, dim=1) for e, out in enumerate(outs)
        ]
        if split_item in (2, 3):
            tail = x[0].new_zeros(num_rows - sum(counts), _of_expert(weight, 0).shape[-1])
            return [torch.cat([*outs, tail])]
        return outs
    else:
        outs = [part @ _of_expert(weight, e) for e, part in enumerate(x)]
    outs = [out if bias is None else out + _of_expert(bias, e, dim=1) for e, out in enumerate(outs)]
    return [torch.cat(outs)] if split_item in (2, 3) else outs


def _along_k(
    x: Tensors,
    weight: Tensors,
    group_list: torch.Tensor | Sequence[int] | None,
    group_list_type: int | None,
) -> list[torch.Tensor]:
    if group_list is None or len(x) != 1 or len(weight) != 1:
        raise ValueError("group_type 2 takes one x [K, T], one weight [T, N] and a group_list")
    length = group_list.shape[0] if isinstance(group_list, torch.Tensor) else len(group_list)
    counts = counts_list(group_list, group_list_type, length)
    outs, start = [], 0
    for count in counts:
        outs.append(x[0][:, start : start + count] @ weight[0][start : start + count])
        start += count
    return outs


def _of_expert(parts: Tensors, expert: int, *, dim: int = 2) -> torch.Tensor:
    """Return the [K, N] of one expert, or its bias [N] with ``dim`` 1, from one stacked tensor or a list."""
    stacked = len(parts) == 1 and parts[0].dim() == dim + 1
    return parts[0][expert] if stacked else parts[expert]


def grouped_matmul_shapes(
    x: Tensors,
    weight: Tensors,
    *,
    group_list_len: int | None,
    split_item: int | None,
    group_type: int | None,
) -> list[torch.Tensor]:
    """Return empty outputs of the right shapes: the operator on meta and fake tensors."""
    if group_type == WEIGHT_GROUP_TYPE:
        num_experts = group_list_len or 0
        stacked = x[0].new_empty(num_experts, x[0].shape[0], weight[0].shape[-1])
        return [stacked] if split_item in (2, 3) else list(stacked.unbind(0))
    if len(x) == 1 and split_item in (2, 3):
        return [x[0].new_empty(x[0].shape[0], weight[0].shape[-1])]
    outs = [
        part.new_empty(part.shape[0], weight[min(e, len(weight) - 1)].shape[-1])
        for e, part in enumerate(x)
    ]
    return [torch.cat(outs)] if split_item in (2, 3) else outs

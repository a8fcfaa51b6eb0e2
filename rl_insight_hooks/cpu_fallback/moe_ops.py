# SPDX-License-Identifier: Apache-2.0
"""The few npu operators around grouped matmul, in differentiable torch.

Semantics as in the torch_npu documentation of each operator; what a Python kernel leaves out is said there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """npu_swiglu: silu of the first half times the second half."""
    gate, up = x.chunk(2, dim)
    return F.silu(gate) * up


def swiglu_backward(grad: torch.Tensor, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """npu_swiglu_backward."""
    gate, up = x.chunk(2, dim)
    sigmoid = torch.sigmoid(gate)
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([grad_gate, grad * gate * sigmoid], dim)


def rms_norm(
    x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """npu_rms_norm: (x / rms * gamma, 1 / rms) over the last axis, in float32."""
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
    return ((x.float() * rstd).to(x.dtype) * gamma).to(x.dtype), rstd


def rotary_mul(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    """npu_rotary_mul, mode "half"."""
    if rotary_mode != "half" or rotate is not None:
        raise ValueError(
            f"npu_rotary_mul on CPU knows rotary_mode 'half' only, not {rotary_mode!r}"
        )
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def token_permute(
    tokens: torch.Tensor,
    indices: torch.Tensor,
    num_out_tokens: int | None = None,
    padded_mode: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """npu_moe_token_permute: rows of ``tokens`` [T, H] sorted by expert, and where each (t, k) went [T * K]."""
    if padded_mode:
        raise ValueError("npu_moe_token_permute on CPU has no padded_mode")
    top_k = 1 if indices.dim() == 1 else indices.shape[1]
    order = torch.argsort(indices.reshape(-1), stable=True)
    where = torch.argsort(order, stable=True).to(torch.int32)
    kept = order if not num_out_tokens else order[:num_out_tokens]
    return tokens.index_select(0, kept // top_k), where


def token_unpermute(
    permuted: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> torch.Tensor:
    """npu_moe_token_unpermute: back to token order [T, H], weighted by ``probs`` [T, K] and summed over K."""
    if padded_mode:
        raise ValueError("npu_moe_token_unpermute on CPU has no padded_mode")
    top_k = 1 if probs is None else probs.shape[1]
    where = sorted_indices.long()
    inside = where < permuted.shape[0]  # rows that were dropped by num_out_tokens count as zero
    rows = permuted.index_select(0, where.clamp(max=permuted.shape[0] - 1)) * inside.unsqueeze(-1)
    rows = rows.reshape(-1, top_k, permuted.shape[-1])
    if probs is not None:
        rows = rows * probs.unsqueeze(-1).to(rows.dtype)
    return rows.sum(1).to(permuted.dtype)


def gating_top_k_softmax(
    x: torch.Tensor, finished: torch.Tensor | None = None, k: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """npu_moe_gating_top_k_softmax: (weights [T, k], expert ids [T, k], row ids [T, k])."""
    weights, ids = x.float().softmax(-1).topk(k, -1)
    if finished is not None:
        ids = ids.masked_fill(finished.bool().unsqueeze(-1), x.shape[-1])
    num_rows = x.shape[0]
    rows = torch.arange(num_rows * k, device=x.device).reshape(k, num_rows).t()
    return weights.to(x.dtype), ids.to(torch.int32), rows.to(torch.int32)

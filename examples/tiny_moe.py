# SPDX-License-Identifier: Apache-2.0
"""A tiny MoE language model whose router has favourites, on torch_npu's grouped matmul.

Shapes: T tokens, H hidden, F expert width, E experts, K experts per token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class GroupedExperts(nn.Module):
    """E gated experts; gate, up and down are one grouped matmul each, as in verl's patch of Qwen3-MoE."""

    def __init__(self, num_experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_EHF = nn.Parameter(torch.randn(num_experts, hidden, width) / hidden**0.5)
        self.up_EHF = nn.Parameter(torch.randn(num_experts, hidden, width) / hidden**0.5)
        self.down_EFH = nn.Parameter(torch.randn(num_experts, width, hidden) / width**0.5)

    def forward(self, x_TH: torch.Tensor, tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        import torch_npu

        def grouped(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return torch_npu.npu_grouped_matmul(
                [x],
                [weight],
                group_list=tokens_per_expert_E,
                group_list_type=1,
                group_type=0,
                split_item=2,
            )[0]

        hidden_TF = F.silu(grouped(x_TH, self.gate_EHF)) * grouped(x_TH, self.up_EHF)
        return grouped(hidden_TF, self.down_EFH)


class MoeBlock(nn.Module):
    """Router and experts. ``skew`` makes some experts favourites."""

    def __init__(self, num_experts: int, top_k: int, hidden: int, width: int, skew: float) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.gate = nn.Linear(hidden, num_experts)
        self.experts = GroupedExperts(num_experts, hidden, width)
        with torch.no_grad():
            rank_E = torch.randperm(num_experts).float() + 1
            self.gate.bias.copy_(-skew * rank_E.log())
            self.gate.weight.mul_(4)  # so that tokens differ in what they like

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        weight_TK, expert_TK = self.gate(x_TH).softmax(-1).topk(self.top_k, -1)
        order = expert_TK.flatten().argsort(stable=True)
        tokens_per_expert_E = torch.bincount(expert_TK.flatten(), minlength=self.num_experts)
        rows = self.experts(x_TH[order // self.top_k], tokens_per_expert_E)
        out_TH = torch.zeros_like(x_TH)
        return out_TH.index_add(0, order // self.top_k, rows * weight_TK.flatten()[order, None])


class DecoderLayer(nn.Module):
    """A residual MoE block; stands for a decoder layer without its attention."""

    def __init__(self, mlp: nn.Module, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.mlp = mlp

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        return x_TH + self.mlp(self.norm(x_TH))


class TinyMoe(nn.Module):
    """Embedding, ``num_layers`` decoder layers (the first one dense, as in DeepSeek-V3), output head."""

    def __init__(
        self,
        *,
        vocab: int = 256,
        hidden: int = 64,
        width: int = 32,
        num_layers: int = 7,
        num_experts: int = 32,
        top_k: int = 4,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        dense = nn.Sequential(nn.Linear(hidden, width), nn.SiLU(), nn.Linear(width, hidden))
        self.layers = nn.ModuleList([DecoderLayer(dense, hidden)])
        for layer in range(1, num_layers):
            skew = 0.2 + 0.8 * layer / num_layers  # deeper layers are more skewed
            self.layers.append(
                DecoderLayer(MoeBlock(num_experts, top_k, hidden, width, skew), hidden)
            )
        self.head = nn.Linear(hidden, vocab)
        self.checkpointing = checkpointing

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x_TH = self.embed(ids.flatten())
        for layer in self.layers:
            if self.checkpointing and torch.is_grad_enabled():
                x_TH = checkpoint(layer, x_TH, use_reentrant=False)
            else:
                x_TH = layer(x_TH)
        return self.head(x_TH)

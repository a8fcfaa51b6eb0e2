# SPDX-License-Identifier: Apache-2.0
"""Models that call the real operators, each in the way of a real caller; and the routers' own counts."""

from __future__ import annotations

import threading

import torch
import torch_npu
from torch import nn
from torch.utils.checkpoint import checkpoint

NUM_LAYERS, NUM_EXPERTS, TOP_K, HIDDEN, WIDTH, VOCABULARY = 4, 8, 2, 32, 16, 64


_histc = torch.histc


def histc_of_ints(values, bins, min, max):
    """The NPU counts ints, which torch's CPU kernel of histc refuses."""
    if values.is_floating_point():
        return _histc(values, bins, min, max)
    return torch.bincount(values.flatten(), minlength=bins)


def qwen3_moe(seed=0):
    """Qwen3-MoE of transformers with verl's npu_patch forward and gates that have favourites."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.models.qwen3_moe import modeling_qwen3_moe
    from verl.models.transformers import npu_patch

    modeling_qwen3_moe.Qwen3MoeSparseMoeBlock.forward = (
        npu_patch.qwen3_moe_sparse_moe_block_forward_npu
    )
    torch.histc = histc_of_ints
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=WIDTH,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=128,
        use_cache=False,
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.mul_(30)
            layer.mlp.gate.weight[:3].add_(0.5 * torch.randn(3, HIDDEN))
    return model


class CallersMoe(nn.Module):
    """A stack of MoE blocks whose experts call the operator in the way ``style`` names.

    verl: gate, up, down; one group_list object a layer, counts.
    cumulative: the same with cumulative lists (the operator's default type).
    pairs: sparse (expert, count) rows. list: Python ints (the List overload).
    te: MindSpeed's TE grouped linear: a tuple of 2-D weights, a new tensor every call, two calls.
    padded: as verl, with padding rows behind the last group.
    """

    def __init__(self, style, *, dense_first=False):
        super().__init__()
        torch.manual_seed(1)
        blocks = [Block(style) for _ in range(NUM_LAYERS)]
        if dense_first:
            blocks[0] = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(blocks)
        self.checkpointing = None

    def forward(self, x_TH):
        for layer in self.layers:
            if self.checkpointing is None or not torch.is_grad_enabled():
                x_TH = x_TH + layer(x_TH)
            else:
                x_TH = x_TH + checkpoint(
                    layer, x_TH, use_reentrant=self.checkpointing == "reentrant"
                )
        return x_TH


class Block(nn.Module):
    def __init__(self, style):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, NUM_EXPERTS)
        nn.init.normal_(self.gate.bias, std=1.5)
        self.num_experts, self.top_k = NUM_EXPERTS, TOP_K
        self.experts = Experts(style)

    def forward(self, x_TH):
        weight_TK, expert_TK = self.gate(x_TH).softmax(-1).topk(TOP_K, -1)
        order = expert_TK.flatten().argsort(stable=True)
        counts_E = torch.bincount(expert_TK.flatten(), minlength=NUM_EXPERTS)
        rows = self.experts(x_TH[order // TOP_K], counts_E)
        return torch.zeros_like(x_TH).index_add(
            0, order // TOP_K, rows * weight_TK.flatten()[order, None]
        )


class Experts(nn.Module):
    def __init__(self, style):
        super().__init__()
        self.style = style
        self.gate_EHF = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, WIDTH) * 0.2)
        self.up_EHF = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, WIDTH) * 0.2)
        self.down_EFH = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, HIDDEN) * 0.2)

    def forward(self, rows, counts_E):
        if self.style == "te":
            both = torch.cat([self.gate_EHF, self.up_EHF], -1)
            gate, up = TeGroupedMatmul.apply(rows, counts_E.tolist(), *both.unbind(0)).chunk(2, -1)
            mid = nn.functional.silu(gate) * up
            return TeGroupedMatmul.apply(mid, counts_E.tolist(), *self.down_EFH.unbind(0))
        num_rows = rows.shape[0]
        if self.style == "padded":
            rows = torch.cat([rows, rows.new_zeros(5, HIDDEN)])
        group_list, list_type = grouped(counts_E, self.style)
        mid = nn.functional.silu(Gmm.apply(rows, self.gate_EHF, group_list, list_type))
        mid = mid * Gmm.apply(rows, self.up_EHF, group_list, list_type)
        return Gmm.apply(mid, self.down_EFH, group_list, list_type)[:num_rows]


def grouped(counts_E, style):
    if style == "cumulative":
        return counts_E.cumsum(0), None
    if style == "pairs":
        used = counts_E.nonzero().flatten()
        pairs = torch.zeros(NUM_EXPERTS, 2, dtype=torch.int64)
        pairs[: used.numel(), 0], pairs[: used.numel(), 1] = used, counts_E[used]
        return pairs, 2
    if style == "list":
        return counts_E.cumsum(0).tolist(), None
    return counts_E, 1


class Gmm(torch.autograd.Function):
    """A grouped matmul as training code wraps it: forward, dX and dW are calls of the operator."""

    @staticmethod
    def forward(ctx, x, weight, group_list, list_type):
        ctx.save_for_backward(x, weight)
        ctx.group_list = group_list
        ctx.options = {} if list_type is None else {"group_list_type": list_type}
        return torch_npu.npu_grouped_matmul(
            [x], [weight], group_list=group_list, split_item=2, group_type=0, **ctx.options
        )[0]

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        options = dict(group_list=ctx.group_list, **ctx.options)
        dx = torch_npu.npu_grouped_matmul(
            [grad], [weight.mT], split_item=2, group_type=0, **options
        )[0]
        dw = torch_npu.npu_grouped_matmul([x.t()], [grad], split_item=3, group_type=2, **options)[0]
        return dx, dw, None, None


class TeGroupedMatmul(torch.autograd.Function):
    """The same in the shape of MindSpeed's TE grouped linear: weights as a tuple, a new list every call."""

    @staticmethod
    def forward(ctx, x, splits, *weights):
        ctx.save_for_backward(x, *weights)
        ctx.splits = splits
        return TeGroupedMatmul.call([x], weights, splits, split_item=2, group_type=0)

    @staticmethod
    def backward(ctx, grad):
        x, *weights = ctx.saved_tensors
        turned = tuple(w.t() for w in weights)
        dx = TeGroupedMatmul.call([grad], turned, ctx.splits, split_item=2, group_type=0)
        dw = TeGroupedMatmul.call([x.t()], [grad], ctx.splits, split_item=3, group_type=2)
        return dx, None, *dw.unbind(0)

    @staticmethod
    def call(x, weights, splits, **options):
        group_list = torch.tensor(splits, dtype=torch.int64)
        return torch_npu.npu_grouped_matmul(
            x, weights, group_list=group_list, group_list_type=1, **options
        )[0]


class RouterTruth:
    """Tokens per expert that the routers chose: [phase][layer][expert], by a plain loop."""

    def __init__(self, model):
        gates = [module for name, module in model.named_modules() if name.endswith(".gate")]
        self.num_layers = len(gates)
        self.backward_runs = False
        self.reset()
        for layer, gate in enumerate(gates):
            gate.register_forward_hook(self._count(layer))

    def reset(self):
        self.counts = {
            phase: [[0] * NUM_EXPERTS for _ in range(self.num_layers)]
            for phase in ("forward", "recompute")
        }

    def _count(self, layer):
        def count(gate, args, output):
            logits = output[0] if isinstance(output, tuple) else output
            row = self.counts["recompute" if self.backward_runs else "forward"][layer]
            for token in (
                logits.detach().float().topk(TOP_K, -1).indices.reshape(-1, TOP_K).tolist()
            ):
                for expert in token:
                    row[expert] += 1

        return count

    def backward(self, loss, *, own_thread=False):
        """Run the backward pass; on a thread of its own as the engine of an accelerator does."""
        self.backward_runs = True
        try:
            if own_thread:
                errors = []

                def run():
                    try:
                        loss.backward()
                    except BaseException as error:
                        errors.append(error)

                thread = threading.Thread(target=run)
                thread.start()
                thread.join()
                assert not errors, errors
            else:
                loss.backward()
        finally:
            self.backward_runs = False

# SPDX-License-Identifier: Apache-2.0
"""A tiny Qwen3-MoE with a tokenizer, on disk: two MoE layers, eight experts, two a token."""

from __future__ import annotations

import subprocess
import sys

NUM_LAYERS, NUM_EXPERTS, TOP_K, VOCABULARY = 2, 8, 2, 64


def save(path):
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=16,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="w0", bos_token="w1", eos_token="w2", unk_token="w0"
    ).save_pretrained(path)


def save_in_process(path, env):
    """Save it by the transformers of ``env``; return ``path``."""
    code = "import sys, tiny_model; tiny_model.save(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, path], env=env, check=True, capture_output=True)
    return path

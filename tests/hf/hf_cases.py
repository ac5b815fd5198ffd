"""Small models of Transformers' own, and small native ones."""

import torch
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

import cosformer.hf as hf

VOCABULARY = 100
NAMES = ("cosformer", "cosformer-multiscale")
"""What `attn_implementation` may be."""
HYBRID = "cosformer-gated*3 softmax cosformer-gated*2"
NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": VOCABULARY, **NO_TOKENS}


def gpt2(name, **given):
    config = GPT2Config(n_head=2, n_positions=64, attn_pdrop=0.0, **SMALL, **given)
    return _made(GPT2LMHeadModel, config, name)


def opt(name):
    wide = {"word_embed_proj_dim": 32, "ffn_dim": 40, "max_position_embeddings": 64}
    return _made(OPTForCausalLM, OPTConfig(num_attention_heads=2, **wide, **SMALL), name)


def bert(name):
    heads = {"num_attention_heads": 2, "intermediate_size": 40}
    return _made(BertModel, BertConfig(**heads, **SMALL), name)


def llama(name, **given):
    """Four heads of queries in two groups."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40}
    config = LlamaConfig(max_position_embeddings=64, **heads, **SMALL, **given)
    return _made(LlamaForCausalLM, config, name)


def native(kind=hf.CosformerForCausalLM, mechanism="cosformer-gated softmax", **given):
    """A native model in evaluation mode."""
    small = {"num_hidden_layers": 2, "hidden_size": 32, "max_position_embeddings": 64}
    causal = kind is hf.CosformerForCausalLM
    torch.manual_seed(0)
    config = {"mechanism": mechanism, "positions": "auto", "causal": causal, **small, **given}
    return kind(hf.CosformerConfig(**config)).eval()


def tokens(batch=2, length=12):
    torch.manual_seed(1)
    return torch.randint(VOCABULARY, (batch, length))


def _made(kind, config, name):
    torch.manual_seed(0)
    return kind._from_config(config, attn_implementation=name).eval()

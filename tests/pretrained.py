"""Small models of Transformers' in folders, as if they were pretrained; their tokens are bytes."""

import torch
import transformers

import cosformer.hf as hf
from cosformer.tasks import Bytes


def save_small(folder, kind="bert", layers=3):
    """An encoder (`bert`) or a decoder (`gpt2`) of two heads and 64 positions; its tokenizer."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    tokenizer = hf.create_tokenizer(Bytes().tokenizer())
    tokenizer.padding_side = "right"
    small = {"num_hidden_layers": layers, "hidden_size": 32, "vocab_size": 2000}
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(n_head=2, n_positions=64, **small)
        model = transformers.GPT2LMHeadModel(config)
    else:
        heads = {"num_attention_heads": 2, "intermediate_size": 48}
        config = transformers.BertConfig(max_position_embeddings=64, **heads, **small)
        model = transformers.BertModel(config)
    for name, x in model.named_parameters():
        if x.dim() == 2 and "embed" not in name and "wte" not in name:  # attention must matter
            torch.nn.init.normal_(x, std=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

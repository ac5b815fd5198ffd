"""Small models with their tokenizers in folders, and texts to learn from."""

import importlib.util

import pytest
import torch

collect_ignore_glob = []
if importlib.util.find_spec("transformers") is None:
    collect_ignore_glob.append("*.py")
else:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()

TEXTS = [f"{n} green bottles hanging on the {wall}" for n in range(40) for wall in ("wall", "tree")]


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """`bert` and `gpt2`: an encoder and a decoder of three layers, whose tokens are bytes."""
    import transformers

    import cosformer.hf as hf

    made = tmp_path_factory.mktemp("models")
    tokenizer = hf.create_tokenizer({"kind": "bytes"})
    tokenizer.padding_side = "right"
    small = {"num_hidden_layers": 3, "hidden_size": 32, "vocab_size": len(tokenizer)}
    wide = {"num_attention_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64}
    torch.manual_seed(0)
    models = {
        "bert": transformers.BertModel(transformers.BertConfig(**small, **wide)),
        "gpt2": transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_head=2, n_positions=64, **small)
        ),
    }
    for name, model in models.items():
        for part, x in model.named_parameters():
            if x.dim() == 2 and "embed" not in part and "wte" not in part:  # attention must matter
                torch.nn.init.normal_(x, std=0.2)
        model.save_pretrained(made / name)
        tokenizer.save_pretrained(made / name)
    return made

"""Hugging Face Transformers: one word changes the attention of a model that it has."""

import argparse

import torch
from transformers import AutoModelForCausalLM, GPT2Config

import cosformer.hf as hf  # the import itself teaches Transformers the names below


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=60, help="to write")
    parser.add_argument("--save", default=None, help="folder for the model")
    given = parser.parse_args(argv)
    torch.manual_seed(0)
    # a tiny one, so that nothing is downloaded; from_pretrained takes the same word
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 512, "vocab_size": 256}
    # single weights cannot be dropped, and bytes have no token that begins or ends a text
    config = GPT2Config(**sizes, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="cosformer-multiscale")
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor([list(b"the quick brown fox jumps over the lazy dog. " * 8)])
    model.train()
    for step in range(given.steps):
        loss = model(text, labels=text).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step in (0, given.steps - 1):
            print(f"step {step + 1}: loss {loss.item():.3f}")
    # with our cache memory and the time of a token stay the same, however long the text is
    prompt, model = text[:, :20], model.eval()
    how = {"max_new_tokens": given.tokens, "do_sample": False, "pad_token_id": 0}
    written = model.generate(prompt, past_key_values=hf.CosformerCache(), **how)
    print(bytes(written[0].tolist()).decode(errors="replace"))
    if given.save is not None:
        model.save_pretrained(given.save)
        # the word is not saved with a model: give it again
        word = {"attn_implementation": "cosformer-multiscale"}
        same = AutoModelForCausalLM.from_pretrained(given.save, **word).eval()
        assert torch.equal(same(prompt).logits, model(prompt).logits)
        print(f"saved to {given.save} and loaded again")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

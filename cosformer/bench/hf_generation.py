"""The speed of `generate` of Hugging Face Transformers with a static cache, at the same size."""

import time
from typing import Any

import torch

from cosformer.models import ModelConfig

BEFORE, TIMED = 32, 96
"""New tokens before the first that is timed, and how many are."""


def transformers_speed(config: ModelConfig, batch: int, prompt: int, seed: int) -> float:
    """Tokens a second of a Llama with as many layers, heads, columns and weights, in bfloat16.

    `generate` compiles the step and replays it as a CUDA graph by itself. The first call compiles
    and is not timed.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteriaList

    torch.manual_seed(seed)
    llama = LlamaConfig(
        vocab_size=config.vocabulary,
        hidden_size=config.width,
        intermediate_size=-(-2 * config.feed_forward_width // 3),  # three products in place of two
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        max_position_embeddings=prompt + BEFORE + TIMED + 1,
        tie_word_embeddings=config.tied,
    )
    model: Any = LlamaForCausalLM(llama)  # type: ignore[no-untyped-call]
    model = model.to("cuda", torch.bfloat16).eval()
    tokens = torch.randint(config.vocabulary, (batch, prompt), device="cuda")
    clock = _Clock()
    options: dict[str, Any] = {
        "max_new_tokens": BEFORE + TIMED,
        "min_new_tokens": BEFORE + TIMED,
        "do_sample": False,
        "cache_implementation": "static",
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(tokens),
        "stopping_criteria": StoppingCriteriaList([clock]),
    }
    for _ in range(2):
        clock.begin()
        model.generate(tokens, **options)
    return batch * TIMED / clock.seconds


class _Clock:
    """A criterion that stops nothing, and takes the time between two tokens."""

    def begin(self) -> None:
        self.calls, self.started, self.seconds = 0, 0.0, float("nan")

    def __call__(self, tokens: torch.Tensor, scores: Any, **given: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls in (BEFORE, BEFORE + TIMED):
            torch.cuda.synchronize()
            now = time.perf_counter()
            self.started, self.seconds = now, now - self.started
        return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)

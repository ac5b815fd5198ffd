"""The choice of a token from its logits."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cosformer.check import check_number, check_seed, check_whole

BLOCK = 1024
"""Tokens whose noise is drawn at once."""


@dataclass(frozen=True)
class Sampling:
    """How generation chooses tokens and when it ends."""

    max_new_tokens: int = 100
    """The most tokens after a prompt."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the likeliest token, the first of equally likely ones."""
    top_k: int | None = None
    """How many of the likeliest tokens to choose among; None: all."""
    top_p: float | None = None
    """Choose among the likeliest tokens that together reach this probability; None: among all."""
    seed: int = 0
    """Prompt n of a call draws from seed + n, whatever the other prompts are."""
    stop: tuple[int, ...] = ()
    """Tokens that end a sequence; the token that ended it is its last."""
    data_tokens: int | None = None
    """Choose only among tokens below this one, where those above are no data but, say, padding;
    None: among all."""

    def __post_init__(self) -> None:
        check_whole("max_new_tokens", self.max_new_tokens, 1)
        check_number("temperature", self.temperature)
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be finite and at least 0, got {self.temperature}")
        for name in ("top_k", "data_tokens"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
        if self.top_p is not None:
            check_number("top_p", self.top_p)
            if not 0 < self.top_p <= 1:
                raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        for name, choice in (("top_k", self.top_k), ("top_p", self.top_p)):
            if choice is not None and self.temperature == 0:
                raise ValueError(f"{name} must be None at temperature=0, got {choice}")
        check_seed(self.seed)
        if not isinstance(self.stop, tuple) or any(type(token) is not int for token in self.stop):
            raise TypeError(f"stop must be a tuple of ints, got {self.stop!r}")


def choose(logits: Tensor, sampling: Sampling, noise: Tensor) -> Tensor:
    """A token `[B]` for each row of logits `[B, vocabulary]`; noise `[B]` lies in [0, 1).

    The chosen token is the first, likeliest first, whose cumulated probability exceeds the noise.
    """
    if not bool(logits.isfinite().all()):
        raise ValueError("logits must be finite, got NaN or inf: the model has diverged")
    logits = logits[:, : sampling.data_tokens]
    if sampling.temperature == 0:
        return logits.argmax(-1)
    scores, tokens = logits.double().sort(dim=-1, descending=True, stable=True)
    if sampling.top_k is not None:
        scores, tokens = scores[:, : sampling.top_k], tokens[:, : sampling.top_k]
    below = scores - scores[:, :1]  # at most 0, so that no temperature makes it inf
    reached = (below / sampling.temperature).softmax(-1).cumsum(-1)
    total = reached[:, -1:]
    if sampling.top_p is not None:  # the first token that reaches it is among them
        last = (reached < sampling.top_p).sum(-1, keepdim=True).clamp(max=reached.shape[1] - 1)
        total = reached.gather(1, last)
    chosen = torch.searchsorted(reached, noise.to(reached)[:, None] * total, right=True)
    return tokens.gather(1, chosen.clamp(max=reached.shape[1] - 1))[:, 0]


def draws(rows: list[int], sampling: Sampling, device: torch.device) -> Iterator[Tensor]:
    """Noise `[B]` of these prompts for each new token in turn.

    It is drawn on the CPU, so that it is the same for any device, and a block at a time, so that a
    text of any length needs no more memory.
    """
    generators = [torch.Generator().manual_seed(sampling.seed + row) for row in rows]
    for begin in range(0, sampling.max_new_tokens, BLOCK):
        count = min(BLOCK, sampling.max_new_tokens - begin)
        drawn = [torch.rand(count, generator=each, dtype=torch.float64) for each in generators]
        yield from torch.stack(drawn, 1).to(device)

"""The choice of a token from its logits."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosformer.check import check_bits, check_number, check_seed, check_whole

ALL = 2**62
"""More tokens than any vocabulary has."""
FEW = 16
"""Streams up to which a CPU is faster by Python's own numbers than by calls of torch."""
GOLDEN = -0x61C8864680B583EB  # 0x9e3779b97f4a7c15
"""The odd 64 bits nearest to 2⁶⁴ over the golden ratio, by which a hash counts."""


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
                check_bits(name, check_whole(name, getattr(self, name), 1), 63)
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


class Plan(NamedTuple):
    """Which steps a choice for several streams needs: the same steps for all rows."""

    most: int | None = 1  # candidates among which some row chooses; None: the vocabulary
    uneven: bool = False  # whether some row may choose among fewer candidates than `most`
    nucleus: bool = False  # whether some row has a top-p
    greedy: bool = False  # whether some row takes its likeliest token, where others do not
    masked: bool = False  # whether some row may not choose among all tokens

    @classmethod
    def of(cls, samplings: Iterable[Sampling]) -> "Plan":
        """The plan for streams that choose like these; few plans differ, as each is recorded.

        >>> Plan.of([Sampling(temperature=0)]).most, Plan.of([Sampling(top_k=40)]).most
        (1, 64)
        """
        given = set(samplings)
        masked = any(each.data_tokens is not None for each in given)
        drawn = [each for each in given if each.temperature > 0]
        counts = {each.top_k for each in drawn}
        if counts <= {1}:  # of which there may be none
            return cls(masked=masked)
        known = [count for count in counts if count is not None]
        most = None if None in counts else 1 << (max(known) - 1).bit_length()
        nucleus = any(each.top_p is not None for each in drawn)
        return cls(most, bool(known), nucleus, len(drawn) < len(given), masked)


class Choices(NamedTuple):
    """How each of B streams chooses, as tensors where its logits are."""

    temperature: Tensor  # [B] float64
    top_k: Tensor  # [B] int64
    top_p: Tensor  # [B] float64; 2 for all
    data_tokens: Tensor  # [B] int64
    seed: Tensor  # [B] int64
    drawn: Tensor  # [B] int64: how many tokens each has chosen

    @classmethod
    def empty(cls, batch: int, device: torch.device | str | None = None) -> "Choices":
        """Choices of so many streams, to be set."""
        real, whole = torch.float64, torch.int64
        dtypes = (real, whole, real, whole, whole, whole)
        return cls(*(torch.zeros(batch, dtype=dtype, device=device) for dtype in dtypes))

    def set(self, row: int, sampling: Sampling, drawn: int = 0) -> None:
        """Set how stream `row` chooses, and how many tokens it has chosen so far."""
        top_p = 2.0 if sampling.top_p is None else sampling.top_p
        values = (
            sampling.temperature,
            sampling.top_k or ALL,
            top_p,
            sampling.data_tokens or ALL,
            sampling.seed,
            drawn,
        )
        for tensor, value in zip(self, values, strict=True):
            tensor[row] = value

    def noise(self) -> Tensor:
        """`[B]` float64 in [0, 1): a hash of each stream's seed and of how many it has chosen.

        The same on every device, whatever the other streams are (SplitMix64: Steele, Lea and
        Flood, 2014).
        """
        if self.seed.is_cpu and len(self.seed) <= FEW:
            pairs = zip(self.seed.tolist(), self.drawn.tolist(), strict=True)
            return torch.tensor([_bits(*pair) * 2.0**-53 for pair in pairs], dtype=torch.float64)
        return _bits(self.seed, self.drawn).double() * 2.0**-53


def choose(logits: Tensor, choices: Choices, plan: Plan, noise: Tensor | None = None) -> Tensor:
    """A token `[B]` for each row of logits `[B, vocabulary]`; -1 where they are not finite.

    The chosen token is the first of the vocabulary whose cumulated probability exceeds the noise
    `[B]`, which is that of the choices if None.
    """
    if plan.masked:
        index = torch.arange(logits.shape[1], device=logits.device)
        logits = logits.masked_fill(index >= choices.data_tokens[:, None], -torch.inf)
    best, likeliest = logits.max(-1)  # NaN is the largest of all
    chosen = likeliest
    if plan.most != 1:
        noise = choices.noise() if noise is None else noise
        sampled = _sampled(logits.double() - best.double()[:, None], choices, plan, noise)
        chosen = sampled
        if plan.greedy:
            chosen = torch.where(choices.temperature == 0, likeliest, sampled)
    return torch.where(best.isfinite(), chosen, -1)


def _sampled(below: Tensor, choices: Choices, plan: Plan, noise: Tensor) -> Tensor:
    """Tokens by logits that are at most 0, so that no temperature makes them inf.

    Ranks decide among which tokens a row chooses. It then goes through these by the vocabulary, so
    that a row chooses alike whatever plan it shares with others.
    """
    heat = choices.temperature[:, None]
    scores, tokens = below / (heat.where(heat > 0, 1) if plan.greedy else heat), None
    if plan.uneven or plan.nucleus:
        if plan.most is not None and plan.most < below.shape[1]:
            scores, tokens = scores.topk(plan.most)
        else:
            scores, tokens = scores.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(scores.shape[1], device=scores.device)
        if plan.uneven:
            scores = scores.masked_fill(rank >= choices.top_k[:, None], -torch.inf)
        if plan.nucleus:  # the first token that reaches top_p is among them
            short = scores.softmax(-1).cumsum(-1) < choices.top_p[:, None]
            scores = scores.masked_fill(rank > short.sum(-1, keepdim=True), -torch.inf)
        tokens, order = tokens.sort(dim=-1)
        scores = scores.gather(1, order)
    reached = scores.softmax(-1).cumsum(-1)
    total = reached[:, -1:]
    chosen = torch.searchsorted(reached, noise[:, None] * total, right=True)
    last = (reached < total).sum(-1, keepdim=True)  # the last token that has a probability
    chosen = torch.minimum(chosen, last)
    return (chosen if tokens is None else tokens.gather(1, chosen))[:, 0]


def _bits(seed: Any, drawn: Any) -> Any:
    """The 53 bits of `Choices.noise`, for ints or tensors of them."""
    return (_mixed(_mixed(seed + GOLDEN) + GOLDEN * drawn) >> 11) & (2**53 - 1)


def _mixed(bits: Any) -> Any:
    """64 bits, of which each depends on all that came in; Python's ints may have more, in front.

    A shift to the right fills with zeros.
    """
    bits = (bits ^ ((bits >> 30) & (2**34 - 1))) * -0x40A7B892E31B1A47  # 0xbf58476d1ce4e5b9
    bits = (bits ^ ((bits >> 27) & (2**37 - 1))) * -0x6B2FB644ECCEEE15  # 0x94d049bb133111eb
    return bits ^ ((bits >> 31) & (2**33 - 1))

"""Text from a model: prompts are read in one pass, then every token costs the same."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from cosformer.models.decoder import LanguageModel
from cosformer.models.generator import (
    GREEDY,
    Generator,
    check_evaluation,
    check_room,
    check_sampling,
)
from cosformer.models.sampling import Sampling
from cosformer.models.tokens import Tokens, check_tokens, pad
from cosformer.models.translation import EncoderDecoder

SLOTS = 256
"""Prompts that are continued at once; others wait."""


def generate(
    model: LanguageModel | EncoderDecoder,
    prompts: Sequence[Tokens],
    sampling: Sampling = GREEDY,
    *,
    sources: Sequence[Tokens] | None = None,
) -> list[list[int]]:
    """The tokens that follow each prompt, as if it were alone.

    Args:
        model: a model in evaluation mode, with a mechanism that streams.
        prompts: sequences of tokens, of any lengths from 1 on: lists, bytes, arrays or tensors.
            They are padded on the left and read together; where weights depend on absolute
            positions, those of one length are.
        sampling: how to choose tokens and when to stop.
        sources: for an encoder-decoder, the sequence that each target looks at; the prompts are
            then the first tokens of the targets.

    >>> model = LanguageModel(ModelConfig()).eval()
    >>> [len(tokens) for tokens in generate(model, [b"To be", b"or"], Sampling(max_new_tokens=9))]
    [9, 9]
    """
    prompts, sources = _check(model, prompts, sampling, sources)
    if not prompts:
        return []
    found: list[list[int]] = [[] for _ in prompts]
    for request, token in _generator(model, prompts, sampling, sources):
        found[request].append(token)
    return found


def generate_tokens(
    model: LanguageModel | EncoderDecoder,
    prompt: Tokens,
    sampling: Sampling = GREEDY,
    *,
    source: Tokens | None = None,
) -> Iterator[int]:
    """The tokens of `generate` for one prompt, each as soon as it is known."""
    given = None if source is None else [source]
    prompts, sources = _check(model, [prompt], sampling, given)
    return (token for _, token in _generator(model, prompts, sampling, sources))


def _generator(
    model: LanguageModel | EncoderDecoder,
    prompts: Sequence[Tokens],
    sampling: Sampling,
    sources: Sequence[Tokens] | None,
) -> Generator:
    """A generator with these prompts as its requests, in their order."""
    context = None
    if sources is not None and isinstance(model, EncoderDecoder):
        with torch.no_grad():
            context = model.read(*pad(sources, model.head.weight.device, left=False))
    longest = max(map(len, prompts)) + sampling.max_new_tokens - 1  # the last is not read again
    length = longest if model.backbone.keeps_tokens else None
    made = Generator(model, min(len(prompts), SLOTS), length=length, context=context)
    for n, prompt in enumerate(prompts):
        made.submit_checked(prompt, replace(sampling, seed=(sampling.seed + n) % 2**63))
    return made


def _check(
    model: LanguageModel | EncoderDecoder,
    prompts: Sequence[Tokens],
    sampling: Sampling,
    sources: Sequence[Tokens] | None,
) -> tuple[list[Tokens], list[Tokens] | None]:
    """The prompts and the sources, lists where they are arrays."""
    if not isinstance(model, LanguageModel | EncoderDecoder):
        raise TypeError(
            f"model must be a LanguageModel or an EncoderDecoder, got {type(model).__name__}"
        )
    check_sampling(model, sampling)
    check_evaluation(model)
    if (sources is not None) != isinstance(model, EncoderDecoder):
        rule = "must be given to" if sources is None else "must be None without"
        raise ValueError(f"sources {rule} an encoder-decoder")
    vocabulary = model.config.vocabulary
    found = check_tokens("prompts", prompts, vocabulary)
    others = None if sources is None else check_tokens("sources", sources, vocabulary)
    if others is not None and len(others) != len(found):
        raise ValueError(f"sources must be one per prompt, {len(found)}, got {len(others)}")
    if found:
        check_room(model, max(map(len, found)), sampling)
    return found, others

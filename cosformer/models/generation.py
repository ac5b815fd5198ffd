"""Text from a model: prompts are read in one pass, then every token costs the same."""

import numbers
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cosformer.models.decoder import LanguageModel
from cosformer.models.sampling import Sampling, choose, draws
from cosformer.models.translation import EncoderDecoder

GREEDY = Sampling(temperature=0)
Tokens = Sequence[int]


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
        prompts: sequences of tokens, of any lengths from 1 on. They are padded on the left and read
            together; where weights depend on absolute positions, those of one length are.
        sampling: how to choose tokens and when to stop.
        sources: for an encoder-decoder, the sequence that each target looks at; the prompts are
            then the first tokens of the targets.

    >>> model = LanguageModel(ModelConfig()).eval()
    >>> [len(tokens) for tokens in generate(model, [b"To be", b"or"], Sampling(max_new_tokens=9))]
    [9, 9]
    """
    _check(model, prompts, sampling, sources)
    together: dict[int, list[int]] = defaultdict(list)
    for row, prompt in enumerate(prompts):
        together[0 if model.backbone.shifts else len(prompt)].append(row)
    found: list[list[int]] = [[] for _ in prompts]
    for rows in together.values():
        for tokens in _steps(model, prompts, sampling, sources, rows):
            for row, token in zip(rows, tokens, strict=True):
                if token is not None:
                    found[row].append(token)
    return found


def generate_tokens(
    model: LanguageModel | EncoderDecoder,
    prompt: Tokens,
    sampling: Sampling = GREEDY,
    *,
    source: Tokens | None = None,
) -> Iterator[int]:
    """The tokens of `generate` for one prompt, each as soon as it is known."""
    sources = None if source is None else [source]
    _check(model, [prompt], sampling, sources)
    steps = _steps(model, [prompt], sampling, sources, [0])
    return (token for (token,) in steps if token is not None)


@torch.no_grad()
def _steps(
    model: LanguageModel | EncoderDecoder,
    prompts: Sequence[Tokens],
    sampling: Sampling,
    sources: Sequence[Tokens] | None,
    rows: list[int],
) -> Iterator[list[int | None]]:
    """The next token of every row; None for rows that have ended."""
    device = model.head.weight.device
    tokens, mask = _pad([prompts[row] for row in rows], device, left=True)
    begin = None
    if sources is not None and isinstance(model, EncoderDecoder):
        begin = model.empty_state(*_pad([sources[row] for row in rows], device, left=False))
    x, state = model.backbone.stream(tokens, begin, key_mask=mask)
    stops = torch.tensor(sampling.stop, dtype=torch.int64, device=device)
    ended = torch.zeros(len(rows), dtype=torch.bool, device=device)
    for n, noise in enumerate(draws(rows, sampling, device)):
        if n > 0:
            x, state = model.backbone.step(tokens, state)
        # Logits of the last token alone: those of a whole prompt would be large.
        chosen = choose(model.head(x[:, -1]), sampling, noise)
        running = (~ended).tolist()
        yield [t if on else None for t, on in zip(chosen.tolist(), running, strict=True)]
        ended = ended | torch.isin(chosen, stops)
        if len(sampling.stop) and bool(ended.all()):
            return
        tokens = chosen[:, None]


def _pad(
    sequences: Sequence[Tokens], device: torch.device, *, left: bool
) -> tuple[Tensor, Tensor | None]:
    """Tokens `[B, longest]` and their key mask, which is None where all are equally long."""
    longest = max(map(len, sequences))
    tokens = torch.zeros(len(sequences), longest, dtype=torch.int64, device=device)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        place = slice(longest - len(sequence), None) if left else slice(len(sequence))
        tokens[row, place] = torch.tensor(list(sequence), device=device)
        mask[row, place] = True
    return tokens, None if all(len(each) == longest for each in sequences) else mask


def _check(
    model: LanguageModel | EncoderDecoder,
    prompts: Sequence[Tokens],
    sampling: Sampling,
    sources: Sequence[Tokens] | None,
) -> None:
    if not isinstance(model, LanguageModel | EncoderDecoder):
        raise TypeError(
            f"model must be a LanguageModel or an EncoderDecoder, got {type(model).__name__}"
        )
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling must be a Sampling, got {type(sampling).__name__}")
    if model.training:
        raise ValueError("model must be in evaluation mode: call model.eval() first")
    if (sources is not None) != isinstance(model, EncoderDecoder):
        rule = "must be given to" if sources is None else "must be None without"
        raise ValueError(f"sources {rule} an encoder-decoder")
    vocabulary, limit = model.config.vocabulary, model.backbone.limit
    if any(not 0 <= token < vocabulary for token in sampling.stop):
        raise ValueError(f"stop must hold tokens from 0 to {vocabulary - 1}, got {sampling.stop}")
    _check_tokens("prompts", prompts, vocabulary)
    if sources is not None:
        _check_tokens("sources", sources, vocabulary)
        if len(sources) != len(prompts):
            raise ValueError(f"sources must be one per prompt, {len(prompts)}, got {len(sources)}")
    longest = max(map(len, prompts), default=0)
    # The last token is chosen, and not read again.
    if limit is not None and longest + sampling.max_new_tokens - 1 > limit:
        raise ValueError(
            f"max_new_tokens must be at most {limit + 1 - longest} after a prompt of {longest} "
            f"tokens, for the model's limit of {limit} ({model.backbone.limited_by}), got "
            f"{sampling.max_new_tokens}: a model made with recommended('lm') has none"
        )


def _check_tokens(name: str, sequences: Sequence[Tokens], vocabulary: int) -> None:
    """Sequences of one token or more, each a whole number below `vocabulary`."""
    if not isinstance(sequences, Sequence):
        raise TypeError(f"{name} must be a sequence of sequences, got {type(sequences).__name__}")
    for n, sequence in enumerate(sequences):
        if not isinstance(sequence, Sequence) or isinstance(sequence, str):
            raise TypeError(
                f"{name} must be sequences of ints each, got {type(sequence).__name__} in {n}"
            )
        if len(sequence) == 0:
            raise ValueError(f"{name} must have at least one token each, got none in {n}")
        for token in sequence:
            if isinstance(token, bool) or not isinstance(token, numbers.Integral):
                raise TypeError(f"{name} must be sequences of ints each, got {token!r} in {n}")
            if not 0 <= token < vocabulary:
                raise ValueError(
                    f"{name} must hold tokens from 0 to {vocabulary - 1}, got {token} in {n}"
                )

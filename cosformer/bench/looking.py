"""What a trained language model does, as rows: where its heads look, what it writes and keeps."""

import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from cosformer.models import LanguageModel
from cosformer.records import Row, Run
from cosformer.training import Writer

DIGITS = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"
"""A digit for each of 64 shades of a map, as base64 has them."""
SHOWN = 64
"""Tokens of a map: the first ones."""
REMEMBERED = tuple(2**n for n in range(6, 17))
"""Tokens after which the memory of a stream is told, as far as the model can go."""


def look(
    this: Run, writer: Writer, tokens: Tensor, prompts: Sequence[str], at: Mapping[str, Any]
) -> tuple[list[Tensor], list[Row]]:
    """Where heads look in these tokens, `[H, T, T]` of each layer; rows of that, and of texts.

    `tokens` is `[T]`; `at`: what else the config of a row says, such as the candidate.
    """
    weights = [layer[0] for layer in writer.model.attention_weights(tokens[None])]
    pieces = [writer.vocabulary.piece(n).decode(errors="replace") for n in tokens.tolist()]
    rows = [*reach_rows(this, weights, pieces, at), *_written_rows(this, writer, prompts, at)]
    return weights, rows


def reach_rows(
    this: Run, weights: Sequence[Tensor], pieces: Sequence[str], at: Mapping[str, Any]
) -> Iterator[Row]:
    """How many tokens each layer looks back in the mean; a row has the maps of its heads, too.

    Args:
        this: the run that rows are of.
        weights: `[H, T, T]` of each layer, as `LanguageModel.attention_weights` has them.
        pieces: the text of each of the tokens.
        at: what else the config of a row says.
    """
    for number, layer in enumerate(weights, 1):
        heads = [_head(each.float().cpu()) for each in layer]
        mean = sum(head["reach"] for head in heads) / len(heads)
        told = {"layer": number, "layers": len(weights), "window": layer.shape[-1], "heads": heads}
        yield this.row("reach", mean, "tokens", **at, **told, pieces=list(pieces[:SHOWN]))


def _written_rows(
    this: Run, writer: Writer, prompts: Sequence[str], at: Mapping[str, Any]
) -> Iterator[Row]:
    """What a model writes after each prompt; the value is the memory of its stream at the end."""
    model, sampling = writer.model, asdict(writer.sampling)
    for prompt, text in zip(prompts, writer.together(prompts), strict=True):
        tokens = len(writer.vocabulary.encode(prompt + text))
        told = {"prompt": prompt, "written": text, "tokens": tokens, "sampling": sampling}
        held = sum(model.stream_memory(tokens).values())
        yield this.row("written", held, "bytes", **at, **told, stream_bytes=_memory(model))


def _memory(model: LanguageModel) -> dict[str, int]:
    """Tokens -> bytes that a stream remembers after them."""
    limit = model.backbone.limit
    lengths = [n for n in REMEMBERED if limit is None or n <= limit]
    return {str(n): sum(model.stream_memory(n).values()) for n in lengths}


def _head(weights: Tensor) -> dict[str, Any]:
    """Numbers of one head, whose weights `[T, T]` are causal."""
    length = len(weights)
    sizes = weights.abs()
    shares = sizes / sizes.sum(1, keepdim=True).clamp_min(1e-30)
    back = torch.arange(length)[:, None] - torch.arange(length)
    shown = sizes[:SHOWN, :SHOWN]
    scale = max(shown.max().item(), 1e-30)
    shades = (63 * (shown / scale).sqrt()).round().long()
    rows, columns = torch.tril_indices(len(shown), len(shown))
    return {
        "reach": round((shares * back).sum(1).mean().item(), 3),
        "is_signed": bool((weights < 0).any()),
        "scale": scale,
        "map": "".join(DIGITS[shade] for shade in shades[rows, columns].tolist()),
        "by_distance": _by_distance(shares, back),
    }


def _by_distance(shares: Tensor, back: Tensor) -> list[float]:
    """The share of the weight at distances 0, 1, 2 to 3, 4 to 7, …, the mean of later queries.

    The first half of the tokens has no far past, and is left out.
    """
    half = len(shares) // 2
    octaves = torch.where(back > 0, back.clamp_min(1).log2().floor().long() + 1, 0)
    count = int(octaves.max()) + 1
    return [
        round(shares[half:].mul(octaves[half:] == n).mul(back[half:] >= 0).sum(1).mean().item(), 5)
        for n in range(count)
    ]

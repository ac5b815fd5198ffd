"""What two trained models do: the text that they write, the tokens that their heads look at."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from cosformer.bench import look
from cosformer.demo.learning import Pair
from cosformer.models import LanguageModel, Sampling
from cosformer.records import Row, Run
from cosformer.training import Writer, load

PROMPTS = ("The following", "Return the number of", "If the object is")
"""No blank at the end: a piece of a word begins with its own."""
SAMPLING: dict[str, Any] = {"max_new_tokens": 60, "temperature": 0.6, "top_k": 40}
WINDOW = 64
"""Tokens of a map: the first ones of validation."""
SHADES = " ·░▒▓█"
"""From a weight of 0 to the largest."""
Weights = list[Tensor]
"""`[H, T, T]` of each layer."""


def looked(this: Run, pair: Pair) -> Iterator[tuple[str, Weights, list[Row]]]:
    """For each mechanism the weights of its heads, and rows of text and maps, by its best
    checkpoint; nothing if one was never judged."""
    if not pair.is_judged:
        return
    seed = this.seed or 0
    batch = pair.task.batch("valid", seed=seed, rank=0, step=0, batch_size=1)
    tokens = batch["tokens"][batch["mask"]][:WINDOW]
    for name, config in pair.configs.items():
        loaded = load(config.out, device="cpu")
        model, vocabulary = loaded.model, loaded.vocabulary
        assert isinstance(model, LanguageModel)  # by its task
        sampling = Sampling(**SAMPLING, seed=seed, data_tokens=vocabulary.size)
        writer = Writer(model, vocabulary, sampling)
        yield name, *look(this, writer, tokens, PROMPTS, {"candidate": name})


def shaded(weights: Sequence[Tensor], height: int = 8, width: int = 16) -> str:
    """Maps side by side, drawn with letters for a terminal: a line for every few queries."""
    heads = {
        f"layer {number}, head {head}": _shades(each, height, width)
        for number, layer in enumerate(weights, 1)
        for head, each in enumerate(layer, 1)
    }
    titles = "  ".join(f"{name:<{width}}" for name in heads)
    return "\n".join([titles, *("  ".join(lines) for lines in zip(*heads.values(), strict=True))])


def _shades(weights: Tensor, height: int, width: int) -> list[str]:
    cells = torch.nn.functional.adaptive_max_pool2d(weights[None], (height, width))[0]
    shade = (cells.sqrt() * (len(SHADES) - 1)).round().long()
    return ["".join(SHADES[each] for each in line) for line in shade.tolist()]

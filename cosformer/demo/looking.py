"""What two trained models do: the text that they write, the tokens that their heads look at."""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from cosformer.demo.learning import Pair
from cosformer.mechanisms import MECHANISMS
from cosformer.models import LanguageModel, Sampling
from cosformer.nn import AttentionLayer, Block
from cosformer.records import Row, Run
from cosformer.report import Maps, Shown
from cosformer.training import Loaded, Writer, load

PROMPTS = ("The following", "Return the number of", "If the object is")
"""No blank at the end: a piece of a word begins with its own."""
SAMPLING: dict[str, Any] = {"max_new_tokens": 60, "temperature": 0.6, "top_k": 40}
WINDOW = 64
"""Tokens of a map: the first ones of validation."""
SHADES = " ·░▒▓█"
"""From a weight of 0 to the largest."""


def shown(pair: Pair, seed: int) -> Shown:
    """Text and maps of the best checkpoint of each mechanism; none if one was never judged."""
    formulas = {name: MECHANISMS[name].formula for name in pair.configs}
    if not pair.is_judged:
        return Shown(formulas)
    models = {name: load(config.out, device="cpu") for name, config in pair.configs.items()}
    batch = pair.task.batch("valid", seed=seed, rank=0, step=0, batch_size=1)
    tokens = batch["tokens"][batch["mask"]][:WINDOW]
    vocabulary = next(iter(models.values())).vocabulary
    return Shown(
        formulas,
        texts={name: written(each, seed) for name, each in models.items()},
        maps={name: maps(cast(LanguageModel, each.model), tokens) for name, each in models.items()},
        window=vocabulary.decode(tokens.numpy()),
    )


def written(loaded: Loaded, seed: int) -> dict[str, str]:
    """Prompt -> what a model writes after it."""
    assert isinstance(loaded.model, LanguageModel)  # by its task
    sampling = Sampling(**SAMPLING, seed=seed, data_tokens=loaded.vocabulary.size)
    texts = Writer(loaded.model, loaded.vocabulary, sampling).together(PROMPTS)
    return dict(zip(PROMPTS, texts, strict=True))


@torch.no_grad()
def maps(model: LanguageModel, tokens: Tensor) -> Maps:
    """The exact weights `[T, T]` by which each head reads the tokens; every row sums to 1."""
    found: list[Tensor] = []

    def keep(layer: AttentionLayer, given: Any, options: Any) -> None:
        found.append(layer.weights(*given, **options)[0])

    layers = [cast(Block, block).attention for block in model.backbone.blocks]
    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    model(tokens[None])
    for hook in hooks:
        hook.remove()
    return {
        f"layer {number}, head {head}": weights.tolist()
        for number, heads in enumerate(found, 1)
        for head, weights in enumerate(heads, 1)
    }


def reach_rows(this: Run, name: str, found: Maps) -> Iterator[Row]:
    """How many tokens each head looks back in the mean."""
    for head, rows in found.items():
        weights = torch.tensor(rows)
        back = torch.arange(len(rows))[:, None] - torch.arange(len(rows))
        mean = (weights * back).sum(1).mean().item()
        yield this.row("reach", mean, "tokens", candidate=name, head=head, window=len(rows))


def shaded(found: Maps, height: int = 8, width: int = 16) -> str:
    """Maps side by side, drawn with letters for a terminal: a line for every few queries."""
    drawn = [_shades(torch.tensor(rows), height, width) for rows in found.values()]
    heads = "  ".join(f"{head:<{width}}" for head in found)
    return "\n".join([heads, *("  ".join(lines) for lines in zip(*drawn, strict=True))])


def _shades(weights: Tensor, height: int, width: int) -> list[str]:
    cells = torch.nn.functional.adaptive_max_pool2d(weights[None], (height, width))[0]
    shade = (cells.sqrt() * (len(SHADES) - 1)).round().long()
    return ["".join(SHADES[each] for each in line) for line in shade.tolist()]

"""`cosformer bench conversion`: what is left of a sentence encoder when its softmax is replaced."""

import copy
import functools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cosformer import records
from cosformer.bench.timing import median_times
from cosformer.bench.verb import OnDevice, check_options
from cosformer.check import check_whole
from cosformer.conversion import Conversion

if TYPE_CHECKING:
    from cosformer.conversion import Pairs

POSITIONAL = "model"
ORIGINAL = "softmax"
CONVERTED = (
    "cosformer",
    "cosformer-multiscale",
    "cosformer-multiscale 1",
    "cosformer-multiscale 2",
)
"""Mechanisms, and how many layers stay softmax."""
FEWEST = 4
"""Tokens that every sentence has at least."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"tokens": 8192, "dtype": torch.float32},
    "cuda": {"tokens": 65_536, "dtype": torch.bfloat16},
}
"""Device -> tokens of one timed call, and the type of its numbers."""


@dataclass(frozen=True, kw_only=True)
class Options(OnDevice, Conversion):
    """Spearman's correlation of a sentence encoder on STS-B: of the original, of one with another
    attention and no training, and after each stage of a conversion; minutes, and the speed of
    embeddings against their length.

    cosformer bench conversion my-minilm --data texts.txt --pairs stsb.tsv.xz
    """

    name = "conversion"
    defaults = DEFAULTS

    model: Path
    """Folder of an encoder whose embeddings are means of its last hidden states."""
    data: tuple[Path, ...]
    """Texts to learn from, as of `cosformer convert`; sentences that are judged are left out."""
    pairs: Path
    """Table with the columns split, score, sentence1 and sentence2."""
    split: str = "dev"
    """The split of these pairs that is judged."""
    candidates: tuple[str, ...] = CONVERTED
    """Mechanisms, each with the number of layers that stay softmax, as "cosformer-multiscale 2"."""
    lengths: tuple[int, ...] = (128, 512, 2048, 8192)
    """Tokens of texts whose embeddings are timed, of the original and of a conversion of all
    layers, and compared; positions past the model's own are its first ones again."""
    repeats: int = 5
    """Samples behind each median."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(self)
        for length in self.lengths:
            check_whole("lengths", length, 1)
        if self.exact or self.exact_count:
            raise ValueError(
                "exact and exact_count must not be given, because candidates say how many layers "
                f"stay softmax, got {self.exact} and {self.exact_count}"
            )
        for candidate in self.candidates:
            self.settings(candidate)

    def settings(self, candidate: str) -> Conversion:
        """The conversion that a candidate names."""
        mechanism, _, count = candidate.partition(" ")
        if count and not count.isdecimal():
            raise ValueError(
                f"candidates must be a mechanism and perhaps a number of layers, got {candidate!r}"
            )
        given: Mapping[str, Any] = {
            name: getattr(self, name) for name in Conversion.__dataclass_fields__
        }
        return Conversion(**{**given, "mechanism": mechanism, "exact_count": int(count or 0)})


def run(options: Options) -> int:
    keys = ("candidate", "stage", "length")
    return options.keep(measure(options), keys)


class Judged(NamedTuple):
    """An encoder and what it is judged by."""

    model: Any
    tokenizer: Any
    pairs: "Pairs"

    def spearman(self) -> float:
        from cosformer.conversion import spearman

        return spearman(self.model, self.tokenizer, self.pairs)


def measure(options: Options) -> Iterator[records.Row]:
    """All rows of one run."""
    from cosformer.conversion import Converter, load, read_pairs, read_texts

    this = records.Run.begin(device=options.device, seed=options.seed)
    pairs = read_pairs(options.pairs, options.split)
    judged = {*pairs.first, *pairs.second}
    texts = [text for text in read_texts(options.data) if text not in judged]
    about = {
        name: getattr(options, name)
        for name in ("split", "expansion", "match_steps", "distil_steps", "batch", "length")
    }
    about |= {"model": options.model.name, "pairs": len(pairs.scores), "texts": len(texts)}
    original = load(options.model, options.device)
    converted: dict[str, Any] = {ORIGINAL: original}
    for candidate in options.candidates:
        settings = options.settings(candidate)
        begin = time.perf_counter()
        converter = Converter(options.model, texts, settings, device=options.device)
        at = {"candidate": candidate, **about}
        seconds = time.perf_counter() - begin
        first = Judged(original, converter.tokenizer, pairs)
        if len(converted) == 1:
            yield this.row(
                "spearman", first.spearman(), "", candidate=ORIGINAL, stage="original", **about
            )
        judge = Judged(converter.model, converter.tokenizer, pairs)
        if not settings.exact_count:
            plain = judge._replace(model=load(options.model, options.device))
            plain.model.set_attn_implementation(settings.mechanism)
            yield this.row("spearman", plain.spearman(), "", stage="replaced", exact=[], **at)
        for stage in (converter.match, converter.distil):
            begin = time.perf_counter()
            for progress in stage():
                print(progress, flush=True)
            seconds += time.perf_counter() - begin
            name = {"match": "matched", "distil": "distilled"}[stage.__name__]
            at |= {"exact": converter.exact}
            yield this.row("spearman", judge.spearman(), "", stage=name, **at)
        yield this.row("conversion_time", seconds / 60, "min", **at)
        agreed = agreement(first, judge, options.lengths)
        for length, cosine in agreed.items():
            yield this.row("agreement", cosine, "", **{**at, "length": length})
        converted[candidate] = converter.model
    shown = {name: model for name, model in converted.items() if " " not in name}
    shown.pop("cosformer", None)  # its horizon is the original's longest text
    yield from _speeds(options, this, shown)


def agreement(one: Judged, other: Judged, lengths: Sequence[int]) -> dict[int, float]:
    """Length -> the mean cosine of two models' embeddings of the same texts of so many tokens.

    The texts are judged sentences, which nobody has learnt from, laid end to end; lengths that the
    first model has no positions for are left out.
    """
    from cosformer.conversion import embed

    sentences, found = one.pairs.first, dict[int, float]()
    for length in lengths:
        count = max(1, length // FEWEST)  # so many have this length at least, and are cut there
        texts = [" ".join(sentences[n : n + count]) for n in range(0, len(sentences), count)]
        texts = texts[: max(1, len(sentences) // count)]
        if length <= one.model.config.max_position_embeddings:
            both = [embed(x.model, x.tokenizer, texts, length=length) for x in (one, other)]
            found[length] = float((both[0] * both[1]).sum(-1).mean())
    return found


def _speeds(
    options: Options, this: records.Run, models: Mapping[str, Any]
) -> Iterator[records.Row]:
    """Tokens a second of embeddings, models in turns."""
    if not options.lengths:
        return
    dtype, longest = options.given("dtype"), max(options.lengths)
    ready = {name: lengthened(model, longest).to(dtype) for name, model in models.items()}
    generator = torch.Generator().manual_seed(options.seed)
    for length in options.lengths:
        batch = max(1, options.given("tokens") // length)
        known = models[ORIGINAL].config.vocab_size
        tokens = torch.randint(known, (batch, length), generator=generator)
        tokens = tokens.to(options.device)
        calls = {name: functools.partial(_embed, model, tokens) for name, model in ready.items()}
        times = median_times(calls, repeats=options.repeats, device=options.device)
        at: dict[str, Any] = {"length": length, "batch": batch, "repeats": options.repeats}
        at |= {"dtype": str(dtype).removeprefix("torch."), "model": options.model.name}
        for name, milliseconds in times.items():
            speed = batch * length / milliseconds * 1e3
            yield this.row("embedding_speed", speed, "tokens/s", candidate=name, **at)
            if name != ORIGINAL:
                ratio = times[ORIGINAL] / milliseconds
                yield this.row("embedding_speed_ratio", ratio, "x", candidate=name, **at)


@torch.no_grad()
def _embed(model: Any, tokens: Tensor) -> Tensor:
    hidden: Tensor = model(tokens).last_hidden_state
    return hidden.mean(1)


def lengthened(model: Any, length: int) -> Any:
    """The same model with so many positions: those past its own are its first ones again."""
    import cosformer.hf as hf

    config = copy.deepcopy(model.config)
    config.max_position_embeddings = max(length, config.max_position_embeddings)
    made = type(model)(config)
    made.set_attn_implementation(model.config._attn_implementation)
    if hf.heads_of(model):
        hf.replace_attention(made, config.quantization_config)
    sizes = {name: x.shape for name, x in made.state_dict().items()}
    state = {
        name: x if x.shape == sizes[name] else _again(x, sizes[name][0])
        for name, x in model.state_dict().items()
    }
    made.load_state_dict(state)
    return made.to(model.device).eval()


def _again(x: Tensor, rows: int) -> Tensor:
    return x.repeat(math.ceil(rows / len(x)), *[1] * (x.dim() - 1))[:rows]

"""`cosformer look RUN …`: where the heads of trained models look and what they write, as rows."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from cosformer import bench, records
from cosformer.check import check_seed
from cosformer.models import LanguageModel, Sampling
from cosformer.training import MOST_SEEDS, Loaded, Writer, load

POSITIONAL = "run"
LOOKED_AT = 512
"""The most tokens that heads look at where the options do not say."""
SHORTEST = 4
"""Fewer tokens have no past to look at."""


@dataclass(frozen=True)
class Options:
    """The exact attention of every head over a window of text, the text that a model writes, and
    what it remembers meanwhile. `cosformer report` shows models side by side that read one window.

    cosformer look runs/cosformer runs/multiscale runs/softmax
    """

    run: tuple[Path, ...]
    """Folders of language models that were trained on the same text."""
    window: int | None = None
    """Tokens that heads look at, the first ones of the validation split; 512 if not given, or as
    many as a sequence has."""
    prompt: tuple[str, ...] = ("The following", "Return the number of")
    """Texts to continue."""
    tokens: int = 120
    """New tokens of each."""
    temperature: float = 0.6
    """Lower is more likely and more repetitive; 0 takes the likeliest token."""
    top_k: int = 40
    """Choose among so many of the likeliest tokens."""
    seed: int = 0
    """Seed of what is written."""
    checkpoint: Literal["best", "last"] = "best"
    """The weights that were best on validation, or the last ones."""
    device: str = "cpu"
    """cpu, cuda, cuda:1; auto: a GPU where there is one."""
    out: Path = Path("results/looking.jsonl")
    """File that the rows are added to."""

    def __post_init__(self) -> None:
        check_seed(self.seed, MOST_SEEDS)
        if not self.run:
            raise ValueError("run must be one folder of a run or more, got none")
        if self.window is not None and self.window < SHORTEST:
            raise ValueError(f"window must be at least {SHORTEST} tokens, got {self.window}")
        if self.tokens < 1:
            raise ValueError(f"tokens must be at least 1, got {self.tokens}")


def run(options: Options) -> int:
    """Look at all runs, then write their rows."""
    records.require_rows(options.out, "out")
    loaded = [load(each, options.checkpoint, device=options.device) for each in options.run]
    if options.window is None:
        lengths = [each.task.facts.length for each in loaded]
        options = replace(options, window=min(LOOKED_AT, *lengths))
    this = records.Run.begin(device=loaded[0].device.split(":")[0], seed=options.seed)
    rows = [row for each in loaded for row in look(this, each, options)]
    records.append(options.out, rows)
    for row in rows:
        if row.what == "reach":
            told = f"layer {row.config['layer']} looks back {row.value:,.4g} tokens in the mean"
        else:
            told = (
                f"after {row.config['prompt']!r} and what follows it remembers {row.value:,} bytes"
            )
        print(f"{row.config['candidate']}: {told}")
    print(f"rows added to {options.out}")
    return 0


def look(this: records.Run, loaded: Loaded, options: Options) -> list[records.Row]:
    """All rows of one run."""
    model, vocabulary = loaded.model, loaded.vocabulary
    if not isinstance(model, LanguageModel):
        raise ValueError(
            f"run must be of a language model, got {loaded.folder}, a {model.config.kind}"
        )
    batch = loaded.task.batch("valid", seed=options.seed, rank=0, step=0, batch_size=1)
    tokens = batch["tokens"][batch["mask"]][: options.window]
    if options.window is not None and len(tokens) < options.window:
        raise ValueError(
            f"window must be at most the {len(tokens)} tokens of a sequence of {loaded.folder}, "
            f"got {options.window}"
        )
    at = {
        "candidate": model.config.mechanism,
        "text": str(loaded.config.task.options.get("text", "")).rpartition("/")[-1],
        "preset": loaded.config.preset,
        "length": loaded.task.facts.length,
        "steps": loaded.place.step,
        "valid": dict(loaded.place.metrics),
    }
    sampling = Sampling(
        max_new_tokens=options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
        data_tokens=vocabulary.size,
    )
    writer = Writer(model, vocabulary, sampling)
    _, rows = bench.look(this, writer, tokens, options.prompt, at)
    return rows

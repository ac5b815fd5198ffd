"""`cosformer bench generation`: one more token far into a text, against one near its beginning."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from cosformer import records
from cosformer.bench.rows import keep
from cosformer.bench.timing import median_times
from cosformer.check import check_seed
from cosformer.mechanisms import MECHANISMS
from cosformer.models import PRESETS, LanguageModel, ModelState, Sampling, choose

SAMPLING = Sampling(temperature=0.8, top_k=40)
"""How a token is chosen; the choice is part of the time."""
TOKENS = 16
"""Tokens that one timed call generates; before the first it copies the state, for steps use it."""

WORDS = {"mechanisms": MECHANISMS, "preset": PRESETS}


@dataclass(frozen=True)
class Options:
    """Time of a generated token and memory of the stream, by position."""

    mechanisms: tuple[str, ...] = ("cosformer", "softmax")
    """Mechanisms to measure."""
    preset: str = "tiny"
    """Size of the decoder; tiny is that of the demo."""
    positions: tuple[int, ...] = (100, 8000)
    """Tokens before those that are timed."""
    threads: int = 2
    """CPU threads of torch."""
    repeats: int = 9
    """Samples behind each median."""
    out: Path = Path("results/generation-cpu.jsonl")
    """File the rows are added to."""
    seed: int = 0
    """Seed of weights and tokens."""

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for name in ("threads", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if min(self.positions, default=0) < 1:
            raise ValueError(f"positions must be one or more above 0, got {self.positions}")
        if self.preset not in PRESETS:
            raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {self.preset!r}")
        able = [name for name, kind in MECHANISMS.items() if kind.traits.state != "none"]
        if not self.mechanisms or not set(self.mechanisms) <= set(able):
            raise ValueError(f"mechanisms must be among {', '.join(able)}, got {self.mechanisms}")


def run(options: Options) -> int:
    keys = ("candidate", "position", "from", "to")
    return keep(measure(options), options.out, keys=keys, count=options.threads)


def measure(options: Options) -> Iterator[records.Row]:
    """All rows of one run; positions take turns, so that a change in load meets all alike."""
    this = records.Run.begin(seed=options.seed)
    first, last = min(options.positions), max(options.positions)
    about = {"preset": options.preset, "dtype": "float32", "repeats": options.repeats}
    for name in options.mechanisms:
        model = _model(options, name, last + TOKENS)
        states = {n: state_after(model, n, options.seed) for n in options.positions}
        calls = {
            str(position): functools.partial(_generate, model, state)
            for position, state in states.items()
        }
        times = {
            position: time / TOKENS
            for position, time in median_times(calls, repeats=options.repeats).items()
        }
        held = {position: held_bytes(state) for position, state in states.items()}
        at = {"candidate": name, **about}
        for position in options.positions:
            yield this.row("token_time", times[str(position)], "ms", position=position, **at)
            yield this.row("stream_memory", held[position], "bytes", position=position, **at)
        if first < last:
            at |= {"from": first, "to": last}
            yield this.row("token_time_ratio", times[str(last)] / times[str(first)], "x", **at)
            yield this.row("stream_memory_ratio", held[last] / held[first], "x", **at)


@torch.no_grad()
def state_after(model: LanguageModel, position: int, seed: int = 0) -> ModelState:
    """The state after so many random tokens, read at once as a prompt is."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.config.vocabulary, (1, position), generator=generator)
    return model.backbone.stream(tokens)[1]


def held_bytes(state: Any) -> int:
    """Bytes of all tensors in a state, however deep they lie."""
    if isinstance(state, Tensor):
        return state.nbytes
    return sum(held_bytes(part) for part in state) if isinstance(state, tuple) else 0


def _model(options: Options, mechanism: str, length: int) -> LanguageModel:
    torch.manual_seed(options.seed)
    config = replace(PRESETS[options.preset], mechanism=mechanism, max_length=length)
    return LanguageModel(config).eval()


@torch.no_grad()
def _generate(model: LanguageModel, state: ModelState) -> None:
    """The next tokens after this state, which stays as it is, and so can be timed again."""
    state = tree_map_only(Tensor, torch.clone, state)
    token, noise = torch.zeros(1, 1, dtype=torch.int64), torch.full((1,), 0.5)
    for _ in range(TOKENS):
        x, state = model.backbone.step(token, state)
        token = choose(model.head(x[:, -1]), SAMPLING, noise)[:, None]

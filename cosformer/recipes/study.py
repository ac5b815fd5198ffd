"""A study: many mechanisms under one protocol, each at several rates and seeds.

`PROTOCOLS` says what all runs have in common, `STUDIES` what is compared. To add an entry: a line.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cosformer.check import check_choice
from cosformer.training import (
    Budget,
    Evaluation,
    Optimiser,
    RunConfig,
    Schedule,
    TaskConfig,
)

SOFTMAX = "softmax"
"""The entry that all others are compared with; it is always a finalist."""

Stage = Literal["rates", "seeds", "long", "speed"]
Scale = Literal["full", "4k", "16k", "base", "tiny"]
Fields = Mapping[str, Any]
"""Fields of `ModelConfig` that differ from the protocol's model."""


@dataclass(frozen=True)
class Protocol:
    """What all runs of a study have in common."""

    text: str = "enwik8"
    """The text, as bytes."""
    held_out: int = 2_000_000
    """Bytes at the end of the text that validate; all before is learnt from."""
    length: int = 1024
    """Tokens of a sequence."""
    preset: str = "small"
    """Size of the model; small: 6 layers of 256 with 4 heads of 64."""
    model: Fields = field(default_factory=dict)
    """Fields of the model that differ from the preset."""
    batch: int = 32
    """Sequences in a step."""
    steps: int = 1500
    """Steps of a run."""
    longer: int = 5
    """By how much a run of the stage `long` is longer."""
    timed: int = 200
    """Steps of a run of the stage `speed`, which has the device for itself and is not judged."""
    warmup: int = 200
    """Steps over which the rate rises."""
    rates: tuple[float, ...] = (3e-3, 6e-3, 1e-3)
    """Highest learning rates, the most promising first."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the finalists; every rate is tried with the first."""
    every: int = 500
    """Steps from one validation to the next."""
    log_every: int = 50
    """Steps from one point of a curve to the next."""
    bin: int = 128
    """Positions of a bin of the loss by position. The first bin is reported as `first`, the last
    two as `last`."""
    bfloat16: bool = True
    """Whether matrix products are in bfloat16."""


PROTOCOLS: dict[str, Protocol] = {
    "full": Protocol(),
    "4k": Protocol(length=4096, batch=8),
    "16k": Protocol(length=16_384, batch=2),
    "base": Protocol(preset="base", steps=6100, longer=2, rates=(1e-3, 3e-3), log_every=100),
    "tiny": Protocol(
        held_out=600,
        length=32,
        preset="tiny",
        model={"layers": 6, "width": 16, "heads": 4},
        batch=2,
        steps=6,
        longer=2,
        timed=4,
        warmup=2,
        every=3,
        log_every=2,
        bin=8,
        bfloat16=False,
    ),
}
"""Scale -> protocol. `4k` and `16k`: longer sequences, as many tokens a step. `base`: 12 layers of
768, 200 million tokens. `tiny`: tries the command out in seconds, and its numbers mean nothing."""

_MULTISCALE = "cosformer-multiscale"
_GATED = "cosformer-gated"
_WINDOW = {"local": {"window": 126}}  # a causal window of 64 tokens: half of it, and the own one
_NORM_SIGMOID = {"norm": True, "gate": "sigmoid"}
_LOWER_HALF = f"local*3 {_MULTISCALE}*3"
_FOURTH = f"{_MULTISCALE}*3 softmax {_MULTISCALE}*2"

LM: dict[str, Fields] = {
    SOFTMAX: {"mechanism": "softmax"},
    "softmax-conv": {"mechanism": "softmax", "conv": 4},
    "cosformer": {"mechanism": "cosformer"},
    "cosformer-1-head": {"mechanism": "cosformer", "heads": 1},
    "cosformer-norm-gate": {"mechanism": "cosformer", "norm": True, "gate": True},
    "cosformer-conv": {"mechanism": "cosformer", "conv": 4},
    "multiscale": {"mechanism": _MULTISCALE},
    "multiscale-horizon-1024": {"mechanism": _MULTISCALE, "options": {"horizon": 1024.0}},
    "multiscale-no-cosine": {"mechanism": _MULTISCALE, "options": {"horizon": float("inf")}},
    "multiscale-learned": {"mechanism": _MULTISCALE, "options": {"learned": True}},
    "multiscale-2-heads": {"mechanism": _MULTISCALE, "heads": 2},
    "multiscale-8-heads": {"mechanism": _MULTISCALE, "heads": 8},
    "multiscale-qk-norm": {"mechanism": _MULTISCALE, "qk_norm": True},
    "multiscale-gate": {"mechanism": _MULTISCALE, "gate": True},
    "multiscale-conv": {"mechanism": _MULTISCALE, "conv": 4},
    "multiscale-conv-input": {"mechanism": _MULTISCALE, "conv": 4, "conv_on": "input"},
    "multiscale-conv-gate": {"mechanism": _MULTISCALE, "conv": 4, "gate": True},
    "multiscale-conv-norm-sigmoid": {
        "mechanism": _MULTISCALE, "conv": 4, **_NORM_SIGMOID,
    },
    "multiscale-conv-wide": {"mechanism": _MULTISCALE, "conv": 4, "value_dim": 128},
    "multiscale-norm-sigmoid": {"mechanism": _MULTISCALE, **_NORM_SIGMOID},
    "multiscale-learned-norm-sigmoid": {
        "mechanism": _MULTISCALE, "options": {"learned": True}, **_NORM_SIGMOID,
    },
    "multiscale-both-signs": {"mechanism": _MULTISCALE, "options": {"both_signs": True}},
    "gated": {"mechanism": _GATED},
    "gated-gate": {"mechanism": _GATED, "gate": True},
    "gated-norm-sigmoid": {"mechanism": _GATED, **_NORM_SIGMOID},
    "gated-norm-sigmoid-qk-norm": {"mechanism": _GATED, "qk_norm": True, **_NORM_SIGMOID},
    "gated-norm-sigmoid-both-signs": {
        "mechanism": _GATED, "options": {"both_signs": True}, **_NORM_SIGMOID,
    },
    "gated-norm-sigmoid-8-heads-of-64": {
        "mechanism": _GATED, "heads": 8, "head_dim": 64, **_NORM_SIGMOID,
    },
    "gated-conv": {"mechanism": _GATED, "conv": 4},
    "gated-conv-gate": {"mechanism": _GATED, "conv": 4, "gate": True},
    "local-gated-turns-norm-sigmoid": {
        "mechanism": f"local {_GATED}", "options": _WINDOW, **_NORM_SIGMOID,
    },
    "hybrid-6-gated-norm-sigmoid": {
        "mechanism": f"{_GATED}*3 softmax {_GATED}*2", **_NORM_SIGMOID,
    },
    "local-multiscale": {"mechanism": _LOWER_HALF, "options": _WINDOW},
    "local-multiscale-conv-gate": {
        "mechanism": _LOWER_HALF, "options": _WINDOW, "conv": 4, "gate": True,
    },
    "hybrid-6": {"mechanism": _FOURTH},
    "hybrid-6-last": {"mechanism": f"{_MULTISCALE}*5 softmax"},
    "hybrid-6-conv-gate": {"mechanism": _FOURTH, "conv": 4, "gate": True},
    "hybrid-3": {"mechanism": f"{_MULTISCALE}*2 softmax"},
    "retention": {"mechanism": "retention"},
    "retention-conv-gate": {"mechanism": "retention", "conv": 4, "gate": True},
    "gated-delta": {"mechanism": "gated-delta"},
    "gated-delta-conv-gate": {"mechanism": "gated-delta", "conv": 4, "gate": True},
}  # fmt: skip
"""Entries of the study of next bytes: name -> fields of the model. Positions are each mechanism's
own best (`positions="auto"`) unless an entry names others. hybrid-6: one softmax layer in six."""

MLM: dict[str, Fields] = {
    SOFTMAX: {"mechanism": "softmax"},
    "softmax-conv": {"mechanism": "softmax", "conv": 5},
    "cosformer": {"mechanism": "cosformer"},
    "cosformer-conv": {"mechanism": "cosformer", "conv": 5},
    "multiscale": {"mechanism": _MULTISCALE},
    "multiscale-no-positions": {"mechanism": _MULTISCALE, "positions": "none"},
    "multiscale-conv": {"mechanism": _MULTISCALE, "conv": 5},
    "multiscale-conv-gate": {"mechanism": _MULTISCALE, "conv": 5, "gate": True},
    "multiscale-conv-learned": {
        "mechanism": _MULTISCALE, "conv": 5, "options": {"learned": True},
    },
    "gated-conv": {"mechanism": _GATED, "conv": 5},
    "hybrid-6-conv": {"mechanism": _FOURTH, "conv": 5},
}  # fmt: skip
"""Entries of the study of masked bytes."""


class Study(NamedTuple):
    """What is compared, and by which number."""

    entries: Mapping[str, Fields]
    what: str
    """The quantity of its rows."""


STUDIES: dict[str, Study] = {
    "lm": Study(LM, "bits_per_byte"),
    "mlm": Study(MLM, "bits_per_masked_byte"),
}
"""Task -> its study."""


@dataclass(frozen=True)
class Trial:
    """One run of a study, by what tells it from the others."""

    study: str
    entry: str
    rate: float
    seed: int
    steps: int
    scale: str = "full"

    @property
    def name(self) -> str:
        """The name of its folder."""
        scale = "" if self.scale == "full" else f"-{self.scale}"
        return f"{self.entry}-lr{self.rate:g}-seed{self.seed}-steps{self.steps}{scale}"

    @property
    def is_timed(self) -> bool:
        """Whether the speed of the run is asked for, and not what it has learnt."""
        return self.steps == self.protocol.timed

    @property
    def protocol(self) -> Protocol:
        return PROTOCOLS[self.scale]

    @property
    def fields(self) -> Fields:
        """Fields of the model that differ from the protocol's."""
        return STUDIES[self.study].entries[self.entry]

    def config(self, out: Path, *, data: str | None, device: str, graph: bool) -> RunConfig:
        """`data`: the folder of the protocol's text, or another file in its place."""
        p = self.protocol
        options: dict[str, Any] = {"text": p.text, "held_out": p.held_out, "length": p.length}
        if data is not None:
            options["text" if Path(data).is_file() else "data"] = str(Path(data).resolve())
        return RunConfig(
            task=TaskConfig(self.study, options),
            out=out,
            preset=p.preset,
            model={"positions": "auto", **p.model, **self.fields},
            optimiser=Optimiser(lr=self.rate, betas=(0.9, 0.98), weight_decay=0.1, clip=1.0),
            schedule=Schedule("cosine", warmup=p.warmup / self.steps, final=0.05),
            budget=Budget(steps=self.steps, batch=p.batch),
            evaluation=Evaluation(every=p.every),
            precision="bfloat16" if p.bfloat16 else "float32",
            graph=graph,
            seed=self.seed,
            device=device,
            log_every=p.log_every,
        )


Done = Mapping[Trial, float | None]
"""Trials that have ended -> their value; None: the run diverged."""


def trials(
    study: str, stage: Stage, done: Done, *, only: Iterable[str], finalists: int, scale: str
) -> list[Trial]:
    """The trials of a stage, those that are done as well.

    `only`: entries by name. Without them `rates` takes all entries; the other stages take so many
    `finalists`, the best on validation among entries that are done at all rates, and softmax.
    """
    entries, p, names = STUDIES[study].entries, PROTOCOLS[scale], tuple(only)
    for name in names:
        check_choice("only", name, entries)
    if stage == "rates":
        return [
            Trial(study, entry, rate, p.seeds[0], p.steps, scale)
            for rate in p.rates
            for entry in names or entries
        ]
    best = best_rates(study, done, scale)
    chosen = names or finalists_of(best, finalists)
    if missing := [name for name in chosen if name not in best]:
        raise ValueError(
            f"only must be entries whose rates {', '.join(map(str, p.rates))} are all done, got "
            f"{', '.join(missing)}: finish --stage rates first"
        )
    if not chosen:
        raise ValueError(f"stage {stage} must come after rates, and no entry is done at all rates")
    rates = {entry: best[entry][1] for entry in chosen}
    if stage != "seeds":
        steps = p.timed if stage == "speed" else p.steps * p.longer
        return [Trial(study, e, rate, p.seeds[0], steps, scale) for e, rate in rates.items()]
    return [
        Trial(study, entry, rate, seed, p.steps, scale)
        for seed in p.seeds
        for entry, rate in rates.items()
    ]


def best_rates(study: str, done: Done, scale: str) -> dict[str, tuple[float, float]]:
    """Entry that is done at all rates -> its best value, and the rate of it; the best first."""
    p, found = PROTOCOLS[scale], {}
    for entry in STUDIES[study].entries:
        each = [Trial(study, entry, rate, p.seeds[0], p.steps, scale) for rate in p.rates]
        values = [(value, t.rate) for t in each if (value := done.get(t)) is not None]
        if values and all(trial in done for trial in each):
            found[entry] = min(values)
    return dict(sorted(found.items(), key=lambda item: item[1]))


def finalists_of(best: Iterable[str], count: int) -> tuple[str, ...]:
    """The first so many entries of those that are sorted from the best on, and softmax."""
    names = tuple(best)
    chosen = names[:count]
    return chosen if SOFTMAX not in names or SOFTMAX in chosen else (*chosen, SOFTMAX)

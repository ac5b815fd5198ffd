"""Protocols: what all runs of a study have in common, at full size, at others, and as a toy."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from cosformer.training import TaskConfig

Scale = Literal["full", "4k", "16k", "deep", "base", "tiny"]
Fields = Mapping[str, Any]
"""Names of fields or options, and values that differ from what they are by default."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How every run learns, whatever it learns."""

    length: int
    """Tokens of a sequence."""
    preset: str
    """Size of the model, before the fields of `model`."""
    model: Fields = field(default_factory=dict)
    """Fields of the model that differ from the preset."""
    batch: int
    """Sequences in a step."""
    steps: int
    """Steps of a run."""
    longer: int = 5
    """By how much a run of the stage `long` is longer."""
    timed: int = 200
    """Steps of a run of the stage `speed`, which has the device for itself and is not judged."""
    warmup: int = 200
    """Steps over which the rate rises."""
    rates: tuple[float, ...]
    """Highest learning rates, the most promising first."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the finalists; every rate is tried with the first."""
    every: int = 500
    """Steps from one validation to the next."""
    log_every: int = 50
    """Steps from one point of a curve to the next."""
    bfloat16: bool = True
    """Whether matrix products are in bfloat16."""

    def task(self, study: str, data: str | None) -> TaskConfig:
        """What is learnt; `data`: a folder or a file that the user names."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class TextProtocol(Protocol):
    """Learning the bytes of a text; the task has the name of the study."""

    text: str = "enwik8"
    """The text, as bytes."""
    held_out: int = 2_000_000
    """Bytes at the end of the text that validate; all before is learnt from."""
    bin: int = 128
    """Positions of a bin of the loss by position. The first bin is reported as `first`, the last
    two as `last`."""
    far: int = 8
    """How many times `length` the sequences have on which a finished model of the next byte is
    judged once more."""
    far_bytes: int = 1_000_000
    """The most held-out bytes that such long sequences are made of."""

    def task(self, study: str, data: str | None) -> TaskConfig:
        """`data`: the folder of the text, or another file in its place."""
        options: dict[str, Any] = {
            "text": self.text, "held_out": self.held_out, "length": self.length,
        }  # fmt: skip
        if data is not None:
            options["text" if Path(data).is_file() else "data"] = str(Path(data).resolve())
        return TaskConfig(study, options)


@dataclass(frozen=True, kw_only=True)
class ProbeProtocol(Protocol):
    """Learning a generated task, of which there are as many samples as a run asks for."""

    name: str
    """The task: a name of `cosformer.tasks.TASKS`."""
    options: Fields
    """Options of the task."""
    far: tuple[int, ...] = ()
    """Further lengths of sequences at which a finished model is tested, the shortest first."""
    far_samples: int = 256
    """Sequences of each further length."""

    def task(self, study: str, data: str | None) -> TaskConfig:
        """`data` must be None: samples are drawn."""
        return TaskConfig(self.name, self.options)


# 6 layers of 256 with 4 heads of 64
_FULL = TextProtocol(length=1024, preset="small", batch=32, steps=1500, rates=(3e-3, 6e-3, 1e-3))
PROTOCOLS: dict[str, TextProtocol] = {
    "full": _FULL,
    "4k": replace(_FULL, length=4096, batch=8),
    "16k": replace(_FULL, length=16_384, batch=2),
    "deep": replace(_FULL, length=4096, batch=8, model={"layers": 12}),
    "base": replace(
        _FULL, preset="base", steps=6100, longer=2, rates=(1e-3, 3e-3), every=2000, log_every=100
    ),
    "tiny": replace(
        _FULL,
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
"""Scale -> protocol of the studies of text. `4k` and `16k`: longer sequences, as many tokens a
step. `deep`: 4,096 tokens and 12 layers of 256, of which one may be exact. `base`: 12 layers of
768, 200 million tokens. `tiny`: tries the command out in seconds, and
its numbers mean nothing."""

_TOKENS = 2**15
"""Tokens of a step of MQAR: 8,192 logits for each are most of what a run needs."""
_TOY: Fields = {
    "model": {"layers": 2, "width": 16, "heads": 2},
    "batch": 64,
    "steps": 4,
    "longer": 2,
    "timed": 2,
    "warmup": 2,
    "every": 4,
    "log_every": 2,
    "bfloat16": False,
}


def _probe(
    name: str, length: int, batch: int, options: Fields, far: tuple[int, ...] = ()
) -> ProbeProtocol:
    return ProbeProtocol(
        name=name,
        options=options,
        length=length,
        preset="mini",
        model={"layers": 2, "heads": 2},  # of 128, with 2 heads of 64
        batch=batch,
        steps=3000,
        rates=(3e-3, 1e-3, 1e-2),
        far=far,
    )


def _mqar(length: int, pairs: int, vocabulary: int = 8192) -> ProbeProtocol:
    options = {"length": length, "pairs": pairs, "vocabulary": vocabulary}
    return _probe("mqar", length, _TOKENS // length, options)


def _copying(length: int, copied: int) -> ProbeProtocol:
    return _probe("copying", length + copied, 128, {"length": length, "copied": copied})


def _induction(length: int, *far: int) -> ProbeProtocol:
    # more sequences than others have: each has one label
    return _probe("induction", length, 256, {"length": length}, far)


_TOYS = {
    "mqar-64": _mqar(8, 1, 16),
    "mqar-128": _mqar(8, 2, 16),
    "mqar-256": _mqar(12, 2, 16),
    "mqar-512": _mqar(16, 4, 16),
    "copying": _copying(8, 4),
    "induction": _induction(8, 16, 32),
}
PROBES: dict[str, dict[str, ProbeProtocol]] = {
    "full": {
        "mqar-64": _mqar(64, 4),
        "mqar-128": _mqar(128, 8),
        "mqar-256": _mqar(256, 16),
        "mqar-512": _mqar(512, 64),
        "copying": _copying(256, 16),
        "induction": _induction(256, 1024, 4096, 16_384, 65_536),
    },
    "tiny": {name: replace(each, **_TOY) for name, each in _TOYS.items()},
}
"""Scale -> probe -> protocol; the names of the probes are the same at every scale."""

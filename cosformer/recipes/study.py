"""A study: many mechanisms under one protocol, each at several rates and seeds.

`STUDIES` says what is compared; to add an entry: a line. `protocols.py` says what all runs share.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cosformer.check import check_choice
from cosformer.models import PRESETS, read_pattern
from cosformer.recipes.protocols import PROBES, PROTOCOLS, Fields, Protocol
from cosformer.training import Budget, Evaluation, Optimiser, RunConfig, Schedule

SOFTMAX = "softmax"
"""The entry that all others are compared with; it is always a finalist."""

Stage = Literal["rates", "seeds", "long", "speed"]


def _of(mechanism: str, **fields: Any) -> dict[str, Any]:
    """Fields of a model with this mechanism."""
    return {"mechanism": mechanism, **fields}


_GATED, _DELTA = _of("cosformer-gated"), _of("gated-delta")
_MULTISCALE, _COSFORMER = _of("cosformer-multiscale"), _of("cosformer")
_EXACT, _RETENTION = _of("softmax"), _of("retention")
_FLAT = _MULTISCALE | {"options": {"decay": 1.0}}  # the past weighs the same but for the cosine
_LEARNED = _MULTISCALE | {"options": {"learned": True}}
_RELU_DELTA = _DELTA | {"options": {"features": "relu"}}
_WINDOW = {"local": {"window": 126}}  # a causal window of 64 tokens: half of it, and the own one
_LOWER_HALF = _of("local*3 cosformer-multiscale*3", options=_WINDOW)
_FOURTH = _of("cosformer-multiscale*3 softmax cosformer-multiscale*2")
_GATED_FOURTH = _of("cosformer-gated*3 softmax cosformer-gated*2")
_LAST_256 = {"local": {"window": 510}}

_CONV, _CONV_5 = {"conv": 4}, {"conv": 5}
_GATE, _NORM_SIGMOID = {"gate": True}, {"norm": True, "gate": "sigmoid"}
_LEARNED_POSITIONS = {"positions": "learned"}

LM: dict[str, Fields] = {
    SOFTMAX: _EXACT,
    "softmax-conv": _EXACT | _CONV,
    "softmax-norm-sigmoid": _EXACT | _NORM_SIGMOID,
    "cosformer": _COSFORMER,
    "cosformer-1-head": _COSFORMER | {"heads": 1},
    "cosformer-positions": _COSFORMER | _LEARNED_POSITIONS,
    "cosformer-1-head-positions": _COSFORMER | {"heads": 1} | _LEARNED_POSITIONS,
    "cosformer-norm-gate": _COSFORMER | {"norm": True} | _GATE,
    "cosformer-conv": _COSFORMER | _CONV,
    "multiscale": _MULTISCALE,
    "multiscale-horizon-1024": _MULTISCALE | {"options": {"horizon": 1024.0}},
    "multiscale-no-cosine": _MULTISCALE | {"options": {"horizon": float("inf")}},
    "multiscale-learned": _LEARNED,
    "multiscale-2-heads": _MULTISCALE | {"heads": 2},
    "multiscale-8-heads": _MULTISCALE | {"heads": 8},
    "multiscale-qk-norm": _MULTISCALE | {"qk_norm": True},
    "multiscale-rotary": _MULTISCALE | {"positions": "rotary"},
    "multiscale-gate": _MULTISCALE | _GATE,
    "multiscale-conv": _MULTISCALE | _CONV,
    "multiscale-conv-input": _MULTISCALE | _CONV | {"conv_on": "input"},
    "multiscale-conv-gate": _MULTISCALE | _CONV | _GATE,
    "multiscale-conv-norm-sigmoid": _MULTISCALE | _CONV | _NORM_SIGMOID,
    "multiscale-conv-wide": _MULTISCALE | _CONV | {"value_dim": 128},
    "multiscale-norm-sigmoid": _MULTISCALE | _NORM_SIGMOID,
    "multiscale-learned-norm-sigmoid": _LEARNED | _NORM_SIGMOID,
    "gated": _GATED,
    "gated-gate": _GATED | _GATE,
    "gated-norm-sigmoid": _GATED | _NORM_SIGMOID,
    "gated-norm-sigmoid-qk-norm": _GATED | _NORM_SIGMOID | {"qk_norm": True},
    "gated-norm-sigmoid-8-heads-of-64": _GATED | _NORM_SIGMOID | {"heads": 8, "head_dim": 64},
    "gated-norm-sigmoid-2-heads": _GATED | _NORM_SIGMOID | {"heads": 2},
    "gated-norm-sigmoid-keys-of-128": _GATED | _NORM_SIGMOID | {"head_dim": 128, "value_dim": 64},
    "gated-conv": _GATED | _CONV,
    "gated-conv-gate": _GATED | _CONV | _GATE,
    "local-gated-turns-norm-sigmoid": _of("local cosformer-gated", options=_WINDOW) | _NORM_SIGMOID,
    "window-6-gated-norm-sigmoid": _of(
        "cosformer-gated*3 local cosformer-gated*2", options=_LAST_256, **_NORM_SIGMOID
    ),
    "window-6-last-qk-norm": _of(
        "cosformer-gated*5 local", options=_LAST_256, qk_norm=True, **_NORM_SIGMOID
    ),
    "windows-conv": _of("local", options=_LAST_256) | _CONV,
    "windows-exact-conv": _of("local*3 softmax local*2", options=_LAST_256) | _CONV,
    "hybrid-6-gated-norm-sigmoid": _GATED_FOURTH | _NORM_SIGMOID,
    "hybrid-12-gated-norm-sigmoid": _of(
        "cosformer-gated*7 softmax cosformer-gated*4", **_NORM_SIGMOID
    ),
    "hybrid-3-gated-norm-sigmoid": _of("cosformer-gated*2 softmax") | _NORM_SIGMOID,
    "local-multiscale": _LOWER_HALF,
    "local-multiscale-conv-gate": _LOWER_HALF | _CONV | _GATE,
    "hybrid-6": _FOURTH,
    "hybrid-6-last": _of("cosformer-multiscale*5 softmax"),
    "hybrid-6-conv-gate": _FOURTH | _CONV | _GATE,
    "hybrid-3": _of("cosformer-multiscale*2 softmax"),
    "retention": _RETENTION,
    "retention-conv-gate": _RETENTION | _CONV | _GATE,
    "gated-delta": _DELTA,
    "gated-delta-conv-gate": _DELTA | _CONV | _GATE,
    "gated-delta-conv-norm-sigmoid": _DELTA | _CONV | _NORM_SIGMOID,
    "gated-delta-relu-norm-sigmoid": _RELU_DELTA | _NORM_SIGMOID,
    "gated-delta-relu-conv-norm-sigmoid": _RELU_DELTA | _CONV | _NORM_SIGMOID,
}
"""Entries of the study of next bytes: name -> fields of the model. Positions are each mechanism's
own best (`positions="auto"`) unless an entry names others. hybrid-6: one softmax layer in six;
window-6: one layer in six that sees the last 256 tokens exactly, and none before; windows: such
layers in place of all linear ones, the rival that keeps constant memory without linear attention;
hybrid-12 is for models of 12 layers."""

MLM: dict[str, Fields] = {
    SOFTMAX: _EXACT,
    "softmax-conv": _EXACT | _CONV_5,
    "softmax-norm-sigmoid": _EXACT | _NORM_SIGMOID,
    "softmax-conv-norm-sigmoid": _EXACT | _CONV_5 | _NORM_SIGMOID,
    "cosformer": _COSFORMER,
    "cosformer-conv": _COSFORMER | _CONV_5,
    "multiscale": _MULTISCALE,
    "multiscale-no-positions": _MULTISCALE | {"positions": "none"},
    "multiscale-conv": _MULTISCALE | _CONV_5,
    "multiscale-conv-gate": _MULTISCALE | _CONV_5 | _GATE,
    "multiscale-conv-learned": _LEARNED | _CONV_5,
    "gated-conv": _GATED | _CONV_5,
    "gated-norm-sigmoid": _GATED | _NORM_SIGMOID,
    "gated-conv-norm-sigmoid": _GATED | _CONV_5 | _NORM_SIGMOID,
    "hybrid-6-gated-conv-norm-sigmoid": _GATED_FOURTH | _CONV_5 | _NORM_SIGMOID,
    "hybrid-6-conv": _FOURTH | _CONV_5,
}
"""Entries of the study of masked bytes."""


PROBED: dict[str, Fields] = {
    SOFTMAX: _EXACT,
    "softmax-conv": _EXACT | _CONV,
    "linear-conv": _of("linear") | _CONV,
    "cosformer": _COSFORMER,
    "cosformer-conv": _COSFORMER | _CONV,
    "multiscale": _MULTISCALE,
    "multiscale-conv": _MULTISCALE | _CONV,
    "gated-conv": _GATED | _CONV,
    "gated-conv-gate": _GATED | _CONV | _GATE,
    "gated-conv-norm-sigmoid": _GATED | _CONV | _NORM_SIGMOID,
    "gated-conv-norm-sigmoid-qk-norm": _GATED | _CONV | _NORM_SIGMOID | {"qk_norm": True},
    "flat-conv-norm-sigmoid": _FLAT | _CONV | _NORM_SIGMOID,
    "flat-1-head-positions": _FLAT | _CONV | _NORM_SIGMOID | {"heads": 1} | _LEARNED_POSITIONS,
    "gated-1-head-positions": _GATED | _CONV | _NORM_SIGMOID | {"heads": 1} | _LEARNED_POSITIONS,
    "delta-conv": _of("delta") | _CONV,
    "gated-delta-conv": _DELTA | _CONV,
    "gated-delta-relu-conv": _RELU_DELTA | _CONV,
    "hybrid": _of("cosformer-multiscale softmax") | _CONV,
    "hybrid-gated-norm-sigmoid": _of("cosformer-gated softmax") | _CONV | _NORM_SIGMOID,
    "hybrid-exact-first": _of("softmax cosformer-gated") | _CONV | _NORM_SIGMOID,
}
"""Entries of the study of probes. hybrid: one exact layer, the last of two unless the name says
first. flat: no decay, so that nothing of a short past is forgotten; positions: tokens know where
pairs end and questions begin."""


class Study(NamedTuple):
    """The entries that a study compares, and the quantity that decides."""

    entries: Mapping[str, Fields]
    what: str
    """The quantity of its rows."""
    unit: str = "bits"
    sign: int = 1
    """1 where a lower value is better, -1 where a higher one is."""


STUDIES: dict[str, Study] = {
    "lm": Study(LM, "bits_per_byte"),
    "mlm": Study(MLM, "bits_per_masked_byte"),
    "probes": Study(PROBED, "accuracy", "accuracy", sign=-1),
}
"""Name -> its study."""


def entries_of(study: str, scale: str) -> tuple[str, ...]:
    """The entries whose pattern of layers divides the layers of the scale's models."""
    some = next(iter(protocols(study, scale).values()))
    layers = some.model.get("layers", PRESETS[some.preset].layers)

    def fits(mechanism: str) -> bool:
        try:
            read_pattern(mechanism, layers)
        except ValueError:
            return False
        return True

    found = STUDIES[study].entries.items()
    return tuple(name for name, fields in found if fits(fields["mechanism"]))


def protocols(study: str, scale: str) -> Mapping[str, Protocol]:
    """Probe -> its protocol; a study of text has one protocol, under the empty name."""
    if study == "probes":
        return PROBES[check_choice("scale", scale, PROBES)]
    return {"": PROTOCOLS[scale]}


@dataclass(frozen=True)
class Trial:
    """One run of a study, by what tells it from the others."""

    study: str
    entry: str
    rate: float
    seed: int
    steps: int
    scale: str = "full"
    probe: str = ""
    """What is learnt in a study of probes; empty in others."""

    @property
    def name(self) -> str:
        """The name of its folder."""
        scale = "" if self.scale == "full" else f"-{self.scale}"
        return f"{self.case}-lr{self.rate:g}-seed{self.seed}-steps{self.steps}{scale}"

    @property
    def case(self) -> str:
        """The entry, and the probe if there is one."""
        return "-".join(filter(None, (self.entry, self.probe)))

    @property
    def is_timed(self) -> bool:
        """Whether the speed of the run is asked for, and not what it has learnt."""
        return self.steps == self.protocol.timed

    def spell(self, value: float | None) -> str:
        """The value for readers; None: the run diverged."""
        if value is None:
            return "diverged"
        if self.is_timed:
            return f"{value:,.0f} tokens/s"
        return f"{value:.4f} {STUDIES[self.study].unit}"

    @property
    def protocol(self) -> Protocol:
        return protocols(self.study, self.scale)[self.probe]

    @property
    def fields(self) -> Fields:
        """Fields of the model that differ from the protocol's."""
        return STUDIES[self.study].entries[self.entry]

    def config(
        self, out: Path, *, data: str | None, device: str, graph: bool, compile: bool | None = None
    ) -> RunConfig:
        """`data`: the folder of the protocol's text, or another file in its place."""
        p = self.protocol
        return RunConfig(
            task=p.task(self.study, data),
            out=out,
            preset=p.preset,
            model={"positions": "auto", **p.model, **self.fields},
            optimiser=Optimiser(lr=self.rate, betas=(0.9, 0.98), weight_decay=0.1, clip=1.0),
            schedule=Schedule("cosine", warmup=p.warmup / self.steps, final=0.05),
            budget=Budget(steps=self.steps, batch=p.batch),
            evaluation=Evaluation(every=p.every),
            precision="bfloat16" if p.bfloat16 else "float32",
            graph=graph,
            compile=compile,
            seed=self.seed,
            device=device,
            log_every=p.log_every,
        )


Done = Mapping[Trial, float | None]
"""Trials that have ended -> their value on validation; None: the run diverged."""


def check_names(study: str, *, only: Iterable[str], probes: Iterable[str], scale: str) -> None:
    """Refuse an entry, a scale or a probe that the study does not have."""
    for name in only:
        check_choice("only", name, STUDIES[study].entries)
        if name not in entries_of(study, scale):
            raise ValueError(
                f"only must be entries whose layers fit the scale {scale}, got {name}: a pattern "
                "of 12 layers needs --scale deep or base"
            )
    known = protocols(study, scale)
    for name in probes:
        if "" in known:
            raise ValueError(f"probes must be left out for {study}, which has none, got {name!r}")
        check_choice("probes", name, known)


def trials(
    study: str,
    stage: Stage,
    done: Done,
    *,
    only: tuple[str, ...] = (),
    probes: tuple[str, ...] = (),
    rates: tuple[float, ...] = (),
    finalists: int = 6,
    scale: str = "full",
) -> list[Trial]:
    """The trials of a stage, those that are done as well; the most promising rates come first.

    `only`: entries by name. Without them `rates` takes all entries; the other stages take so many
    `finalists` of each probe, the best on validation among entries that are done at all rates, and
    softmax. `probes`: by name; all of them if none is given. `rates`: in place of all of them, and
    of the best one in other stages.
    """
    check_names(study, only=only, probes=probes, scale=scale)
    if rates and not only and stage != "rates":
        raise ValueError(f"rates need entries by name (only) in the stage {stage}, got {rates}")
    known, found = protocols(study, scale), []
    for probe in probes or known:
        p = known[probe]
        best = best_rates(study, done, scale, probe)
        if stage == "rates":
            names = only or entries_of(study, scale)
            tried = dict.fromkeys(names, rates or p.rates)
        elif rates:
            tried = dict.fromkeys(only, rates)
        else:
            names = only or finalists_of(best, finalists)
            _require_rates(stage, names, best, probe)
            tried = {name: (best[name],) for name in names}
        seeds = p.seeds if stage == "seeds" else p.seeds[:1]
        steps = {"speed": p.timed, "long": p.steps * p.longer}.get(stage, p.steps)
        found += [
            (seed, number, Trial(study, name, rate, seed, steps, scale, probe))
            for seed in seeds
            for name, rates in tried.items()
            for number, rate in enumerate(rates)
        ]
    return [trial for *_, trial in sorted(found, key=lambda case: case[:2])]


def best_rates(study: str, done: Done, scale: str, probe: str = "") -> dict[str, float]:
    """Entry that is done at all rates -> its best rate; the best entry first."""
    p, sign = protocols(study, scale)[probe], STUDIES[study].sign
    found = {}
    for entry in STUDIES[study].entries:
        each = [Trial(study, entry, rate, p.seeds[0], p.steps, scale, probe) for rate in p.rates]
        values = [(sign * value, t.rate) for t in each if (value := done.get(t)) is not None]
        if values and all(trial in done for trial in each):
            found[entry] = min(values)
    return {entry: found[entry][1] for entry in sorted(found, key=lambda entry: found[entry])}


def finalists_of(best: Iterable[str], count: int) -> tuple[str, ...]:
    """The first so many entries of those that are sorted from the best on, and softmax."""
    names = tuple(best)
    chosen = names[:count]
    return chosen if SOFTMAX not in names or SOFTMAX in chosen else (*chosen, SOFTMAX)


def _require_rates(
    stage: Stage, names: tuple[str, ...], best: Mapping[str, float], probe: str
) -> None:
    """Refuse a stage that comes before the rates of its entries are done."""
    of = f" of {probe}" if probe else ""
    if missing := [name for name in names if name not in best]:
        raise ValueError(
            f"only must be entries whose rates{of} are all done, got {', '.join(missing)}: "
            "finish --stage rates first"
        )
    if not names:
        raise ValueError(
            f"stage {stage} must come after rates, and no entry is done at all rates{of}"
        )

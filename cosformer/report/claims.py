"""What a table says about the paper's claim, in one sentence that is made of its numbers."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cosformer.records import growth_exponent
from cosformer.report.selection import Times, crossover, two_digits

SHORTEST = 1024
"""Tokens of the shortest sequences in the paper's table of speed."""
GROWTH_FROM = 4 * SHORTEST
"""Below this length fixed costs hide how time grows."""
LINEAR = 1.2
"""An exponent of growth below which time counts as linear: fixed costs and caches bend it."""
PLACES = {1: "ahead of", 0: "level with", -1: "behind"}


class Score(NamedTuple):
    """A number of a table, over seeds."""

    mean: float
    deviation: float | None = None
    """The standard deviation over seeds; None for one seed, whose spread nobody knows."""
    doubt: str = ""
    """Why the number is not final, in words; empty where it is."""

    @classmethod
    def of(cls, values: Sequence[float], doubt: str = "") -> "Score":
        spread = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), spread, doubt)


Scores = Mapping[str, Mapping[str, Score]]
"""Entry -> column -> its number."""


class Pair(NamedTuple):
    """Two entries of a table that a claim compares."""

    ours: str
    theirs: str = "softmax"


class Claim(NamedTuple):
    """What the paper says that a table can judge."""

    says: str
    """A clause that follows "The paper says that"; empty where the paper says nothing of it."""
    judged: Sequence[Pair] = (Pair("cosformer"),)
    """What the claim is about."""
    also: Sequence[Pair] = ()
    """What the paper does not have, and is told beside it."""
    slack: float = 0.0
    """A difference of means that the claim itself allows."""
    is_strict: bool = True
    """Whether ours must be ahead; if not, level is enough."""


CLAIMS = {
    "lra": Claim(
        "cosFormer's mean over Long-Range Arena is above that of softmax (55.2 against 54.4)",
        also=(Pair("cosformer-multiscale"),),
    ),
    "lra-pretrained": Claim("", also=(Pair("cosformer"), Pair("cosformer-multiscale"))),
    "lm": Claim(
        "cosFormer models language better than softmax (perplexity 23.1 against 26.2)",
        also=(Pair("cosformer-multiscale"),),
    ),
    "mlm": Claim(
        "cosFormer comes within a point of softmax after masked pre-training (85.3 against 85.7)",
        also=(Pair("cosformer-multiscale"),),
        slack=1.0,
        is_strict=False,
    ),
    "ablation": Claim(
        "ReLU is a better feature than identity and leaky ReLU, and that the cosine improves it",
        judged=(Pair("relu", "identity"), Pair("relu", "leaky-relu"), Pair("relu-cosine", "relu")),
        also=(Pair("relu-cosine-decay", "relu-cosine"), Pair("relu-cosine-decay")),
    ),
    "study lm": Claim("cosFormer models language better than softmax"),
    "study mlm": Claim("cosFormer comes close to softmax in masked pre-training", is_strict=False),
}
"""Name of a table -> what it judges. The numbers in parentheses are those of Qin et al. 2022."""


def claim_sentence(
    claim: Claim, scores: Scores, *, lower: Mapping[str, bool], mean: Sequence[str] = ()
) -> str:
    """What the numbers say about a claim.

    `lower`: column -> whether a lower number is better. `mean`: columns whose mean decides, as soon
    as both entries have all of them. Two numbers are level that differ by no more than the sum of
    their deviations, or that are written alike; a deviation that is not known is taken to be that
    of the other number.
    """

    def compared(pairs: Sequence[Pair], slack: float) -> list[_Compared]:
        found = (_compared(pair, scores, lower, mean, slack) for pair in pairs)
        return [each for each in found if each is not None]

    judged = compared(claim.judged if claim.says else (), claim.slack)
    told = compared(claim.also, 0.0)
    parts = [f"The paper says that {claim.says}" if claim.says else "The paper has no such table"]
    if judged:
        conclusion = _conclusion([p for each in judged for p in each.places], claim.is_strict)
        parts.append(f"here{_doubts(judged)} {_said(judged)}, {conclusion}")
    elif claim.says:
        parts.append("what it compares is not measured yet")
    if told:
        parts.append(f"beyond the paper{_doubts(told)}, {_said(told)}")
    return f"{'; '.join(parts)}." if judged or told else f"{parts[0]}; nothing is measured yet."


def speed_sentence(found: Times, growth: Mapping[str, float], ours: str, theirs: str) -> str:
    """What times of both passes, of a call or of a token, say about linear time."""
    begin = (
        "The paper says that the cost of cosFormer grows linearly with the length, and that it "
        f"trains faster than softmax from {SHORTEST:,} tokens on"
    )
    common = sorted(found.get(ours, {}).keys() & found.get(theirs, {}).keys())
    if not common:
        return f"{begin}; there are no times of both here, so nothing can be said."
    short, long = common[0], common[-1]
    times = found[theirs][long] / found[ours][long]
    length = crossover(found[ours], found[theirs])
    if length is None:
        told = f"not faster than softmax at any measured length, and takes {1 / times:.3g} times"
        told += f" its time at {long:,}"
    else:
        since = f"about {two_digits(length):,}" if length else f"{short:,}"
        told = f"faster than softmax from {since} tokens on and takes 1/{times:.3g} of its time at "
        told += f"{long:,} tokens"
    told = f"here {ours} is {told}"
    if ours in growth:
        told += f"; its time grows as length^{growth[ours]:.2f}"
        told += f" (softmax: length^{growth[theirs]:.2f})" if theirs in growth else ""
    found_true, missing = [length is not None], list[str]()
    if length == 0 and short > SHORTEST:
        missing.append(f"{SHORTEST:,} tokens")
    else:
        found_true.append(length is not None and length <= SHORTEST)
    if ours in growth:
        found_true.append(growth[ours] < LINEAR)
    else:
        missing.append(f"growth from {GROWTH_FROM:,} tokens on")
    conclusion = _conclusion([1 if each else -1 for each in found_true], True)
    left = f" (not measured: {', '.join(missing)})" if missing else ""
    return f"{begin}; {told}, {conclusion}{left}."


def growth_by_name(tokens: Times) -> dict[str, float]:
    """Candidate -> the exponent by which the time of a sequence grows, from times of a token; of
    those that have two lengths from `GROWTH_FROM` on."""
    found = dict[str, float]()
    for name, by_length in tokens.items():
        sequences = {n: n * time for n, time in by_length.items() if n >= GROWTH_FROM}
        if len(sequences) > 1:
            found[name] = growth_exponent(sequences)
    return found


class _Compared(NamedTuple):
    """A pair of entries, compared."""

    said: str
    places: Sequence[int]
    """Where ours stands in each column: 1 ahead, 0 level, -1 behind."""
    scores: Mapping[str, Sequence[Score]]
    """Entry -> the numbers of it that were compared."""


def _compared(
    pair: Pair, scores: Scores, lower: Mapping[str, bool], mean: Sequence[str], slack: float
) -> _Compared | None:
    """One pair in words, and where ours stands; None where they have no column in common."""
    ours, theirs = scores.get(pair.ours, {}), scores.get(pair.theirs, {})
    if mean and all(column in ours and column in theirs for column in mean):
        both = {name: [scores[name][column] for column in mean] for name in pair}
        means = [mean_score(both[name]) for name in pair]
        place, against = _place(means, ".1f", lower[mean[0]], slack), _spelt(means, ".1f")
        said = f"{pair.ours} is {PLACES[place]} {pair.theirs} in the mean ({against})"
        return _Compared(said, [place], both)
    columns = [column for column in lower if column in ours and column in theirs]
    if not columns:
        return None
    places = {c: _place((ours[c], theirs[c]), ".4g", lower[c], 0.0) for c in columns}
    spelt = {c: f"{c} ({_spelt((ours[c], theirs[c]), '.4g')})" for c in columns}
    parts = []
    for place, words in PLACES.items():
        if at := [spelt[c] for c in columns if places[c] == place]:
            parts.append(f"{words} {pair.theirs} in {_listed(at)}")
    both = {name: [scores[name][column] for column in columns] for name in pair}
    return _Compared(f"{pair.ours} is {_listed(parts)}", list(places.values()), both)


def _spelt(scores: Sequence[Score], digits: str) -> str:
    return " against ".join(f"{each.mean:{digits}}" for each in scores)


def _place(scores: Sequence[Score], digits: str, is_lower_better: bool, slack: float) -> int:
    """1 if the first of two scores is ahead, 0 if they are level, -1 if it is behind."""
    ours, theirs = scores
    lead = (theirs.mean - ours.mean) * (1 if is_lower_better else -1)
    known = [each.deviation for each in scores if each.deviation is not None]
    if f"{ours.mean:{digits}}" == f"{theirs.mean:{digits}}":
        return 0
    if known and abs(lead) <= 2 * statistics.fmean(known):
        return 0
    return 1 if lead > 0 else 0 if -lead <= slack else -1


def _said(found: Sequence[_Compared]) -> str:
    return _listed([each.said for each in found])


def _doubts(found: Sequence[_Compared]) -> str:
    """What may still change a comparison, in parentheses; empty where nothing does."""
    scores = [(name, s) for each in found for name, mine in each.scores.items() for s in mine]
    doubts = ["one seed each"] if all(s.deviation is None for _, s in scores) else []
    doubts += dict.fromkeys(f"{name}: {s.doubt}" for name, s in scores if s.doubt)
    return f" ({'; '.join(doubts)})" if doubts else ""


def mean_score(scores: Sequence[Score]) -> Score:
    """The mean of independent scores, and its deviation, as far as theirs are known."""
    known = [each.deviation for each in scores if each.deviation is not None]
    spread = math.hypot(*known) / len(scores) if known else None
    return Score(statistics.fmean(each.mean for each in scores), spread)


def beats_floor(value: float, floor: float, *, samples: int | None) -> bool:
    """Whether a number is better than a floor by more than chance.

    `samples`: of an accuracy, how many it was measured on (0: nobody knows); two standard errors of
    guesses that are right as often as the floor are chance. None: a loss, where lower is better.
    """
    if samples is None:
        return value < floor
    chance = 2 * math.sqrt(floor * (1 - floor) / samples) if samples else 0.0
    return value > floor + chance


def _conclusion(places: Sequence[int], is_strict: bool) -> str:
    """What follows for a claim. `places`: where ours stands, 1 for ahead, 0 level, -1 behind."""
    holds = [place >= is_strict for place in places]
    if all(holds):
        return "which supports the claim"
    if any(holds):
        return "which supports it in part"
    return "which speaks against the claim" if min(places) < 0 else "which leaves the claim open"


def _listed(parts: Sequence[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last

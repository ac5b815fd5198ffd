"""What a table says about the paper's claim, in one sentence that is made of its numbers."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cosformer.report.selection import Times, crossover, two_digits

SHORTEST = 1024
"""Tokens of the shortest sequences in the paper's table of speed."""
LINEAR = 1.2
"""An exponent of growth below which time counts as linear: fixed costs and caches bend it."""
PLACES = {1: "ahead of", 0: "level with", -1: "behind"}


class Score(NamedTuple):
    """A number of a table, over seeds."""

    mean: float
    deviation: float = 0.0
    """The standard deviation over seeds; 0 for one seed, whose spread nobody knows."""

    @classmethod
    def of(cls, values: Sequence[float]) -> "Score":
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        return cls(statistics.fmean(values), spread)


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
    their deviations.
    """
    judged, places = list[str](), list[int]()
    for pair in claim.judged if claim.says else ():
        if found := _compared(pair, scores, lower, mean, claim.slack):
            judged.append(found[0])
            places += found[1]
    beside = [_compared(pair, scores, lower, mean, 0.0) for pair in claim.also]
    told = [found[0] for found in beside if found]
    parts = [f"The paper says that {claim.says}" if claim.says else "The paper has no such table"]
    if judged:
        parts.append(f"here {_listed(judged)}, {_conclusion(places, claim.is_strict)}")
    elif claim.says:
        parts.append("what it compares is not measured yet")
    if told:
        parts.append(f"beyond the paper, {_listed(told)}")
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
    long = common[-1]
    times = found[theirs][long] / found[ours][long]
    length = crossover(found[ours], found[theirs])
    since = "not faster than softmax at any measured length"
    if length is not None:
        since = f"faster than softmax from about {two_digits(length):,} tokens on"
        since = since if length else f"faster than softmax from {common[0]:,} tokens on"
    told = f"here {ours} is {since} and takes 1/{times:.3g} of its time at {long:,} tokens"
    if length is None:
        told = f"here {ours} is {since}, and takes {1 / times:.3g} times its time at {long:,}"
    if growth.keys() >= {ours, theirs}:
        grown = f"length^{growth[ours]:.2f} (softmax: length^{growth[theirs]:.2f})"
        told += f"; its time grows as {grown}"
    found_true = [length is not None, length is not None and length <= SHORTEST]
    found_true += [growth[ours] < LINEAR] if ours in growth else []
    return f"{begin}; {told}, {_conclusion([1 if each else -1 for each in found_true], True)}."


def _compared(
    pair: Pair, scores: Scores, lower: Mapping[str, bool], mean: Sequence[str], slack: float
) -> tuple[str, list[int]] | None:
    """One pair in words, and where ours stands; None where they have no column in common."""
    ours, theirs = scores.get(pair.ours, {}), scores.get(pair.theirs, {})
    if mean and all(column in ours and column in theirs for column in mean):
        one, other = (mean_score([each[column] for column in mean]) for each in (ours, theirs))
        place = _place(one, other, lower[mean[0]], slack)
        said = f"{pair.ours} is {PLACES[place]} {pair.theirs} in the mean"
        return f"{said} ({one.mean:.1f} against {other.mean:.1f})", [place]
    columns = [column for column in lower if column in ours and column in theirs]
    if not columns:
        return None
    places = {c: _place(ours[c], theirs[c], lower[c], 0.0) for c in columns}
    parts = []
    for place, words in PLACES.items():
        at = [
            f"{column} ({ours[column].mean:.4g} against {theirs[column].mean:.4g})"
            for column in columns
            if places[column] == place
        ]
        if at:
            parts.append(f"{words} {pair.theirs} in {_listed(at)}")
    return f"{pair.ours} is {_listed(parts)}", list(places.values())


def _place(ours: Score, theirs: Score, is_lower_better: bool, slack: float) -> int:
    """1: ours is ahead, 0: level, -1: behind."""
    lead = (theirs.mean - ours.mean) * (1 if is_lower_better else -1)
    if abs(lead) <= ours.deviation + theirs.deviation:
        return 0
    return 1 if lead > 0 else 0 if -lead <= slack else -1


def mean_score(scores: Sequence[Score]) -> Score:
    """The mean of independent scores, and its deviation."""
    spread = math.hypot(*(each.deviation for each in scores)) / len(scores)
    return Score(statistics.fmean(each.mean for each in scores), spread)


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

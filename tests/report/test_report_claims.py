"""What a table says about a claim follows from its numbers."""

import pytest

from cosformer.report.claims import CLAIMS, Claim, Pair, Score, claim_sentence, speed_sentence

LOWER = {"a": False, "b": False}
CLAIM = Claim("ours is better", judged=(Pair("ours"),), also=(Pair("more"),))
THEIRS = {"a": Score(50.0, 0.5), "b": Score(60.0)}
SAID = {
    "ahead of softmax in a (52 against 50) and b (61 against 60), which supports the claim": (
        52,
        61,
    ),
    "level with softmax in a (50.5 against 50) and b (60 against 60), which leaves": (50.5, 60),
    "behind softmax in a (40 against 50) and b (50 against 60), which speaks against": (40, 50),
    "a (52 against 50) and behind softmax in b (50 against 60), which supports it in part": (
        52,
        50,
    ),
}


@pytest.mark.parametrize("words", SAID)
def test_columns_decide_and_deviations_make_level(words):
    ours = dict(zip("ab", map(Score, SAID[words]), strict=True))
    said = claim_sentence(CLAIM, {"ours": ours, "softmax": THEIRS}, lower=LOWER)
    assert said.startswith("The paper says that ours is better; here ours is ")
    assert words in said


def test_a_mean_decides_as_soon_as_it_is_whole_and_slack_forgives():
    ours = {"a": Score(40.0), "b": Score(69.0)}
    scores = {"ours": ours, "softmax": THEIRS, "more": {"a": Score(60.0)}}
    said = claim_sentence(CLAIM, scores, lower=LOWER, mean=("a", "b"))
    # a deviation of 0.25, and as much of ours
    assert "here ours is level with softmax in the mean (54.5 against 55.0)" in said
    assert said.endswith("; beyond the paper, more is ahead of softmax in a (60 against 50).")
    behind = {"ours": {**ours, "b": Score(68.0)}, "softmax": THEIRS}
    for slack, words in ((0.0, "speaks against"), (1.0, "supports the claim")):
        about = CLAIM._replace(slack=slack, is_strict=False)
        said = claim_sentence(about, behind, lower=LOWER, mean=("a", "b"))
        assert words in said


def test_numbers_that_are_written_alike_are_level_and_one_seed_is_told():
    scores = {"ours": {"a": Score(50.001), "b": Score(61.0)}, "softmax": {"a": Score(50.0)}}
    scores["softmax"]["b"] = Score(60.0, doubt="not all runs have ended")
    said = claim_sentence(CLAIM, scores, lower=LOWER)
    assert "ahead of softmax in b (61 against 60) and level with softmax in a (50 against" in said
    assert "here (one seed each; softmax: not all runs have ended) ours is ahead" in said
    said = claim_sentence(CLAIM, scores, lower=LOWER, mean=("a",))
    assert "level with softmax in the mean (50.0 against 50.0)" in said


@pytest.mark.parametrize("name", CLAIMS)
def test_without_numbers_nothing_is_claimed(name):
    assert claim_sentence(CLAIMS[name], {}, lower={"a": True}).endswith("nothing is measured yet.")


def test_lower_is_better_where_a_column_says_so():
    scores = {"ours": {"a": Score(1.0)}, "softmax": {"a": Score(2.0)}}
    assert "ahead of softmax" in claim_sentence(CLAIM, scores, lower={"a": True})
    assert "behind softmax" in claim_sentence(CLAIM, scores, lower={"a": False})


def test_times_are_judged_by_the_longest_length_and_by_growth():
    found = {"ours": {256: 2.0, 1024: 2.0}, "softmax": {256: 1.0, 1024: 8.0}}
    said = speed_sentence(found, {"ours": 1.0, "softmax": 2.0}, "ours", "softmax")
    assert "from about 410 tokens on and takes 1/4 of its time at 1,024 tokens" in said
    assert said.endswith("length^1.00 (softmax: length^2.00), which supports the claim.")
    late = {"ours": {256: 2.0, 4096: 2.0}, "softmax": {256: 0.01, 4096: 4.0}}
    for times, growth in ((found, 1.9), (late, 1.0)):
        assert "in part" in speed_sentence(times, {"ours": growth}, "ours", "softmax")
    slower = {"ours": {256: 2.0}, "softmax": {256: 1.0}}
    said = speed_sentence(slower, {"ours": 1.9}, "ours", "softmax")
    assert "is not faster than softmax" in said
    assert said.endswith("which speaks against the claim.")
    long = {"ours": {2048: 1.0, 8192: 1.0}, "softmax": {2048: 2.0, 8192: 8.0}}
    said = speed_sentence(long, {}, "ours", "softmax")
    assert said.endswith(
        "supports the claim (not measured: 1,024 tokens, growth from 4,096 tokens on)."
    )
    assert "no times of both" in speed_sentence({}, {}, "ours", "softmax")

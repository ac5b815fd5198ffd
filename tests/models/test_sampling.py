"""The choice of a token: what temperature, top-k and top-p leave, and how often."""

import pytest
import torch

from cosformer.models import Sampling
from cosformer.models.sampling import Choices, Plan, choose

LOGITS = torch.tensor([2.0, 0.0, 3.0, 1.0, -1.0])  # likeliest: 2, 0, 3, 1, 4
EVEN = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000


def chosen(logits, noise, *samplings):
    """What is chosen for each noise by samplings in turn."""
    choices = Choices.empty(len(samplings))
    for row, sampling in enumerate(samplings):
        choices.set(row, sampling)
    repeated = Choices(*(x.repeat(len(noise) // len(samplings)) for x in choices))
    return choose(logits.expand(len(noise), -1), repeated, Plan.of(samplings), noise)


def shares(**options):
    """How often each token is chosen under evenly spread noise."""
    tokens = chosen(LOGITS, EVEN, Sampling(**options))
    return torch.bincount(tokens, minlength=5) / len(EVEN)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_come_as_often_as_the_softmax_says(temperature):
    right = (LOGITS / temperature).softmax(-1)
    assert (shares(temperature=temperature) - right).abs().max() < 1e-4


def test_temperature_zero_takes_the_likeliest():
    assert shares(temperature=0)[2] == 1
    tie = torch.tensor([[0.0, 5.0, 5.0]])
    assert chosen(tie, EVEN[:1], Sampling(temperature=0)).tolist() == [1]


def test_a_temperature_of_almost_zero_is_no_nan():
    assert shares(temperature=1e-300)[2] == 1


@pytest.mark.parametrize("count", [1, 3, 9])
def test_top_k_leaves_so_many(count):
    right = LOGITS.softmax(-1)
    right[LOGITS.argsort(descending=True)[count:]] = 0
    assert (shares(top_k=count) - right / right.sum()).abs().max() < 1e-4


def test_top_p_leaves_the_fewest_that_reach_it():
    """Probabilities .636, .234, .086, .032, .012."""
    for top_p, left in ((0.63, [2]), (0.64, [0, 2]), (0.9, [0, 2, 3]), (1.0, [0, 1, 2, 3, 4])):
        right = torch.zeros(5)
        right[left] = LOGITS.softmax(-1)[left]
        assert (shares(top_p=top_p) - right / right.sum()).abs().max() < 1e-4


def test_top_p_looks_at_what_top_k_left():
    assert (shares(top_k=2, top_p=0.7) > 0).tolist() == [False, False, True, False, False]
    assert (shares(top_k=2, top_p=0.8) > 0).tolist() == [True, False, True, False, False]


def test_noise_at_its_ends_chooses_a_token_that_is_left():
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    for options in ({}, {"top_k": 2}, {"top_p": 0.9}):
        tokens = chosen(LOGITS, ends, Sampling(**options)).tolist()
        assert tokens == {"": [0, 4], "top_k": [0, 2], "top_p": [0, 3]}[next(iter(options), "")]


def test_streams_that_choose_in_different_ways_choose_together_what_each_does_alone():
    ways = [{"temperature": 0}, {"top_k": 2}, {"top_p": 0.9}, {}, {"data_tokens": 3, "top_k": 9}]
    ways = [Sampling(**{"temperature": 1.3, **way}) for way in ways]
    for subset in (ways, ways[:2], ways[3:4] + ways[:1]):
        together = chosen(LOGITS, EVEN, *subset)
        for n, way in enumerate(subset):
            tokens = together[n :: len(subset)]
            alone = chosen(LOGITS, EVEN[n :: len(subset)], way)
            assert torch.equal(tokens, alone)
    assert Plan.of(ways[:2]).most == 2  # no more is sorted than someone asks for


def test_noise_is_even_and_a_stream_draws_from_its_own_seed():
    choices = Choices.empty(4)
    for row, seed in enumerate((5, 6, 2**63 - 1, 0)):
        choices.set(row, Sampling(seed=seed))
    drawn = []
    for _ in range(4000):
        drawn.append(choices.noise())
        choices.drawn.add_(1)
    noise = torch.stack(drawn, 1)
    choices.drawn.zero_()
    assert torch.equal(Choices(*(x.repeat(9) for x in choices)).noise()[:4], noise[:, 0])
    alone = Choices.empty(1)
    alone.set(0, Sampling(seed=6), drawn=1234)
    assert torch.equal(alone.noise()[0], noise[1, 1234])
    assert ((noise >= 0) & (noise < 1)).all()
    counts = torch.histc(noise.flatten(), 16, 0, 1)
    assert (counts - 1000).abs().max() < 5 * 1000**0.5
    assert torch.corrcoef(noise).fill_diagonal_(0).abs().max() < 0.08
    assert torch.corrcoef(torch.stack([noise[0, 1:], noise[0, :-1]]))[0, 1].abs() < 0.08


def test_logits_of_a_diverged_model_give_no_token():
    bad = torch.tensor([[1.0, float("nan")], [float("inf"), 0.0], [1.0, 2.0]])
    for way in (Sampling(), Sampling(temperature=0), Sampling(top_k=2)):
        assert (chosen(bad, EVEN[:3], way) < 0).tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be .* 1 on, got 0"),
        ({"temperature": -1.0}, ValueError, "temperature must be finite and at least 0, got -1.0"),
        ({"temperature": float("inf")}, ValueError, "temperature must be finite .*, got inf"),
        ({"temperature": "hot"}, TypeError, "temperature must be a number, got str"),
        ({"top_k": 0}, ValueError, "top_k must be a whole .* 1 on, got 0"),
        ({"top_k": 2**63}, ValueError, "top_k must have at most 63 bits .* got 64"),
        ({"data_tokens": 2**63}, ValueError, "data_tokens must have at most 63 bits .* got 64"),
        ({"top_p": 0.0}, ValueError, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_k": 3, "temperature": 0}, ValueError, "top_k must be None at temperature=0, got 3"),
        ({"seed": 1.5}, TypeError, r"seed must be a whole number from 0 on, got 1\.5"),
        ({"seed": 2**63}, ValueError, f"seed must be below {2**63}, got {2**63}"),
        ({"stop": [3]}, TypeError, r"stop must be a tuple of ints, got \[3\]"),
    ],
)
def test_bad_options_are_named(options, error, message):
    with pytest.raises(error, match=message):
        Sampling(**options)

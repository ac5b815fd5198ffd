"""The choice of a token: what temperature, top-k and top-p leave, and how often."""

from dataclasses import replace

import pytest
import torch

from cosformer.models import Sampling, choose
from cosformer.models.sampling import draws

LOGITS = torch.tensor([2.0, 0.0, 3.0, 1.0, -1.0])  # likeliest: 2, 0, 3, 1, 4
EVEN = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000


def shares(**options):
    """How often each token is chosen under evenly spread noise."""
    tokens = choose(LOGITS.expand(len(EVEN), -1), Sampling(**options), EVEN)
    return torch.bincount(tokens, minlength=5) / len(EVEN)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_come_as_often_as_the_softmax_says(temperature):
    right = (LOGITS / temperature).softmax(-1)
    assert (shares(temperature=temperature) - right).abs().max() < 1e-4


def test_temperature_zero_takes_the_likeliest():
    assert shares(temperature=0)[2] == 1
    tie = torch.tensor([[0.0, 5.0, 5.0]])
    assert choose(tie, Sampling(temperature=0), EVEN[:1]).tolist() == [1]


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
        tokens = choose(LOGITS.expand(2, -1), Sampling(**options), ends).tolist()
        assert tokens[0] == 2
        assert tokens[1] == {"": 4, "top_k": 0, "top_p": 3}[next(iter(options), "")]


def test_a_row_draws_from_its_own_seed():
    sampling, cpu = Sampling(seed=5, max_new_tokens=2500), torch.device("cpu")
    both = torch.stack([*draws([0, 1], sampling, cpu)], 1)
    assert torch.equal(both[1], torch.cat([*draws([0], replace(sampling, seed=6), cpu)]))
    assert not torch.equal(both[0], both[1])
    at_once = torch.rand(2500, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    assert torch.equal(both[0], at_once)  # though it is drawn in blocks


def test_logits_of_a_diverged_model_are_refused():
    with pytest.raises(ValueError, match="logits must be finite"):
        choose(torch.tensor([[1.0, float("nan")]]), Sampling(), EVEN[:1])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be .* 1 on, got 0"),
        ({"temperature": -1.0}, ValueError, "temperature must be finite and at least 0, got -1.0"),
        ({"temperature": float("inf")}, ValueError, "temperature must be finite .*, got inf"),
        ({"temperature": "hot"}, TypeError, "temperature must be a number, got str"),
        ({"top_k": 0}, ValueError, "top_k must be a whole .* 1 on, got 0"),
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

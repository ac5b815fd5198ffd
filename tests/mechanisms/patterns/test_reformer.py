"""Reformer: what hashing does, what it keeps to itself, and what it gives away."""

import pytest
import torch
from mechanism_cases import LENGTH, draw, make
from torch.nn import functional as F
from torch.testing import assert_close

from cosformer.mechanisms.patterns.reformer import buckets


def shared(length=LENGTH):
    """q (= k) and v."""
    return draw(2, 2, length, 6), draw(2, 2, length, 6, seed=1)


def dense_shared(x, causal):
    """Softmax over all keys, normalised, a token itself last of all."""
    score = x @ F.normalize(x, dim=-1).mT / x.shape[-1] ** 0.5
    score = score.diagonal_scatter(torch.full(x.shape[:3], -5e4, dtype=x.dtype), dim1=-2, dim2=-1)
    if causal:
        score = score.masked_fill(torch.ones_like(score, dtype=torch.bool).triu(1), -torch.inf)
    return score.softmax(-1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("length", [5, 37, 40])
def test_two_chunks_are_dense_attention(causal, rounds, length):
    mechanism = make("reformer", bucket=20, rounds=rounds)
    x, v = shared(length)
    out, _ = mechanism(x, x, v, causal=causal)
    assert_close(out, dense_shared(x, causal) @ v)


@pytest.mark.parametrize("causal", [False, True])
def test_a_token_sees_itself_only_where_there_is_nothing_else(causal):
    mechanism = make("reformer")
    x, _ = shared()
    weights = mechanism.weights(x, x, causal=causal)
    itself = weights.diagonal(dim1=-2, dim2=-1)
    alone = itself == 1
    assert (alone | (itself == 0)).all()
    assert alone[..., 0].all() == causal  # the first token has no past
    assert_close(weights.sum(-1), torch.ones_like(itself))


def test_tokens_that_hash_alike_see_each_other():
    mechanism = make("reformer", bucket=4, rounds=1)
    centres = 5 * draw(10, 6, seed=3)
    group = torch.arange(40) % 10
    x = (centres[group] + 1e-3 * draw(40, 6, seed=4)).expand(2, 2, -1, -1)
    order = mechanism.order(x)[0, 0, 0]
    (rotation,) = mechanism.rotations(40)
    turned = x[0, 0] @ rotation[0]
    bucket = torch.cat([turned, -turned], -1).argmax(-1)
    assert torch.equal(order, (bucket * 40 + torch.arange(40)).argsort())
    weights = mechanism.weights(x, x)[0, 0]
    assert (weights > 0).sum(-1).max() <= 2 * 4
    same = (group[:, None] == group) & ~torch.eye(40, dtype=torch.bool)
    assert weights[same].sum() > 0.5 * 40


def test_padding_is_sorted_last():
    order = make("reformer", bucket=4, rounds=3).order(shared(13)[0])
    assert (order[..., 13:] == torch.arange(13, 16)).all()
    assert (order[..., :13].sort(-1).values == torch.arange(13)).all()


def test_more_buckets_than_one_hash_has_are_those_of_several():
    mechanism = make("reformer", bucket=1, rounds=1)
    sizes = [2 * rotation.shape[-1] for rotation in mechanism.rotations(1000)]
    assert sizes == [128, 8]
    x, v = shared(1000)
    out, _ = mechanism(x, x, v)
    assert_close(out, mechanism.weights(x, x) @ v)
    assert [2 * rotation.shape[-1] for rotation in mechanism.rotations(100)] == [100]


def test_the_future_decides_which_past_is_seen():
    """Why the trait says leaky: weights on the future are zero, yet it moves those on the past."""
    mechanism = make("reformer")
    x, _ = shared()
    changed = x.clone()
    changed[:, :, 20:] = draw(2, 2, LENGTH - 20, 6, seed=9)
    before, after = (mechanism.weights(y, y, causal=True)[:, :, :20] for y in (x, changed))
    assert not before[..., 20:].any()
    assert not after[..., 20:].any()
    assert not torch.allclose(before, after)


def test_items_of_different_lengths_in_one_batch():
    mechanism = make("reformer")
    x, v = shared()
    mask = torch.arange(LENGTH) < torch.tensor([[LENGTH], [18]])
    out, _ = mechanism(x, x, v, key_mask=mask)
    assert_close(out[:1], mechanism(x[:1], x[:1], v[:1])[0])
    short = x[1:, :, :18]
    assert_close(out[1:, :, :18], mechanism(short, short, v[1:, :, :18])[0])


def test_buckets_are_the_largest_of_both_directions_of_every_hash():
    x = draw(2, 3, 11, 5)
    rotations = [draw(4, 5, half, seed=half) for half in (6, 2)]
    one, other = (
        torch.cat([turned, -turned], -1).argmax(-1)
        for turned in (x[:, :, None] @ rotation for rotation in rotations)
    )
    assert torch.equal(buckets(x, rotations).long(), one * 4 + other)


def test_what_is_no_number_has_a_bucket():
    found = buckets(torch.full((1, 1, 2, 4), torch.nan), [torch.ones(3, 4, 5), torch.ones(3, 4, 2)])
    assert ((found >= 0) & (found < 40)).all()

"""Performer with keys so long that the exponentials of all their features would be 0."""

import math

import pytest
import torch
from mechanism_cases import draw, make, stream
from torch.testing import assert_close

LENGTH = 20
SIZES = {
    "all long": lambda t: torch.full_like(t, 60.0),
    "ever longer": lambda t: 1 + 4 * t,
    "ever shorter": lambda t: 80 - 4 * t,
    "one short among long": lambda t: torch.where(t == 11, 1.0, 60.0),
}


def sized(name, dtype=torch.float64):
    """q, k, v; keys of these lengths, so that exponents go from near 0 to below −1,000."""
    direction = torch.nn.functional.normalize(draw(2, 2, LENGTH, 6, seed=1), dim=-1)
    k = direction * SIZES[name](torch.arange(LENGTH, dtype=torch.float64))[:, None]
    return [x.to(dtype) for x in (0.3 * draw(2, 2, LENGTH, 6), k, draw(2, 2, LENGTH, 6, seed=2))]


def by_logarithms(mechanism, q, k, causal):
    """The quotient with nothing exponentiated before all exponents are added."""
    q, k = q / q.shape[-1] ** 0.25, k / k.shape[-1] ** 0.25
    of_q, of_k = (x @ mechanism.projection.mT - x.square().sum(-1)[..., None] / 2 for x in (q, k))
    scores = of_q[:, :, :, None] + of_k[:, :, None]
    scores = scores.logsumexp(-1)  # [B, H, T, S]
    if causal:
        scores = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -math.inf)
    return scores.softmax(-1)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_long_keys_have_their_weights(name, causal, dtype):
    mechanism = make("performer").to(dtype)
    q, k, v = sized(name, dtype)
    exact = make("performer")
    exact.load_state_dict(mechanism.state_dict())
    right = by_logarithms(exact, q.double(), k.double(), causal) @ v.double()
    out, _ = mechanism(q, k, v, causal=causal)
    assert_close(out.double(), right, rtol=1e-3, atol=1e-7 if dtype == torch.float64 else 2e-3)
    assert_close(mechanism.weights(q, k, causal=causal) @ v, out)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("pieces", [(1,) * LENGTH, (7, 1, 12)])
@pytest.mark.parametrize("graded", [True, False])  # a single token without a gradient is a step
@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-6), (torch.float32, 1e-3)])
def test_a_stream_of_long_keys_is_the_full_pass(name, pieces, graded, dtype, near):
    mechanism = make("performer").to(dtype)
    q, k, v = sized(name, dtype)
    with torch.set_grad_enabled(graded):
        whole, _ = mechanism(q, k, v, causal=True)
        found, _ = stream(mechanism, (q, k, v), {}, pieces)
    assert_close(found, whole, rtol=near, atol=near / 1000)


GROWING = ["ever longer", "ever shorter"]  # exponents of ever shorter keys rise


@pytest.mark.parametrize("name", GROWING)
@pytest.mark.parametrize(("queries", "start"), [(5, None), (5, 3), (30, None), (9, 14)])
def test_queries_stand_anywhere_among_keys_that_grow(queries, start, name):
    mechanism = make("performer")
    _, k, v = sized(name)
    q = 0.3 * draw(2, 2, queries, 6, seed=4)
    out, _ = mechanism(q, k, v, causal=True, start=start)
    first = LENGTH - queries if start is None else start
    for n in range(queries):
        seen = min(max(first + n + 1, 0), LENGTH)
        if not seen:
            assert not out[:, :, n].any()
            continue
        one, _ = mechanism(q[:, :, n : n + 1], k[:, :, :seen], v[:, :, :seen])
        assert_close(out[:, :, n : n + 1], one)


@pytest.mark.parametrize("name", SIZES)
def test_padding_and_the_future_have_no_say_in_the_scale(name):
    mechanism = make("performer")
    q, k, v = sized(name)
    whole, _ = mechanism(q, k, v, causal=True)
    early, _ = mechanism(*(x[:, :, :8] for x in (q, k, v)), causal=True)
    assert_close(whole[:, :, :8], early)
    for causal in (False, True):
        right, _ = mechanism(*(x[:, :, 6:] for x in (q, k, v)), causal=causal)
        mask = (torch.arange(LENGTH) >= 6).expand(2, -1)
        out, _ = mechanism(q, k, v, causal=causal, key_mask=mask)
        assert_close(out[:, :, 6:], right)


@pytest.mark.parametrize("name", GROWING)
def test_gradients_of_keys_that_grow(name):
    mechanism = make("performer", heads=1, width=3)
    q, k, v = (x[:1, :1, :6, :3].clone() for x in sized(name))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(lambda *x: mechanism(*x, causal=True)[0], inputs, atol=1e-4)

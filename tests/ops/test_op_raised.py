"""Raised cosine weights: what rows give whose weights are all near zero, however they are computed.

Half a plain sum and half a cosine one cancel there. Without a floor under the denominator what is
left of them, rounding, would be divided by itself, and outputs be hundreds of times the values.
"""

import math

import pytest
import torch
from formula import (
    IMPLEMENTATIONS,
    agree,
    by_steps,
    cosine_weight,
    hold,
    in_pieces,
    largest,
    tokens,
)

from cosformer import (
    State,
    attention,
    attention_weights,
    attention_with_state,
    linear_attention,
    linear_attention_with_state,
    step,
)

HORIZON = 16
FAINT = 2.0**-12  # rows below it on average fade to zero
RAISED = {"horizon": HORIZON, "weight": "raised_cosine"}
every_impl = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
both_ways = pytest.mark.parametrize("causal", [True, False])
every_precision = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def formula(q, k, v, *, causal=True, key_mask=None):
    """Σ w s v / max(Σ w s, eps, 2⁻¹² Σ s)."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    seen = cosine_weight(q, k, horizon=math.inf, causal=causal).to(q.dtype)
    weight = cosine_weight(q, k, horizon=HORIZON, causal=causal, raised=True).to(q.dtype)
    score = q.relu() @ k.relu().mT * seen
    if key_mask is not None:
        score = score.masked_fill(~key_mask[:, None, None], 0)
    total, mass = ((score * x).sum(-1, keepdim=True) for x in (weight, seen))
    return score * weight @ v / hold(torch.maximum(total.clamp(min=1e-6), FAINT * mass))


def one_far_key():
    """Only key 0 is real, and the last query stands a horizon away from it."""
    q, k, v = tokens(2, 4, HORIZON + 1, kv_heads=2)
    mask = torch.arange(HORIZON + 1).expand(2, -1) == 0
    return (30 * q.abs(), 30 * k.abs(), v), {"key_mask": mask}


def sparse(length=2000):
    """One feature in 64 is not zero. Even queries see keys that weigh nothing: 16, 80, … away."""
    size, _, v = tokens(1, 2, length, width=1, value_width=4)
    t = torch.arange(length)
    keys, queries = (torch.eye(64, dtype=v.dtype)[x % 64] for x in (t, t - 16 + t % 2 * 13))
    return (30 * size.abs() * queries, 30 * size.abs() * keys, v), {}


CASES = {"one far key": one_far_key, "sparse features": sparse}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def in_hull(out, v):
    """Whether outputs lie between the least value and the largest, or zero."""
    v = v.repeat_interleave(out.shape[1] // v.shape[1], 1).double()
    least, most = v.amin(2, keepdim=True).clamp(max=0), v.amax(2, keepdim=True).clamp(min=0)
    room = 0.01 * v.abs().max()
    return bool(((out >= least - room) & (out <= most + room)).all())


@every_impl
@both_ways
@every_precision
@pytest.mark.parametrize("case", [one_far_key, lambda: sparse(1100)], ids=CASES)  # 18 chunks
def test_faint_rows_and_their_gradients_are_those_of_the_formula(case, impl, causal, dtype):
    inputs, options = case()
    agree(
        lambda *x: attention(*x, causal=causal, impl=impl, **RAISED, **options),
        lambda *x: formula(*x, causal=causal, **options),
        *inputs,
        dtype=dtype,
        argument=1 / FAINT,
    )


@every_case
@every_precision
def test_streams_in_pieces_stay_among_the_values(case, dtype):
    (q, k, v), options = case()
    given = [x.to(dtype) for x in (q, k, v)]
    out, _ = in_pieces(attention_with_state, given, (0, 5, 16, q.shape[2]), **RAISED, **options)
    assert in_hull(out, v)
    error = largest(out.double() - formula(q, k, v, **options))
    assert error <= 8 / FAINT * torch.finfo(dtype).eps * largest(v)


@every_precision
@pytest.mark.parametrize("slots", [False, True])
def test_steps_stay_among_the_values(dtype, slots):
    (q, k, v), _ = one_far_key()
    k[:, :, 1:] = 0  # as good as a mask: steps have none
    position = torch.zeros(2, dtype=torch.int64) if slots else 0
    state = State.empty(2, 2, 4, 4, dtype=dtype, position=position, **RAISED)
    order = torch.tensor([1, 0]) if slots else None
    out = by_steps(step, [x.to(dtype) for x in (q, k, v)], state, slots=order)
    assert in_hull(out, v)
    error = largest(out.double() - formula(q, k, v))
    assert error <= 8 / FAINT * torch.finfo(dtype).eps * largest(v)


@both_ways
@every_precision
def test_maps_have_rows_of_at_most_one(causal, dtype):
    (q, k, v), options = one_far_key()
    given = [x.to(dtype) for x in (q, k)]
    dense = attention_weights(*given, causal=causal, **RAISED, **options)
    assert dense.sum(-1).max() <= 1.01
    assert dense.min() >= -0.01
    out = attention(*given, v.to(dtype), causal=causal, **RAISED, **options)
    torch.testing.assert_close(
        dense @ v.to(dtype).repeat_interleave(2, 1), out, rtol=0.01, atol=0.01
    )


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_the_family_has_the_same_floor_with_a_decay_or_without(gamma):
    (q, k, v), options = one_far_key()
    options |= {"feature_map": "relu", "theta": math.pi / (2 * HORIZON), "raised": True}
    options["gamma"] = gamma
    exact = linear_attention(q, k, v, causal=True, impl="reference", **options)
    single = [x.float() for x in (q, k, v)]
    out = linear_attention(*single, causal=True, **options)
    assert in_hull(out, v)
    assert largest(out - exact) < 0.01 * largest(v)
    streamed, _ = linear_attention_with_state(*single, **options)
    torch.testing.assert_close(streamed, out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_widened_before_both_halves(dtype):
    (q, k, v), options = one_far_key()
    half = [x.to(dtype) for x in (q / 30, k / 30, v)]
    out = attention(*half, causal=True, **RAISED, **options)
    right = formula(*(x.double() for x in half), **options)
    assert out.dtype == dtype
    assert largest(out.double() - right) <= 0.01 * largest(v)

"""The backward: what it keeps, and that it is right to second order."""

import math
from functools import partial

import pytest
import torch
from formula import tokens, uniform
from torch.autograd import gradcheck, gradgradcheck

from cosformer import (
    State,
    attention,
    attention_with_state,
    linear_attention,
    linear_attention_with_state,
)


def saved_bytes(function):
    """Bytes of the distinct storages that `function` keeps for its backward, and the largest."""
    storages = {}

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = function()
    return sum(storages.values()), max(storages.values()), out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("gated", [False, True], ids=["no decay", "decay per token"])
def test_only_inputs_output_and_denominators_are_kept(causal, dtype, kv_heads, gated):
    q, k, v = tokens(1, 8, 1024, kv_heads=kv_heads, width=32)
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    log_decay = -uniform(1, 8, 1024).float().requires_grad_() if gated else None
    total, largest, out = saved_bytes(
        lambda: attention(q, k, v, causal=causal, log_decay=log_decay)
    )
    rows = q.nbytes + k.nbytes + v.nbytes + out.nbytes
    denominators = 4 * 8 * 1024
    angles = 2 * 2 * 4 * 1024  # cos and sin of every query and key position, shared by all heads
    gates_and_sums, last_state = 2 * 8 * 8 * 1024, 4 * 8 * 2 * 32 * 33
    decay = gates_and_sums + last_state if gated else 0
    assert total <= rows + denominators + angles + decay
    assert largest <= q.nbytes


def fewer_queries(q, k, v, **options):
    return attention(q[:, :, :3], k, v, **options)


def beyond(q, k, v):
    return attention(q, k[:, :, :3], v[:, :, :3], causal=True, query_start=1, horizon=9)


def streamed(q, k, v, key_value, key_sum):
    state = State(key_value, key_sum, torch.tensor(4), 20.0)
    out, last = attention_with_state(q, k, v, state=state)
    return out, last.key_value, last.key_sum


def gated(q, k, v, decay, **options):
    return linear_attention(q, k, v, log_decay=decay, causal=True, **options)


def gated_stream(q, k, v, decay, key_value):
    key_sum = key_value.new_empty(*key_value.shape[:3], 0)
    total = torch.zeros(key_value.shape[:2], dtype=torch.float64)
    state = State(key_value, key_sum, torch.tensor(3), None, log_decay=total)
    out, last = linear_attention_with_state(
        q, k, v, log_decay=decay, normaliser="none", state=state
    )
    return out, last.key_value


def retained(q, k, v, gamma):
    return linear_attention(
        q[:, :, :3], k, v, feature_map="silu", rule="add", gamma=gamma, causal=True
    )


def fading(**options):
    return lambda q, k, v, decay: attention(q, k, v, decay=decay, **options)


def gating(**options):
    return lambda q, k, v, log_decay: attention(q, k, v, log_decay=log_decay, **options)


def merged(q, k, v, log_decay):
    states = []
    for start, stop in ((0, 2), (2, 5)):
        x = (y[:, :, start:stop] for y in (q, k, v, log_decay))
        empty = {"horizon": 9.0, "position": start, "per_token": True, "dtype": torch.float64}
        x, gates = (next(x), next(x), next(x)), next(x)
        state = State.empty(1, 2, 2, 2, **empty)
        states.append(attention_with_state(*x, state=state, log_decay=gates)[1])
    whole = states[0] + states[1]
    return whole.key_value, whole.key_sum, whole.log_decay


CAUSAL = {"causal": True}
MASK = torch.tensor([[True, False, True, True, False]])
PACKED = {"cu_seqlens": torch.tensor([0, 2, 2, 5])}
TURNING = {"feature_map": "1+elu", "theta": 0.1}
STATE = (uniform(1, 2, 2, 2, 2), uniform(1, 2, 2, 2, low=1, high=2))
DECAY = -uniform(1, 2, 5)
RATES = torch.tensor([0.7, 0.95], dtype=torch.float64)
CASES = {
    "causal": (partial(attention, **CAUSAL), 2, ()),
    "bidirectional": (attention, 2, ()),
    "stretched": (partial(fewer_queries, positions="stretch"), 2, ()),
    "raised": (partial(attention, **CAUSAL, horizon=3, weight="raised_cosine"), 2, ()),
    "masked": (partial(attention, **CAUSAL, key_mask=MASK), 2, ()),
    "packed, causal": (partial(attention, **CAUSAL, **PACKED), 2, ()),
    "packed, bidirectional": (partial(attention, **PACKED), 2, ()),
    "grouped": (partial(attention, **CAUSAL), 1, ()),
    "horizon per head": (partial(attention, **CAUSAL, horizon=torch.tensor([6.0, 9.0])), 1, ()),
    "fewer queries": (partial(fewer_queries, **CAUSAL), 2, ()),
    "queries beyond the keys": (beyond, 1, ()),
    "state in and out": (streamed, 2, STATE),
    "state in and out, grouped": (streamed, 1, tuple(x[:, :1] for x in STATE)),
    "log_decay": (partial(gated, **TURNING), 2, (DECAY,)),
    "log_decay, grouped": (partial(gated, **TURNING), 1, (DECAY,)),
    "log_decay, no division": (partial(gated, normaliser="none"), 2, (DECAY,)),
    "log_decay, state": (gated_stream, 2, (DECAY, uniform(1, 2, 1, 2, 2))),
    "gamma, fewer queries": (retained, 2, (torch.tensor([0.7, 0.9], dtype=torch.float64),)),
    "decay, learned": (fading(causal=True), 1, (RATES,)),
    "decay, one for all": (fading(causal=True, horizon=math.inf), 2, (RATES[0],)),
    "decay, both ways": (fading(), 2, (RATES,)),
    "gates": (gating(causal=True), 2, (DECAY,)),
    "gates, both ways": (gating(), 1, (DECAY[:, :1],)),
    "gates, raised, both ways": (gating(horizon=3, weight="raised_cosine"), 2, (DECAY,)),
    "merged": (merged, 2, (DECAY,)),
    "signed": (lambda q, k, v: linear_attention(q.abs(), -k.abs(), v, rule="signed"), 2, ()),
    "map": (partial(linear_attention, feature_map=torch.exp, **CAUSAL), 2, ()),
    "scaled": (partial(linear_attention, normaliser="none", scale=0.3, theta=0.1), 1, ()),
}


@pytest.mark.parametrize(("function", "kv_heads", "more"), CASES.values(), ids=CASES)
def test_first_and_second_derivatives_pass_the_numeric_check(function, kv_heads, more):
    inputs = (*tokens(1, 2, 5, kv_heads=kv_heads, width=2), *more)
    inputs = tuple(x.clone().requires_grad_() for x in inputs)
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("causal", [True, False])
def test_second_derivatives_cross_chunks(causal):
    def curvature(impl):
        q, k, v = (x.requires_grad_() for x in tokens(1, 2, 150, kv_heads=1, width=2))
        out = attention(q, k, v, causal=causal, impl=impl)
        first = torch.autograd.grad(out.square().sum(), (q, k, v), create_graph=True)
        return torch.autograd.grad(sum(x.sin().sum() for x in first), (q, k, v))

    for given, right in zip(curvature("chunked"), curvature("reference"), strict=True):
        torch.testing.assert_close(given, right)

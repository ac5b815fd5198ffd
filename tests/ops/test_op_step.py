"""A step takes one token at a constant cost in memory and changes the state in place."""

import pytest
import torch
from formula import cosformer, rounded_once, tokens

from cosformer import State, attention_with_state, step

KINDS = {
    "equal heads": (2, 2),
    "grouped": (6, 2),
    "one key head": (4, 1),
}
every_kind = pytest.mark.parametrize(("heads", "kv_heads"), KINDS.values(), ids=KINDS)


def at(x, t):
    return [y[:, :, t : t + 1] for y in x]


@every_kind
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_steps_are_the_formula(heads, kv_heads, dtype):
    x = [t.to(dtype) for t in tokens(2, heads, 12, kv_heads=kv_heads, width=3, value_width=5)]
    state = State.empty(2, kv_heads, 3, 5, horizon=12, dtype=dtype)
    right = cosformer(*(t.double() for t in x), causal=True)
    for t in range(12):
        out = step(*at(x, t), state)
        assert out.shape == (2, heads, 1, 5)
        torch.testing.assert_close(out, right[:, :, t : t + 1].to(dtype))


@every_kind
def test_a_token_may_come_without_a_length(heads, kv_heads):
    x = tokens(2, heads, 1, kv_heads=kv_heads, value_width=5)
    states = [State.empty(2, kv_heads, 4, 5, horizon=12, dtype=torch.float64) for _ in range(2)]
    flat = step(*(t[:, :, 0] for t in x), states[0])
    assert flat.shape == (2, heads, 5)
    assert torch.equal(flat, step(*x, states[1])[:, :, 0])
    assert all(torch.equal(a, b) for a, b in zip(states[0][:3], states[1][:3], strict=True))


@pytest.mark.parametrize("prefilled", [False, True])
def test_a_step_changes_the_state_where_it_lies(prefilled):
    x = tokens(2, 2, 50)
    if prefilled:
        _, state = attention_with_state(*tokens(2, 2, 5), horizon=100)
    else:
        state = State.empty(2, 2, 4, 4, horizon=100, dtype=torch.float64)
    start = int(state.position)
    addresses = [part.data_ptr() for part in state[:3]]
    sizes = [part.untyped_storage().nbytes() for part in state[:3]]
    for t in range(50):
        step(*at(x, t), state)
        assert int(state.position) == start + t + 1
    assert addresses == [part.data_ptr() for part in state[:3]]
    assert sizes == [part.untyped_storage().nbytes() for part in state[:3]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_tokens_meet_float32_sums(dtype):
    x = [t.to(dtype) for t in tokens(1, 2, 40)]
    state = State.empty(1, 2, 4, 4, horizon=40)
    outs = [step(*at(x, t), state) for t in range(40)]
    assert {out.dtype for out in outs} == {dtype}
    assert state.key_value.dtype == torch.float32
    right = cosformer(*(t.double() for t in x), causal=True)
    rounded_once(torch.cat(outs, 2), right)


def test_a_step_refuses_gradients_and_says_where_they_go():
    q, k, v = tokens(1, 2, 1)
    state = State.empty(1, 2, 4, 4, horizon=9, dtype=torch.float64)
    for place in range(3):
        x = [t.clone().requires_grad_(n == place) for n, t in enumerate((q, k, v))]
        with pytest.raises(ValueError, match="step records no gradients: use attention_with_state"):
            step(*x, state)
        with torch.no_grad():
            step(*x, state)
    trained = attention_with_state(q.requires_grad_(), k.requires_grad_(), v, horizon=9)[1]
    with pytest.raises(ValueError, match="step records no gradients"):
        step(*tokens(1, 2, 1), trained)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_leaves_the_sums_of_a_step_in_float32(dtype):
    x = [t.to(dtype).float() for t in tokens(1, 2, 60)]
    state = State.empty(1, 2, 4, 4, horizon=60)
    with torch.autocast("cpu", dtype=dtype):
        out = torch.cat([step(*at(x, t), state) for t in range(60)], 2)
    right = cosformer(*(t.double() for t in x), causal=True)
    rounded_once(out, right)

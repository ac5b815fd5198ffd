"""One token at a time: every mechanism that streams, by `step` and by `forward`."""

import math

import pytest
import torch
from mechanism_cases import LENGTH, STREAMS, by_steps, cut, make, names_where, stream, tokens
from torch.testing import assert_close
from torch.utils import _pytree as pytree

from cosformer import ops

CONSTANT = names_where(state=("constant",))
OPTIONS = [(name, {}) for name in STREAMS] + [
    ("cosformer", {"weight": "raised_cosine"}),
    ("cosformer", {"eps": 1e4}),
    ("cosformer", {"decay": 0.9}),
    ("cosformer", {"decay": "multiscale"}),
    ("cosformer", {"decay": "multiscale", "horizon": math.inf}),
    ("cosformer-multiscale", {"decay": "multiscale", "learned": False, "horizon": 64}),
    ("cosformer-multiscale", {"decay": 0.3, "learned": False}),
    ("cosformer-multiscale", {"decay": [0.2, 0.43], "learned": False}),
    ("cosformer-multiscale", {"decay": "multiscale", "learned": False, "horizon": 65_536}),
    ("cosformer-multiscale", {"horizon": math.inf}),
    ("cosformer-gated", {"horizon": math.inf}),
]


@torch.no_grad()
@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_steps_and_pieces_are_the_full_causal_pass(name, options):
    mechanism = make(name, heads=4, key_heads=2, **options)
    *rows, controls = tokens(mechanism, value_width=5)
    whole, _ = mechanism(*rows, causal=True, controls=controls)
    assert_close(by_steps(mechanism, rows, controls, mechanism.empty_state(*rows[1:])), whole)
    assert_close(stream(mechanism, rows, controls, (20, 0, 1, 16))[0], whole)


@torch.no_grad()
@pytest.mark.parametrize("name", STREAMS)
def test_forward_takes_one_token_by_a_step_and_leaves_the_state_it_was_given(name, monkeypatch):
    mechanism = make(name)
    *rows, controls = tokens(mechanism)
    last = slice(LENGTH - 1, LENGTH)
    whole, _ = mechanism(*rows, causal=True, controls=controls)
    _, state = stream(mechanism, rows, controls, (LENGTH - 1,))
    before = pytree.tree_map_only(torch.Tensor, torch.clone, state)
    if name in CONSTANT:
        monkeypatch.setattr(type(mechanism), "advance", None)  # which sweeps over tokens
        monkeypatch.setattr(ops, "linear_attention_step", None)  # which checks its arguments again
    given = [x[:, :, last] for x in rows]
    out, after = mechanism(*given, causal=True, state=state, controls=cut(controls, last))
    assert_close(out, whole[:, :, last])
    for now, then in zip(pytree.tree_leaves(state), pytree.tree_leaves(before), strict=True):
        assert torch.equal(now, then) if isinstance(now, torch.Tensor) else now == then
    assert type(after) is type(state)


@torch.no_grad()
@pytest.mark.parametrize("name", CONSTANT)
def test_a_step_changes_sums_in_place(name):
    mechanism = make(name)
    *rows, controls = tokens(mechanism, 1)
    state = mechanism.empty_state(*rows[1:])
    sums = max(filter(torch.is_tensor, pytree.tree_leaves(state)), key=torch.numel)
    mechanism.step(*rows, state, controls=controls)
    assert sums.any()


@torch.no_grad()
@pytest.mark.parametrize("name", ["cosformer", "spe", "gated-delta", "performer"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_steps_in_16_bits_have_the_dtype_of_q(name, dtype):
    mechanism = make(name).to(torch.float32)
    *rows, controls = tokens(mechanism, 20, dtype=dtype)
    whole, _ = mechanism(*rows, causal=True, controls=controls)
    out = by_steps(mechanism, rows, controls, mechanism.empty_state(*rows[1:]))
    assert out.dtype == dtype
    assert_close(out[:, :, 19:], whole[:, :, 19:], rtol=0.03, atol=0.03)


@torch.no_grad()
@pytest.mark.parametrize("name", ["cosformer", "linear"])
def test_a_masked_token_is_passed_over(name):
    mechanism = make(name)
    q, k, v, _ = tokens(mechanism, 1)
    mask = torch.tensor([[True], [False]])
    state = mechanism.empty_state(k, v)
    out, _ = mechanism(q, k, v, causal=True, state=state, key_mask=mask)
    assert not out[1].any()
    assert out[0].any()

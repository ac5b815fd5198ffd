"""One token of a cosFormer stream without gradients goes a shorter way to the same place."""

import pytest
import torch
from mechanism_cases import cut, make, tokens
from torch.testing import assert_close

from cosformer.mechanisms import cosine


@pytest.mark.parametrize("options", [{}, {"weight": "raised_cosine"}, {"eps": 1e4}])
def test_a_token_without_gradients_is_the_token_with_them(options, monkeypatch):
    mechanism = make("cosformer", heads=4, key_heads=2, **options)
    q, k, v, controls = tokens(mechanism, value_width=5)
    start = mechanism.empty_state(k, v)
    first, last = ([x[:, :, now] for x in (q, k, v)] for now in (slice(0, 36), slice(36, 37)))
    _, state = mechanism(*first, causal=True, state=start, controls=cut(controls, slice(0, 36)))
    kept = [x.clone() for x in state[:3]]
    right, after = mechanism(*last, causal=True, state=state)
    monkeypatch.setattr(cosine, "attention_with_state", None)  # the short way does not call it
    with torch.no_grad():
        out, moved = mechanism(*last, causal=True, state=state)
    assert_close(out, right)
    for mine, theirs in zip(moved[:3], after[:3], strict=True):
        assert_close(mine, theirs)
    for now, before in zip(state[:3], kept, strict=True):
        assert torch.equal(now, before)


def test_a_masked_token_goes_the_long_way():
    mechanism = make("cosformer")
    q, k, v, _ = tokens(mechanism, 1)
    mask = torch.tensor([[True], [False]])
    with torch.no_grad():
        state = mechanism.empty_state(k, v)
        out, _ = mechanism(q, k, v, causal=True, state=state, key_mask=mask)
    assert not out[1].any()
    assert out[0].any()


def test_a_foreign_state_is_named():
    mechanism = make("cosformer")
    q, k, v, _ = tokens(mechanism, 1)
    with torch.no_grad(), pytest.raises(TypeError, match="state must be a State, got int"):
        mechanism(q, k, v, causal=True, state=3)

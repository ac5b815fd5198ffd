"""One token of any member of the family is one more token of its stream."""

import math

import pytest
import torch
from formula import F64, by_steps, tokens, uniform

from cosformer import State
from cosformer import linear_attention_with_state as stretch
from cosformer.ops import linear_attention_step
from cosformer.ops.problem import FEATURE_MAPS

LENGTH = 9
RATES = torch.tensor([0.8, 0.95])
GATES = -uniform(2, 2, LENGTH)
UNDIVIDED = {"normaliser": "none"}
CASES = {
    **{name: {"feature_map": name, **UNDIVIDED} for name in FEATURE_MAPS},
    "divided": {"feature_map": "1+elu"},
    "added": {"feature_map": "1+elu", "rule": "add", "eps": 0.1},
    "signed": {"feature_map": "identity", "rule": "signed", "eps": 0.1},
    "clamped": {"feature_map": "relu", "eps": 5.0},
    "scaled": {"feature_map": "silu", "scale": 0.3, **UNDIVIDED},
    "a cosine": {"feature_map": "relu", "theta": 0.1},
    "a cosine for each head": {"feature_map": "1+elu", "theta": torch.tensor([0.1, 0.02])},
    "one decay": {"gamma": 0.9, **UNDIVIDED},
    "a decay for each head": {"feature_map": "relu", "gamma": [0.8, 0.95]},
    "a learned decay": {"feature_map": "relu", "gamma": RATES, "theta": 0.1},
    "gates": {"log_decay": GATES, **UNDIVIDED},
    "gates and a decay": {"feature_map": "relu", "log_decay": GATES, "gamma": 0.9, "theta": 0.1},
    "raised": {"feature_map": "relu", "theta": 0.4, "raised": True},
    "raised for each head": {"theta": torch.tensor([0.4, 0.1]), "raised": True, **UNDIVIDED},
    "raised and fading": {"feature_map": "relu", "theta": 0.4, "raised": True, "log_decay": GATES},
}


def at(options, rows, dtype=F64):
    """The options for some tokens."""
    decay = options.get("log_decay")
    return options if decay is None else options | {"log_decay": decay[:, :, rows].to(dtype)}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_steps_are_the_stretch_and_leave_its_state(options, dtype):
    q, k, v = (x.to(dtype) for x in tokens(2, 4, LENGTH, kv_heads=2, width=3, value_width=2))
    right, last = stretch(q, k, v, **at(options, slice(None), dtype))
    start = slice(0, 4)
    _, state = stretch(*(x[:, :, start] for x in (q, k, v)), **at(options, start, dtype))
    before = [x.data_ptr() for x in state[:3]]
    out = by_steps(linear_attention_step, (q, k, v), state, 4, **at(options, slice(None), dtype))
    torch.testing.assert_close(out, right[:, :, 4:])
    for mine, theirs in zip(state[:3], last[:3], strict=True):
        torch.testing.assert_close(mine, theirs)
    assert before == [x.data_ptr() for x in state[:3]]


def test_16_bit_tokens_meet_float32_sums():
    x = [t.bfloat16() for t in tokens(1, 2, LENGTH)]
    right, last = stretch(*x, feature_map="1+elu", gamma=0.9)
    _, state = stretch(*(t[:, :, :0] for t in x), feature_map="1+elu", gamma=0.9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = by_steps(linear_attention_step, x, state, feature_map="1+elu", gamma=0.9)
        torch.testing.assert_close(out, right)
    assert state.key_value.dtype == torch.float32
    torch.testing.assert_close(state.key_value, last.key_value)


def made(**options):
    return stretch(*tokens(2, 4, 4, kv_heads=2), **options)[1]


TOKEN = [x[:, :, :1] for x in tokens(2, 4, 1, kv_heads=2)]
COSINE = {"feature_map": "relu", "theta": 0.1}
RAISED = COSINE | {"raised": True}
GATED = {"log_decay": GATES[:, :, :4]}
REFUSED = [
    ({}, COSINE, "state was made for plain weights, theta and raised ask cosine"),
    (COSINE, {"feature_map": "relu"}, "state was made for cosine weights"),
    (COSINE, RAISED, "state was made for cosine weights"),
    (COSINE, COSINE | {"theta": 0.2}, "another theta"),
    (COSINE, COSINE | {"feature_map": "1+elu"}, "another theta or feature map"),
    (COSINE, COSINE | {"gamma": 0.9}, "gamma must be the state's 1.0, got 0.9"),
    (COSINE, COSINE | UNDIVIDED, "state was made for another normaliser than 'none'"),
    (UNDIVIDED, {}, "state was made for another normaliser than 'sum'"),
    ({"gamma": 0.9}, {}, "gamma must be the state's 0.9, got 1.0"),
    ({}, {"log_decay": GATES[:, :, :1]}, "log_decay must be None: the stream began without"),
    (GATED, {}, "log_decay must be given: the stream began with"),
    ({}, {"feature_map": "gelu"}, "feature_map must be one of identity, relu, .*got 'gelu'"),
    ({}, {"rule": "abs"}, "rule must be one of clamp, add, signed, got 'abs'"),
    ({}, {"eps": 0}, "eps must be above 0, got 0"),
    ({}, {"scale": 0.5}, "scale must be 1 with normaliser='sum'"),
    (UNDIVIDED, UNDIVIDED | {"scale": -1.0}, "scale must be above 0"),
    (RAISED, RAISED | {"rule": "add"}, "raised=True needs rule='clamp'"),
    ({"gamma": 0.9}, {"gamma": 1.5}, r"gamma must lie in \(0, 1\], got 1.5"),
    ({"gamma": 0.9}, {"gamma": [0.9] * 4}, r"gamma must be .*one per.* head \[2\].*, got \[4\]"),
    (
        COSINE,
        COSINE | {"theta": torch.ones(4)},
        r"theta must be .*one per.* head \[2\].*, got \[4\]",
    ),
    (COSINE, COSINE | {"theta": math.inf}, "theta must be finite, got inf|another theta"),
    ({}, {"log_decay": -0.1}, "log_decay must be a tensor, got float"),
    (GATED, {"log_decay": GATES}, r"log_decay must be .*\[2, 2, 1\].*, got .*\[2, 2, 9\]"),
    (GATED, {"log_decay": -GATES[:, :, :1]}, "log_decay must be at most 0, got"),
    (GATED, {"log_decay": GATES[:, :, :1].long()}, "log_decay must be real, got torch.int64"),
]


@pytest.mark.parametrize(("before", "options", "message"), REFUSED)
def test_what_does_not_belong_to_a_stream_is_refused_and_changes_nothing(before, options, message):
    state = made(**before)
    kept = [x.clone() for x in state[:3]]
    for call in (linear_attention_step, stretch):
        with pytest.raises((ValueError, TypeError), match=message):
            call(*TOKEN, state=state, **options)
    assert all(map(torch.equal, state[:3], kept))


def test_tokens_and_states_that_do_not_fit_are_named():
    state, (q, k, v) = made(), TOKEN
    for bad, message in (
        ((q, k, v[..., :2], state), r"state must hold .*got \[2, 2, 1, 4, 4\]"),
        ((q[:1], k[:1], v[:1], state), "state must hold"),
        ((*tokens(2, 4, 2, kv_heads=2), state), "one token, got 2 queries and 2 keys"),
        ((q.clone().requires_grad_(), k, v, state), "step records no gradients"),
        ((q, k, v.long(), state), "v must be float64"),
    ):
        with pytest.raises(ValueError, match=message):
            linear_attention_step(*bad)
    with pytest.raises(TypeError, match="state must be a State, got tuple"):
        linear_attention_step(q, k, v, tuple(state))
    assert isinstance(state, State)


@pytest.mark.parametrize(
    "options",
    [
        {"gamma": RATES.clone().requires_grad_(), "log_decay": None},
        {"gamma": RATES, "log_decay": GATES[:, :, :1].clone().requires_grad_()},
    ],
    ids=["gamma", "log_decay"],
)
def test_a_decay_to_learn_is_refused_and_changes_nothing(options):
    before = options | {"gamma": RATES}
    if before["log_decay"] is not None:
        before["log_decay"] = GATES[:, :, :4]
    state = made(**before)
    kept = state.key_value.clone()
    with pytest.raises(ValueError, match="step records no gradients"):
        linear_attention_step(*TOKEN, state, **options)
    assert torch.equal(state.key_value, kept)

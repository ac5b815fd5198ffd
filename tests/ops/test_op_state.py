"""State is a value: made empty, merged, copied, refused where it does not fit."""

import copy
import math

import pytest
import torch
from formula import IMPLEMENTATIONS, tokens
from torch.utils import _pytree as pytree

from cosformer import State, attention_with_state, linear_attention_with_state, step


def stream(horizon=20.0, length=8, **options):
    return attention_with_state(*tokens(2, 2, length), horizon=horizon, **options)[1]


def snapshot(state):
    return [x.clone() for x in state[:3]]


def unchanged(state, before):
    return all(torch.equal(a, b) for a, b in zip(state[:3], before, strict=True))


def test_an_empty_state_has_the_documented_shapes():
    state = State.empty(3, 2, 5, 7, horizon=9)
    assert state.key_value.shape == (3, 2, 2, 5, 7)
    assert state.key_sum.shape == (3, 2, 2, 5)
    assert state.position.shape == ()
    assert state.position.dtype == torch.int64
    assert state.horizon == 9
    assert state.key_value.dtype == torch.float32
    raised = State.empty(3, 2, 5, 7, horizon=9, weight="raised_cosine", position=4)
    assert raised.key_value.shape == (3, 2, 3, 5, 7)
    assert int(raised.position) == 4
    assert (state.weight, raised.weight) == ("cosine", "raised_cosine")


def test_an_empty_state_does_not_share_the_position_it_was_given():
    position = torch.tensor([1, 2])
    state = State.empty(2, 2, 4, 4, horizon=20, position=position)
    step(*(x.float() for x in tokens(2, 2, 1)), state)
    assert position.tolist() == [1, 2]
    assert state.position.tolist() == [2, 3]


@pytest.mark.parametrize(
    "start", [stream, lambda horizon: State.empty(2, 2, 4, 4, horizon=horizon)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_state_does_not_share_the_horizon_it_was_given(start, dtype):
    horizon = torch.tensor([20.0, 30.0], dtype=dtype)
    state = start(horizon)
    horizon.fill_(25.0)
    assert state.horizon.tolist() == [20.0, 30.0]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("length", [0, 1, 8])
def test_a_stretch_leaves_the_given_state_alone_and_shares_no_memory_with_it(length, impl):
    state = stream()
    before = snapshot(state)
    _, after = attention_with_state(*tokens(2, 2, length), state=state, impl=impl)
    assert unchanged(state, before)
    after.key_value.add_(1), after.key_sum.add_(1), after.position.add_(1)
    assert unchanged(state, before)


@pytest.mark.parametrize("length", [0, 3])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_an_undivided_stream_shares_no_memory_with_the_given_state(length, impl):
    options = {"normaliser": "none", "gamma": 0.9, "impl": impl}
    _, state = linear_attention_with_state(*tokens(2, 2, 5), **options)
    before = snapshot(state)
    _, after = linear_attention_with_state(*tokens(2, 2, length), state=state, **options)
    after.key_value.add_(1), after.position.add_(1)
    assert unchanged(state, before)


@pytest.mark.parametrize("horizon", [8, 8.9, torch.tensor([100.0, 8.5])])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_stream_past_its_horizon_raises_before_it_changes_the_state(horizon, impl):
    state = stream(horizon)
    before = snapshot(state)
    message = r"position 8, 1 more would pass its horizon 8.*raise horizon.*raised_cosine"
    with pytest.raises(ValueError, match=message):
        step(*tokens(2, 2, 1), state)
    assert unchanged(state, before)
    with pytest.raises(ValueError, match=message.replace("1 more", "3 more")):
        attention_with_state(*tokens(2, 2, 3), state=state, impl=impl)
    assert unchanged(state, before)


def test_a_stream_reaches_exactly_its_horizon():
    state = stream(9)
    step(*tokens(2, 2, 1), state)
    assert int(state.position) == 9
    with pytest.raises(ValueError, match="position 9, 1 more would pass its horizon 9"):
        step(*tokens(2, 2, 1), state)
    with pytest.raises(ValueError, match="position 0, 10 more would pass its horizon 9"):
        attention_with_state(*tokens(2, 2, 10), horizon=9)


def test_a_state_remembers_its_horizon_and_weight():
    state, x = stream(20), tokens(2, 2, 3)
    for same in ({"horizon": 20}, {"horizon": 20.0}, {"weight": "cosine"}):
        attention_with_state(*x, state=state, **same)
    with pytest.raises(ValueError, match=r"horizon must be the state's 20.*got 21"):
        attention_with_state(*x, state=state, horizon=21)
    with pytest.raises(
        ValueError, match=r"weight must be the state's 'cosine', got 'raised_cosine'"
    ):
        attention_with_state(*x, state=state, weight="raised_cosine")
    per_head = stream(torch.tensor([20.0, 30.0]))
    attention_with_state(*x, state=per_head, horizon=torch.tensor([20.0, 30.0]))
    for other in (20, torch.tensor([20.0, 31.0])):
        with pytest.raises(ValueError, match="horizon must be the state's"):
            attention_with_state(*x, state=per_head, horizon=other)


MISFITS = {
    "batch": (1, 2, 4, 4),
    "heads": (2, 1, 4, 4),
    "key width": (2, 2, 5, 4),
    "value width": (2, 2, 4, 5),
}


@pytest.mark.parametrize("sizes", MISFITS.values(), ids=MISFITS)
def test_a_state_of_another_shape_is_refused_with_both_shapes(sizes):
    state = State.empty(*sizes, horizon=20, dtype=torch.float64)
    wanted = r"\[2, 2, 2, 4, 4\], got \[{}, {}, 2, {}, {}\]".format(*sizes)
    with pytest.raises(ValueError, match=rf"state must hold .*{wanted}"):
        attention_with_state(*tokens(2, 2, 3), state=state)
    with pytest.raises(ValueError, match=rf"state must hold .*{wanted}"):
        step(*tokens(2, 2, 1), state)


def test_states_that_do_not_belong_together_do_not_add():
    state = stream(20)
    for other, message in (
        (stream(21), "one horizon to add, got 20.0 and 21.0"),
        (stream(torch.tensor([20.0, 30.0])), "one horizon"),
        (State.empty(2, 2, 4, 5, horizon=20), "one shape"),
        (stream(20, weight="raised_cosine"), "one shape"),
    ):
        with pytest.raises(ValueError, match=message):
            state + other
    with pytest.raises(TypeError):
        state + 1
    with pytest.raises(TypeError):
        state + tuple(state)


def test_decaying_states_do_not_add_and_are_no_cosine_streams():
    x = tokens(2, 2, 4)
    _, state = linear_attention_with_state(*x, gamma=0.9)
    with pytest.raises(ValueError, match="states add where weights do not decay"):
        state + state
    with pytest.raises(
        ValueError, match="state must come from attention: go on with linear_attention_with_state"
    ):
        attention_with_state(*x, state=state)
    with pytest.raises(ValueError, match="state must come from attention"):
        step(*tokens(2, 2, 1), state)


def test_streams_of_the_family_refuse_the_state_of_another_member():
    x = tokens(2, 2, 4)
    relu = {"feature_map": "relu"}
    cosine = linear_attention_with_state(*x, theta=0.1, **relu)[1]
    for options, message in (
        ({}, "state was made for cosine weights"),
        ({"theta": 0.1, "raised": True}, "state was made for cosine weights"),
        ({"theta": 0.2}, "another theta"),
        ({"theta": 0.1, "gamma": 0.9}, "decay"),
        ({"theta": 0.1, "normaliser": "none"}, "another normaliser than 'none'"),
    ):
        with pytest.raises(ValueError, match=message):
            linear_attention_with_state(*x, state=cosine, **relu, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"feature_map": "relu"},  # no cosine
        {"feature_map": "1+elu", "theta": 0.001},
        {"feature_map": "relu", "theta": 0.001, "normaliser": "none"},
        {"feature_map": "relu", "theta": 0.001, "gamma": 0.9},
    ],
)
def test_the_op_refuses_streams_it_could_not_go_on_with(options):
    x = tokens(2, 2, 4, width=1)
    _, state = linear_attention_with_state(*x, **options)
    before = snapshot(state)
    with pytest.raises(ValueError, match="state must come from attention"):
        attention_with_state(*x, state=state)
    with pytest.raises(ValueError, match="state must come from attention"):
        step(*(t[:, :, :1] for t in x), state)
    assert unchanged(state, before)


def test_a_cosine_stream_of_the_family_is_one_of_the_op():
    x = tokens(2, 2, 8)
    theta = math.pi / (2 * 20)
    _, state = linear_attention_with_state(*x, feature_map="relu", theta=theta)
    given, _ = attention_with_state(*x, state=state, horizon=20)
    right, _ = attention_with_state(*x, state=stream(20))
    torch.testing.assert_close(given, right)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("kept", "given"), [("float32", "float64"), ("float64", "float32")])
def test_tokens_of_another_precision_go_on_with_a_stream(kept, given, impl):
    kept, given = getattr(torch, kept), getattr(torch, given)
    q, k, v = tokens(2, 2, 12)
    first, second = ([x[:, :, part] for x in (q, k, v)] for part in (slice(8), slice(8, 12)))
    _, state = attention_with_state(*(x.to(kept) for x in first), horizon=20, impl=impl)
    out, _ = attention_with_state(*(x.to(given) for x in second), state=state, impl=impl)
    right, _ = attention_with_state(q, k, v, horizon=20)
    assert out.dtype == given
    torch.testing.assert_close(out.float(), right[:, :, 8:].float())


@pytest.mark.parametrize("horizon", [20.0, torch.tensor([20.0, 30.0])])
def test_a_copied_state_is_another_stream(horizon):
    state = stream(horizon)
    before = snapshot(state)
    for twin in (copy.deepcopy(state), pytree.tree_map(lambda x: x + 0, state)):
        assert isinstance(twin, State)
        assert unchanged(twin, before)
        step(*tokens(2, 2, 1), twin)
        assert unchanged(state, before)
        assert int(twin.position) == 9

"""State is a value: made empty, merged, copied, refused where it does not fit."""

import copy

import pytest
import torch
from formula import IMPLEMENTATIONS, tokens
from torch.utils import _pytree as pytree

from cosformer import State, attention_with_state, linear_attention_with_state, step

every_impl = pytest.mark.parametrize("impl", IMPLEMENTATIONS)


def stream(horizon=20.0, length=8, **options):
    return attention_with_state(*tokens(2, 2, length), horizon=horizon, **options)[1]


def snapshot(state):
    return [x.clone() for x in state[:3]]


def unchanged(state, before):
    return all(map(torch.equal, state[:3], before))


def test_an_empty_state_has_the_documented_shapes_and_memory_of_its_own():
    position, horizon = torch.tensor([1, 2, 4]), torch.tensor([9.0, 20.0])
    state = State.empty(3, 2, 5, 7, horizon=horizon, position=position)
    assert state.key_value.shape == (3, 2, 2, 5, 7)
    assert state.key_sum.shape == (3, 2, 2, 5)
    assert state.position.dtype == torch.int64
    assert state.key_value.dtype == torch.float32
    position.fill_(0), horizon.fill_(25.0)
    assert (state.position.tolist(), state.horizon.tolist()) == ([1, 2, 4], [9.0, 20.0])
    raised = State.empty(3, 2, 5, 7, horizon=9, weight="raised_cosine", position=4)
    assert raised.key_value.shape == (3, 2, 3, 5, 7)
    assert int(raised.position) == 4
    assert (state.weight, raised.weight) == ("cosine", "raised_cosine")


@every_impl
@pytest.mark.parametrize("length", [0, 1, 8])
def test_a_stretch_leaves_the_given_state_alone_and_shares_no_memory_with_it(length, impl):
    x, undivided = tokens(2, 2, length), {"normaliser": "none", "gamma": 0.9, "impl": impl}
    one, other = stream(), linear_attention_with_state(*tokens(2, 2, 5), **undivided)[1]
    before = snapshot(one), snapshot(other)
    for after in (
        attention_with_state(*x, state=one, impl=impl)[1],
        linear_attention_with_state(*x, state=other, **undivided)[1],
        one + one,
    ):
        after.key_value.add_(1), after.key_sum.add_(1), after.position.add_(1)
    assert unchanged(one, before[0])
    assert unchanged(other, before[1])


@pytest.mark.parametrize("horizon", [8, 8.9, torch.tensor([100.0, 8.5])])
@every_impl
def test_a_stream_past_its_horizon_raises_before_it_changes_the_state(horizon, impl):
    state = stream(horizon)
    before = snapshot(state)
    message = r"position 8, 1 more would pass its horizon 8.*raise horizon.*raised_cosine"
    with pytest.raises(ValueError, match=message):
        step(*tokens(2, 2, 1), state)
    with pytest.raises(ValueError, match=message.replace("1 more", "3 more")):
        attention_with_state(*tokens(2, 2, 3), state=state, impl=impl)
    assert unchanged(state, before)
    last = stream(9)
    step(*tokens(2, 2, 1), last)
    assert int(last.position) == 9


def test_a_state_remembers_its_horizon_and_weight():
    state, x = stream(20), tokens(2, 2, 3)
    for same in ({"horizon": 20}, {"horizon": torch.tensor(20.0)}, {"weight": "cosine"}):
        attention_with_state(*x, state=state, **same)
    with pytest.raises(ValueError, match=r"horizon must be the state's 20.*got 21"):
        attention_with_state(*x, state=state, horizon=21)
    with pytest.raises(ValueError, match="weight must be the state's 'cosine', got 'raised"):
        attention_with_state(*x, state=state, weight="raised_cosine")
    per_head = stream(torch.tensor([20.0, 30.0]))
    attention_with_state(*x, state=per_head, horizon=torch.tensor([20.0, 30.0]))
    for other in (20, torch.tensor([20.0, 31.0])):
        with pytest.raises(ValueError, match="horizon must be the state's"):
            attention_with_state(*x, state=per_head, horizon=other)


def test_states_that_do_not_belong_together_do_not_add():
    state = stream(20)
    for other, message in (
        (stream(21), "one horizon to add, got 20.0 and 21.0"),
        (stream(torch.tensor([20.0, 30.0])), "one horizon"),
        (State.empty(2, 2, 4, 5, horizon=20), "one shape"),
        (stream(20, weight="raised_cosine"), "one shape"),
        (stream(20, decay=0.9), "one decay to add, got 1.0 and 0.9"),
        (stream(20, log_decay=-torch.ones(2, 2, 8)), "both have a decay per token to add"),
        (State.empty(2, 2, 4, 4, horizon=20, device="meta"), "on one device to add, got cpu and m"),
    ):
        with pytest.raises(ValueError, match=message):
            state + other
    for other in (1, tuple(state)):
        with pytest.raises(TypeError):
            state + other
    for product in (lambda: 2 * state, lambda: state * 2):
        with pytest.raises(TypeError, match="a State has no product"):
            product()


@pytest.mark.parametrize(
    "options",
    [
        {"feature_map": "identity"},
        {"feature_map": "1+elu", "theta": 0.001},
        {"feature_map": "relu", "theta": 0.001, "normaliser": "none"},
        {"feature_map": "1+elu", "gamma": 0.9},
    ],
)
def test_the_op_refuses_streams_it_could_not_go_on_with(options):
    x = tokens(2, 2, 1)
    state = linear_attention_with_state(*x, **options)[1]
    for call in (lambda: attention_with_state(*x, state=state), lambda: step(*x, state)):
        with pytest.raises(ValueError, match="state must come from attention: go on with linear"):
            call()


@every_impl
@pytest.mark.parametrize(
    ("kept", "given"), [(torch.float32, torch.float64), (torch.float64, torch.float32)]
)
def test_tokens_of_another_precision_go_on_with_a_stream(kept, given, impl):
    x = tokens(2, 2, 12)
    state = attention_with_state(*(y[:, :, :8].to(kept) for y in x), horizon=20, impl=impl)[1]
    out, _ = attention_with_state(*(y[:, :, 8:].to(given) for y in x), state=state, impl=impl)
    assert out.dtype == given
    right = attention_with_state(*x, horizon=20)[0][:, :, 8:]
    torch.testing.assert_close(out.float(), right.float())


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

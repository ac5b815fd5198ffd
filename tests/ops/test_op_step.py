"""A step takes one token at a constant cost, changes the state in place, and picks streams by slot.

By torch and by its kernel, under Triton's interpreter.
"""

import math
import sys

import pytest
import torch
from formula import by_steps, cosformer, rounded_once, tokens, uniform

from cosformer import State, attention, attention_with_state, step
from cosformer.ops.step import copy_like
from cosformer.ops.triton import INTERPRETED, fused_step

needs_kernels = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
both = pytest.mark.parametrize("impl", ["chunked", pytest.param("triton", marks=needs_kernels)])
PER_HEAD = torch.tensor([50.0, 70.0])
FADING = {
    "no decay": {},
    "one decay": {"decay": 0.5},
    "decay per head": {"decay": [0.5, 0.9], "horizon": math.inf},
    "decay per token": {"per_token": True},
}


def rows(length=20, heads=4, width=6, value_width=5, dtype=torch.float32):
    shape = {"heads": heads, "kv_heads": 2, "width": width, "value_width": value_width}
    return [x.to(dtype) for x in tokens(3, length=length, **shape)]


def at(x, t):
    return [y[:, :, t : t + 1] for y in x]


@both
@pytest.mark.parametrize(
    ("horizon", "heads", "width", "value_width"),
    [(50.0, 4, 6, 5), (math.inf, 2, 100, 70), (PER_HEAD, 6, 6, 100)],
)
def test_steps_are_the_formula(horizon, heads, width, value_width, impl):
    x = rows(6, heads, width, value_width)
    exact = cosformer(*(y.double() for y in x), causal=True, horizon=horizon)
    state = State.empty(3, 2, width, value_width, horizon=horizon)
    out = by_steps(step, x, state, impl=impl)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
    assert int(state.position) == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_tokens_meet_float32_sums_under_autocast_as_well(dtype):
    x = rows(12, dtype=dtype)
    state = State.empty(3, 2, 6, 5, horizon=12)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        out = by_steps(step, x, state)
    assert state.key_value.dtype == torch.float32
    rounded_once(out, cosformer(*(y.double() for y in x), causal=True))


def test_a_token_may_come_without_a_length():
    x = rows(1, dtype=torch.float64)
    states = [State.empty(3, 2, 6, 5, horizon=12, dtype=torch.float64) for _ in range(2)]
    flat = step(*(t[:, :, 0] for t in x), states[0])
    assert torch.equal(flat, step(*x, states[1])[:, :, 0])
    assert all(map(torch.equal, states[0][:3], states[1][:3]))


@pytest.mark.parametrize("prefilled", [False, True])
def test_a_step_changes_the_state_where_it_lies(prefilled):
    x = rows()
    state = State.empty(3, 2, 6, 5, horizon=100)
    if prefilled:
        _, state = attention_with_state(*rows(5), horizon=100)
    start, places = int(state.position), [part.data_ptr() for part in state[:3]]
    sizes = [part.untyped_storage().nbytes() for part in state[:3]]
    by_steps(step, x, state)
    assert int(state.position) == start + 20
    assert places == [part.data_ptr() for part in state[:3]]
    assert sizes == [part.untyped_storage().nbytes() for part in state[:3]]


def test_a_step_refuses_gradients_and_says_where_they_go():
    x = tokens(1, 2, 1)
    state = State.empty(1, 2, 4, 4, horizon=9, dtype=torch.float64)
    for place in range(3):
        graded = [t.clone().requires_grad_(n == place) for n, t in enumerate(x)]
        with pytest.raises(ValueError, match="step records no gradients: use attention_with_state"):
            step(*graded, state)
        with torch.no_grad():
            step(*graded, state)
    trained = attention_with_state(*(t.clone().requires_grad_() for t in x), horizon=9)[1]
    with pytest.raises(ValueError, match="step records no gradients"):
        step(*x, trained)
    fading = State.empty(1, 2, 4, 4, horizon=9, per_token=True, dtype=torch.float64)
    with pytest.raises(ValueError, match="step records no gradients"):
        step(*x, fading, log_decay=-torch.ones(1, 2, 1, requires_grad=True))
    assert not fading.position


@needs_kernels
@pytest.mark.parametrize(
    ("width", "value_width", "dtype"), [(6, 100, torch.bfloat16), (100, 70, torch.float32)]
)
@pytest.mark.parametrize("slots", [None, torch.tensor([2, -1, 0])], ids=["every row", "slots"])
@pytest.mark.parametrize("fading", FADING.values(), ids=FADING)
def test_the_kernel_leaves_the_state_of_torch(width, value_width, dtype, slots, fading):
    x, start = rows(3, 4, width, value_width, dtype), torch.tensor([5, 0, 7])
    options = {"horizon": 50.0, "position": start} | fading
    mine, torchs = (State.empty(3, 2, width, value_width, **options) for _ in range(2))
    near = 1e-5 if dtype == torch.float32 else 1e-2
    gates = -torch.rand(3, 2, 3)
    gates[0, 0, 1] = -torch.inf
    for t in range(3):
        about = {"slots": slots}
        if mine.per_token:
            about["log_decay"] = gates[..., t : t + 1]
        out = step(*at(x, t), mine, **about, impl="triton")
        expected = step(*at(x, t), torchs, **about, impl="chunked")
        torch.testing.assert_close(out, expected, rtol=near, atol=1e-6)
    for one, other in zip(mine.tensors, torchs.tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@needs_kernels
def test_the_kernel_takes_an_angle_as_a_number_no_raised_cosine_and_no_two_decays():
    x, theta = rows(1), math.pi / 2 / 50
    outs, states = [], []
    for turn in (theta, torch.full((1, 1), theta, dtype=torch.float64)):
        states.append(State.empty(3, 2, 6, 5, horizon=50.0, position=2**30))
        outs.append(fused_step(*x, states[-1], turn, None, 1e-6, limit=None))
    assert torch.equal(*outs)
    assert all(map(torch.equal, states[0][:3], states[1][:3]))
    raised = State.empty(3, 2, 6, 5, horizon=50.0, weight="raised_cosine")
    with pytest.raises(
        ValueError, match="impl='triton' needs cosine or plain weights, got raised_cosine"
    ):
        step(*x, raised, impl="triton")
    twice = State.empty(3, 2, 6, 5, horizon=50.0, per_token=True)._replace(decay=0.5)
    with pytest.raises(ValueError, match="decays per head and per token: use impl='chunked'"):
        step(*x, twice, log_decay=-torch.ones(3, 2, 1), impl="triton")


@needs_kernels
@pytest.mark.parametrize("slots", [None, torch.tensor([2, 0, 1])])
def test_the_step_of_torch_calls_no_kernel_on_a_gpu_either(slots, monkeypatch):
    room = sys.modules[step.__module__]
    monkeypatch.setattr(room, "on_gpu", lambda x: True)
    monkeypatch.setattr(room, "fused_step", lambda *_, **__: pytest.fail("by a kernel"))
    state = State.empty(3, 2, 6, 5, horizon=50.0, position=torch.zeros(3, dtype=torch.int64))
    step(*rows(1), state, slots=slots, impl="chunked")
    assert state.position.tolist() == [1, 1, 1]


@both
def test_no_rows_move_nobody_but_a_shared_position(impl):
    x = [y[:0] for y in rows(1)]
    state = State.empty(3, 2, 6, 5, horizon=50.0, position=torch.tensor([4, 0, 2]))
    out = step(*x, state, slots=torch.zeros(0, dtype=torch.int64), impl=impl)
    assert out.shape == (0, 4, 1, 5)
    assert state.position.tolist() == [4, 0, 2]
    assert not state.key_value.any()
    shared = State.empty(0, 2, 6, 5, horizon=50.0)
    step(*x, shared, impl=impl)
    assert int(shared.position) == 1


@both
@pytest.mark.parametrize("gated", [False, True])
def test_streams_by_slot_are_streams_of_their_own(gated, impl):
    x, gates, more = rows(8), -uniform(3, 2, 8).float().double(), {}
    about = {"log_decay": gates} if gated else {}
    exact = attention(*(y.double() for y in x), causal=True, horizon=50.0, **about)
    start = torch.zeros(5, dtype=torch.int64)
    state = State.empty(5, 2, 6, 5, horizon=50.0, position=start, per_token=gated)
    slots, done = [4, 0, 2], [0, 0, 0]
    generator = torch.Generator().manual_seed(0)
    while min(done) < 8:
        order = torch.randperm(3, generator=generator).tolist()
        taking = [i for i in order if done[i] < 8 and torch.rand((), generator=generator) < 0.7]
        picked, when = [*taking, 0], [*(done[i] for i in taking), 0]  # the last row is padding
        parts = [torch.stack([y[i, :, t] for i, t in zip(picked, when, strict=True)]) for y in x]
        index = torch.tensor([*(slots[i] for i in taking), -1])
        if gated:
            of_rows = [gates[i, :, t] for i, t in zip(picked, when, strict=True)]
            more["log_decay"] = torch.stack(of_rows).float()
        out = step(*parts, state, slots=index, impl=impl, **more)
        assert (out[-1] == 0).all()
        for row, i in enumerate(taking):
            right = exact[i, :, done[i]]
            torch.testing.assert_close(out[row].double(), right, rtol=1e-5, atol=1e-6)
            done[i] += 1
    assert state.position.tolist() == [8, 0, 8, 0, 8]
    assert not state.key_value[3].any()
    if gated:
        torch.testing.assert_close(state.log_decay[slots], gates.sum(-1))
        assert not state.log_decay[[1, 3]].any()


@both
def test_a_full_stream_raises_before_anything_changes_and_others_go_on(impl):
    x = [y[:2] for y in rows(1)]
    state = State.empty(3, 2, 6, 5, horizon=10.0, position=torch.tensor([10, 0, 0]))
    with pytest.raises(ValueError, match="would pass its horizon"):
        step(*x, state, slots=torch.tensor([1, 0]), impl=impl)
    assert not state.key_value.any()
    step(*x, state, slots=torch.tensor([1, 2]), impl=impl)
    assert state.position.tolist() == [10, 1, 1]


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (torch.tensor([0, 5]), "slots must be below 3, got 5"),
        (torch.tensor([1, 1]), r"slots must differ from each other, got \[1, 1\]"),
        (torch.tensor([0]), r"slots must be int64 \[2\]"),
    ],
)
def test_bad_slots_are_named(slots, message):
    x = [y[:2] for y in rows(1)]
    position = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        step(*x, State.empty(3, 2, 6, 5, horizon=10.0, position=position), slots=slots)
    with pytest.raises(ValueError, match="one position per stream"):
        step(*x, State.empty(3, 2, 6, 5, horizon=10.0), slots=torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"k": torch.ones(2)}, r"k must have the shape captured, torch.Size\(\[3\]\), got"),
        ({"k": torch.ones(3).double()}, "k must have the dtype captured, torch.float32, got"),
        ({"k": torch.ones(3, device="meta")}, "k must have the device captured, cpu, got meta"),
        ({"slots": torch.zeros(1, dtype=torch.int64)}, "slots must have the shape captured"),
        ({"slots": None}, "slots must be given with every call, or not at all"),
        ({"log_decay": torch.zeros(3)}, "log_decay must be given with every call, or not at all"),
    ],
)
def test_a_graph_takes_what_it_captured_and_of_anything_else_nothing(wrong, rule):
    def given(value):
        slots = torch.full((3,), int(value))
        return {"q": torch.full((3,), value), "k": torch.full((3,), value), "slots": slots}

    captured = given(1.0) | {"log_decay": None}
    with pytest.raises(ValueError, match=rule):
        copy_like(captured, given(2.0) | {"log_decay": None} | wrong)
    assert all((x == 1).all() for x in captured.values() if x is not None)
    copy_like(captured, given(2.0) | {"log_decay": None})
    assert all((x == 2).all() for x in captured.values() if x is not None)

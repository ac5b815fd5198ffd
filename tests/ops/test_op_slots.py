"""Steps by kernels (under Triton's interpreter) and for streams that are picked by slot."""

import math

import pytest
import torch
from formula import tokens

from cosformer import State, attention, step
from cosformer.ops.triton import INTERPRETED, fused_step

IMPLS = ("chunked", "triton")


@pytest.fixture(autouse=True)
def with_kernels():
    pytest.importorskip("triton")
    if not INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1 before Triton's import")


def rows(length=20, heads=4, kv_heads=2, width=6, value_width=5):
    shape = {"heads": heads, "kv_heads": kv_heads, "width": width, "value_width": value_width}
    return [x.float() for x in tokens(3, length=length, **shape)]


PER_HEAD = torch.tensor([50.0, 70.0])
STEPS = [(50.0, 6, 5), (math.inf, 100, 70), (PER_HEAD, 6, 100)]


@pytest.mark.parametrize(("horizon", "width", "value_width"), STEPS)
def test_kernels_take_the_same_steps(horizon, width, value_width):
    q, k, v = rows(6, width=width, value_width=value_width)
    exact = attention(*(x.double() for x in (q, k, v)), causal=True, horizon=horizon)
    state = State.empty(3, 2, width, value_width, horizon=horizon)
    for t in range(6):
        out = step(*(x[:, :, t : t + 1] for x in (q, k, v)), state, impl="triton")
        torch.testing.assert_close(out.double(), exact[:, :, t : t + 1], rtol=1e-5, atol=1e-6)
    assert int(state.position) == 6


@pytest.mark.parametrize(
    ("width", "value_width", "dtype"), [(6, 100, torch.bfloat16), (100, 70, torch.float32)]
)
@pytest.mark.parametrize("slots", [None, torch.tensor([2, -1, 0])], ids=["every row", "slots"])
def test_kernels_leave_the_state_of_torch(width, value_width, dtype, slots):
    q, k, v = (x.to(dtype) for x in rows(length=3, width=width, value_width=value_width))
    start = torch.tensor([5, 0, 7])
    mine, torchs = (
        State.empty(3, 2, width, value_width, horizon=50.0, position=start) for _ in range(2)
    )
    for t in range(3):
        parts = [x[:, :, t : t + 1] for x in (q, k, v)]
        out = step(*parts, mine, slots=slots, impl="triton")
        expected = step(*parts, torchs, slots=slots, impl="chunked")
        torch.testing.assert_close(
            out, expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6
        )
    for one, other in zip(mine[:3], torchs[:3], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_an_angle_may_be_a_number():
    q, k, v = (x[:, :, :1] for x in rows())
    theta = math.pi / 2 / 50
    outs, states = [], []
    for turn in (theta, torch.full((1, 1), theta, dtype=torch.float64)):
        states.append(State.empty(3, 2, 6, 5, horizon=50.0, position=2**30))
        outs.append(fused_step(q, k, v, states[-1], turn, None, 1e-6, limit=None))
    assert torch.equal(*outs)
    assert all(map(torch.equal, states[0][:3], states[1][:3]))


@pytest.mark.parametrize("impl", IMPLS)
def test_no_slots_move_nobody(impl):
    q, k, v = (x[:0, :, :1] for x in rows())
    state = State.empty(3, 2, 6, 5, horizon=50.0, position=torch.tensor([4, 0, 2]))
    out = step(q, k, v, state, slots=torch.zeros(0, dtype=torch.int64), impl=impl)
    assert out.shape == (0, 4, 1, 5)
    assert state.position.tolist() == [4, 0, 2]
    assert not state.key_value.any()


@pytest.mark.parametrize("impl", IMPLS)
def test_streams_by_slot_are_streams_of_their_own(impl):
    q, k, v = rows()
    exact = attention(*(x.double() for x in (q, k, v)), causal=True, horizon=50.0)
    start = torch.zeros(5, dtype=torch.int64)
    state = State.empty(5, 2, 6, 5, horizon=50.0, position=start)
    untouched = state.key_value[3].clone()
    slots, done = [4, 0, 2], [0, 0, 0]
    generator = torch.Generator().manual_seed(0)
    while min(done) < 20:
        order = torch.randperm(3, generator=generator).tolist()
        taking = [i for i in order if done[i] < 20 and torch.rand((), generator=generator) < 0.7]
        batch = [*taking, None]  # the last row is padding
        picked = [0 if i is None else i for i in batch]
        at = [0 if i is None else done[i] for i in batch]
        parts = [
            torch.stack([x[i, :, t] for i, t in zip(picked, at, strict=True)]) for x in (q, k, v)
        ]
        index = torch.tensor([-1 if i is None else slots[i] for i in batch])
        out = step(*parts, state, slots=index, impl=impl)
        assert (out[-1] == 0).all()
        for row, i in enumerate(taking):
            torch.testing.assert_close(
                out[row].double(), exact[i, :, done[i]], rtol=1e-5, atol=1e-6
            )
            done[i] += 1
    assert state.position.tolist() == [20, 0, 20, 0, 20]
    assert torch.equal(state.key_value[3], untouched)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_full_stream_raises_before_anything_changes_and_others_go_on(impl):
    q, k, v = (x[:2, :, :1] for x in rows())
    state = State.empty(3, 2, 6, 5, horizon=10.0, position=torch.tensor([10, 0, 0]))
    before = [x.clone() for x in state[:3]]
    with pytest.raises(ValueError, match="would pass its horizon"):
        step(q, k, v, state, slots=torch.tensor([1, 0]), impl=impl)
    assert all(map(torch.equal, state[:3], before))
    step(q, k, v, state, slots=torch.tensor([1, 2]), impl=impl)
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
    q, k, v = (x[:2, :, :1] for x in rows())
    state = State.empty(3, 2, 6, 5, horizon=10.0, position=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=message):
        step(q, k, v, state, slots=slots)

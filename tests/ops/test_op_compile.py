"""torch.compile without a break, and torch.export at a length that is open."""

import shutil

import pytest
import torch
from formula import results, tokens, uniform
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim, export

from cosformer import (
    State,
    attention,
    attention_weights,
    attention_with_state,
    linear_attention,
    step,
)

PER_HEAD = torch.tensor([400.0, 500.0])
MASK = torch.rand(2, 40, generator=torch.Generator().manual_seed(0)) < 0.6
EDGES = torch.tensor([0, 7, 7, 40])


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(function, **options):
    return torch.compile(function, fullgraph=True, **{"backend": "aot_eager"} | options)


def streamed(q, k, v):
    first, state = attention_with_state(
        q[:, :, :30], k[:, :, :30], v[:, :, :30], horizon=400, key_mask=MASK[:, :30]
    )
    second, state = attention_with_state(q[:, :, 30:], k[:, :, 30:], v[:, :, 30:], state=state)
    return torch.cat([first, second], 2), state.key_value, state.key_sum


def gated(q, k, v):
    return linear_attention(q, k, v, feature_map="1+elu", log_decay=-v.abs().sum(-1), causal=True)


FUNCTIONS = {
    "causal": lambda *x: attention(*x, causal=True),
    "bidirectional, masked": lambda *x: attention(*x, key_mask=MASK),
    "fewer queries": lambda q, k, v: attention(q[:, :, :7], k, v, causal=True),
    "gates": gated,
    "stream": streamed,
}
MORE = {
    "horizon": lambda *x: attention(*x, causal=True, horizon=400),
    "horizon per head": lambda *x: attention(*x, causal=True, horizon=PER_HEAD),
    "raised": lambda *x: attention(*x, horizon=9, weight="raised_cosine"),
    "started": lambda q, k, v: attention(q, k, v, causal=True, query_start=5, horizon=99),
    "stretched": lambda q, k, v: attention(q[:, :, :7], k, v, positions="stretch"),
    "retention": lambda *x: linear_attention(
        *x, gamma=0.9, normaliser="none", scale=0.5, causal=True
    ),
    "weights": lambda q, k, v: attention_weights(q, k, causal=True, rows=slice(2, 5)),
    "reference": lambda *x: attention(*x, causal=True, impl="reference"),
}


def check(function, given, inputs):
    for value, right in zip(results(given, inputs), results(function, inputs), strict=True):
        torch.testing.assert_close(value, right)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_forward_and_backward_compile_into_one_graph(function):
    check(function, compiled(function), tokens(2, 2, 40))


@pytest.mark.parametrize("function", MORE.values(), ids=MORE)
def test_every_option_traces_without_a_break(function):
    check(function, compiled(function, backend="eager"), tokens(2, 2, 40))


@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences_compile(causal):
    def function(q, k, v):
        return attention(q, k, v, causal=causal, cu_seqlens=EDGES)

    check(function, compiled(function, backend="eager"), tokens(1, 2, 40))


def test_dynamic_graphs_serve_lengths_they_never_saw():
    function = FUNCTIONS["causal"]
    counter = CompileCounterWithBackend("eager")
    fast = compiled(function, dynamic=True, backend=counter)
    for length in (300, 384):  # with and without a rest after the last chunk
        fast(*tokens(1, 2, length))
    before = counter.frame_count
    for length in (301, 520, 640):
        x = tokens(1, 2, length)
        torch.testing.assert_close(fast(*x), function(*x))
    assert counter.frame_count == before


def test_a_dynamic_graph_takes_a_decay_for_each_head():
    def fading(q, k, v, gamma):
        return linear_attention(q, k, v, causal=True, normaliser="none", gamma=gamma)

    for heads in (2, 4):
        graph = compiled(fading, backend="eager", dynamic=True)
        x, gamma = tokens(1, heads, 20), [0.5, 0.9, 0.7, 0.99][:heads]
        torch.testing.assert_close(graph(*x, gamma), fading(*x, gamma))


@pytest.mark.slow
def test_a_dynamic_graph_trains():
    function = FUNCTIONS["causal"]
    fast = compiled(function, dynamic=True)
    for length in (30, 50):
        check(function, fast, tokens(1, 2, length))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # inductor's own use
def test_inductor_compiles_forward_and_backward():
    function = FUNCTIONS["causal"]
    fast = compiled(function, backend="inductor")
    inputs = tuple(x.float() for x in tokens(1, 1, 30, width=2))
    for value, right in zip(results(fast, inputs), results(function, inputs), strict=True):
        torch.testing.assert_close(value, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("horizon", [20.0, torch.tensor([20.0, 30.0])])
def test_a_step_compiles_and_changes_the_state_in_place(horizon):
    x = tokens(1, 2, 6)
    states = [State.empty(1, 2, 4, 4, horizon=horizon, dtype=torch.float64) for _ in range(2)]
    address = states[0].key_value.data_ptr()
    fast = compiled(step)
    for t in range(6):
        token = [y[:, :, t : t + 1] for y in x]
        torch.testing.assert_close(fast(*token, states[0]), step(*token, states[1]))
    for a, b in zip(states[0][:3], states[1][:3], strict=True):
        torch.testing.assert_close(a, b)
    assert states[0].key_value.data_ptr() == address


def test_a_compiled_step_past_its_horizon_raises_before_it_changes_the_state():
    state = State.empty(1, 2, 4, 4, horizon=9, position=9, dtype=torch.float64)
    before = [part.clone() for part in state[:3]]
    with pytest.raises(RuntimeError, match="past the horizon: raise horizon"):
        compiled(step)(*tokens(1, 2, 1), state)
    assert all(torch.equal(a, b) for a, b in zip(state[:3], before, strict=True))


def test_a_compiled_stream_past_its_horizon_raises():
    state = State.empty(1, 2, 4, 4, horizon=9, position=7, dtype=torch.float64)

    def function(q, k, v):
        return attention_with_state(q, k, v, state=state)

    with pytest.raises(RuntimeError, match="past the horizon: raise horizon"):
        compiled(function)(*tokens(1, 2, 3))


class Op(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, q, k, v):
        return self.function(q, k, v)


EXPORTED = {
    "causal": (FUNCTIONS["causal"], False),
    "causal, strict": (FUNCTIONS["causal"], True),
    "bidirectional": (lambda *x: attention(*x), False),
    "horizon": (MORE["horizon"], False),
    "horizon per head": (MORE["horizon per head"], False),
    "gates": (gated, False),
    "masked": (lambda q, k, v: attention(q, k, v, causal=True, key_mask=v[:, 0, :, 0] > 0), False),
    "raised": (MORE["raised"], False),
    "retention": (MORE["retention"], False),
}


@pytest.mark.parametrize(("function", "strict"), EXPORTED.values(), ids=EXPORTED)
def test_an_exported_op_runs_at_lengths_it_never_saw(function, strict):
    shapes = ({2: Dim("length", min=2, max=400)},) * 3
    program = export(Op(function), tokens(1, 2, 40), dynamic_shapes=shapes, strict=strict).module()
    for size in (2, 40, 127, 128, 129, 300):
        x = tokens(1, 2, size, seed=size)
        torch.testing.assert_close(program(*x), function(*x))


def test_cross_attention_exports_with_two_open_lengths():
    shapes = ({2: Dim("queries", max=400)}, *({2: Dim("keys", max=400)},) * 2)
    program = export(
        Op(EXPORTED["bidirectional"][0]),
        tokens(1, 2, 9, keys=40),
        dynamic_shapes=shapes,
        strict=False,
    )
    for queries, keys in ((5, 9), (200, 3), (130, 130)):
        x = tokens(1, 2, queries, keys=keys)
        torch.testing.assert_close(program.module()(*x), attention(*x))


def test_a_stream_exports_with_an_open_length():
    class Stream(torch.nn.Module):
        def forward(self, q, k, v, key_value, key_sum, position):
            state = State(key_value, key_sum, position, 1000.0)
            out, last = attention_with_state(q, k, v, state=state)
            return out, *last[:3]

    state = (uniform(1, 2, 2, 4, 4), uniform(1, 2, 2, 4), torch.tensor(3))
    shapes = (*({2: Dim("length", max=400)},) * 3, None, None, None)
    program = export(Stream(), (*tokens(1, 2, 40), *state), dynamic_shapes=shapes, strict=False)
    for size in (2, 130):
        x = tokens(1, 2, size)
        out, last = attention_with_state(*x, state=State(*state, 1000.0))
        for given, right in zip(program.module()(*x, *state), (out, *last[:3]), strict=True):
            torch.testing.assert_close(given, right)


def test_a_compiled_call_refuses_a_horizon_that_is_not_positive():
    compiled = torch.compile(attend_within, backend="aot_eager", fullgraph=True)
    for bad in (-9.0, float("nan")):
        with pytest.raises(RuntimeError, match="horizon must be above 0"):
            compiled(torch.randn(1, 2, 8, 4), torch.tensor([bad, 9.0]))


def attend_within(x, horizon):
    return attention(x, x, x, horizon=horizon)

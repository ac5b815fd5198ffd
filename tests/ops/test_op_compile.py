"""torch.compile without a break, and torch.export at a length that is open."""

import shutil
from functools import partial

import pytest
import torch
from formula import in_pieces, results, tokens, uniform
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
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
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(function, **options):
    return torch.compile(function, fullgraph=True, **{"backend": "aot_eager"} | options)


def stream(q, k, v, **options):
    out, state = in_pieces(attention_with_state, (q, k, v), (0, 25, 40), **options)
    return out, *state.tensors[:2], *state.tensors[3:]  # all but the position


def gated_stream(q, k, v):
    return stream(q, k, v, horizon=torch.inf, log_decay=-v.abs().sum(-1))


def gated(q, k, v):
    return linear_attention(q, k, v, feature_map="1+elu", log_decay=-v.abs().sum(-1), causal=True)


def packed(causal):
    edges = torch.tensor([0, 7, 7, 40])
    return lambda *x: attention(*(y[:1] for y in x), causal=causal, cu_seqlens=edges)


FUNCTIONS = {
    "causal": lambda *x: attention(*x, causal=True),
    "bidirectional, masked": lambda *x: attention(*x, key_mask=MASK),
    "fewer queries": lambda q, k, v: attention(q[:, :, :7], k, v, causal=True),
    "gates": gated,
    "stream": partial(stream, horizon=400, key_mask=MASK),
    "horizon per head": lambda *x: attention(*x, causal=True, horizon=PER_HEAD),
    "raised": lambda *x: attention(*x, horizon=9, weight="raised_cosine"),
    "started": lambda q, k, v: attention(q, k, v, causal=True, query_start=5, horizon=99),
    "stretched": lambda q, k, v: attention(q[:, :, :7], k, v, positions="stretch"),
    "retention": lambda *x: linear_attention(
        *x, gamma=0.9, normaliser="none", scale=0.5, causal=True
    ),
    "weights": lambda q, k, v: attention_weights(q, k, causal=True, rows=slice(2, 5)),
    "reference": lambda *x: attention(*x, causal=True, impl="reference"),
    "decay": lambda *x: attention(*x, causal=True, decay=[0.5, 0.9]),
    "decay, both ways": lambda *x: attention(*x, decay=torch.tensor([0.5, 0.9]), key_mask=MASK),
    "gates, both ways": lambda q, k, v: attention(q, k, v, log_decay=-v.abs().sum(-1)),
    "gated stream": gated_stream,
    "decaying stream": partial(stream, horizon=400, decay=[0.5, 0.9]),
    "packed": packed(True),
    "packed, both ways": packed(False),
    "grouped": lambda q, k, v: attention(q, k[:, :1], v[:, :1], causal=True),
}
FIRST = ("causal", "retention")
EVERY = [pytest.param(name, marks=() if name in FIRST else slow) for name in FUNCTIONS]


def check(function, given, inputs):
    for value, right in zip(results(given, inputs), results(function, inputs), strict=True):
        torch.testing.assert_close(value, right)


@pytest.mark.parametrize("name", EVERY)
def test_every_option_traces_without_a_break_and_trains(name):
    function = FUNCTIONS[name]
    check(function, compiled(function, backend="eager"), tokens(2, 2, 40))


@pytest.mark.parametrize("name", ["causal", pytest.param("gates", marks=slow)])
def test_forward_and_backward_compile_into_one_graph(name):
    check(FUNCTIONS[name], compiled(FUNCTIONS[name]), tokens(2, 2, 40))


@slow
def test_dynamic_graphs_serve_lengths_they_never_saw():
    function, counter = FUNCTIONS["causal"], CompileCounterWithBackend("eager")
    fast = compiled(function, dynamic=True, backend=counter)
    for length in (300, 384):  # with and without a rest after the last chunk
        fast(*tokens(1, 2, length))
    before = counter.frame_count
    for length in (301, 520, 640):
        x = tokens(1, 2, length)
        torch.testing.assert_close(fast(*x), function(*x))
    assert counter.frame_count == before


@slow
def test_a_dynamic_graph_takes_other_scales_and_a_decay_for_each_head():
    def fading(q, k, v, gamma, scale):
        about = {"causal": True, "normaliser": "none", "gamma": gamma, "scale": scale}
        return linear_attention(q, k, v, **about)

    for heads in (2, 4):
        graph = compiled(fading, backend="eager", dynamic=True)
        x, gamma = tokens(1, heads, 20), [0.5, 0.9, 0.7, 0.99][:heads]
        for scale in (0.5, 3.0):
            torch.testing.assert_close(graph(*x, gamma, scale), fading(*x, gamma, scale))


needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="inductor needs a C++ compiler"
)
inductors_own = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


@slow
@needs_compiler
@inductors_own
def test_inductor_compiles_a_learned_decay_at_lengths_it_never_saw():
    def fading(q, k, v, rates):
        return attention(q, k, v, causal=True, horizon=297.6, decay=rates)

    fast = torch.compile(fading, fullgraph=True, dynamic=True)
    rates = torch.tensor([0.5, 0.9, 0.99])
    for length in (257, 140):
        x = [y.float() for y in tokens(2, 3, length, width=3)]
        for value, right in zip(
            results(fast, (*x, rates)), results(fading, (*x, rates)), strict=True
        ):
            torch.testing.assert_close(value, right, rtol=1e-4, atol=1e-4)


@slow
@needs_compiler
@inductors_own
def test_inductor_compiles_forward_and_backward():
    function = FUNCTIONS["causal"]
    fast = compiled(function, backend="inductor")
    inputs = tuple(x.float() for x in tokens(1, 1, 30, width=2))
    for value, right in zip(results(fast, inputs), results(function, inputs), strict=True):
        torch.testing.assert_close(value, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"horizon": 20.0},
        {"horizon": torch.tensor([20.0, 30.0])},
        pytest.param({"horizon": torch.inf, "decay": [0.5, 0.9]}, marks=slow),
    ],
)
def test_a_step_compiles_and_changes_the_state_in_place(options):
    x = tokens(1, 2, 6)
    states = [State.empty(1, 2, 4, 4, **options, dtype=torch.float64) for _ in range(2)]
    address = states[0].key_value.data_ptr()
    fast = compiled(step)
    for t in range(6):
        token = [y[:, :, t : t + 1] for y in x]
        torch.testing.assert_close(fast(*token, states[0]), step(*token, states[1]))
    for a, b in zip(states[0][:3], states[1][:3], strict=True):
        torch.testing.assert_close(a, b)
    assert states[0].key_value.data_ptr() == address


def test_compiled_calls_that_break_a_rule_raise_before_they_change_anything():
    state = State.empty(1, 2, 4, 4, horizon=9, position=9, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="past the horizon: raise horizon"):
        compiled(step)(*tokens(1, 2, 1), state)
    assert not state.key_value.any()
    with pytest.raises(RuntimeError, match="past the horizon: raise horizon"):
        compiled(lambda *x: attention_with_state(*x, state=state))(*tokens(1, 2, 3))
    within = compiled(lambda x, horizon: attention(x, x, x, horizon=horizon))
    with pytest.raises(RuntimeError, match="horizon must be above 0"):
        within(torch.randn(1, 2, 8, 4), torch.tensor([torch.nan, 9.0]))


def test_a_horizon_of_one_number_in_a_tensor_compiles_and_goes_on_with_a_stream():
    x, horizon = tokens(1, 2, 8), torch.tensor(9.0)
    begun = compiled(lambda *x: attention_with_state(*x[:3], horizon=x[3]))
    out, state = begun(*x, horizon)
    right, same = attention_with_state(*x, horizon=9.0)
    torch.testing.assert_close(out, right)
    torch.testing.assert_close((state + same).key_value, 2 * same.key_value)
    with pytest.raises(RuntimeError, match="past the horizon: raise horizon"):
        begun(*x, torch.tensor(7.0))


class Op(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, q, k, v):
        return self.function(q, k, v)


OPEN = ("causal", "horizon per head", "gates", "raised", "retention", "decay", "gates, both ways")
STRICT = ("gates", "decay")
EXPORTED = {name: FUNCTIONS[name] for name in (*OPEN, "grouped")} | {
    "grouped, gates": lambda q, k, v: attention(q, k[:, :1], v[:, :1], log_decay=-v.abs().sum(-1)),
    "masked": lambda q, k, v: attention(q, k, v, causal=True, key_mask=v[:, 0, :, 0] > 0),
}
EVERY_EXPORT = [pytest.param(name, marks=() if name == "causal" else slow) for name in EXPORTED]


@pytest.mark.parametrize("name", EVERY_EXPORT)
def test_an_exported_op_runs_at_lengths_it_never_saw(name):
    function, shapes = EXPORTED[name], ({2: Dim("length", min=2, max=400)},) * 3
    strict = name in STRICT
    program = export(Op(function), tokens(1, 2, 40), dynamic_shapes=shapes, strict=strict).module()
    for size in (2, 40, 127, 128, 300):
        x = tokens(1, 2, size, seed=size)
        torch.testing.assert_close(program(*x), function(*x))


@slow
def test_cross_attention_exports_with_two_open_lengths():
    shapes = ({2: Dim("queries", max=400)}, *({2: Dim("keys", max=400)},) * 2)
    inputs = tokens(1, 2, 9, keys=40)
    program = export(Op(attention), inputs, dynamic_shapes=shapes, strict=False)
    for queries, keys in ((5, 9), (200, 3), (130, 130)):
        x = tokens(1, 2, queries, keys=keys)
        torch.testing.assert_close(program.module()(*x), attention(*x))


@slow
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


def test_a_compiled_training_step_goes_by_kernels_both_ways(interpreted):
    """A graph is given zeros for the gradient of row totals, which must not lead it to torch.

    A state after the last token, for which nobody asked, would be stored, and its gradient read.
    """
    graphs: list[set[str]] = []

    def keep(graph, inputs):
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return make_boxed_func(graph.forward)

    inputs = [torch.randn(1, 2, 70, 8, requires_grad=True) for _ in range(3)]
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    call = torch.compile(partial(attention, causal=True, impl="triton"), backend=backend)
    out = call(*inputs)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, grad)
    assert "cosformer.kernels_forward.default" in graphs[0]
    assert "cosformer.kernels_backward.default" in graphs[1]
    assert "aten.zeros.default" not in graphs[1]
    exact = torch.autograd.grad(attention(*inputs, causal=True, impl="reference"), inputs, grad)
    for one, other in zip(found, exact, strict=True):  # single numbers near 0 may be off by more
        assert (one - other).norm() < 1e-5 * other.norm()

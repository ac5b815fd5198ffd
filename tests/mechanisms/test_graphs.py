"""The whole table as one graph of torch.compile, as far as its traits say."""

import pytest
import torch
from mechanism_cases import LENGTH, NAMES, draw, make, names_where, results, tokens
from torch.testing import assert_close

from cosformer.nn import AttentionLayer


def compiled_whole(call):
    torch.compiler.reset()  # or `call` would be compiled anew too often
    return torch.compile(call, fullgraph=True, backend="eager")


STRIDES = ["softmax", "nystromformer", "gated-linear", "delta", "synthesizer-dense"]
"""Those in which torch's shapes without numbers have other strides, if one is not careful."""


COMPILED = ["local", "reformer"]
"""Representatives: blocks, and draws. The others are slow."""


def slow_but(few, names):
    return [name if name in few else pytest.param(name, marks=pytest.mark.slow) for name in names]


ALIKE = {"relu", "leaky-relu", "identity", "rfa-arccos", "transnormer"}
"""Mechanisms that differ from another one by the name of a feature map alone."""
CONTAINED = {"cosformer-multiscale", "rfa", "retention", "delta"}
"""Mechanisms of which another one (a gate for each token) does all and more."""


@pytest.mark.parametrize(
    "name", slow_but(COMPILED, [n for n in NAMES if n not in ALIKE | CONTAINED])
)
@torch.no_grad()
def test_all_compile_without_a_break_for_lengths_that_change(name):
    mechanism = make(name)
    causal = mechanism.traits.causal != "no"

    def call(q, k, v, controls):
        return mechanism(q, k, v, causal=causal, controls=controls)[0]

    compiled = compiled_whole(call)
    for length in (LENGTH, 50):
        given = tokens(mechanism, length)
        assert_close(compiled(*given), call(*given))


STREAMED = ["cosformer-gated", "softmax", "gated-delta", "performer", "rope-linear"]
"""Representatives of what streams keep: sums, tokens, a memory, a level beside sums, two sums."""


@pytest.mark.parametrize("name", STREAMED)
@torch.no_grad()
def test_a_graph_returns_the_stream_that_it_begins(name):
    """PyTorch 2.11 could not return what `_replace` of a NamedTuple had made there."""
    torch.manual_seed(0)
    layer = AttentionLayer(8, 2, mechanism=name).eval()
    first, second = torch.randn(2, 2, 5, 8)

    def begun(x):
        return layer.stream(x, layer.empty_state(2))

    compiled = compiled_whole(begun)
    (found, state), (right, known) = compiled(first), begun(first)
    assert_close(found, right)
    assert_close(layer.stream(second, state)[0], layer.stream(second, known)[0])


@pytest.mark.slow
def test_patterns_in_one_graph_have_the_same_gradients():
    """PyTorch 2.11 gives what a function of its own has changed in place gradients of 0 there."""
    mechanism = make("local")
    *given, _ = tokens(mechanism)
    torch.compiler.reset()
    compiled = torch.compile(mechanism, fullgraph=True, backend="aot_eager")
    right, found = (results(each, given, causal=True) for each in (mechanism, compiled))
    assert_close(found, right)


@pytest.mark.parametrize("name", slow_but([], STRIDES))
def test_gradients_compile_for_tokens_that_a_layer_has_split_into_heads(name):
    layer = AttentionLayer(24, 4, mechanism=name, dtype=torch.float64)
    causal = layer.mechanism.traits.causal != "no"
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for length in (8, 16):  # whole chunks: nothing is padded
        x = draw(2, length, 24, seed=length).requires_grad_()
        results = []
        for attend in (compiled, layer):
            out = attend(x, causal=causal)
            results.append([out, *torch.autograd.grad(out.sin().sum(), x)])
        assert_close(*results)


@pytest.mark.parametrize(
    "name", slow_but(["softmax", "sinkhorn"], names_where(state=("window", "cache", "none")))
)
def test_the_others_compile_without_a_break_as_far_as_the_host_reads_no_mask(name):
    mechanism = make(name)
    q, k, v, _ = tokens(mechanism, 20)
    mask = torch.arange(20) >= torch.tensor([[0], [3]])
    if not mechanism.traits.reads_mask:
        masked = compiled_whole(lambda q, k, v: mechanism(q, k, v, key_mask=mask)[0])
        assert_close(masked(q, k, v), mechanism(q, k, v, key_mask=mask)[0])
        return
    plain = compiled_whole(lambda q, k, v: mechanism(q, k, v)[0])
    assert_close(plain(q, k, v), mechanism(q, k, v)[0])
    masked = compiled_whole(lambda q, k, v: mechanism(q, k, v, key_mask=mask)[0])
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="data-dependent"):
        masked(q, k, v)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bigbird", "reformer"])
def test_a_graph_draws_what_belongs_to_its_length_and_seed(name):
    mechanism = make(name)
    compiled = compiled_whole(lambda q, k, v: mechanism(q, k, v)[0])
    for length in (LENGTH, 50):  # the second one is symbolic
        q, k, v, _ = tokens(mechanism, length)
        found = compiled(q, k, v)
        assert_close(found, mechanism(q, k, v)[0])
    mechanism.redraw(torch.Generator().manual_seed(1))
    assert_close(compiled(q, k, v), mechanism(q, k, v)[0])
    assert not torch.allclose(compiled(q, k, v), found)

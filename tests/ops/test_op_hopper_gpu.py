"""The kernels in CUDA C++ on a Hopper GPU: every role, width and way to cut a sequence."""

from functools import partial

import pytest
import torch
from gpu_marks import ON_HOPPER
from kernel_cases import CASES, Case, results
from kernel_cases import check as check_any

from cosformer import (
    State,
    attention,
    attention_with_state,
    linear_attention,
    linear_attention_with_state,
)
from cosformer.ops import hopper
from cosformer.ops.hopper.roles import MAPS

pytestmark = ON_HOPPER
CAUSAL = {"causal": True}
FEW = 0.1  # of a rounding: enough where hundreds of tokens leave nothing to luck
UNDIVIDED = {"feature_map": "identity", "normaliser": "none"}
SERVED = [
    "causal", "bidirectional", "cross", "masked", "masked, both ways", "a horizon for each head",
    "plain relu", "linear transformer", "signed", "added", "retention", "gated",
    "gated, scaled", "scaled, both ways", "closed gates", "fading quotient", "gated quotient",
]  # fmt: skip


check = partial(check_any, impl="hopper")
every_scale = pytest.mark.parametrize("scale", [1.0, 0.3])


@pytest.fixture(autouse=True)
def served(monkeypatch):
    """Memory that nobody wrote to holds NaN; counts the calls that these kernels took."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    calls = []
    for name in ("forward", "backward"):
        original = getattr(hopper, name)
        monkeypatch.setattr(
            hopper, name, lambda *a, f=original, n=name: (calls.append(n), f(*a))[1]
        )
    yield calls
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("length", [1, 63, 1000])
def test_every_role_agrees_with_its_formula(name, length, served):
    check(CASES[name], length, torch.bfloat16, device="cuda")
    assert served.count("forward") == served.count("backward") == 2


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width", [8, 64, 72, 128])
@pytest.mark.parametrize("value_width", [8, 64, 128])
def test_every_width(width, value_width, causal, served):
    case = Case(options={"causal": causal}, width=width, value_width=value_width)
    check(case, 300, torch.bfloat16, device="cuda", batch=2)
    assert served


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [700, 4097])
@pytest.mark.parametrize("masked", [False, True])
def test_every_way_to_cut(length, causal, masked, segments, served):
    case = Case(options={"causal": causal}, width=64, value_width=64, masked=masked)
    check(case, length, torch.bfloat16, device="cuda")
    assert served


@every_scale
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("theta", [0.0, 1e-3])
@pytest.mark.parametrize("width", [64, 128])
def test_no_denominator(width, theta, causal, scale, segments, served):
    options = {"causal": causal, "theta": theta, "scale": scale, **UNDIVIDED}
    case = Case(linear_attention, options, width=width, value_width=width)
    check(case, 700, torch.bfloat16, device="cuda")
    assert served


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("width", [64, 72, 128])
@pytest.mark.parametrize("value_width", [8, 64, 128])
@pytest.mark.parametrize("scale", [None, 1.0, 0.3])
def test_decays_at_every_width(width, value_width, gated, scale, served):
    """Without a scale they are divided."""
    gamma = {} if gated else {"gamma": torch.tensor([0.9, 0.999])}
    undivided = {**UNDIVIDED, "scale": scale}
    options = {**CAUSAL, **({"feature_map": "1+elu"} if scale is None else undivided), **gamma}
    case = Case(linear_attention, options, width=width, value_width=value_width, gated=gated)
    check(case, 300, torch.bfloat16, roundings=FEW, device="cuda", batch=2)
    assert served.count("forward") == served.count("backward") == 2


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("feature_map", MAPS)
def test_every_feature_map(feature_map, masked, causal, served):
    options = {"causal": causal, "feature_map": feature_map, "normaliser": "none"}
    case = Case(linear_attention, options, width=64, value_width=64, masked=masked)
    check(case, 300, torch.bfloat16, roundings=FEW, device="cuda")
    assert served.count("forward") == served.count("backward") == 2


@pytest.mark.parametrize("length", [700, 4097])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("feature_map", MAPS)
def test_gates_and_every_way_to_cut(length, masked, feature_map, segments, served):
    options = {**CAUSAL, **UNDIVIDED, "feature_map": feature_map, "scale": 0.3}
    case = Case(linear_attention, options, width=64, value_width=64, gated=True, masked=masked)
    check(case, length, torch.bfloat16, roundings=FEW, device="cuda")
    assert served.count("forward") == served.count("backward") == 2


@pytest.mark.parametrize("rule", ["clamp", "add", "signed"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("width", [64, 128])
def test_a_fading_quotient_and_every_way_to_cut(width, masked, rule, segments, served):
    options = {**CAUSAL, "feature_map": "1+elu", "rule": rule}
    case = Case(linear_attention, options, width=width, value_width=64, gated=True, masked=masked)
    check(case, 700, torch.bfloat16, roundings=FEW, device="cuda")
    assert served.count("forward") == served.count("backward") == 2


@pytest.mark.parametrize("length", [128, 700])
@pytest.mark.parametrize("width", [64, 128])
def test_gates_that_let_nothing_through(length, width, segments, served):
    options = {**CAUSAL, **UNDIVIDED}
    wide = {"width": width, "value_width": width}
    case = Case(linear_attention, options, gated=True, closed=True, **wide)
    check(case, length, torch.bfloat16, roundings=FEW, device="cuda")
    assert served.count("forward") == served.count("backward") == 2


def test_masked_keys_may_be_anything_under_a_gate(served):
    q, k, v = torch.randn(3, 1, 2, 300, 64, device="cuda", dtype=torch.bfloat16)
    gates = -torch.rand(1, 2, 300, device="cuda")
    mask = torch.rand(1, 300, device="cuda") < 0.7
    hidden = ~mask[:, None, :, None]
    options = {**CAUSAL, **UNDIVIDED, "feature_map": "relu", "key_mask": mask}

    def call(*x):
        return linear_attention(*x[:3], **options, log_decay=x[3])

    poisoned = [q, k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.nan), gates]
    zeroed = [q, k.masked_fill(hidden, 0), v.masked_fill(hidden, 0), gates]
    for a, b in zip(results(call, poisoned), results(call, zeroed), strict=True):
        assert torch.equal(a, b)
    assert served.count("backward") == 2


@every_scale
@pytest.mark.parametrize("split", [64, 500])
def test_a_gated_stream_in_two_pieces(split, scale, segments, served):
    q, k, v = torch.randn(3, 2, 3, 1000, 64, device="cuda", dtype=torch.bfloat16)
    first = torch.randn(2, 3, 1, 64, 64, device="cuda")
    leaves = [q, k, v, -0.02 * torch.rand(2, 3, 1000, device="cuda"), first]

    def begun(first):
        return State(first, first[..., 0][..., :0], torch.tensor(0, device="cuda"), None)

    def pieces(*x):
        outs, state = [], begun(x[4])
        for part in (slice(0, split), slice(split, None)):
            q, k, v, gates = (y[:, :, part] for y in x[:4])
            out, state = linear_attention_with_state(
                q, k, v, state=state, log_decay=gates, scale=scale, **UNDIVIDED
            )
            outs.append(out)
        return torch.cat([*outs, state.key_value[:, :, 0].to(outs[0])], 2)

    def whole(*x):
        q, k, v = (y.float() for y in x[:3])
        about = {"log_decay": x[3], "scale": scale, **UNDIVIDED}
        out, state = linear_attention_with_state(
            q, k, v, state=begun(x[4]), **about, impl="chunked"
        )
        return torch.cat([out, state.key_value[:, :, 0]], 2)

    for a, b in zip(results(pieces, leaves), results(whole, leaves), strict=True):
        error = (a.float() - b.float()).norm() / b.float().norm()
        assert error < 0.02
    assert served.count("forward") == served.count("backward") == 2


def test_strides_of_a_fused_projection(served):
    joint = torch.randn(2, 500, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    inputs = [x.transpose(1, 2) for x in joint.unbind(2)]
    found = results(lambda *x: attention(*x, causal=True), inputs)
    copied = results(lambda *x: attention(*x, causal=True), [x.contiguous() for x in inputs])
    for a, b in zip(found, copied, strict=True):
        assert torch.equal(a, b)
    assert served.count("forward") == 2


def test_the_gradient_of_a_sum(served):
    q, k, v = torch.randn(3, 1, 2, 300, 64, device="cuda", dtype=torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, causal=True)
    expanded = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    for a, b in zip(expanded, torch.autograd.grad(out, leaves, torch.ones_like(out)), strict=True):
        assert torch.equal(a, b)
    assert "backward" in served


@pytest.mark.parametrize("split", [64, 500])
def test_a_stream_in_two_pieces(split, segments, served):
    q, k, v = torch.randn(3, 2, 3, 1000, 64, device="cuda", dtype=torch.bfloat16)
    leaves = [x.detach().requires_grad_() for x in (q.abs(), k.abs(), v)]

    def pieces(*x):
        first, state = attention_with_state(*(y[:, :, :split] for y in x), horizon=2000)
        second, _ = attention_with_state(*(y[:, :, split:] for y in x), state=state)
        return torch.cat([first, second], 2)

    def whole(*x):
        return attention(*(y.float() for y in x), causal=True, horizon=2000, impl="chunked")

    for a, b in zip(results(pieces, leaves), results(whole, leaves), strict=True):
        error = (a.float() - b.float()).norm() / b.float().norm()
        assert error < 0.02
    assert served.count("forward") == 2


def test_many_heads_and_more_blocks_than_a_grid_axis_holds(served):
    q, k, v = (torch.randn(5000, 16, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out = attention(q, k, v, causal=True)
    exact = attention(*(x.float() for x in (q, k, v)), causal=True, impl="chunked")
    assert (out.float() - exact).norm() / exact.norm() < 0.01
    assert served


def test_a_graph_replays_what_was_captured(served):
    q, k, v = torch.randn(3, 1, 4, 1000, 64, device="cuda", dtype=torch.bfloat16)
    expected = attention(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    attention(q, k, v, causal=True)
    with torch.cuda.graph(graph):
        out = attention(q, k, v, causal=True)
    graph.replay()
    assert torch.equal(out, expected)


def test_inductor_compiles_without_a_break(served):
    inputs = list(torch.randn(3, 1, 2, 300, 64, device="cuda", dtype=torch.bfloat16))
    compiled = torch.compile(lambda *x: attention(*x, causal=True), fullgraph=True)
    eager = results(lambda *x: attention(*x, causal=True), inputs)
    for a, b in zip(eager, results(compiled, inputs), strict=True):
        torch.testing.assert_close(b, a, rtol=2e-2, atol=2e-2)

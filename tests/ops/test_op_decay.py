"""A decay per head or per token multiplies the cosine, in both directions, at any length."""

import math
from itertools import pairwise

import pytest
import torch
from formula import IMPLEMENTATIONS, agree, by_steps, cosformer, in_pieces, tokens, uniform
from hypothesis import given
from hypothesis import strategies as st
from properties import PROPERTY

from cosformer import (
    State,
    attention,
    attention_with_state,
    linear_attention,
    linear_attention_with_state,
    multiscale_decays,
    step,
)
from cosformer.ops import chunked, dispatch
from cosformer.ops.autograd import function
from cosformer.ops.autograd.both_ways import both_ways
from cosformer.ops.autograd.gates import gradient_of_gates, with_sums
from cosformer.ops.problem import Given, Results
from cosformer.ops.problem.weights import LOGARITHMS

every_impl = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
every_way = pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
RATES = [0.5, 0.99]
OPTIONS = {
    "one for all": {"decay": 0.9},
    "per head": {"decay": [*RATES, 1.0, 1e-3]},
    "per key head, grouped": {"decay": RATES, "kv_heads": 2},
    "no cosine": {"decay": RATES, "kv_heads": 2, "horizon": math.inf},
    "raised": {"decay": 0.9, "horizon": 9.0, "raised": True},
    "masked": {"decay": 0.9, "masked": True},
    "packed": {"decay": 0.9, "packed": True},
    "packed, one horizon": {"decay": RATES, "kv_heads": 2, "packed": True, "horizon": 200.0},
}


@every_impl
@every_way
@pytest.mark.parametrize("per_token", [False, True], ids=["per head", "per token"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("length", [1, 70, 131])
def test_a_decay_is_its_formula_with_gradients(options, length, per_token, causal, impl):
    about = {"causal": causal, **options}
    kv_heads, raised = about.pop("kv_heads", 4), about.pop("raised", False)
    batch = 1 if about.pop("packed", False) else 2
    if batch == 1:
        about["cu_seqlens"] = torch.tensor([0, length // 3, length // 3, length])
    if about.pop("masked", False):
        about["key_mask"] = torch.rand(2, length, generator=torch.Generator().manual_seed(3)) < 0.6
    leaf, name = torch.as_tensor(about.pop("decay"), dtype=torch.float64), "decay"
    if per_token:
        name, leaf = "log_decay", -0.3 * uniform(batch, kv_heads, length)
    weight = "raised_cosine" if raised else "cosine"

    def ours(q, k, v, decay):
        return attention(q, k, v, **about, **{name: decay}, weight=weight, impl=impl)

    def formula(q, k, v, decay):
        return cosformer(q, k, v, **about, **{name: decay}, raised=raised)

    x = tokens(batch, 4, length, kv_heads=kv_heads, value_width=3)
    agree(ours, formula, *x, leaf, argument=length)


@every_impl
@every_way
@pytest.mark.parametrize("rule", ["add", "signed", "none"])
def test_the_family_decays_both_ways(rule, causal, impl):
    about = {"feature_map": "1+elu", "causal": causal, "theta": 0.01, "impl": impl}
    about |= {"normaliser": "none", "scale": 0.3} if rule == "none" else {"rule": rule}
    x, gates = tokens(2, 2, 70), -0.1 * uniform(2, 2, 70)
    found = linear_attention(*x, gamma=0.9, log_decay=gates, **about)
    both = linear_attention(*x, log_decay=gates + math.log(0.9), **about | {"impl": "reference"})
    torch.testing.assert_close(found, both)


@pytest.mark.parametrize("asked", [("q", "k", "v", "decay"), ("decay",)], ids=["all", "alone"])
@pytest.mark.parametrize("normaliser", ["sum", "none"])
@pytest.mark.parametrize("per_token", [False, True], ids=["per head", "per token"])
def test_the_gradient_of_a_decay_of_bfloat16_tokens_is_right_to_their_digits(
    per_token, normaliser, asked
):
    """It sums over all positions the error of the rounded output, which must cancel."""
    q, k, v = (x.bfloat16() - 0.5 for x in tokens(2, 4, 500, width=16))
    decay = -0.1 * uniform(2, 4, 500) if per_token else torch.tensor([0.5, 0.9, 0.99, 0.999])
    name = "log_decay" if per_token else "gamma"

    def gradient(dtype):
        x = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype), "decay": decay.double()}
        leaves = {each: y.detach().requires_grad_(each in asked) for each, y in x.items()}
        given = {name: leaves.pop("decay")}
        about = {"feature_map": "1+elu", "causal": True, "normaliser": normaliser}
        linear_attention(**leaves, **given, **about).sum().backward()
        return given[name].grad

    right = gradient(torch.float64)
    assert (gradient(torch.bfloat16) - right).norm() < 2**-7 * right.norm()


def test_decays_given_as_numbers_work_under_any_default_device(monkeypatch):
    monkeypatch.setattr(LOGARITHMS, "kept", {})
    x = tokens(1, 4, 9)
    with torch.device("meta"):
        found = attention(*x, decay=OPTIONS["per head"]["decay"])
    assert torch.equal(found, attention(*x, decay=OPTIONS["per head"]["decay"]))


@every_impl
@every_way
@pytest.mark.parametrize("one", [1, 1.0, [1, 1]], ids=str)
def test_a_decay_of_one_changes_no_bit(one, causal, impl):
    x = [y.float() for y in tokens(1, 2, 150)]
    options = {"causal": causal, "impl": impl}
    assert torch.equal(attention(*x, decay=one, **options), attention(*x, **options))
    if causal:
        outs = [attention_with_state(*x, horizon=200, decay=each)[0] for each in (one, None)]
        assert torch.equal(*outs)


@every_impl
@every_way
@pytest.mark.parametrize("gate", [-torch.inf, -1e9])
def test_nothing_passes_a_closed_gate(gate, causal, impl):
    x, cut = [y.float() for y in tokens(1, 2, 140)], 70
    gates = -0.1 * uniform(1, 2, 140).float()
    gates[..., cut] = gate
    gates.requires_grad_()
    out = attention(*x, log_decay=gates, causal=causal, horizon=200, impl=impl)
    for rows in (slice(0, cut), slice(cut, None)):
        alone = [y[:, :, rows].double() for y in x]
        about = {"log_decay": gates[..., rows].detach(), "causal": causal, "horizon": 200}
        if rows.start:
            about["log_decay"] = about["log_decay"].masked_fill(torch.arange(70) == 0, 0)
        right = attention(*alone, **about, impl="reference")
        torch.testing.assert_close(out[:, :, rows].double(), right, rtol=1e-4, atol=1e-5)
    (grad,) = torch.autograd.grad(out.sum(), gates)
    assert grad.isfinite().all()
    assert not grad[..., cut].any()


@PROPERTY
@given(
    exponent=st.floats(-30, 0),
    length=st.integers(1, 400),
    causal=st.booleans(),
)
def test_any_decay_gives_finite_means_of_values(exponent, length, causal):
    x = [y.float().requires_grad_() for y in tokens(1, 1, length, width=3)]
    out = attention(*x, decay=10.0**exponent, causal=causal)
    right = attention(*(y.detach().double() for y in x), decay=10.0**exponent, causal=causal)
    torch.testing.assert_close(out.double(), right, rtol=1e-3, atol=1e-4)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), x))


@every_way
@pytest.mark.parametrize("loss", [0.7, 0.71, 5.0], ids=["e^44.8", "e^45.4", "e^320"])
def test_chunks_that_lose_little_or_much_are_as_exact(loss, causal):
    """About e^45 in a chunk of 64 the decay changes its form; here only half of the chunks do."""
    gates = torch.full((1, 2, 600), -loss, dtype=torch.float64)
    gates[..., :300] = -0.01

    def ours(q, k, v, gates):
        return attention(q, k, v, log_decay=gates, causal=causal, impl="chunked")

    def formula(q, k, v, gates):
        return cosformer(q, k, v, log_decay=gates, causal=causal)

    for dtype in (torch.float64, torch.float32):
        agree(ours, formula, *tokens(1, 2, 600, width=4), gates, dtype=dtype, argument=600)


@pytest.mark.slow
@every_way
@pytest.mark.parametrize("per_token", [False, True], ids=["per head", "per token"])
def test_a_million_tokens_in_float32_agree_with_float64(per_token, causal):
    length = 1_000_000
    x = tokens(1, 2, length, width=4)
    about = {"decay": [0.99, 0.999999]}
    if per_token:
        about = {"log_decay": torch.tensor([0.01, 1e-6])[None, :, None] * -uniform(1, 1, length)}
    found = attention(*(y.float() for y in x), causal=causal, **about)
    right = attention(*(y.float().double() for y in x), causal=causal, **about)
    torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("per_token", [False, True], ids=["per head", "per token"])
def test_second_derivatives_of_kernels_that_go_both_ways_are_those_of_torch(per_token, monkeypatch):
    """The kernels are played by the formula."""

    class Kernels:
        @staticmethod
        def maps(impl):
            return ("relu",)

        @staticmethod
        def forward(given):
            made = both_ways(lambda x: Results(*chunked.forward(x)).out, with_sums(given))
            return Results(made, given.q.new_empty(*given.q.shape[:2], 0), None)

        @staticmethod
        def backward(given, results, grads, asked):
            leaves = [x.detach().requires_grad_() for x in given[:4]]
            with torch.enable_grad():
                summed = with_sums(Given(*leaves, *given[4:]))
            found = function._gradients_both_ways(summed, grads, asked)
            if given.options.gated:
                of_gates = gradient_of_gates(found.decay.detach(), given.decay, -800.0)
                found = found._replace(decay=of_gates)
            return found._replace(**{x: y.detach() for x, y in zip("qkv", found, strict=False)})

    monkeypatch.setattr(
        function, "implementation", lambda impl: Kernels if impl == "hopper" else chunked
    )
    monkeypatch.setattr(dispatch, "why_not", lambda *_: None)
    leaf, name = torch.tensor(RATES, dtype=torch.float64), "decay"
    if per_token:
        leaf, name = -uniform(1, 2, 9), "log_decay"

    def curvature(impl):
        leaves = [x.requires_grad_() for x in (*tokens(1, 2, 9, kv_heads=1), leaf.clone())]
        out = attention(*leaves[:3], **{name: leaves[3]}, impl=impl)
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return [*first, *torch.autograd.grad(sum(x.sin().sum() for x in first), leaves)]

    for found, right in zip(curvature("hopper"), curvature("reference"), strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("impl", ["chunked", "reference"])
def test_a_stream_without_cosine_never_ends(impl):
    x, far = tokens(1, 2, 9), 10**9
    state = State.empty(1, 2, 4, 4, horizon=math.inf, decay=0.9, position=far, dtype=x[0].dtype)
    assert state.key_value.shape == (1, 2, 1, 4, 4)
    out, state = attention_with_state(*(y[:, :, :5] for y in x), state=state, impl=impl)
    right = attention(*x, causal=True, decay=0.9, horizon=math.inf)
    torch.testing.assert_close(torch.cat([out, by_steps(step, x, state, 5)], 2), right)
    assert int(state.position) == far + 9
    assert torch.equal(attention(*x, causal=True, horizon=math.inf),
                       linear_attention(*x, causal=True, feature_map="relu"))  # fmt: skip


def test_a_state_goes_on_with_its_own_decay_and_with_no_other():
    x, gates = tokens(2, 2, 4), -uniform(2, 2, 4)
    token, gate = [y[:, :, :1] for y in x], gates[..., :1]
    _, fading = attention_with_state(*x, horizon=20, decay=RATES)
    for same in (None, RATES, torch.tensor(RATES, dtype=torch.float64)):
        attention_with_state(*token, state=fading, decay=same)
    _, gated = attention_with_state(*x, horizon=20, log_decay=gates)
    _, plain = attention_with_state(*x, horizon=20)
    began = "log_decay must be {}: the stream began with"
    for state, options, message in (
        (fading, {"decay": 0.9}, r"decay must be the state's .*0.5.*0.99.*got 0.9"),
        (fading, {"decay": 1}, "decay must be the state's .*got 1.0"),
        (plain, {"decay": 0.9}, "decay must be the state's 1.0, got 0.9"),
        (plain, {"log_decay": gate}, began.format("None")),
        (fading, {"log_decay": gate}, began.format("None")),
        (gated, {}, began.format("given")),
        (gated, {"decay": 0.9}, "decay must be None: the state decays per token, got 0.9"),
    ):
        before = [y.clone() for y in state.tensors]
        with pytest.raises(ValueError, match=message):
            attention_with_state(*token, state=state, **options)
        if "decay" not in options:
            with pytest.raises(ValueError, match=message):
                step(*token, state, **options)
        assert all(map(torch.equal, state.tensors, before))
    with pytest.raises(ValueError, match="decay and per_token=True must not both be given"):
        State.empty(1, 2, 4, 4, horizon=9, decay=0.5, per_token=True)


def test_a_learned_decay_is_learned_through_a_stream():
    x = tokens(1, 2, 12)

    def grad(call):
        rates = torch.tensor(RATES, dtype=torch.float64, requires_grad=True)
        return torch.autograd.grad(call(rates).sin().sum(), rates)

    def stream(rates):
        return in_pieces(attention_with_state, x, (0, 7, 12), horizon=20, decay=rates)[0]

    whole = grad(lambda rates: attention(*x, causal=True, horizon=20, decay=rates))
    torch.testing.assert_close(grad(stream), whole)
    learned = torch.tensor(RATES, requires_grad=True)
    state = State.empty(1, 2, 4, 4, horizon=20, decay=learned, dtype=torch.float64)
    with pytest.raises(ValueError, match="step records no gradients"):
        step(*(y[:, :, :1] for y in x), state)


@every_impl
def test_a_stream_of_the_family_goes_on_with_both_of_its_decays(impl):
    x, gates = tokens(1, 2, 9), -uniform(1, 2, 9)
    family = {"feature_map": "relu", "theta": math.pi / 2 / 50, "gamma": RATES}
    right, _ = linear_attention_with_state(*x, log_decay=gates, **family)
    start = [y[:, :, :4] for y in x]
    _, state = linear_attention_with_state(*start, log_decay=gates[..., :4], **family)
    rest = [y[:, :, 4:] for y in x]
    out, _ = attention_with_state(*rest, state=state, log_decay=gates[..., 4:], impl=impl)
    torch.testing.assert_close(out, right[:, :, 4:])
    found = by_steps(step, x, state, 4, log_decay=gates)
    torch.testing.assert_close(found, right[:, :, 4:])


def test_multiscale_decays_reach_from_2_tokens_to_362_by_equal_factors():
    for heads in (2, 3, 8, 16):
        reach = [1 / (1 - rate) for rate in multiscale_decays(heads)]
        assert reach[0] == 2
        assert reach[-1] == pytest.approx(2**8.5)
        factors = [b / a for a, b in pairwise(reach)]
        assert factors == pytest.approx([2 ** (7.5 / (heads - 1))] * (heads - 1))


def test_a_single_head_has_the_longest_reach():
    assert multiscale_decays(1) == multiscale_decays(8)[-1:]


def test_a_wrong_number_of_heads_is_named():
    with pytest.raises(ValueError, match="heads must be a whole number from 1 on, got 0"):
        multiscale_decays(0)
    with pytest.raises(TypeError, match=r"heads must be a whole number from 1 on, got 2\.0"):
        multiscale_decays(2.0)

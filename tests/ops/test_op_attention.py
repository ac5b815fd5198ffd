"""attention is the paper's formula: every length, width, placement, mask and dtype, with gradients.

Also what it does at the ends: rows of zeros, empty sides, the range of float16, a million tokens.
"""

import pytest
import torch
from formula import (
    IMPLEMENTATIONS,
    agree,
    cosformer,
    largest,
    prefix_sums,
    results,
    tokens,
    uniform,
)
from formula import rounded_once as is_rounded_once
from hypothesis import given
from hypothesis import strategies as st
from properties import PROPERTY

from cosformer import attention, attention_with_state, linear_attention

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
every_impl = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
every_half = pytest.mark.parametrize("dtype", DTYPES[2:], ids=str)
both_ways = pytest.mark.parametrize("causal", [True, False])
PER_HEAD = torch.tensor([310.0, 9e9])


def masked(length, batch=2):
    """Left padding, right padding, holes, or nothing but padding, by row."""
    holes = torch.rand(4, length, generator=torch.Generator().manual_seed(1)) < 0.5
    holes[1, : length // 2], holes[2, length // 2 :], holes[3] = False, False, False
    return holes[[0, 3] if batch == 2 else slice(batch)]


def packed(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def shape(length, **more):
    return {"batch": 1, "length": length, "value_width": 3} | more


CASES = {
    **{f"{n} tokens": (shape(n), {}) for n in (1, 2, 63, 64, 65, 128, 257)},
    **{f"width {n}": (shape(70, width=n, value_width=m), {}) for n, m in ((1, 5), (256, 256))},
    "many heads": (shape(260, heads=33, width=2), {}),
    "a large batch": (shape(129, batch=70, heads=1, width=2), {}),
    "grouped": (shape(131, batch=2, heads=6, kv_heads=2), {}),
    **{f"{n} queries, {m} keys": (shape(n, keys=m), {}) for n, m in ((0, 5), (5, 0), (257, 129))},
    "no batch": (shape(5, batch=0), {}),
    "one query": (shape(1, keys=300), {}),
    "one key": (shape(300, keys=1), {}),
    "a horizon": (shape(140), {"horizon": 1500}),
    "a horizon per head": (shape(140), {"horizon": PER_HEAD}),
    "a horizon per key head": (shape(140, heads=4, kv_heads=2), {"horizon": PER_HEAD}),
    "raised": (shape(300), {"horizon": 47.5, "raised": True}),
    "eps": (shape(20), {"eps": 3.0}),
    "masked": (shape(140, batch=4, kv_heads=1), {"key_mask": masked(140, 4)}),
    **{
        f"from {start} on": (
            shape(20, keys=290, heads=4, kv_heads=2),
            {"query_start": start, "horizon": PER_HEAD + 700, "key_mask": masked(290, 1)},
        )
        for start in (-300, -7, 0, 4, 128, 400)
    },
    "packed": (shape(388), {"cu_seqlens": packed(127, 1, 0, 128, 129, 3)}),
    "packed, a horizon per head": (
        shape(388, heads=4, kv_heads=2),
        {"cu_seqlens": packed(127, 1, 0, 128, 129, 3).int(), "horizon": PER_HEAD},
    ),
    "packed, masked": (
        shape(180),
        {"cu_seqlens": packed(0, *[3] * 59, 3), "key_mask": masked(180, 1)},
    ),
    "past the horizon": (shape(140), {"horizon": 40.0, "decay": [0.3, 0.6]}),
    "packed, raised": (shape(80), {"cu_seqlens": packed(80), "horizon": 9.0, "raised": True}),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def op(impl="auto", *, raised=False, stretch=False, **options):
    """attention under the names that the formula uses."""
    names = {"weight": "raised_cosine" if raised else "cosine"}
    names["positions"] = "stretch" if stretch else "index"
    return lambda q, k, v: attention(q, k, v, impl=impl, **names, **options)


def formula(**options):
    return lambda q, k, v: cosformer(q, k, v, **options)


@every_case
@every_impl
@both_ways
def test_every_case_is_the_formula_with_its_gradients(case, impl, causal):
    sizes, options = case
    options = options | {"causal": causal}
    argument = 30 if "raised" in options else 140 if "decay" in options else 1
    agree(op(impl, **options), formula(**options), *tokens(**sizes), argument=argument)


@every_impl
@pytest.mark.parametrize(("queries", "keys"), [(1, 7), (7, 1), (5, 130), (0, 4), (4, 0)])
def test_stretched_positions_are_scaled_to_the_longer_side(queries, keys, impl):
    agree(op(impl, stretch=True), formula(stretch=True), *tokens(1, 2, queries, keys=keys))


@every_impl
@both_ways
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_as_right_as_the_plain_formula(dtype, causal, impl):
    inputs = tokens(length=40, value_width=3)
    agree(op(impl, causal=causal), formula(causal=causal), *inputs, dtype=dtype)
    assert op(impl, causal=causal)(*(x.to(dtype) for x in inputs)).dtype == dtype


@pytest.mark.parametrize("length", [2049, 8200])
def test_long_sequences_agree_across_chunks_and_spans(length):
    inputs = tokens(1, 1, length, width=2)
    for dtype in (torch.float64, torch.float32):
        agree(op(causal=True), lambda *x: prefix_sums(*x, horizon=length), *inputs, dtype=dtype)


@PROPERTY
@given(data=st.data())
def test_any_combination_of_sizes_and_options_is_the_formula(data):
    draw = data.draw
    groups, kv_heads, batch = (draw(st.integers(1, 3)) for _ in range(3))
    queries, keys = draw(st.integers(0, 150)), draw(st.integers(0, 150))
    width, value_width = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    mask = torch.rand(batch, keys, generator=torch.Generator().manual_seed(3)) < 0.7
    options = {
        "causal": draw(st.booleans()),
        "raised": draw(st.booleans()),
        "query_start": draw(st.none() | st.integers(-20, 40)),
        "key_mask": draw(st.sampled_from([None, mask])),
        "horizon": draw(st.sampled_from([400.0, torch.linspace(300, 500, groups * kv_heads)])),
    }
    heads = {"kv_heads": kv_heads, "width": width, "value_width": value_width}
    inputs = tokens(batch, groups * kv_heads, queries, keys=keys, **heads)
    agree(op(**options), formula(**options), *inputs)


PAST = [
    ({"horizon": 9}, 10, 10, 10),
    ({"horizon": 9.5}, 3, 10, 10),
    ({"horizon": 9, "causal": True}, 10, 3, 10),
    ({"horizon": torch.tensor([20.0, 9.0])}, 10, 10, 10),
    ({"horizon": 20, "causal": True, "query_start": 12}, 10, 10, 22),
    ({"horizon": 20, "query_start": -11}, 3, 10, 21),
    ({"horizon": 5, "cu_seqlens": torch.tensor([0, 4, 10])}, 10, 10, 6),
]


@pytest.mark.parametrize(("options", "queries", "keys", "length"), PAST)
def test_a_short_horizon_is_refused_by_name_with_length_and_remedy(options, queries, keys, length):
    inputs = tokens(1, length=queries, keys=keys)
    smallest = float(torch.as_tensor(options["horizon"]).min())
    message = rf"horizon .*length {length}, got {smallest:g}: .*raise horizon.*raised_cosine"
    for impl in IMPLEMENTATIONS:
        with pytest.raises(ValueError, match=message):
            attention(*inputs, **options, impl=impl)
        attention(*inputs, **options, weight="raised_cosine", impl=impl)
        attention(*inputs, **options | {"horizon": length}, impl=impl)


@every_impl
def test_future_tokens_do_not_change_the_past(impl):
    inputs = tokens(1, 2, 300)
    changed = [x.clone() for x in inputs]
    for x in changed:
        x[:, :, 200:] = 1e3
    before, after = (attention(*x, causal=True, impl=impl) for x in (inputs, changed))
    assert torch.equal(before[:, :, :200], after[:, :, :200])


def run(inputs, call=attention, **options):
    return results(lambda *x: call(*x, **options), inputs)


@every_impl
@both_ways
@pytest.mark.parametrize("changed", [0, 3])
@pytest.mark.parametrize("raised", [False, True])
def test_nothing_leaks_between_packed_sequences(raised, impl, changed, causal):
    edges = packed(127, 1, 0, 128, 3)
    inside = torch.zeros(259, dtype=torch.bool)
    inside[edges[changed] : edges[changed + 1]] = True
    options = {"cu_seqlens": edges, "causal": causal, "raised": raised, "horizon": 200}
    inputs = tokens(1, 2, 259)
    # Finite, but 2^100 times as large: one leaked addend would show in every digit.
    other = [torch.where(inside[:, None], x * 2.0**100, x) for x in inputs]
    found = (run(x, op(impl, **options)) for x in (inputs, other))
    for before, after in zip(*found, strict=True):
        assert torch.equal(before[:, :, ~inside], after[:, :, ~inside])


def poison(x, mask, value):
    return x.masked_fill(~mask[:, None, :, None], value)


FADING = {"no decay": {}, "per head": {"decay": [0.5, 0.99]}}
FADING["per token"] = {"log_decay": -uniform(4, 2, 140)}


@every_impl
@both_ways
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("fading", FADING.values(), ids=FADING)
def test_poison_behind_the_mask_changes_no_bit(fading, impl, causal, value):
    mask = masked(140, 4)
    q, k, v = tokens(4, 2, 140)
    bad = q, poison(k, mask, value), poison(v, mask, value)
    options = {"causal": causal, "key_mask": mask, "impl": impl, **fading}
    clean, poisoned = run((q, k, v), **options), run(bad, **options)
    assert all(map(torch.equal, clean, poisoned))
    for grad in poisoned[2:]:
        assert not grad.masked_select(~mask[:, None, :, None]).any()
    del options["causal"]
    states = [attention_with_state(*x, horizon=140, **options)[1] for x in ((q, k, v), bad)]
    assert all(map(torch.equal, states[0][:3], states[1][:3]))


@every_impl
@pytest.mark.parametrize("name", ["identity", "leaky_relu", "1+elu", "elu", "silu", torch.exp])
def test_poison_reaches_no_derivative_of_any_order(name, impl):
    mask = masked(20)
    options = {"feature_map": name, "rule": "signed", "key_mask": mask, "impl": impl}

    def derivatives(*inputs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        found = (linear_attention(*leaves, causal=True, **options),)
        for _ in range(3):
            yield from found
            loss = sum(x.sin().sum() for x in found)
            found = torch.autograd.grad(loss, leaves, create_graph=True)

    q, k, v = tokens(2, 2, 20)
    clean = list(derivatives(q, poison(k, mask, 0), poison(v, mask, 0)))
    for value in (torch.nan, -torch.inf):
        poisoned = derivatives(q, poison(k, mask, value), poison(v, mask, value))
        for before, after in zip(clean, poisoned, strict=True):
            torch.testing.assert_close(before, after)


@every_half
@every_impl
@both_ways
def test_half_precision_costs_one_rounding_of_the_output(dtype, impl, causal):
    x = [t.to(dtype) for t in tokens(1, 2, 700)]
    out = attention(*x, causal=causal, impl=impl)
    is_rounded_once(out, cosformer(*(t.double() for t in x), causal=causal))


@every_half
def test_angles_are_not_computed_in_16_bits(dtype):
    length = 5000  # bf16 cannot tell neighbouring positions apart from 256 on, fp16 from 2048 on
    q, k = (torch.ones(1, 1, length, 1, dtype=dtype) for _ in range(2))
    v = torch.linspace(-1, 1, length, dtype=torch.float64)[None, None, :, None].to(dtype)
    out = attention(q, k, v, causal=True).double()[:, :, -50:]
    last = (t.double() for t in (q[:, :, -50:], k, v))
    right = cosformer(*last, causal=True, horizon=length)
    assert largest(out - right) <= torch.finfo(dtype).eps * largest(right)


@every_half
@every_impl
def test_the_ends_of_float16_stay_finite(dtype, impl):
    most = 65504.0
    for q, k, v in ((most, most, -most), (1.0, most, most), (6e-8, 6e-8, most)):
        x = [torch.full((1, 2, 200, 64), value).to(dtype) for value in (q, k, v)]
        out, *grads = run(x, causal=True, impl=impl)
        assert out.isfinite().all()
        assert not any(grad.isnan().any() for grad in grads)
        if q * k > 1:
            torch.testing.assert_close(out, x[2])
    _, state = attention_with_state(*x, horizon=400, impl=impl)
    assert state.key_value.isfinite().all()


@every_half
@every_impl
@both_ways
@pytest.mark.parametrize("zero", ["q", "k", "qkv", "negative"])
def test_all_zero_rows_give_zeros_and_finite_gradients(dtype, impl, causal, zero):
    x = dict(zip("qkv", (t.to(dtype) for t in tokens(1, 2, 130)), strict=True))
    for name in {"negative": "qk"}.get(zero, zero):
        x[name] = -x[name].abs() if zero == "negative" else torch.zeros_like(x[name])
    out, *grads = run(x.values(), causal=causal, impl=impl)
    assert not out.any()
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.slow
@both_ways
def test_a_million_tokens_in_float32_agree_with_float64(causal):
    x = [t.float() for t in tokens(1, 1, 1_000_000, width=2)]
    out = attention(*x, causal=causal)
    right = prefix_sums(*(t.double() for t in x), horizon=1_000_000, causal=causal)
    assert largest(out - right) < 1e-4 * largest(right)

"""attention is the paper's formula: every kind, length, width and dtype, with gradients."""

import pytest
import torch
from formula import IMPLEMENTATIONS, PROPERTY, agree, cosformer, prefix_sums, tokens
from hypothesis import given
from hypothesis import strategies as st

from cosformer import attention

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
KINDS = {
    "causal": {"causal": True},
    "bidirectional": {},
    "causal with a horizon": {"causal": True, "horizon": 1500},
    "raised cosine": {"causal": True, "horizon": 20, "raised": True},
}


def op(impl="auto", *, raised=False, stretch=False, **options):
    """attention under the names that the formula uses."""
    names = {"weight": "raised_cosine" if raised else "cosine"}
    names["positions"] = "stretch" if stretch else "index"
    return lambda q, k, v: attention(q, k, v, impl=impl, **names, **options)


def formula(**options):
    return lambda q, k, v: cosformer(q, k, v, **options)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_as_right_as_the_plain_formula(dtype, options, impl):
    inputs = tokens(length=40, value_width=3)
    agree(op(impl, **options), formula(**options), *inputs, dtype=dtype)
    assert op(impl, **options)(*(x.to(dtype) for x in inputs)).dtype == dtype


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 257])
def test_any_length_is_exact(length, causal, impl):
    inputs = tokens(1, 2, length, value_width=3)
    agree(op(impl, causal=causal), formula(causal=causal), *inputs)


@pytest.mark.parametrize(("batch", "heads", "length"), [(1, 33, 260), (70, 1, 129), (5, 7, 130)])
def test_few_and_many_heads_agree_across_the_spans_they_share(batch, heads, length):
    for causal in (True, False):
        inputs = tokens(batch, heads, length, width=2)
        agree(op(causal=causal), formula(causal=causal), *inputs)


@pytest.mark.parametrize("length", [2049, 4096, 8200])
def test_long_sequences_agree_across_chunks_and_spans(length):
    inputs = tokens(1, 1, length, width=2)
    options = {"horizon": length}
    for dtype in (torch.float64, torch.float32):
        agree(op(causal=True), lambda *x: prefix_sums(*x, **options), *inputs, dtype=dtype)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("width", "value_width"), [(1, 5), (64, 1), (256, 256)])
def test_any_width_is_exact(width, value_width, causal):
    inputs = tokens(1, 2, 140, width=width, value_width=value_width)
    agree(op(causal=causal), formula(causal=causal), *inputs)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_grouped_queries_share_keys_and_values(causal, kv_heads, impl):
    inputs = tokens(2, 6, 131, kv_heads=kv_heads, value_width=3)
    agree(op(impl, causal=causal), formula(causal=causal), *inputs)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (0, 5), (5, 0), (1, 300), (300, 1)])
@pytest.mark.parametrize("batch", [0, 2])
def test_empty_and_single_sides_have_their_shape(batch, queries, keys, impl):
    for causal in (True, False):
        inputs = tokens(batch, 2, queries, keys=keys, value_width=3)
        out = attention(*inputs, causal=causal, impl=impl)
        assert out.shape == (batch, 2, queries, 3)
        agree(op(impl, causal=causal), formula(causal=causal), *inputs)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_future_tokens_do_not_change_the_past(impl):
    q, k, v = tokens(1, 2, 300)
    changed = [x.clone() for x in (q, k, v)]
    for x in changed:
        x[:, :, 200:] = 1e3
    before, after = (attention(*x, causal=True, impl=impl) for x in ((q, k, v), changed))
    assert torch.equal(before[:, :, :200], after[:, :, :200])


def test_eps_is_the_least_denominator():
    q, k, v = tokens()
    for eps in (1e-6, 3.0, 1e3):
        agree(op(causal=True, eps=eps), formula(causal=True, eps=eps), q, k, v)


@PROPERTY
@given(data=st.data())
def test_any_combination_of_sizes_and_options_is_the_formula(data):
    draw = data.draw
    groups, kv_heads, batch = (draw(st.integers(1, 3)) for _ in range(3))
    queries, keys = draw(st.integers(0, 150)), draw(st.integers(0, 150))
    width, value_width = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    options = {"causal": draw(st.booleans()), "raised": draw(st.booleans())}
    start = draw(st.none() | st.integers(-20, 40))
    mask = torch.rand(batch, keys, generator=torch.Generator().manual_seed(3)) < 0.7
    options |= {
        "query_start": start,
        "key_mask": draw(st.sampled_from([None, mask])),
        "horizon": draw(st.sampled_from([400.0, torch.linspace(300, 500, groups * kv_heads)])),
    }
    inputs = tokens(
        batch,
        groups * kv_heads,
        queries,
        keys=keys,
        kv_heads=kv_heads,
        width=width,
        value_width=value_width,
    )
    agree(op(**options), formula(**options), *inputs)

"""Packed sequences equal separate calls, and nothing leaks from one to another."""

from itertools import pairwise

import pytest
import torch
from formula import IMPLEMENTATIONS, PROPERTY, agree, cosformer, tokens
from hypothesis import given
from hypothesis import strategies as st

from cosformer import attention, linear_attention

LENGTHS = {
    "empty ones": [0, 3, 0, 0, 7, 0],
    "all empty": [0, 0],
    "around a chunk": [127, 1, 128, 129, 3],
    "many": [3] * 60,
}
OPTIONS = {
    "causal": {"causal": True},
    "bidirectional": {},
    "causal, horizon": {"causal": True, "horizon": 400},
    "bidirectional, horizon per head": {"horizon": torch.tensor([310.0, 500.0])},
    "raised": {"horizon": 4.0, "raised": True},
}
every_case = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
every_impl = pytest.mark.parametrize("impl", IMPLEMENTATIONS)


def boundaries(lengths, dtype=torch.int64):
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def separately(function, lengths):
    """`function` of each sequence alone, laid end to end again."""

    def run(*inputs):
        edges = boundaries(lengths).tolist()
        outs = [function(*(x[:, :, a:b] for x in inputs)) for a, b in pairwise(edges)]
        return torch.cat(outs, 2)

    return run


def op(lengths, impl="auto", raised=False, **options):
    weight = "raised_cosine" if raised else "cosine"
    edges = boundaries(lengths)
    return lambda *x: attention(*x, cu_seqlens=edges, weight=weight, impl=impl, **options)


@every_case
@every_option
@every_impl
def test_packed_sequences_equal_separate_formulas(lengths, options, impl):
    inputs = tokens(1, 2, sum(lengths), width=3)
    plain = separately(lambda *x: cosformer(*x, **options), lengths)
    agree(op(lengths, impl, **options), plain, *inputs)


@every_impl
@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences_may_be_masked_and_grouped(causal, impl):
    lengths = LENGTHS["around a chunk"]
    q, k, v = tokens(1, 4, sum(lengths), kv_heads=2)
    mask = torch.rand(1, sum(lengths), generator=torch.Generator().manual_seed(0)) < 0.7
    edges = boundaries(lengths).tolist()
    expected = [
        cosformer(*(x[:, :, a:b] for x in (q, k, v)), causal=causal, key_mask=mask[:, a:b])
        for a, b in pairwise(edges)
    ]
    out = op(lengths, impl, causal=causal, key_mask=mask)(q, k, v)
    torch.testing.assert_close(out, torch.cat(expected, 2))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_boundaries_may_be_int32_or_int64(dtype):
    inputs = tokens(1, 2, 18)
    out = attention(*inputs, cu_seqlens=boundaries([5, 1, 12], dtype))
    assert torch.equal(out, op([5, 1, 12])(*inputs))


@every_option
@every_impl
@pytest.mark.parametrize("changed", [0, 2])
def test_nothing_leaks_between_sequences(options, impl, changed):
    lengths = LENGTHS["around a chunk"]
    edges = boundaries(lengths).tolist()
    inside = torch.zeros(sum(lengths), dtype=torch.bool)
    inside[edges[changed] : edges[changed + 1]] = True

    def run(inputs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = op(lengths, impl, **options)(*leaves)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    inputs = tokens(1, 2, sum(lengths))
    # Finite, but 2^100 times as large: one leaked addend would show in every digit.
    other = [torch.where(inside[:, None], x * 2.0**100, x) for x in inputs]
    for before, after in zip(run(inputs), run(other), strict=True):
        assert torch.equal(before[:, :, ~inside], after[:, :, ~inside])


@every_impl
@pytest.mark.parametrize("normaliser", ["sum", "none"])
def test_a_decay_starts_again_with_each_sequence(normaliser, impl):
    lengths = [40, 0, 130, 1]
    q, k, v = tokens(1, 2, sum(lengths))
    log_decay = -torch.rand(1, 2, sum(lengths), generator=torch.Generator().manual_seed(0)).double()
    options = {"feature_map": "1+elu", "causal": True, "normaliser": normaliser}

    def packed(q, k, v, decay):
        return linear_attention(
            q, k, v, log_decay=decay, cu_seqlens=boundaries(lengths), impl=impl, **options
        )

    def alone(*inputs):
        edges = boundaries(lengths).tolist()
        outs = []
        for a, b in pairwise(edges):
            *rows, decay = (x[:, :, a:b] for x in inputs)
            outs.append(linear_attention(*rows, log_decay=decay, impl="reference", **options))
        return torch.cat(outs, 2)

    agree(packed, alone, q, k, v, log_decay)


@PROPERTY
@given(lengths=st.lists(st.integers(0, 70), min_size=1, max_size=8), causal=st.booleans())
def test_any_packing_equals_separate_calls(lengths, causal):
    inputs = tokens(1, 2, sum(lengths), width=2)
    plain = separately(lambda *x: cosformer(*x, causal=causal), lengths)
    agree(op(lengths, causal=causal), plain, *inputs)

"""Precision and extremes: 16-bit inputs, long sequences, empty rows, the ends of float16."""

import pytest
import torch
from formula import IMPLEMENTATIONS, agree, cosformer, largest, prefix_sums, rounded_once, tokens

from cosformer import attention, attention_weights

HALF = (torch.bfloat16, torch.float16)
every_half = pytest.mark.parametrize("dtype", HALF, ids=str)
every_impl = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
both_ways = pytest.mark.parametrize("causal", [True, False])


def all_finite(*tensors):
    return all(bool(x.isfinite().all()) for x in tensors)


def run(inputs, **options):
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attention(*leaves, **options)
    return [out, *torch.autograd.grad(out.sum(), leaves)]


@every_half
@every_impl
@both_ways
def test_half_precision_costs_one_rounding_of_the_output(dtype, impl, causal):
    x = [t.to(dtype) for t in tokens(1, 2, 700)]
    out = attention(*x, causal=causal, impl=impl)
    rounded_once(out, cosformer(*(t.double() for t in x), causal=causal))


@every_half
@both_ways
def test_angles_are_not_computed_in_16_bits(dtype, causal):
    length = 5000  # bf16 cannot tell neighbouring positions apart from 256 on, fp16 from 2048 on
    q, k = (torch.ones(1, 1, length, 1, dtype=dtype) for _ in range(2))
    v = torch.linspace(-1, 1, length, dtype=torch.float64)[None, None, :, None].to(dtype)
    out = attention(q, k, v, causal=causal).double()
    rows = slice(length - 50, length)
    right = cosformer(*(t.double() for t in (q[:, :, rows], k, v)), causal=True, horizon=length)
    if not causal:
        i, j = torch.arange(length).double()[rows, None], torch.arange(length).double()
        weight = torch.cos(torch.pi / 2 * (i - j) / length)
        right = (weight @ v[0, 0].double() / weight.sum(-1, keepdim=True))[None, None]
    roundings = torch.finfo(dtype).eps * largest(right)
    assert largest(out[:, :, rows] - right) <= roundings


@every_half
@every_impl
@both_ways
def test_the_ends_of_float16_stay_finite(dtype, impl, causal):
    most = 65504.0
    for q, k, v in ((most, most, most), (most, most, -most), (1.0, most, most), (6e-8, 6e-8, most)):
        x = [torch.full((1, 2, 200, 64), value).to(dtype) for value in (q, k, v)]
        out, *grads = run(x, causal=causal, impl=impl)
        assert all_finite(out)
        assert not any(grad.isnan().any() for grad in grads)
        if q * k > 1:
            assert all_finite(*grads)
            torch.testing.assert_close(out, x[2])


@every_half
@every_impl
@both_ways
@pytest.mark.parametrize("zero", ["q", "k", "v", "all", "negative"])
def test_all_zero_rows_give_zeros_and_finite_gradients(dtype, impl, causal, zero):
    x = dict(zip("qkv", (t.to(dtype) for t in tokens(1, 2, 130)), strict=True))
    for name in {"all": "qkv", "negative": "qk"}.get(zero, zero):
        x[name] = -x[name].abs() if zero == "negative" else torch.zeros_like(x[name])
    out, *grads = run(x.values(), causal=causal, impl=impl)
    assert not out.any()
    assert all_finite(*grads)


@every_impl
@both_ways
def test_single_zero_rows_disturb_no_other(impl, causal):
    q, k, v = tokens(1, 2, 130)
    q[:, :, [0, 50]] = 0
    k[:, :, [0, 1, 2, 128]] = 0
    agree(
        lambda *x: attention(*x, causal=causal, impl=impl),
        lambda *x: cosformer(*x, causal=causal),
        q, k, v,
    )  # fmt: skip
    out, *grads = run((q, k, v), causal=causal, impl=impl)
    assert not out[:, :, [0, 50]].any()
    assert all_finite(*grads)


@every_half
def test_weights_are_divided_in_float32(dtype):
    q, k, _ = (t.abs().to(dtype) for t in tokens(1, 1, 3000, width=2))
    window = attention_weights(q, k, rows=slice(2998, 3000), columns=slice(0, 40)).double()
    i, j = torch.arange(2998, 3000).double()[:, None], torch.arange(3000).double()
    score = q[:, :, 2998:].double() @ k.double().mT * torch.cos(torch.pi / 2 * (i - j) / 3000)
    right = (score / score.sum(-1, keepdim=True))[..., :40]
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    torch.testing.assert_close(window, right, rtol=torch.finfo(dtype).eps, atol=tiny)


@pytest.mark.slow
@both_ways
def test_a_million_tokens_in_float32_agree_with_float64(causal):
    x = [t.float() for t in tokens(1, 1, 1_000_000, width=2)]
    out = attention(*x, causal=causal)
    right = prefix_sums(*(t.double() for t in x), horizon=1_000_000, causal=causal)
    assert largest(out - right) < 1e-4 * largest(right)
    assert (out - right).norm() < 1e-4 * right.norm()

"""Decays: per head, per token, learnable, across unequal lengths, strong and long."""

import math

import pytest
import torch
from formula import F64, IMPLEMENTATIONS, agree, clamped, largest, recurrence, tokens, uniform

from cosformer import linear_attention
from cosformer.ops.problem import PROBLEMS, decay_gradient

LENGTH = 135
every_impl = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
DIVISIONS = {"none": None, "sum": clamped}
every_division = pytest.mark.parametrize("normaliser", DIVISIONS)


def loop(q, k, v, decay, *, normaliser, **options):
    options = {"phi": torch.relu, "divide": DIVISIONS[normaliser]} | options
    return recurrence(q, k, v, decay=decay, **options)[0]


@every_impl
@every_division
@pytest.mark.parametrize("theta", [0.0, 0.01])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_a_decay_per_token_is_the_recurrence(kv_heads, theta, normaliser, impl):
    def op(q, k, v, decay):
        return linear_attention(
            q,
            k,
            v,
            feature_map="relu",
            log_decay=decay,
            theta=theta,
            normaliser=normaliser,
            causal=True,
            impl=impl,
        )

    def plain(q, k, v, decay):
        return loop(q, k, v, decay, theta=theta, normaliser=normaliser)

    inputs = tokens(2, 4, LENGTH, kv_heads=kv_heads, value_width=3)
    agree(op, plain, *inputs, -uniform(2, 4, LENGTH), argument=LENGTH / 2)


@every_impl
@every_division
def test_gamma_learns_per_head(normaliser, impl):
    def op(q, k, v, gamma):
        return linear_attention(
            q,
            k,
            v,
            feature_map="relu",
            gamma=gamma,
            normaliser=normaliser,
            causal=True,
            impl=impl,
        )

    def plain(q, k, v, gamma):
        decay = gamma.log().reshape(1, -1, 1).expand(q.shape[:3])
        return loop(q, k, v, decay, normaliser=normaliser)

    for gamma in (torch.tensor([0.5, 0.9, 0.999]), torch.tensor(0.9)):  # or one for all
        agree(op, plain, *tokens(2, 3, LENGTH), gamma, argument=LENGTH)


def test_numbers_are_as_a_tensor_and_their_problem_is_kept(monkeypatch):
    monkeypatch.setattr(PROBLEMS, "kept", {})
    q, k, v = tokens(2, 2, 20)
    options = {"causal": True, "normaliser": "none"}
    rates = [0.9, 0.99]
    expected = linear_attention(q, k, v, gamma=torch.tensor(rates, dtype=F64), **options)
    for given in (rates, tuple(rates)):
        assert torch.equal(linear_attention(q, k, v, gamma=given, **options), expected)
        assert len(PROBLEMS.kept) == 1
    other = linear_attention(q, k, v, gamma=[0.9, 0.98], **options)
    assert not torch.equal(other, expected)
    four = torch.cat([q, q], 1)
    grouped = linear_attention(four, k, v, gamma=rates, **options)
    assert grouped.shape[1] == 4
    with pytest.raises(ValueError, match=r"one per head \[4\], got \[2\]"):
        linear_attention(four, four, four, gamma=rates, **options)


@every_impl
@every_division
@pytest.mark.parametrize(("queries", "keys"), [(20, 150), (150, 20), (5, 0), (0, 5)])
@pytest.mark.parametrize("start", [None, -3, 2, 200])
def test_gamma_decays_from_wherever_queries_stand(queries, keys, start, normaliser, impl):
    gamma = torch.tensor([0.9, 0.99], dtype=torch.float64)
    first = keys - queries if start is None else start

    def plain(q, k, v, rate):
        distance = torch.arange(queries)[:, None] + first - torch.arange(keys)
        power = rate[:, None, None] ** distance.clamp(min=0)
        score = (q.relu() @ k.relu().mT) * power * (distance >= 0)
        return score @ v / (clamped(score.sum(-1, keepdim=True)) if normaliser == "sum" else 1)

    def op(q, k, v, rate):
        return linear_attention(
            q,
            k,
            v,
            feature_map="relu",
            gamma=rate,
            normaliser=normaliser,
            causal=True,
            query_start=start,
            impl=impl,
        )

    agree(op, plain, *tokens(2, 2, queries, keys=keys), gamma, argument=20)


@pytest.mark.parametrize("start", [-3, 2])
def test_gates_of_tokens_need_queries_among_them(start):
    q, k, v = tokens(2, 2, 5)
    decay = torch.full((2, 2, 5), -0.1, dtype=torch.float64)
    with pytest.raises(ValueError, match=f"log_decay needs .*query_start=0, got {start}"):
        linear_attention(q, k, v, causal=True, log_decay=decay, query_start=start)


@every_impl
@pytest.mark.parametrize("length", [3, 700])
@pytest.mark.parametrize("size", [-30.0, -1e30])
def test_a_strong_decay_forgets_without_nan(size, length, impl):
    q, k, v = (x.float().requires_grad_() for x in tokens(1, 1, length, width=2))
    decay = torch.full((1, 1, length), size).requires_grad_()
    out = linear_attention(q, k, v, log_decay=decay, normaliser="none", causal=True, impl=impl)
    torch.testing.assert_close(out, (q * k).sum(-1, keepdim=True) * v)
    for grad in torch.autograd.grad(out.sum(), (q, k, v, decay)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_decay_runs_across_many_chunks(dtype):
    def op(q, k, v, decay):
        return linear_attention(q, k, v, log_decay=decay, normaliser="none", causal=True)

    def plain(q, k, v, decay):
        return recurrence(q, k, v, phi=lambda x: x, decay=decay)[0]

    inputs = tokens(1, 1, 600, width=2)
    agree(op, plain, *inputs, -0.01 * uniform(1, 1, 600), dtype=dtype, argument=6)


def test_a_long_decay_stays_precise_at_100_000_positions():
    length, gamma = 100_000, 1 - 1e-5
    q, k, v = (x.abs() for x in tokens(1, 1, length, width=2))
    options = {"gamma": gamma, "causal": True}
    single = linear_attention(*(x.float() for x in (q, k, v)), **options)
    double = linear_attention(q, k, v, **options)
    assert largest(single - double) < 1e-4 * largest(double)
    weight = gamma ** torch.arange(length - 1, -1, -1, dtype=torch.float64)[:, None]
    score = weight * (k[0, 0] @ q[0, 0, -1])[:, None]  # of the last query, without a recurrence
    torch.testing.assert_close(double[0, 0, -1], (score * v[0, 0]).sum(0) / score.sum())


@pytest.mark.parametrize("gate", [-1e3, -1e16, -math.inf])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_hard_reset_forgets_all_and_spoils_nothing_after_it(gate, impl):
    q, k, v = tokens(1, 1, 150, width=3)
    decay = torch.full((1, 1, 150), -0.1, dtype=F64)
    decay[..., 70] = gate
    call = {"causal": True, "normaliser": "none", "impl": impl}
    out = linear_attention(q, k, v, log_decay=decay, **call)
    fresh = [x[:, :, 70:] for x in (q, k, v)]
    after = linear_attention(*fresh, log_decay=torch.full((1, 1, 80), -0.1, dtype=F64), **call)
    torch.testing.assert_close(out[:, :, 70:], after)


def test_roundings_of_a_long_sequence_do_not_add_up():
    generator = torch.Generator().manual_seed(0)
    by_query = torch.randn(1, 2, 4000, 1, generator=generator, dtype=F64)
    by_key = by_query.roll(1, 2)  # the same sum: a shift of every L changes nothing
    decay, total = torch.zeros(1, 2, 4000), torch.zeros(1, 2, dtype=F64)

    def of_gates(*dots, **options):
        return decay_gradient(*dots, None, decay.double(), **options).flip(-1).cumsum(-1)

    truth = of_gates(by_query, by_key)
    assert largest(of_gates(by_query, by_key, at_start=total) - truth) < 1e-9
    noisy = [x * (1 + 0.01 * torch.randn(x.shape, generator=generator)) for x in (by_query, by_key)]
    errors = [(of_gates(*noisy, **o) - truth).norm() for o in ({}, {"at_start": total})]
    assert errors[1] < 0.8 * errors[0]
    large = [1e25 * x.float() for x in noisy]  # whose squares are more than float32 has
    assert of_gates(*large, at_start=total.float()).isfinite().all()
    nothing = [0 * x for x in large]
    assert of_gates(*nothing, at_start=total.float() + 9).isfinite().all()

"""linear_attention: cosFormer, its ablations and its relatives are calls of one function."""

import math

import pytest
import torch
from formula import (
    IMPLEMENTATIONS,
    agree,
    clamped,
    cosformer,
    recurrence,
    tokens,
)
from torch.nn import functional as F

from cosformer import attention, linear_attention

LENGTH = 135


def one_plus_elu(x):
    return F.elu(x) + 1


def signed(total):
    return torch.where(total < 0, total.clamp(max=-1e-6), total.clamp(min=1e-6))


FEATURES = {
    "identity": lambda x: x,
    "relu": torch.relu,
    "leaky_relu": lambda x: torch.where(x > 0, x, 0.1 * x),
    "1+elu": one_plus_elu,
    "elu": lambda x: torch.where(x > 0, x, x.exp() - 1),
    "silu": lambda x: x * torch.sigmoid(x),
}
RULES = {"clamp": clamped, "add": lambda total: total + 1e-6, "signed": signed}
every_impl = pytest.mark.parametrize("impl", IMPLEMENTATIONS)


def loop(**options):
    return lambda q, k, v, *decay: recurrence(q, k, v, **options)[0]


@every_impl
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_every_feature_map_is_its_formula(name, dtype, impl):
    inputs = tokens(2, 2, LENGTH, value_width=3)
    agree(
        lambda *x: linear_attention(
            *x, feature_map=name, causal=True, normaliser="none", impl=impl
        ),
        loop(phi=FEATURES[name]),
        *inputs,
        dtype=dtype,
    )


@pytest.mark.parametrize("name", FEATURES)
def test_feature_maps_are_finite_far_from_zero(name):
    q, k, v = tokens(1, 1, 6, width=2)
    q, k = (x.detach().float() * 200 for x in (q, k))
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    out = linear_attention(*leaves, feature_map=name, normaliser="none")
    assert all(x.isfinite().all() for x in (out, *torch.autograd.grad(out.sum(), leaves)))


@every_impl
@pytest.mark.parametrize("causal", [True, False])
def test_a_feature_map_of_the_callers_may_change_the_width(causal, impl):
    def wider(x):  # [B, H, T, 4] -> [B, H, T, 8]
        return torch.cat([x.exp(), (-x).exp()], -1)

    def plain(q, k, v):
        seen = torch.ones(LENGTH, LENGTH).tril() if causal else torch.ones(LENGTH, LENGTH)
        score = wider(q) @ wider(k).mT * seen.to(q.dtype)
        return score @ v / clamped(score.sum(-1, keepdim=True))

    agree(
        lambda *x: linear_attention(*x, feature_map=wider, causal=causal, impl=impl),
        plain,
        *tokens(2, 2, LENGTH),
    )


def test_a_feature_map_of_the_callers_gets_gradients_for_its_weights():
    q, k, v = tokens(1, 2, 20)
    projection = torch.nn.Linear(4, 6, dtype=torch.float64)

    def run(*arguments):
        projection.zero_grad()
        out = linear_attention(
            q, k, v, feature_map=lambda x: projection(x).exp(), impl=arguments[0]
        )
        out.square().sum().backward()
        return projection.weight.grad.clone()

    torch.testing.assert_close(run("chunked"), run("reference"))
    assert run("chunked").any()


@every_impl
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["1+elu", "identity"])
def test_every_rule_divides_by_its_formula(rule, name, impl):
    inputs = tokens(1, 2, LENGTH, width=2)
    inputs = (*(x.abs() + 0.1 for x in inputs[:2]), inputs[2])
    if rule == "signed" and name == "identity":
        inputs = (-inputs[0], *inputs[1:])  # every sum is negative
    agree(
        lambda *x: linear_attention(*x, feature_map=name, rule=rule, causal=True, impl=impl),
        loop(phi=FEATURES[name], divide=RULES[rule]),
        *inputs,
    )


@every_impl
@pytest.mark.parametrize(("rule", "divisor"), [("clamp", 2.0), ("add", 1.5), ("signed", -2.0)])
def test_eps_moves_a_small_sum_as_the_rule_says(rule, divisor, impl):
    q, k, v = (torch.full((1, 1, 1, 1), x, dtype=torch.float64) for x in (1.0, -0.5, 3.0))
    out = linear_attention(q, k, v, rule=rule, eps=2.0, impl=impl)
    torch.testing.assert_close(out, -1.5 / torch.full_like(out, divisor))


@every_impl
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("theta", [0.01, torch.tensor([0.0, 0.003, 0.011])])
def test_theta_turns_weights_per_head(theta, causal, impl):
    inputs = tokens(2, 3, LENGTH)
    options = {"feature_map": "relu", "theta": theta, "causal": causal, "impl": impl}

    def plain(q, k, v):
        angle = (
            torch.as_tensor(theta, dtype=torch.float64).reshape(-1, 1, 1)
            * torch.arange(LENGTH).double()
        )
        i_minus_j = angle[..., :, None] - angle[..., None, :]
        weight = i_minus_j[:, 0].cos().to(q.dtype)
        score = q.relu() @ k.relu().mT * (weight.tril() if causal else weight)
        return score @ v / clamped(score.sum(-1, keepdim=True))

    agree(lambda *x: linear_attention(*x, **options), plain, *inputs)


@pytest.mark.parametrize("causal", [True, False])
def test_cosformer_is_a_call_of_the_engine(causal):
    q, k, v = tokens(2, 2, LENGTH)
    theta = math.pi / (2 * LENGTH)
    out = linear_attention(q, k, v, feature_map="relu", theta=theta, causal=causal)
    torch.testing.assert_close(out, cosformer(q, k, v, causal=causal))
    torch.testing.assert_close(out, attention(q, k, v, causal=causal))


@every_impl
def test_the_engine_takes_masks_groups_and_unequal_lengths(impl):
    q, k, v = tokens(2, 4, 20, keys=LENGTH, kv_heads=2)
    mask = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.6

    def plain(q, k, v):
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        score = one_plus_elu(q) @ one_plus_elu(k).mT
        seen = torch.arange(LENGTH) <= torch.arange(20)[:, None] + LENGTH - 20
        score = score.masked_fill(~(mask[:, None, None] & seen), 0)
        return score @ v / clamped(score.sum(-1, keepdim=True))

    options = {"feature_map": "1+elu", "causal": True, "key_mask": mask, "impl": impl}
    agree(lambda *x: linear_attention(*x, **options), plain, q, k, v)

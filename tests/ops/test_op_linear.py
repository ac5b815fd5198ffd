"""linear_attention: cosFormer, its ablations and its relatives are calls of one function.

Also decays: per head, per token, learned, across unequal lengths, packed, strong and long.
"""

import math

import pytest
import torch
from formula import (
    F64,
    FEATURES,
    IMPLEMENTATIONS,
    RULES,
    agree,
    clamped,
    largest,
    recurrence,
    tokens,
    uniform,
)

from cosformer import linear_attention, linear_attention_with_state
from cosformer.ops import linear, linear_attention_step
from cosformer.ops.problem import PROBLEMS, decay_gradient

LENGTH = 135
every_impl = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
both_ways = pytest.mark.parametrize("causal", [True, False])


def check(impl, more=(), *, dtype=F64, argument=1.0, positive=False, **options):
    """A causal call, with gradients, against the loop over tokens; `more` is a decay by name."""
    divide = RULES[options.get("rule", "clamp")] if options.get("normaliser") != "none" else None
    phi, scale = FEATURES[options.get("feature_map", "identity")], options.get("scale", 1.0)
    turn = {"theta": options.get("theta", 0.0), "raised": options.get("raised", False)}

    def op(q, k, v, *decay):
        named = dict(zip(more, decay, strict=True))
        return linear_attention(q, k, v, causal=True, impl=impl, **named, **options)

    def plain(q, k, v, *decay):
        log = torch.zeros(q.shape[:3], dtype=q.dtype)
        for name, given in zip(more, decay, strict=True):
            per_token = given.log().reshape(1, -1, 1) if name == "gamma" else given
            heads = q.shape[1] // (per_token.shape[1] if per_token.shape[1] > 1 else q.shape[1])
            log = log + per_token.repeat_interleave(heads, 1).expand(log.shape)
        return scale * recurrence(q, k, v, phi=phi, decay=log, divide=divide, **turn)[0]

    decays = {"log_decay": -uniform(2, 2, LENGTH), "gamma": torch.tensor([0.5, 0.999])}
    decays["one"], decays["reset"] = torch.tensor(0.9), decays["log_decay"].clone()
    decays["reset"][..., 20:22], decays["reset"][..., 70] = -math.inf, -1e3
    decays["reset"][..., 90:92], decays["reset"][..., 110] = -1e16, -30.0
    inputs = tokens(2, 4, LENGTH, kv_heads=2, value_width=3)
    if positive:
        sign = -1 if options.get("rule") == "signed" else 1  # every sum is negative
        inputs = (sign * (inputs[0].abs() + 0.1), inputs[1].abs() + 0.1, inputs[2])
    given = [decays[name] for name in more]
    more = [{"one": "gamma", "reset": "log_decay"}.get(name, name) for name in more]
    agree(op, plain, *inputs, *given, dtype=dtype, argument=argument)


@every_impl
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_every_feature_map_is_its_formula(name, dtype, impl):
    check(impl, feature_map=name, normaliser="none", dtype=dtype)


@every_impl
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_divides_by_its_formula(rule, impl):
    check(impl, feature_map="1+elu", rule=rule)
    check(impl, feature_map="identity", rule=rule, positive=True)


@every_impl
@pytest.mark.parametrize(("rule", "divisor"), [("clamp", 2.0), ("add", 1.5), ("signed", -2.0)])
def test_eps_moves_a_small_sum_as_the_rule_says(rule, divisor, impl):
    q, k, v = (torch.full((1, 1, 1, 1), x, dtype=torch.float64) for x in (1.0, -0.5, 3.0))
    out = linear_attention(q, k, v, rule=rule, eps=2.0, impl=impl)
    torch.testing.assert_close(out, -1.5 / torch.full_like(out, divisor))


UNDIVIDED = {"normaliser": "none"}
DECAYS = {
    "gates": (["log_decay"], {"feature_map": "1+elu"}),
    "gates, undivided": (["log_decay"], {"scale": 0.3, **UNDIVIDED}),
    "hard resets": (["reset"], UNDIVIDED),
    "gates, turning": (["log_decay"], {"feature_map": "relu", "theta": 0.01}),
    "a decay per head": (["gamma"], {"feature_map": "relu"}),
    "retention": (["gamma"], UNDIVIDED),
    "one decay": (["one"], {"feature_map": "1+elu"}),
    "gates and a decay": (["log_decay", "gamma"], {"theta": 0.01, **UNDIVIDED}),
    "raised and fading": (["log_decay"], {"theta": 0.1, "raised": True, **UNDIVIDED}),
}


@every_impl
@pytest.mark.parametrize(("more", "options"), DECAYS.values(), ids=DECAYS)
def test_every_decay_is_the_recurrence_and_learns(more, options, impl):
    check(impl, more, argument=LENGTH, **options)


def seen(queries, keys, causal, start=None):
    first = (keys - queries if causal else 0) if start is None else start
    distance = torch.arange(queries)[:, None] + first - torch.arange(keys)
    return distance, distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)


@every_impl
@both_ways
def test_a_feature_map_of_the_callers_may_change_the_width_under_a_mask(causal, impl):
    mask = uniform(2, LENGTH) < 0.6

    def wider(x):  # [B, H, T, 4] -> [B, H, T, 8]
        return torch.cat([x.exp(), (-x).exp()], -1)

    def plain(q, k, v):
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        allowed = mask[:, None, None] & seen(20, LENGTH, causal)[1]
        score = (wider(q) @ wider(k).mT).masked_fill(~allowed, 0)
        return score @ v / clamped(score.sum(-1, keepdim=True))

    options = {"feature_map": wider, "causal": causal, "key_mask": mask, "impl": impl}
    inputs = tokens(2, 4, 20, keys=LENGTH, kv_heads=2)
    agree(lambda *x: linear_attention(*x, **options), plain, *inputs)


@every_impl
@both_ways
@pytest.mark.parametrize("theta", [0.01, torch.tensor([0.0, 0.011])])
@pytest.mark.parametrize("scale", [None, 3.0])
def test_theta_turns_weights_per_head_divided_or_scaled(theta, causal, scale, impl):
    options = {"feature_map": "relu", "theta": theta, "causal": causal, "impl": impl}
    if scale:
        options |= {"scale": scale, **UNDIVIDED}

    def plain(q, k, v):
        distance, allowed = seen(LENGTH, LENGTH, causal)
        turn = torch.as_tensor(theta, dtype=F64).reshape(-1, 1, 1) * distance
        score = q.relu() @ k.relu().mT * (turn.cos() * allowed).to(q.dtype)
        return score @ v * scale if scale else score @ v / clamped(score.sum(-1, keepdim=True))

    agree(lambda *x: linear_attention(*x, **options), plain, *tokens(2, 2, LENGTH))


@every_impl
@pytest.mark.parametrize(("queries", "keys"), [(20, 150), (150, 20), (5, 0), (0, 5)])
@pytest.mark.parametrize("start", [None, -3, 2, 200])
@pytest.mark.parametrize("normaliser", ["none", "sum"])
def test_gamma_decays_from_wherever_queries_stand(queries, keys, start, normaliser, impl):
    distance, allowed = seen(queries, keys, True, start)
    options = {"feature_map": "relu", "normaliser": normaliser, "query_start": start}

    def plain(q, k, v, rate):
        score = q.relu() @ k.relu().mT * rate[:, None, None] ** distance.clamp(min=0) * allowed
        return score @ v / (clamped(score.sum(-1, keepdim=True)) if normaliser == "sum" else 1)

    def op(q, k, v, rate):
        return linear_attention(q, k, v, gamma=rate, causal=True, impl=impl, **options)

    gamma = torch.tensor([0.9, 0.99], dtype=F64)
    agree(op, plain, *tokens(2, 2, queries, keys=keys), gamma, argument=20)


def test_a_long_decay_stays_precise_at_100_000_positions():
    length, gamma = 100_000, 1 - 1e-5
    q, k, v = (x.abs() for x in tokens(1, 1, length, width=2))
    single, double = (
        linear_attention(*(x.to(dtype) for x in (q, k, v)), gamma=gamma, causal=True)
        for dtype in (torch.float32, F64)
    )
    assert largest(single - double) < 1e-4 * largest(double)
    weight = gamma ** torch.arange(length - 1, -1, -1, dtype=F64)[:, None]
    score = weight * (k[0, 0] @ q[0, 0, -1])[:, None]  # of the last query, without a recurrence
    torch.testing.assert_close(double[0, 0, -1], (score * v[0, 0]).sum(0) / score.sum())


def test_numbers_are_as_a_tensor_and_their_problem_is_kept(monkeypatch):
    monkeypatch.setattr(PROBLEMS, "kept", {})
    q, k, v = tokens(2, 4, 20, kv_heads=2)
    options, rates = {"causal": True, **UNDIVIDED}, [0.9, 0.99]
    expected = linear_attention(q, k, v, gamma=torch.tensor(rates, dtype=F64), **options)
    for given in (rates, tuple(rates)):
        assert torch.equal(linear_attention(q, k, v, gamma=given, **options), expected)
        assert len(PROBLEMS.kept) == 1
    for other in ({"gamma": [0.9, 0.98]}, {"gamma": rates, "scale": 0.5}):
        assert not torch.equal(linear_attention(q, k, v, **other, **options), expected)


def test_every_call_checks_its_names_and_numbers_once(monkeypatch):
    seen, check_scale = [], linear.check_scale
    monkeypatch.setattr(linear, "check_scale", lambda *given: seen.append(check_scale(*given)))
    x = tokens(1, 2, 5)
    linear_attention(*x, causal=True, normaliser="none", scale=0.3125)
    assert len(seen) == 1
    _, state = linear_attention_with_state(*x, normaliser="none", scale=0.3125)
    assert len(seen) == 2
    one = [y[:, :, :1] for y in x]
    linear_attention_step(*one, state, normaliser="none", scale=0.3125)
    assert len(seen) == 3


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

"""A scale is a factor of what is not divided, whatever computes it, and of no state."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import results
from formula import F64, IMPLEMENTATIONS, PROPERTY, agree, recurrence, tokens, uniform

from cosformer import State, linear_attention, linear_attention_with_state

LENGTH = 135
SCALE = 0.3
UNDIVIDED = {"normaliser": "none", "feature_map": "relu"}
OPTIONS = {
    "both ways": {},
    "a cosine": {"theta": 0.01},
    "causal": {"causal": True},
    "a raised cosine": {"causal": True, "theta": 0.1, "raised": True},
    "a decay": {"causal": True, "gamma": [0.5, 0.99]},
    "a later start": {"causal": True, "gamma": 0.9, "query_start": 30},
    "masked": {"causal": True, "key_mask": uniform(1, LENGTH) < 0.7},
    "packed": {"causal": True, "cu_seqlens": torch.tensor([0, 50, 50, LENGTH])},
    "a map of the caller's": {"feature_map": torch.sigmoid},
}
every_impl = pytest.mark.parametrize("impl", IMPLEMENTATIONS)


@every_impl
def test_it_multiplies_the_recurrence_and_its_gradients(impl):
    def op(q, k, v, decay):
        about = {"causal": True, "log_decay": decay, "scale": SCALE, **UNDIVIDED}
        return linear_attention(q, k, v, impl=impl, **about)

    def plain(q, k, v, decay):
        return SCALE * recurrence(q, k, v, phi=torch.relu, decay=decay)[0]

    inputs = tokens(2, 4, LENGTH, kv_heads=2, value_width=3)
    agree(op, plain, *inputs, -uniform(2, 4, LENGTH), argument=LENGTH / 2)


@PROPERTY
@given(
    name=st.sampled_from(sorted(OPTIONS)),
    scale=st.floats(1e-3, 1e3),
    impl=st.sampled_from(IMPLEMENTATIONS),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_it_is_a_factor_under_every_option(name, scale, impl, dtype):
    inputs = [x.to(dtype) for x in tokens(1, 2, LENGTH)]
    options = {**UNDIVIDED, **OPTIONS[name], "impl": impl}
    found = results(lambda *x: linear_attention(*x, scale=scale, **options), inputs)
    right = results(lambda *x: scale * linear_attention(*x, **options), inputs)
    for a, b in zip(found, right, strict=True):
        rounding = torch.finfo(dtype).eps
        torch.testing.assert_close(
            a, b, rtol=4 * rounding, atol=64 * rounding * float(b.abs().max())
        )


def stream(q, k, v, decay, first, *, cuts, impl, scale):
    """Outputs in pieces, and the last state beside them."""
    state, outs = State(first, first[..., 0][..., :0], torch.tensor(0), None), []
    for start, stop in pairwise([0, *cuts, q.shape[2]]):
        part = (x[:, :, start:stop] for x in (q, k, v))
        here = {"state": state, "log_decay": decay[:, :, start:stop], "scale": scale}
        out, state = linear_attention_with_state(*part, **here, impl=impl, **UNDIVIDED)
        outs.append(out)
    groups = q.shape[1] // k.shape[1]
    return torch.cat([*outs, state.key_value[:, :, 0].repeat_interleave(groups, 1)], 2)


def given_stream(length, dtype):
    leaves = (*tokens(2, 4, length, kv_heads=2), -uniform(2, 2, length), uniform(2, 2, 1, 4, 4))
    return [x.to(dtype) for x in leaves]


def as_scaled_queries(q, *others, **options):
    return stream(q * SCALE, *others, scale=1.0, **options)


@PROPERTY
@given(
    cuts=st.lists(st.integers(0, LENGTH), max_size=3).map(sorted),
    impl=st.sampled_from(IMPLEMENTATIONS),
)
def test_a_stream_in_pieces_scales_what_it_reads_and_not_what_it_keeps(cuts, impl):
    leaves = given_stream(LENGTH, F64)
    found = results(lambda *x: stream(*x, cuts=cuts, impl=impl, scale=SCALE), leaves)
    whole = results(lambda *x: as_scaled_queries(*x, cuts=[], impl="reference"), leaves)
    for a, b in zip(found, whole, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("interpreted", "poisoned")
@pytest.mark.parametrize("cuts", [[], [30]])
def test_a_stream_by_kernels(cuts):
    leaves = given_stream(70, torch.float32)
    found = results(lambda *x: stream(*x, cuts=cuts, impl="triton", scale=SCALE), leaves)
    right = results(lambda *x: as_scaled_queries(*x, cuts=cuts, impl="chunked"), leaves)
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5 * float(b.abs().max()))


@pytest.mark.parametrize("impl", ["chunked", "triton"])
def test_second_derivatives_and_transforms(impl, request):
    if impl == "triton":
        request.getfixturevalue("interpreted")
    q, k, v = (x.float() for x in tokens(1, 2, 20))
    gates = -uniform(1, 2, 20).float()

    def op(q, k, v, gates, scale=SCALE):
        about = {"causal": True, "log_decay": gates, "scale": scale, "impl": impl}
        return linear_attention(q, k, v, **about, **UNDIVIDED)

    def slope(function):
        def first(*x):
            x = [y.requires_grad_() for y in x]
            grads = torch.autograd.grad(function(*x).pow(2).sum(), x, create_graph=True)
            return torch.cat([y.flatten() for y in grads])

        return first

    def plain(q, *others):
        return op(q * SCALE, *others, scale=1.0)

    leaves = [q, k, v, gates]
    pairs = list(zip(results(slope(op), leaves), results(slope(plain), leaves), strict=True))
    twice = [torch.stack([x, 2 * x]) for x in leaves]
    pairs.append((torch.func.vmap(op)(*twice), torch.func.vmap(plain)(*twice)))
    pairs.append(
        (
            torch.func.grad(lambda *x: op(*x).sum())(*leaves),
            torch.func.grad(lambda *x: plain(*x).sum())(*leaves),
        )
    )
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5 * float(b.abs().max()))


def test_calls_of_another_scale_are_told_apart():
    q, k, v = tokens(1, 2, 20)
    options = {"causal": True, "gamma": 0.9, **UNDIVIDED}
    one, half = (linear_attention(q, k, v, scale=scale, **options) for scale in (1, 0.5))
    assert torch.equal(half, 0.5 * one)

"""Autocast, functional transforms and checkpointing treat the op as any PyTorch function."""

import warnings
from functools import partial

import pytest
import torch
from formula import cosformer, in_pieces, rounded_once, tokens, uniform
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.functional import hessian as second_derivatives
from torch.autograd.functional import jacobian
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

from cosformer import (
    State,
    attention,
    attention_weights,
    attention_with_state,
    linear_attention,
    step,
)

every_half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
both_ways = pytest.mark.parametrize("causal", [True, False])


@every_half
@pytest.mark.parametrize("impl", ["chunked", "reference"])
def test_autocast_rounds_inputs_and_outputs_and_nothing_between(dtype, impl):
    x = [t.to(dtype).float() for t in tokens(1, 2, 600)]
    decay = -0.01 * uniform(1, 2, 600)
    with torch.autocast("cpu", dtype=dtype):
        out = attention(*x, causal=True, impl=impl)
        fading = linear_attention(
            *x, causal=True, feature_map="relu", log_decay=decay.float(), impl=impl
        )
        dense = attention_weights(x[0], x[1], causal=True)
        _, state = attention_with_state(*x, horizon=600, impl=impl)
        untouched = attention(*tokens(1, 2, 20))
    exact = [t.double() for t in x]
    rounded_once(out, cosformer(*exact, causal=True))
    right = linear_attention(*exact, causal=True, feature_map="relu", log_decay=decay)
    rounded_once(fading, right)
    rounded_once(dense, attention_weights(exact[0], exact[1], causal=True))
    assert out.dtype == dense.dtype == dtype
    assert state.key_value.dtype == torch.float32
    right = attention_with_state(*exact, horizon=600)[1].key_value
    torch.testing.assert_close(state.key_value.double(), right, rtol=1e-5, atol=1e-3)
    assert torch.equal(untouched, attention(*tokens(1, 2, 20)))  # float64 is left alone


@every_half
@pytest.mark.parametrize("inside", [True, False])
def test_gradients_under_autocast_are_those_of_the_rounded_inputs(dtype, inside):
    x = [t.to(dtype).float().requires_grad_() for t in tokens(1, 2, 200)]
    cotangent = tokens(1, 2, 200, seed=1)[2].to(dtype)
    with torch.autocast("cpu", dtype=dtype):
        out = attention(*x, causal=True)
        given = torch.autograd.grad(out, x, cotangent) if inside else None
    given = given or torch.autograd.grad(out, x, cotangent)
    half = [t.detach().to(dtype).requires_grad_() for t in x]
    right = torch.autograd.grad(attention(*half, causal=True), half, cotangent)
    for a, b in zip(given, right, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b.float())


def loss(q, k, v, **options):
    return attention(q, k, v, **options).sin().sum()


def curved_formula(q, k, v):
    return cosformer(q, k, v).sin().sum()


MAPS = {
    "all, other dimensions": (1, 2, 3),
    "queries": (0, None, None),
    "values": (None, None, 0),
    "keys and values": (None, 0, 0),
}
every_map = pytest.mark.parametrize("dims", MAPS.values(), ids=MAPS)


def stacked(dims=(0, 0, 0), batch=2):
    """One input of each for every mapped call, laid along `dims`, and the calls themselves."""
    calls = [list(tokens(batch, 2, 130, seed=seed)) for seed in range(3)]
    for i, dim in enumerate(dims):
        for call in calls:
            call[i] = calls[0][i] if dim is None else call[i]
    inputs = [
        calls[0][i] if dim is None else torch.stack([call[i] for call in calls], dim)
        for i, dim in enumerate(dims)
    ]
    return inputs, calls


@every_map
@both_ways
def test_vmap_of_outputs_and_gradients_equals_a_loop(dims, causal):
    def call(*x):
        out = attention(*x, causal=causal)
        return out.sin().sum(), out

    function = grad(call, argnums=(0, 1, 2), has_aux=True)
    inputs, calls = stacked(dims)
    given, out = vmap(function, in_dims=dims)(*inputs)
    right = [(*grads, one) for grads, one in (function(*each) for each in calls)]
    for a, parts in zip((*given, out), zip(*right, strict=True), strict=True):
        torch.testing.assert_close(a, torch.stack(parts))


def gated(q, k, v, decay):
    return linear_attention(q, k, v, log_decay=decay, normaliser="none", causal=True)


def test_vmap_maps_masks_packings_decays_and_streams():
    inputs, calls = stacked(batch=1)
    masks = torch.rand(3, 1, 130, generator=torch.Generator().manual_seed(0)) < 0.5
    decays, edges = -uniform(3, 1, 2, 130), torch.tensor([0, 30, 130])
    for function, more in (
        (lambda q, k, v, m: attention(q, k, v, key_mask=m), masks),
        (lambda q, k, v, _: attention(q, k, v, cu_seqlens=edges, causal=True), masks),
        (lambda *x: in_pieces(attention_with_state, x[:3], (0, 50, 130), horizon=200)[0], masks),
        (gated, decays),
        (lambda q, k, v, g: attention(q, k, v, log_decay=g), decays),
        (lambda q, k, v, r: attention(q, k, v, decay=r, causal=True), decays[:, 0, :, 0].exp()),
    ):
        right = [function(*call, each) for call, each in zip(calls, more, strict=True)]
        torch.testing.assert_close(vmap(function)(*inputs, more), torch.stack(right))
    one = vmap(gated, in_dims=(None, None, None, 0))(*calls[0], decays)
    torch.testing.assert_close(one, torch.stack([gated(*calls[0], decay) for decay in decays]))


def test_vmap_over_what_the_host_compares_is_refused_by_name():
    q, k, v = tokens(1, 2, 9)

    def packed(ends):
        return attention(q, k, v, cu_seqlens=ends, horizon=9)

    def begun(start):
        state = State.empty(1, 2, 4, 4, horizon=20, position=start)
        return attention_with_state(q, k, v, state=state)[0]

    for function, mapped, name in (
        (lambda horizon: attention(q, k, v, horizon=horizon), torch.full((3,), 20.0), "horizon"),
        (lambda horizon: attention(q, k, v, horizon=horizon), torch.full((3, 2), 20.0), "horizon"),
        (packed, torch.tensor([[0, 3, 9], [0, 4, 9]]), "cu_seqlens"),
        (begun, torch.tensor([1, 2]), "the position of a stream"),
    ):
        with pytest.raises(ValueError, match=f"{name} cannot be mapped over by vmap"):
            vmap(function)(mapped)


def test_a_step_under_vmap_needs_a_state_that_is_mapped_over_too():
    calls = [tokens(1, 2, 1, seed=seed) for seed in range(3)]
    inputs = [torch.stack(x) for x in zip(*calls, strict=True)]

    def empty():
        return State.empty(1, 2, 4, 4, horizon=9, dtype=torch.float64)

    def stepped(q, k, v, key_value, key_sum):
        return step(q, k, v, empty()._replace(key_value=key_value, key_sum=key_sum))

    with pytest.raises(ValueError, match="state must be mapped over by vmap"):
        vmap(lambda q, k, v: step(q, k, v, empty()))(*inputs)
    sums = [x.expand(3, *x.shape).clone() for x in empty()[:2]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch finds one of its operations slow under vmap
        found = vmap(stepped)(*inputs, *sums)
    torch.testing.assert_close(found, torch.stack([step(*x, empty()) for x in calls]))


@both_ways
def test_jacobians_and_hessians_equal_those_of_the_formula(causal):
    q, k, v = tokens(1, 1, 4, width=2)

    def curved(function):
        return jacrev(
            jacrev(lambda q, k: function(q, k, v, causal=causal).sin().sum(), (0, 1)), (0, 1)
        )

    for a, b in zip(curved(attention)(q, k), curved(cosformer)(q, k), strict=True):
        for given, right in zip(a, b, strict=True):
            torch.testing.assert_close(given, right)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch's own use
def test_forward_mode_says_that_it_is_not_there():
    x = tokens(1, 1, 4, width=2)
    for call in (
        lambda: hessian(loss)(*x),
        lambda: jvp(loss, x, x),
        lambda: jacobian(loss, x, vectorize=True, strategy="forward-mode"),
    ):
        with pytest.raises(NotImplementedError, match=r"forward-mode .*need impl='reference'"):
            call()
    found, right = (jvp(f, x, x)[1] for f in (partial(loss, impl="reference"), curved_formula))
    torch.testing.assert_close(found, right)


def test_gradients_in_batches_say_what_they_need():
    x = tokens(1, 1, 4, width=2)
    out = attention(*(y.requires_grad_() for y in x))
    for call in (
        lambda: torch.autograd.grad(out, x, torch.stack([out, out]), is_grads_batched=True),
        lambda: jacobian(attention, x, vectorize=True),
        lambda: second_derivatives(loss, x, vectorize=True),
    ):
        with pytest.raises(NotImplementedError, match="vectorize=True need impl='reference'"):
            call()


@both_ways
def test_transforms_work_where_gradients_are_off(causal):
    x = tokens(1, 2, 7, width=3)

    def function(q, k, v):
        return attention(q, k, v, causal=causal)

    expected = jacrev(lambda *x: cosformer(*x, causal=causal), argnums=(0, 1, 2))(*x)
    out, pull = vjp(function, *x)
    cotangents = torch.eye(out.numel(), dtype=out.dtype).view(-1, *out.shape)
    with torch.no_grad():
        jacobians = jacrev(function, argnums=(0, 1, 2))(*x)
        pulled = vmap(pull)(cotangents)
    for given in (jacobians, pulled):
        for a, b in zip(given, expected, strict=True):
            torch.testing.assert_close(a.reshape(b.shape), b)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(use_reentrant):
    def gradients(call):
        x = [t.requires_grad_() for t in tokens(1, 2, 140)]
        call(*x).square().sum().backward()
        return [t.grad for t in x]

    def function(*x):
        return attention(*x, causal=True)

    kept = gradients(lambda *x: checkpoint(function, *x, use_reentrant=use_reentrant))
    assert all(map(torch.equal, kept, gradients(function)))


@both_ways
def test_shapes_and_gradients_of_decays_are_found_in_a_mode_without_data(causal):
    with FakeTensorMode():
        x = [torch.empty(1, 2, 70, 8, requires_grad=True) for _ in range(3)]
        gates = torch.empty(1, 2, 70, requires_grad=True)
        rates = torch.empty(2, requires_grad=True)
        for decay in ({"log_decay": gates}, {"decay": rates}):
            attention(*x, causal=causal, **decay).sum().backward()
        packed = attention(*x, causal=causal, cu_seqlens=torch.empty(3, dtype=torch.int64))
    assert gates.grad.shape == gates.shape
    assert rates.grad.shape == rates.shape
    assert packed.shape == x[2].shape


def test_shapes_are_found_without_data():
    q = torch.empty(1, 4, 70, 8, device="meta", requires_grad=True)
    k, v = (torch.empty(1, 2, 70, width, device="meta") for width in (8, 5))
    attention(q, k, v, causal=True).sum().backward()
    assert q.grad.shape == q.shape
    out, state = attention_with_state(q, k, v, horizon=100)
    assert out.shape == (1, 4, 70, 5)
    assert state.key_value.shape == (1, 2, 2, 8, 5)

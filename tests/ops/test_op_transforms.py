"""Autocast, functional transforms and checkpointing treat the op as any PyTorch function."""

import pytest
import torch
from formula import cosformer, rounded_once, tokens, uniform
from torch.func import grad, hessian, jacrev, vjp, vmap
from torch.utils.checkpoint import checkpoint

from cosformer import (
    attention,
    attention_weights,
    attention_with_state,
    linear_attention,
)

HALF = (torch.bfloat16, torch.float16)
every_half = pytest.mark.parametrize("dtype", HALF, ids=str)
both_ways = pytest.mark.parametrize("causal", [True, False])


@every_half
@both_ways
@pytest.mark.parametrize("impl", ["chunked", "reference"])
def test_autocast_rounds_inputs_and_outputs_and_nothing_between(dtype, causal, impl):
    x = [t.to(dtype).float() for t in tokens(1, 2, 600)]
    with torch.autocast("cpu", dtype=dtype):
        out = attention(*x, causal=causal, impl=impl)
    assert out.dtype == dtype
    rounded_once(out, cosformer(*(t.double() for t in x), causal=causal))


@every_half
@both_ways
@pytest.mark.parametrize("backward_inside", [True, False])
def test_gradients_under_autocast_are_those_of_the_rounded_inputs(dtype, causal, backward_inside):
    x = [t.to(dtype).float().requires_grad_() for t in tokens(1, 2, 200)]
    cotangent = tokens(1, 2, 200, seed=1)[2].to(dtype)
    with torch.autocast("cpu", dtype=dtype):
        out = attention(*x, causal=causal)
        if backward_inside:
            given = torch.autograd.grad(out, x, cotangent)
    if not backward_inside:
        given = torch.autograd.grad(out, x, cotangent)
    half = [t.detach().to(dtype).requires_grad_() for t in x]
    right = torch.autograd.grad(attention(*half, causal=causal), half, cotangent)
    for a, b in zip(given, right, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b.float())


@every_half
def test_autocast_keeps_state_and_maps_in_float32(dtype):
    x = [t.to(dtype).float() for t in tokens(1, 2, 300)]
    exact = [t.double() for t in x]
    _, right = attention_with_state(*exact, horizon=300)
    with torch.autocast("cpu", dtype=dtype):
        out, state = attention_with_state(*x, horizon=300)
        dense = attention_weights(x[0], x[1], causal=True)
    assert out.dtype == dtype
    assert state.key_value.dtype == torch.float32
    for a, b in zip(state[:2], right[:2], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-4)
    map_right = attention_weights(exact[0], exact[1], causal=True)
    rounded_once(dense, map_right)


def test_autocast_leaves_float64_alone():
    x = tokens(1, 2, 20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(*x, causal=True)
    assert torch.equal(out, attention(*x, causal=True))


def loss(q, k, v, **options):
    return attention(q, k, v, **options).sin().sum()


MAPS = {
    "all": (0, 0, 0),
    "other dimensions": (1, 2, 3),
    "queries": (0, None, None),
    "keys": (None, 0, None),
    "values": (None, None, 0),
    "keys and values": (None, 0, 0),
}
every_map = pytest.mark.parametrize("dims", MAPS.values(), ids=MAPS)


def stacked(dims, batch, n=3):
    """One input of each for every mapped call, laid along `dims`, and the calls themselves."""
    calls = [tokens(batch, 2, 130, seed=seed) for seed in range(n)]
    inputs = [
        calls[0][i] if dim is None else torch.stack([call[i] for call in calls], dim)
        for i, dim in enumerate(dims)
    ]
    calls = [
        [calls[0][i] if dim is None else call[i] for i, dim in enumerate(dims)] for call in calls
    ]
    return inputs, calls


@every_map
@both_ways
def test_vmap_equals_a_loop(dims, causal):
    def function(q, k, v):
        return attention(q, k, v, causal=causal)

    inputs, calls = stacked(dims, 2)
    given = vmap(function, in_dims=dims)(*inputs)
    torch.testing.assert_close(given, torch.stack([function(*call) for call in calls]))


@pytest.mark.parametrize(("dims", "batch"), [((1, 2, 3), 1), ((None, 0, 0), 2)])
def test_vmap_of_gradients_equals_a_loop(dims, batch):
    function = grad(lambda *x: loss(*x, causal=True), argnums=(0, 1, 2))
    inputs, calls = stacked(dims, batch)
    given = vmap(function, in_dims=dims)(*inputs)
    right = [torch.stack(parts) for parts in zip(*(function(*c) for c in calls), strict=True)]
    for a, b in zip(given, right, strict=True):
        torch.testing.assert_close(a, b)


def test_vmap_maps_masks_packings_and_decays():
    inputs, calls = stacked((0, 0, 0), 1)
    masks = torch.rand(3, 1, 130, generator=torch.Generator().manual_seed(0)) < 0.5
    given = vmap(lambda q, k, v, m: attention(q, k, v, key_mask=m))(*inputs, masks)
    right = [attention(*call, key_mask=m) for call, m in zip(calls, masks, strict=True)]
    torch.testing.assert_close(given, torch.stack(right))

    edges = torch.tensor([0, 30, 130])
    given = vmap(lambda *x: attention(*x, cu_seqlens=edges, causal=True))(*inputs)
    right = [attention(*call, cu_seqlens=edges, causal=True) for call in calls]
    torch.testing.assert_close(given, torch.stack(right))

    def gated(q, k, v, decay):
        return linear_attention(q, k, v, log_decay=decay, normaliser="none", causal=True)

    decays = -uniform(3, 1, 2, 130)
    given = vmap(gated)(*inputs, decays)
    right = [gated(*call, decay) for call, decay in zip(calls, decays, strict=True)]
    torch.testing.assert_close(given, torch.stack(right))
    one = vmap(gated, in_dims=(None, None, None, 0))(*calls[0], decays)
    torch.testing.assert_close(one, torch.stack([gated(*calls[0], decay) for decay in decays]))


def test_vmap_carries_streams():
    inputs, calls = stacked((0, 0, 0), 2)

    def function(q, k, v):
        first, state = attention_with_state(q[:, :, :50], k[:, :, :50], v[:, :, :50], horizon=200)
        second, _ = attention_with_state(q[:, :, 50:], k[:, :, 50:], v[:, :, 50:], state=state)
        return torch.cat([first, second], 2)

    torch.testing.assert_close(
        vmap(function)(*inputs), torch.stack([function(*call) for call in calls])
    )


@both_ways
def test_jacobians_and_hessians_equal_those_of_the_formula(causal):
    q, k, v = tokens(1, 1, 4, width=2)
    for place in range(3):
        given, right = (
            jacrev(lambda *x, f=function: f(*x, causal=causal), argnums=place)(q, k, v)
            for function in (attention, cosformer)
        )
        torch.testing.assert_close(given, right)

    def curved(function):
        return jacrev(
            jacrev(lambda q, k: function(q, k, v, causal=causal).sin().sum(), (0, 1)), (0, 1)
        )

    for a, b in zip(curved(attention)(q, k), curved(cosformer)(q, k), strict=True):
        for given, right in zip(a, b, strict=True):
            torch.testing.assert_close(given, right)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch's own use
def test_forward_mode_says_that_it_is_not_there():
    q, k, v = tokens(1, 1, 4, width=2)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"jvp|forward"):
        hessian(loss)(q, k, v)
    torch.testing.assert_close(
        hessian(lambda q: loss(q, k, v, impl="reference"))(q),
        jacrev(jacrev(lambda q: loss(q, k, v)))(q),
    )


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
        inside = vmap(lambda cotangent: vjp(function, *x)[1](cotangent))(cotangents)
    for given in (jacobians, pulled, inside):
        for a, b in zip(given, expected, strict=True):
            torch.testing.assert_close(a.reshape(b.shape), b)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(use_reentrant):
    def function(q, k, v):
        return attention(q, k, v, causal=True)

    def gradients(call):
        x = [t.requires_grad_() for t in tokens(1, 2, 140)]
        call(*x).square().sum().backward()
        return [t.grad for t in x]

    kept = gradients(lambda *x: checkpoint(function, *x, use_reentrant=use_reentrant))
    for a, b in zip(kept, gradients(function), strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
def test_anomaly_detection_finds_nothing():
    x = [t.requires_grad_() for t in tokens(2, 2, 140)]
    mask = torch.zeros(2, 140, dtype=torch.bool)
    with torch.autograd.detect_anomaly(check_nan=True):
        attention(*x, causal=True, key_mask=mask).sum().backward()


def test_inference_mode_serves_the_op():
    with torch.inference_mode():
        x = tokens(1, 2, 140)
        out = attention(*x, causal=True)
    torch.testing.assert_close(out.clone(), attention(*(t.clone() for t in x), causal=True))


def test_shapes_are_found_without_data():
    q = torch.empty(1, 4, 70, 8, device="meta", requires_grad=True)
    k, v = (torch.empty(1, 2, 70, width, device="meta") for width in (8, 5))
    out = attention(q, k, v, causal=True)
    out.sum().backward()
    assert out.shape == (1, 4, 70, 5)
    assert q.grad.shape == q.shape
    out, state = attention_with_state(q, k, v, horizon=100)
    assert out.shape == (1, 4, 70, 5)
    assert state.key_value.shape == (1, 2, 2, 8, 5)

"""Mechanisms on a GPU have the numbers of a CPU."""

import pytest
import torch
from mechanism_cases import CASES, draw, make, results, tokens
from torch.testing import assert_close

from cosformer.mechanisms.request import Request
from cosformer.mechanisms.sdpa import sdpa_for, sdpa_to_the_last

pytestmark = pytest.mark.gpu
BOUNDS = {torch.bfloat16: 0.03, torch.float32: 1e-4}  # of the norm


@pytest.mark.parametrize(("name", "causal"), CASES)
@pytest.mark.parametrize("masked", [False, True])
def test_a_gpu_computes_what_a_cpu_does(name, causal, masked):
    mechanism = make(name)
    if masked and not mechanism.traits.mask:
        pytest.skip(f"{name} has no masks")
    *inputs, controls = tokens(mechanism)
    mask = draw(2, inputs[0].shape[2], seed=9) > -0.8 if masked else None
    right = results(mechanism, inputs, controls, causal=causal, key_mask=mask)
    mechanism.cuda()
    there = {key: x.cuda() for key, x in controls.items()}
    mask = None if mask is None else mask.cuda()
    given = [x.cuda() for x in inputs]
    found = results(mechanism, given, there, causal=causal, key_mask=mask)
    assert_close([x.cpu() for x in found], right)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("key_heads", [4, 2])
def test_queries_that_end_with_the_keys_need_no_mask(dtype, key_heads):
    """As on the last of many ranks."""
    sizes = (4, 100), (key_heads, 300), (key_heads, 300)
    given = [draw(1, heads, n, 64, seed=seed) for seed, (heads, n) in enumerate(sizes)]

    def found(attend, device, dtype):
        q, k, v = (x.to(device, dtype).requires_grad_() for x in given)
        out = attend(q, k, v)
        return [
            x.cpu().double() for x in (out, *torch.autograd.grad(out.square().sum(), (q, k, v)))
        ]

    right = found(lambda *x: sdpa_for(*x, Request(True, None, 200, {})), "cpu", torch.float64)
    for one, exact in zip(found(sdpa_to_the_last, "cuda", dtype), right, strict=True):
        assert (one - exact).norm() <= BOUNDS[dtype] * exact.norm()


FEATURES = {
    "performer": {},
    "hedgehog": {},
    "rfa": {"features": 64},
    "rfa-gated": {"features": 64},
    "rope-linear": {},
    "spe": {"realizations": 256},
    "based": {"features": 16},
}
"""Members of the linear family with features of their own, at their usual sizes."""


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("name", "causal"), [c for c in CASES if c[0] in FEATURES])
def test_wide_features_in_16_bits_are_near_those_of_float64(name, causal, dtype):
    mechanism = make(name, heads=4, width=64, **FEATURES[name]).float()
    *inputs, controls = tokens(mechanism, 1000, dtype=dtype)
    mask = draw(2, 1000, seed=9) > -0.8

    def found(device, dtype):
        mechanism.to(device, torch.promote_types(dtype, torch.float32))
        there = {key: x.to(device, dtype) for key, x in controls.items()}
        given = [x.to(device, dtype) for x in inputs]
        found = results(mechanism, given, there, causal=causal, key_mask=mask.to(device))
        return [x.cpu().double() for x in found[: 4 + len(controls)]]  # all but parameters

    for one, exact in zip(found("cuda", dtype), found("cpu", torch.float64), strict=True):
        assert (one - exact).norm() <= BOUNDS[dtype] * exact.norm()

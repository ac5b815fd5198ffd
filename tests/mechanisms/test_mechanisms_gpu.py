"""Mechanisms on a GPU: the numbers of the CPU, and features by kernels."""

import pytest
import torch
from mechanism_cases import CASES, draw, make, tokens
from torch.testing import assert_close

from cosformer.mechanisms import family, performer, projecting
from cosformer.ops import divided, log_sigmoid, series, sines
from cosformer.ops.features import projected, quotient
from cosformer.ops.features import rotary as rotation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BOUNDS = {torch.bfloat16: 0.02, torch.float32: 1e-4}  # of the norm


def run(mechanism, inputs, controls=None, **options):
    """Output and gradients."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    controls = {name: x.detach().requires_grad_() for name, x in (controls or {}).items()}
    leaves = [*inputs, *controls.values()]
    out, _ = mechanism(*inputs, controls=controls, **options)
    weight = draw(*out.shape, seed=8).to(out)
    found = torch.autograd.grad(
        (out * weight).sum(), leaves, allow_unused=True, materialize_grads=True
    )
    return [out.detach(), *found]


@pytest.mark.parametrize(("name", "causal"), CASES)
@pytest.mark.parametrize("masked", [False, True])
def test_a_gpu_computes_what_a_cpu_does(name, causal, masked):
    mechanism = make(name)
    if masked and not mechanism.traits.mask:
        pytest.skip(f"{name} has no masks")
    *inputs, controls = tokens(mechanism)
    mask = draw(2, inputs[0].shape[2], seed=9) > -0.8 if masked else None
    right = run(mechanism, inputs, causal=causal, controls=controls, key_mask=mask)
    mechanism.cuda()
    there = {key: x.cuda() for key, x in controls.items()}
    mask = None if mask is None else mask.cuda()
    given = [x.cuda() for x in inputs]
    found = run(mechanism, given, causal=causal, controls=there, key_mask=mask)
    for one, other in zip(found, right, strict=True):
        assert_close(one.cpu(), other)


FEATURES = {
    "performer": {},
    "hedgehog": {},
    "rfa": {"features": 64},
    "rfa-arccos": {"features": 64},
    "rfa-gated": {"features": 64},
    "rope-linear": {},
    "spe": {"realizations": 256},
    "based": {"features": 16},
}
"""Members of the linear family with features of their own, at their usual sizes."""


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("name", "causal"), [c for c in CASES if c[0] in FEATURES])
def test_features_by_kernels_are_no_worse_than_by_torch(name, causal, masked, dtype, monkeypatch):
    mechanism = make(name, heads=4, width=64, **FEATURES[name]).float()
    *inputs, controls = tokens(mechanism, 1000, dtype=dtype)
    mask = draw(2, 1000, seed=9) > -0.8 if masked else None

    def found(device, dtype):
        mechanism.to(device, torch.promote_types(dtype, torch.float32))
        there = {key: x.to(device, dtype) for key, x in controls.items()}
        options = {"causal": causal, "controls": there}
        hidden = None if mask is None else mask.to(device)
        given = [x.to(device, dtype) for x in inputs]
        return [x.cpu().double() for x in run(mechanism, given, key_mask=hidden, **options)]

    right = found("cpu", torch.float64)
    ours = found("cuda", dtype)
    monkeypatch.setattr(family, "goes_in_groups", lambda *given: False)
    for module in (family, projected):
        monkeypatch.setattr(module, "is_served", lambda *given: False)
    for module in (performer, projecting):
        monkeypatch.setattr(module, "is_attended", lambda *given: False)
    for module in (divided, log_sigmoid, quotient, rotation, series, sines):
        monkeypatch.setattr(module, "kernels_serve", lambda x: False)
    for one, plain, exact in zip(ours, found("cuda", dtype), right, strict=True):
        usual = (plain - exact).norm()
        assert (one - exact).norm() <= 2 * usual + BOUNDS[dtype] / 4 * exact.norm()

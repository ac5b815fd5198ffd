"""Mechanisms whose features kernels make, under Triton's interpreter: the formula's numbers."""

import pytest
import torch
from mechanism_cases import cases_where, draw, make, tokens
from torch.testing import assert_close

from cosformer.mechanisms import MECHANISMS, family
from cosformer.ops import divided, log_sigmoid, series, sines
from cosformer.ops.features import projected, quotient
from cosformer.ops.features import rotary as rotation

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1 before Triton's import"
)
CASES = [
    (name, causal)
    for name, causal in cases_where()
    if getattr(MECHANISMS[name], "projected_map", "") or name in ("based", "rope-linear", "spe")
]


@pytest.fixture
def kernels(monkeypatch):
    """Makes CPU tensors count as a GPU's; counts the features that kernels made."""
    made = []

    def counted(function):
        return lambda *given: (made.append(function), function(*given))[1]

    def switch_on():
        monkeypatch.setattr(family, "is_served", projected.fits)
        monkeypatch.setattr(projected, "is_served", projected.fits)
        monkeypatch.setattr(projected, "by_kernel", counted(projected.by_kernel))
        for module in (divided, rotation, series, sines):
            monkeypatch.setattr(module, "by_kernel", counted(module.by_kernel))
        for module in (divided, rotation, series, sines, quotient, log_sigmoid):
            monkeypatch.setattr(module, "kernels_serve", lambda x: x.numel() > 0)
        return made

    return switch_on


def float_mechanism(name):
    mechanism = make(name, heads=4, key_heads=2, width=10).float()
    *inputs, controls = tokens(mechanism, 37, dtype=torch.float32)
    return mechanism, inputs, controls


def results(mechanism, inputs, controls, **options):
    """Output, gradients of inputs, controls and parameters."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    controls = {name: x.clone().requires_grad_() for name, x in controls.items()}
    leaves = [*inputs, *controls.values(), *mechanism.parameters()]
    out, _ = mechanism(*inputs, controls=controls, **options)
    weight = draw(*out.shape, seed=8, dtype=out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


@pytest.mark.parametrize(("name", "causal"), CASES)
@pytest.mark.parametrize("masked", [False, True])
def test_kernels_and_formulas_agree(name, causal, masked, kernels):
    mechanism, inputs, controls = float_mechanism(name)
    mask = draw(2, inputs[0].shape[2], seed=9) > -0.8 if masked else None
    options = {"causal": causal, "key_mask": mask}
    right = results(mechanism, inputs, controls, **options)
    made = kernels()
    found = results(mechanism, inputs, controls, **options)
    assert len(made) == (1 if name == "rope-linear" else 2)  # of q and k together, or each
    for one, other in zip(found, right, strict=True):
        assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


@pytest.mark.parametrize("causal", [False, True])
def test_rotary_queries_that_stand_elsewhere_are_divided_after_the_sweep(causal, kernels):
    mechanism, (q, k, v), _ = float_mechanism("rope-linear")
    inputs = [q[:, :, 5:], k, v]
    right = results(mechanism, inputs, {}, causal=causal)
    made = kernels()
    found = results(mechanism, inputs, {}, causal=causal)
    assert len(made) == 2
    for one, other in zip(found, right, strict=True):
        assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


def test_the_kernel_of_the_features_multiplies_by_a_gate_s_share(kernels, monkeypatch):
    mechanism, inputs, controls = float_mechanism("rfa-gated")
    kernels()
    shares, own = [], projected.by_kernel
    monkeypatch.setattr(
        projected, "by_kernel", lambda *given: (shares.append(given[4]), own(*given))[1]
    )
    mechanism(*inputs, causal=True, controls=controls)
    assert shares[0] is None  # of queries
    assert_close(shares[1], 1 - controls["gate"].sigmoid())


@pytest.mark.parametrize("causal", [False, True])
def test_rotary_features_over_their_sums_fit_in_float16(causal, kernels):
    mechanism, inputs, _ = float_mechanism("rope-linear")
    mask = torch.ones(2, 37, dtype=torch.bool)
    mask[0, :20] = False  # where nothing is seen, features are divided by 10⁻⁶
    inputs = [x.half() for x in inputs]
    options = {"causal": causal, "key_mask": mask}
    right = results(mechanism, [x.double() for x in inputs], {}, **options)
    made = kernels()
    found = results(mechanism, inputs, {}, **options)
    assert len(made) == 1
    for one, other in zip(found, right, strict=True):
        assert one.dtype == torch.float16
        assert_close(one.double(), other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


@pytest.mark.parametrize("name", ["based", "spe"])
def test_kernels_make_features_of_all_tokens_at_once(name, kernels, monkeypatch):
    mechanism, inputs, _ = float_mechanism(name)
    right, _ = mechanism(*inputs, causal=True)
    made = kernels()
    monkeypatch.setattr(family, "SCRATCH", {"cpu": 1})
    found, _ = mechanism(*inputs, causal=True)
    assert len(made) == 2
    assert_close(found, right, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", sorted({name for name, _ in CASES}))
def test_a_stream_has_a_state_of_its_width(name, kernels):
    mechanism, inputs, controls = float_mechanism(name)
    right, _ = mechanism(*inputs, causal=True, controls=controls)
    made = kernels()
    state, outs, first = mechanism.empty_state(*inputs[1:]), [], 0
    for length in (20, 1, 16):
        part = [x[:, :, first : first + length] for x in inputs]
        gates = {key: x[:, :, first : first + length] for key, x in controls.items()}
        out, state = mechanism(*part, causal=True, state=state, controls=gates)
        outs.append(out)
        first += length
    assert made
    assert_close(torch.cat(outs, 2), right, rtol=1e-3, atol=1e-4)

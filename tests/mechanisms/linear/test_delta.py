"""Kernels of the delta rule under Triton's interpreter, against torch's and a plain formula."""

import pytest
import torch
from delta_cases import CASES, Case, check, draw
from torch.testing import assert_close

from cosformer.mechanisms import create
from cosformer.mechanisms.linear import delta_launch
from cosformer.mechanisms.linear.delta_launch import by_formula, by_kernel

pytestmark = pytest.mark.usefixtures("interpreted", "poisoned")
SMALL = Case(6, 5, 1, 2)


@pytest.mark.parametrize(
    ("name", "length", "dtype"),
    [
        ("usual", 1, torch.float16),
        ("open", 63, torch.float32),
        ("grouped", 130, torch.float16),
        pytest.param("closed", 130, torch.float32, marks=pytest.mark.slow),
        pytest.param("alike", 130, torch.float16, marks=pytest.mark.slow),
        pytest.param("wide", 63, torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_results_and_gradients_are_no_worse_than_by_torch(name, length, dtype):
    check(draw(CASES[name], length, dtype, batch=2 if length == 63 else 1))


@pytest.fixture
def one_chunk_segments(monkeypatch):
    monkeypatch.setattr(delta_launch, "_segment_steps", lambda *_: 1)


@pytest.mark.usefixtures("one_chunk_segments")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["grouped", "closed", "wide"])
def test_segments_begin_where_others_end(name):
    check(draw(CASES[name], 300, torch.float32, batch=1))


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 64])
def test_a_stream_goes_on_with_its_gradients(cut):
    given = draw(SMALL, 130, torch.float32)

    def in_two(*leaves):
        *tokens, memory = leaves
        first, memory = by_kernel(*(x[:, :, :cut] for x in tokens), memory)
        second, memory = by_kernel(*(x[:, :, cut:] for x in tokens), memory)
        return torch.cat([first, second], 2), memory

    assert_close(given.results(in_two), given.results(by_kernel), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_any_strides_give_the_same_numbers():
    given = draw(SMALL, 67, torch.float32)
    right = given.results(by_kernel)
    grad, of_memory = given.grads
    whole = [x.contiguous() for x in given[:6]]
    across = [x.mT.contiguous().mT for x in given[:6]]
    for tensors, slope in ((whole, grad.contiguous()), (across, grad.mT.contiguous().mT)):
        each = type(given)(*tensors, (slope, of_memory))
        assert_close(each.results(by_kernel), right, rtol=0, atol=0)


@pytest.mark.slow
def test_a_gradient_that_is_one_number():
    given = draw(SMALL, 70, torch.float32)
    found = []
    for by in (by_kernel, by_formula):
        leaves = [x.detach().requires_grad_() for x in given[:6]]
        found.append(torch.autograd.grad(by(*leaves)[0].sum(), leaves))
    assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_future_changes_no_bit_of_the_past():
    given = draw(SMALL, 150, torch.float32)
    right, _ = by_kernel(*given[:6])
    for past in (10, 64, 90):
        changed = [x.clone() for x in given[:5]]
        for x in changed[1:4]:
            x[:, :, past:] = 0.5
        found, _ = by_kernel(*changed, given.memory)
        assert torch.equal(found[:, :, :past], right[:, :, :past])
        assert not torch.equal(found[:, :, past:], right[:, :, past:])


@pytest.mark.slow
def test_rates_of_zero_have_a_gradient():
    given = draw(SMALL, 70, torch.float32)
    given.beta[..., 10:20] = 0
    check(given)


def test_second_derivatives_are_those_of_the_formula():
    given, found = draw(SMALL, 5, torch.float32), []
    given.k[:, :, 2] = 1  # the norm of nothing has no second derivative
    for by in (by_formula, by_kernel):
        leaves = [x.detach().requires_grad_() for x in (*given[:6], *given.grads)]
        q, k, *others = leaves[:6]
        results = by(q, k + q[:, :1], *others)  # of inputs that follow from each other
        first = torch.autograd.grad(results, leaves[:6], leaves[6:], create_graph=True)
        found.append(torch.autograd.grad(sum(x.square().sum() for x in first), leaves))
    for one, other in zip(*found, strict=True):
        assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "poison"), [("delta", torch.inf), ("gated-delta", torch.nan)])
def test_a_mechanism_is_served_and_padding_reaches_nothing(name, poison, monkeypatch):
    mechanism = create(name, 4, 8, key_heads=2)
    q, k, v = (torch.randn(2, heads, 70, 8) for heads in (4, 2, 2))
    controls = {name: torch.randn(2, 2, 70) for name in mechanism.traits.controls}
    mask = torch.rand(2, 70) < 0.7
    hidden = ~mask[:, None]
    masked = {key: x.masked_fill(hidden, poison) for key, x in controls.items()}
    k, v = (x.masked_fill(hidden[..., None], poison) for x in (k, v))
    leaves = [q, k, v, *masked.values()]
    found = []
    for kernels in (True, False):
        monkeypatch.setattr(delta_launch, "kernels_serve", lambda x, kernels=kernels: kernels)
        assert delta_launch.is_served(q, k, v, torch.zeros(1)) == kernels
        ours = [x.clone().requires_grad_() for x in leaves]
        given = dict(zip(controls, ours[3:], strict=True))
        out, _ = mechanism(*ours[:3], causal=True, key_mask=mask, controls=given)
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), ours)])
    assert_close(*found, rtol=1e-4, atol=1e-5)
    assert all(x.isfinite().all() for x in found[0])


def test_who_is_served(monkeypatch):
    monkeypatch.setattr(delta_launch, "kernels_serve", lambda x: x.numel() > 0)
    q, wide, memory = torch.zeros(1, 2, 9, 8), torch.zeros(1, 2, 9, 130), torch.zeros(1, 2, 8, 8)
    assert delta_launch.is_served(q, q, q, memory)
    assert not delta_launch.is_served(q, q, q.half(), memory)
    assert not delta_launch.is_served(q, q, q, memory.double())
    assert not delta_launch.is_served(wide, wide, q, memory)
    assert not delta_launch.is_served(q, q, wide, memory)
    assert not delta_launch.is_served(*[q[:, :, :0]] * 3, memory)

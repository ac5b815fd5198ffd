"""Kernels of sums of sines with noise, under Triton's interpreter, against the formula."""

import pytest
import torch
from asked_cases import gradients
from mixed_cases import CASES, Case, draw, mixed_results
from projected_cases import no_worse
from torch.testing import assert_close

from cosformer.ops import sines

pytestmark = pytest.mark.usefixtures("interpreted", "poisoned")
SMALL = Case(6, 1, 9, heads=4, apart=True)
ROUNDINGS = 4 * torch.finfo(torch.float32).eps
"""Of the norm: a gradient by a single token has so few terms that the formula may be lucky."""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("length", "dtype"),
    [(1, torch.float32), (100, torch.float32), (63, torch.float16), (150, torch.float16)],
    ids=str,
)
def test_sums_and_gradients_are_those_of_the_formula(name, length, dtype):
    no_worse(*mixed_results(draw(CASES[name], length, dtype)), ROUNDINGS)


def test_a_program_sums_over_many_tokens_where_nobody_shares_their_sines():
    length = 64 * sines.SPAN + 70
    no_worse(*mixed_results(draw(CASES["apart"], length, torch.float32)), ROUNDINGS)


def test_the_formula_is_the_sum_over_dimensions_and_sines():
    given = draw(Case(10, 3, 40, heads=6), 3, torch.float64)
    found = given.results(sines.by_formula)[0]
    waves = [torch.cos, torch.sin]
    for head, token, column in [(0, 0, 0), (2, 1, 5), (5, 2, 39)]:
        right = 0.0
        for d in range(10):
            for j in range(6):
                rate, phase, gain = (y[head // 3, d, j % 3].double() for y in given.sines)
                wave = gain * waves[j // 3](rate * given.position[0, token] + phase)
                right += given.x[1, head, token, d] * wave * given.noise[head // 3, d, j, column]
        assert_close(found[1, head, token, column], right / (10 * 40) ** 0.25)


def test_any_strides_give_the_same_numbers_every_time():
    given = draw(SMALL, 67, torch.float32)
    right = given.results(sines.by_kernel)
    whole = given._replace(x=given.x.contiguous(), grad=given.grad.contiguous())
    across = given._replace(x=given.x.mT.contiguous().mT, grad=given.grad.mT.contiguous().mT)
    for each in (given, whole, across):
        for one, other in zip(each.results(sines.by_kernel), right, strict=True):
            assert torch.equal(one, other)


def test_long_sequences_go_in_segments(monkeypatch):
    given = draw(SMALL, 40, torch.float32)
    right = given.results(sines.by_kernel)
    made, own = [], sines._tables
    monkeypatch.setattr(sines, "TABLE", 2**14)
    monkeypatch.setattr(sines, "_tables", lambda *a: (made.append(y) or y for y in own(*a)))
    found = given.results(sines.by_kernel)
    assert len(made) > 2
    assert all(table.numel() <= 2**14 for _, table in made)
    for one, other in zip(found[:2], right[:2], strict=True):
        assert torch.equal(one, other)
    for one, other in zip(found[2:], right[2:], strict=True):
        assert_close(one, other, rtol=1e-5, atol=1e-6 * float(other.abs().max()))


def test_second_derivatives_are_those_of_the_formula():
    given, found = draw(SMALL, 5, torch.float32), []
    for by in (sines.by_formula, sines.by_kernel):
        leaves = [y.detach().requires_grad_() for y in (given.x, *given.sines, given.grad)]
        out = given.mixed(by, *leaves[:4])
        first = torch.autograd.grad(out, leaves[:4], leaves[4], create_graph=True)
        found.append(torch.autograd.grad(sum(y.square().sum() for y in first), leaves))
    for one, other in zip(*found, strict=True):
        assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


@pytest.mark.parametrize("asked", [3 * (False,) + (True,), (True,) + 3 * (False,)], ids=str)
def test_only_gradients_that_are_asked_for_are_made(asked, monkeypatch):
    given, made = draw(SMALL, 7, torch.float32), []
    inputs = (given.x, *given.sines)

    def mixed(*leaves):
        return given.mixed(sines.by_kernel, *leaves)

    full = gradients(mixed, inputs, [True] * 4)
    for name in ("_slope", "_learned"):
        own = getattr(sines, name)
        counted = lambda *a, name=name, own=own: (made.append(name), own(*a))[1]  # noqa: E731
        monkeypatch.setattr(sines, name, counted)
    found = gradients(mixed, inputs, asked)
    assert made == ["_slope"] * asked[0] + ["_learned"] * any(asked[1:])
    for one, right, each in zip(found, full, asked, strict=True):
        assert torch.equal(one, right) if each else one is None


def test_what_is_not_a_number_stays_so():
    given = draw(SMALL, 9, torch.float32)
    x = given.x.clone()
    x[0, 0, 3, 1] = torch.nan
    for by in (sines.by_formula, sines.by_kernel):
        out = by(x, given.position, given.sines, given.noise)
        assert out[0, 0, 3].isnan().all()
        assert out.isnan().sum() == out.shape[-1]

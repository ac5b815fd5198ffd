"""Kernels of rotary features over their denominators, under Triton's interpreter."""

import pytest
import torch
from divided_cases import CASES, Case, divided_results, draw
from projected_cases import no_worse
from torch.testing import assert_close

from cosformer.ops import divided

pytestmark = pytest.mark.usefixtures("interpreted", "poisoned")
SMALL = Case(6, 1, 2, masked=True)
each_sight = pytest.mark.parametrize("causal", [True, False])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("length", "dtype"), [(1, torch.float32), (63, torch.float16), (130, torch.float32)], ids=str
)
def test_features_and_gradients_are_those_of_the_formula(name, length, dtype):
    no_worse(*divided_results(draw(CASES[name], length, dtype)))


def test_sums_over_many_blocks_are_those_of_the_formula():
    no_worse(*divided_results(draw(SMALL, 1000, torch.float32)))


def test_the_formula_is_the_attention_of_its_docstring():
    given = draw(CASES["grouped"], 7, torch.float64)
    turned_q, turned_k = given.results(divided.by_formula)[:2]
    features = [1 + torch.nn.functional.elu(x) for x in (given.q, given.k)]
    for item, head, i in [(0, 0, 0), (1, 5, 6), (0, 3, 4)]:
        seen = [j for j in range(i + 1) if given.key_mask[item, j]]
        keys = features[1][item, head // 2]
        total = sum(features[0][item, head, i] @ keys[j] for j in seen)
        for n in range(12):
            angle = torch.tensor(i * 1e4 ** (-2 * n / 24), dtype=torch.float64)
            even, odd = features[0][item, head, i, 2 * n : 2 * n + 2] / total
            right = even * angle.cos() - odd * angle.sin()
            assert_close(turned_q[item, head, i, 2 * n], right)
            assert_close(turned_q[item, head, i, 2 * n + 1], even * angle.sin() + odd * angle.cos())
    assert not turned_k.masked_select(~given.key_mask[:, None, :, None]).any()
    assert_close(turned_k.norm(dim=-1)[0, :, 0], features[1].norm(dim=-1)[0, :, 0])


def test_any_strides_give_the_same_numbers_every_time():
    given = draw(SMALL, 67, torch.float32)
    right = given.results(divided.by_kernel)
    whole = given._replace(q=given.q.contiguous(), grads=tuple(x.contiguous() for x in given.grads))
    across = given._replace(
        k=given.k.mT.contiguous().mT, grads=tuple(x.mT.contiguous().mT for x in given.grads)
    )
    for each in (given, whole, across):
        for one, other in zip(each.results(divided.by_kernel), right, strict=True):
            assert torch.equal(one, other)


def test_the_future_changes_no_bit_of_the_past():
    given = draw(SMALL, 100, torch.float32)
    right, _ = given.features(divided.by_kernel, given.q, given.k)
    for past in (10, 64, 90):
        k = given.k.clone()
        k[:, :, past:] = 1e6
        found, _ = given.features(divided.by_kernel, given.q, k)
        assert torch.equal(found[:, :, :past], right[:, :, :past])
        assert not torch.equal(found[:, :, past:], right[:, :, past:])


@each_sight
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_poison_behind_the_mask_reaches_nothing(causal, poison):
    given = draw(SMALL._replace(causal=causal), 70, torch.float32)
    hidden = ~given.key_mask[:, None, :, None]
    clean, poisoned = (
        given._replace(k=given.k.masked_fill(hidden, value)).results(divided.by_kernel)
        for value in (0.0, poison)
    )
    for one, other in zip(clean, poisoned, strict=True):
        assert torch.equal(one, other)
    assert not clean[3].masked_select(hidden).any()


@each_sight
def test_queries_that_see_no_key_are_divided_by_eps(causal):
    given = draw(SMALL._replace(causal=causal), 70, torch.float32)
    mask = given.key_mask.clone()
    mask[0, :20] = False
    mask[1] = False
    results = divided_results(given._replace(key_mask=mask))
    for item, tokens in ((0, slice(0, 20)), (0, slice(20, 70)), (1, slice(0, 70))):
        no_worse(*([x[item, :, tokens] for x in each] for each in results))
    assert results[0][0][1].abs().max() > 1e5


def test_second_derivatives_are_those_of_the_formula():
    given, found = draw(SMALL, 5, torch.float32), []
    for by in (divided.by_formula, divided.by_kernel):
        leaves = [x.detach().requires_grad_() for x in (given.q, given.k, *given.grads)]
        out = given.features(by, *leaves[:2])
        first = torch.autograd.grad(out, leaves[:2], leaves[2:], create_graph=True)
        found.append(torch.autograd.grad(sum(x.square().sum() for x in first), leaves))
    for one, other in zip(*found, strict=True):
        assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


def test_which_queries_kernels_divide(monkeypatch):
    monkeypatch.setattr(divided, "kernels_serve", lambda x: x.numel() > 0)
    q, few, wide = (torch.zeros(1, 2, *shape) for shape in ((9, 8), (4, 8), (9, 130)))
    assert divided.is_served(q, q, 0)
    assert not divided.is_served(q, q, 1)
    assert not divided.is_served(few, q, 0)
    assert not divided.is_served(wide, wide, 0)
    assert not divided.is_served(q[:0], q[:0], 0)

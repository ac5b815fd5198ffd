"""Buckets of rows by direction: the formula, and the kernel under Triton's interpreter."""

import pytest
import torch
from buckets_cases import HALVES, check_buckets

from cosformer.ops import buckets


@pytest.mark.usefixtures("interpreted", "poisoned")
@pytest.mark.parametrize("halves", HALVES, ids=str)
@pytest.mark.parametrize(("length", "width"), [(1, 6), (16, 8), (37, 70)])
def test_the_kernel_finds_the_largest(length, width, halves, monkeypatch):
    monkeypatch.setattr(buckets, "ROWS", 16)
    check_buckets(length, width, halves, torch.float16)


@pytest.mark.usefixtures("interpreted")
def test_of_equal_numbers_the_first_is_chosen():
    x, rotation = torch.ones(1, 1, 3, 2).half(), torch.tensor([[[1.0, -1.0, 1.0], [0.0, 0.0, 0.0]]])
    for made in (buckets.by_formula, buckets.by_kernel):
        assert made(torch.cat([x, -x, 0 * x], 2), [rotation]).flatten().tolist() == [
            *[0] * 3, *[3] * 3, *[0] * 3,
        ]  # fmt: skip


@pytest.mark.usefixtures("interpreted")
def test_what_is_no_number_has_a_bucket():
    x = torch.full((1, 1, 2, 4), torch.nan, dtype=torch.float16)
    rotations = [torch.ones(3, 4, 5), torch.ones(3, 4, 2)]
    for made in (buckets.by_formula, buckets.by_kernel):
        found = made(x, rotations)
        assert ((found >= 0) & (found < 40)).all()


def test_the_formula_is_what_it_says():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 11, 5, generator=draw, dtype=torch.float64)
    rotations = [torch.randn(4, 5, half, generator=draw, dtype=torch.float64) for half in (6, 2)]
    one, other = (
        torch.cat([turned, -turned], -1).argmax(-1)
        for turned in (x[:, :, None] @ rotation for rotation in rotations)
    )
    found = buckets.buckets(x, rotations)
    assert found.dtype == torch.int32
    assert torch.equal(found.long(), one * 4 + other)


def test_a_gpu_is_given_to_the_kernel(monkeypatch):
    monkeypatch.setattr(buckets, "by_kernel", lambda *given: "kernel")
    x, rotations = torch.zeros(1, 1, 3, 2).half(), [torch.zeros(1, 2, 2)]
    assert buckets.buckets(x, rotations).shape == (1, 1, 1, 3)
    monkeypatch.setattr(buckets, "kernels_serve", lambda x: True)
    assert buckets.buckets(x, rotations) == "kernel"
    wide = torch.zeros(1, 1, 3, buckets.WIDEST + 1).half()
    for other in (x.float(), wide):
        matrix = torch.zeros(1, other.shape[3], 2)
        assert buckets.buckets(other, [matrix]).shape == (1, 1, 1, 3)

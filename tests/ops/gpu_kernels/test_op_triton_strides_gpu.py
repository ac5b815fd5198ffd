"""Every option with inputs of every layout on a GPU, forward and backward, against float64.

`python -m pytest -n 8` compiles kernels side by side. Reads and writes out of range that do no harm
by luck are found by

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 \
        python -m pytest tests/ops/gpu_kernels/test_op_triton_strides_gpu.py
"""

from dataclasses import replace

import pytest
import torch
from kernel_cases import CASES, Case
from kernel_cases import check as check_case
from layouts import batch_last, heads_inside, in_columns, sliced

from cosformer import linear_attention

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]


def by_one_number(*rows, gamma, **options):
    return linear_attention(*rows, gamma=float(gamma[0]), **options)


DECAYING = {"causal": True, "feature_map": "relu", "gamma": torch.tensor([0.97, 0.97])}
NEW = {
    "one decay": Case(by_one_number, DECAYING),
    "one decay, cosine": Case(by_one_number, {**DECAYING, "theta": 1e-3}),
    "one decay, masked": Case(by_one_number, DECAYING, masked=True),
    "gated, cosine, masked": Case(
        linear_attention,
        {"causal": True, "feature_map": "relu", "theta": 1e-3},
        gated=True,
        masked=True,
    ),
}
KNOWN = [
    "causal", "bidirectional", "cross", "masked", "grouped", "packed", "packed, both ways",
    "packed, decaying", "raised cosine", "retention", "fading quotient", "gated", "gated, scaled",
    "gated quotient", "gated, divided",
]  # fmt: skip
EVERY = {**NEW, **{name: CASES[name] for name in KNOWN}}
FEW = ["one decay, cosine", "gated, cosine, masked", "packed, decaying", "gated quotient"]


def check(case, layout, dtype=torch.bfloat16, width=64):
    case = replace(case, width=width, value_width=width)
    batch = 1 if case.packed else 2
    check_case(case, 300, dtype, impl="auto", layout=layout, batch=batch, device="cuda")


@pytest.mark.parametrize("name", EVERY)
def test_rows_that_lie_column_by_column(name):
    check(EVERY[name], in_columns)


@pytest.mark.parametrize("layout", [heads_inside, sliced, batch_last], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", FEW)
def test_other_layouts(name, layout):
    check(EVERY[name], layout)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FEW)
def test_other_precisions(name, dtype):
    check(EVERY[name], in_columns, dtype)


@pytest.mark.parametrize("width", [1, 8, 128, 256])
def test_other_widths(width):
    check(EVERY["one decay, cosine"], in_columns, width=width)


@pytest.mark.parametrize("theta", [0.0, 1e-3])
@pytest.mark.parametrize("decay", ["one", "for every head", "for every token"])
def test_the_output_of_a_convolution(decay, theta):
    """Its length of 1,024 is cut into segments."""
    x = torch.randn(3, 4, 4 * 64, 1024, device="cuda", dtype=torch.bfloat16)
    rows = [y.view(4, 4, 64, 1024).mT.requires_grad_() for y in x]
    options = {
        "one": {"gamma": 0.99},
        "for every head": {"gamma": torch.linspace(0.9, 0.99, 4, device="cuda")},
        "for every token": {"log_decay": -torch.rand(4, 4, 1024, device="cuda")},
    }[decay]
    options |= {"causal": True, "theta": theta, "feature_map": "relu"}
    out = linear_attention(*rows, **options)
    found = [out, *torch.autograd.grad(out, rows, out.detach())]
    exact = [y.detach().double().requires_grad_() for y in rows]
    wanted = linear_attention(*exact, **options, impl="reference")
    wanted = [wanted, *torch.autograd.grad(wanted, exact, out.detach().double())]
    for mine, right in zip(found, wanted, strict=True):
        assert (mine.double() - right).norm() <= 0.02 * right.norm()


def test_columns_further_apart_than_32_bits_count():
    stride, width = 2**26, 64
    storage = torch.empty(3, width * stride, device="cuda", dtype=torch.bfloat16)
    rows = [x.as_strided((1, 1, 128, width), (1, 1, 1, stride)) for x in storage]
    for x in rows:
        x.normal_()
    options = {"causal": True, "theta": 1e-3, "gamma": 0.99, "feature_map": "relu"}
    found = linear_attention(*rows, **options)
    right = linear_attention(*(x.double() for x in rows), **options, impl="reference")
    assert (found.double() - right).norm() <= 0.02 * right.norm()

"""Rivals with 16-bit products as on a GPU, emulated on a CPU."""

import threading
from types import SimpleNamespace

import pytest
import torch
from mechanism_cases import draw, make, tokens
from rivals_cases import CASES, DTYPES, FUSED, LENGTHS, SHARP, check_long, check_rival
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from cosformer.mechanisms import fused, linformer, synthesizer, whole
from cosformer.mechanisms.dense.nystromformer import banded, means
from cosformer.runtime import long_dtype


@pytest.fixture
def short(monkeypatch):
    """Long tensors stay as they are, and queries go in pieces."""
    for module in (linformer, synthesizer, whole):
        monkeypatch.setattr(module, "long_dtype", lambda x: x.dtype)
    monkeypatch.setitem(fused.PIECE, "cpu", 200)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("name", "causal"), CASES)
def test_16_bits_are_no_worse_than_in_plain_torch(name, causal, length, dtype):
    check_rival(name, causal, length, dtype)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("name", "causal"), CASES)
def test_many_tokens_whose_means_are_nearly_equal(name, causal):
    check_rival(name, causal, 4096, torch.bfloat16)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("name", "causal"), CASES)
@pytest.mark.parametrize("masked", [False, True])
def test_masks_and_grouped_heads(name, causal, masked):
    check_rival(name, causal, 331, torch.bfloat16, masked=masked, key_heads=2)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("sharp", SHARP)
def test_sinkhorn_takes_almost_all_from_a_block_that_is_not_full(sharp, dtype):
    check_rival("sinkhorn", False, 266, dtype, sharp=sharp)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("name", "causal"), FUSED)
def test_no_tensor_as_long_as_the_inputs_is_wider_than_they_are(name, causal):
    check_long(name, causal)


def test_a_cpu_computes_in_float32_at_least():
    found = [long_dtype(torch.zeros(1, dtype=dtype)) for dtype in (torch.bfloat16, torch.float64)]
    assert found == [torch.float32, torch.float64]


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("length", [0, 1, 8, 29])
def test_pieces_of_queries_are_the_whole(length, heads, monkeypatch):
    q, k, v = draw(3, 4, length, 5), draw(3, heads, 7, 5, seed=1), draw(3, heads, 7, 2, seed=2)
    whole = fused.few_keys(q, k, v, 0.3)
    monkeypatch.setitem(fused.PIECE, "cpu", 8)
    assert_close(fused.few_keys(q, k, v, 0.3), whole)


def test_pieces_of_blocks_are_the_whole(monkeypatch):
    shapes = (2, 3, 7, 5, 4), (2, 3, 7, 10, 4), (2, 3, 7, 10, 6)
    inputs = [draw(*shape, seed=n).requires_grad_() for n, shape in enumerate(shapes)]
    seen = draw(7, 5, 10, seed=3) > -1

    def found():
        out = fused.by_blocks(*inputs, seen)
        return out, *torch.autograd.grad(out, inputs, draw(*out.shape, seed=4))

    whole, given, attention = found(), [], F.scaled_dot_product_attention
    monkeypatch.setattr(fused, "GRID", 3)
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda q, *rest, **options: given.append(q.shape[1]) or attention(q, *rest, **options),
    )
    for piece, right in zip(found(), whole, strict=True):
        assert_close(piece, right)
    assert given == [3, 3, 1]


@pytest.mark.parametrize(
    "name", [name for name, causal in FUSED if name != "sinkhorn" and not causal]
)
def test_pytorch_is_given_one_width_for_all_or_it_would_store_scores(name, monkeypatch):
    given, attention = [], F.scaled_dot_product_attention
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda q, k, v, **options: given.append((q, k, v)) or attention(q, k, v, **options),
    )
    mechanism = make(name)
    q, k, v, _ = tokens(mechanism, value_width=11)
    assert_close(mechanism(q, k, v)[0], mechanism.weights(q, k) @ v)
    assert {x.shape[3] for inputs in given for x in inputs} == {16}


def test_values_wider_than_queries_lose_less():
    q, k = draw(1, 4, 50, 8).bfloat16().requires_grad_(), draw(1, 2, 50, 8, seed=1).bfloat16()
    v = 1 + 1e-2 * draw(1, 2, 50, 8, seed=2)
    outs = [
        fused.few_keys(q, k, v.float()),
        fused.few_keys(q, k, v.bfloat16()),
        fused.few_keys(q.double(), k.double(), v),
    ]
    assert outs[0].dtype == torch.bfloat16
    assert_close(outs[0].double(), outs[2], rtol=torch.finfo(torch.bfloat16).eps, atol=0)
    weight = draw(1, 4, 50, 8, seed=3)
    ours, rounded, exact = (torch.autograd.grad(x, q, weight.to(x))[0].double() for x in outs)
    assert (ours - exact).norm() < 0.1 * (rounded - exact).norm()


@pytest.mark.parametrize("kernel", [1, 5, 33])
@pytest.mark.parametrize("length", [1, 64, 150])
def test_products_of_a_banded_matrix_are_a_convolution(length, kernel):
    missing = (kernel // 2, kernel // 4)
    x = draw(2, 3, length + kernel - 1 - sum(missing), 4).requires_grad_()
    weight = draw(3, kernel, seed=1).requires_grad_()
    padded = F.pad(x, (0, 0, *missing))
    outs = banded(x, weight, missing), F.conv2d(padded, weight[:, None, :, None], groups=3)
    assert_close(*outs)
    cotangent = draw(*outs[0].shape, seed=2)
    slopes = (torch.autograd.grad(out, (x, weight), cotangent) for out in outs)
    for found, right in zip(*slopes, strict=True):
        assert_close(found, right)


@pytest.mark.parametrize(("length", "count"), [(64, 8), (37, 8), (37, 37), (100, 64), (1001, 16)])
def test_means_of_16_bits_are_those_of_float32(length, count):
    x = draw(2, 3, length, 4).half()
    rounding = torch.finfo(torch.float32).eps
    assert_close(means(x, count), means(x.double(), count).float(), rtol=0, atol=4 * rounding)


def test_means_are_of_stretches_whose_lengths_differ_by_a_token():
    x = draw(2, 3, 11, 4)
    stretches = x.split([2, 3, 3, 3], 2)
    assert_close(means(x, 4), torch.stack([part.mean(2) for part in stretches], 2))


ON_GPU = SimpleNamespace(is_cuda=True)


def allowed():
    cuda = torch.backends.cuda
    return {
        SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: cuda.math_sdp_enabled(),
        SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled(),
    }


@pytest.mark.parametrize("kept", [list(allowed()), list(allowed())[:1], list(allowed())[2:]])
def test_a_choice_of_backends_loses_cudnn_at_most(kept):
    with sdpa_kernel(kept):
        before = allowed()
        with fused.without_cudnn(ON_GPU):
            inside = allowed()
        assert allowed() == before
    assert before == {backend: backend in kept for backend in before}
    without = SDPBackend.FLASH_ATTENTION in kept
    assert inside == before | ({SDPBackend.CUDNN_ATTENTION: False} if without else {})


def test_threads_restore_the_backends_that_were_allowed():
    before, events = allowed(), [[threading.Event() for _ in range(2)] for _ in range(2)]

    def visit(inside, leave):
        with fused.without_cudnn(ON_GPU):
            inside.set()
            leave.wait(10)

    threads = [threading.Thread(target=visit, args=each) for each in events]
    for thread, (inside, _) in zip(threads, events, strict=True):
        thread.start()
        inside.wait(0.2)  # the second waits for the first to leave, or would go on after it
    for thread, (_, leave) in zip(threads, events, strict=True):
        leave.set()
        thread.join(10)
    assert allowed() == before

"""Kernels of the delta rule on a GPU, against float64."""

import pytest
import torch
from delta_cases import CASES, SLACK, Case, check, draw
from torch.testing import assert_close

from cosformer.mechanisms import create
from cosformer.mechanisms.linear import delta_launch
from cosformer.mechanisms.linear.delta_launch import by_kernel

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]
each_dtype = pytest.mark.parametrize("dtype", SLACK, ids=str)
WIDTHS = {
    "16": Case(16, 16),
    "64": Case(64, 64, 1, 2),
    "80": Case(80, 80),
    "128": Case(128, 128, 1, 2),
}


@each_dtype
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", [1, 65, 1000])
def test_every_case_is_no_worse_than_by_torch(name, length, dtype):
    check(draw(CASES[name], length, dtype))


@each_dtype
@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000, 4096])
def test_every_width_is_no_worse_than_by_torch(name, length, dtype):
    check(draw(WIDTHS[name], length, dtype, batch=1))


@each_dtype
def test_without_segments(dtype, monkeypatch):
    monkeypatch.setattr(delta_launch, "_segment_steps", lambda _, length: -(-length // 64))
    check(draw(WIDTHS["64"], 1000, dtype))


@each_dtype
def test_a_stream_goes_on_where_it_stood(dtype):
    given = draw(WIDTHS["64"], 1000, dtype)
    right, last = by_kernel(*given[:6])
    memory, outs = given.memory, []
    for part in (slice(0, 1), slice(1, 130), slice(130, 1000)):
        out, memory = by_kernel(*(x[:, :, part] for x in given[:5]), memory)
        outs.append(out)
    for one, other in ((torch.cat(outs, 2), right), (memory, last)):
        assert (one.double() - other.double()).norm() <= 2 * SLACK[dtype] * other.double().norm()


@pytest.mark.parametrize("name", ["delta", "gated-delta"])
def test_no_length_or_batch_compiles_again(name):
    from cosformer.mechanisms.linear.delta_kernels import carry_kernel, gradients_kernel

    mechanism = create(name, 4, 64)

    def run(batch, length):
        q, k, v = torch.randn(3, batch, 4, length, 64, device="cuda", dtype=torch.bfloat16)
        controls = {
            key: torch.randn(batch, 4, length, device="cuda") for key in mechanism.traits.controls
        }
        assert delta_launch.is_served(q, k, v, torch.zeros(1, device="cuda"))
        out, _ = mechanism(q.requires_grad_(), k, v, causal=True, controls=controls)
        assert out.dtype == torch.bfloat16
        torch.autograd.grad(out.sum(), q)

    def compiled():
        kernels = (carry_kernel, gradients_kernel)
        return sum(len(c[0]) for kernel in kernels for c in kernel.device_caches.values())

    for length in (128, 5000):  # one segment, and several
        run(2, length)
    before = compiled()
    for batch, length in ((1, 64), (3, 999), (2, 6000), (5, 333)):
        run(batch, length)
    assert compiled() == before


def test_a_captured_call_is_the_call():
    given = draw(WIDTHS["64"], 1000, torch.bfloat16)
    right = by_kernel(*given[:6])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = by_kernel(*given[:6])
    graph.replay()
    assert_close(found, right, rtol=0, atol=0)


def test_compiled_calls_go_by_torch():
    mechanism = create("delta", 2, 64).cuda()
    q, k, v = torch.randn(3, 1, 2, 100, 64, device="cuda")
    beta = torch.randn(1, 2, 100, device="cuda")

    def call(q, k, v, beta):
        return mechanism(q, k, v, causal=True, controls={"beta": beta})[0]

    compiled = torch.compile(call, backend="eager")
    assert_close(compiled(q, k, v, beta), call(q, k, v, beta), rtol=1e-4, atol=1e-4)


def test_memory_is_a_few_times_the_tokens():
    given = draw(Case(64, 64, 16), 2**16, torch.bfloat16, batch=1)
    leaves = [x.detach().requires_grad_() for x in given[:6]]
    tokens = sum(x.numel() * x.element_size() for x in given[:3])
    by_kernel(*leaves)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, last = by_kernel(*leaves)
    assert torch.cuda.memory_allocated() - before <= 0.5 * tokens  # q, k and v are the caller's
    assert torch.cuda.max_memory_allocated() - before <= 1.5 * tokens
    torch.autograd.grad((out, last), leaves, given.grads)
    assert torch.cuda.max_memory_allocated() - before <= 4.5 * tokens

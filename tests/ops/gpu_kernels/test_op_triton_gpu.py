"""Triton's kernels on a GPU: every option and tile in three precisions, long lengths, steps."""

import pytest
import torch
from formula import results
from gate_cases import LENGTHS, check_balanced, check_sums
from kernel_cases import CASES, Case, check

from cosformer import State, attention, attention_with_state, step
from cosformer.ops import StepGraph

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.parametrize("name", CASES)
def test_every_option_agrees_with_its_formula(name):
    for length in (1, 63, 1000):
        check(CASES[name], length, torch.bfloat16, device="cuda")


@each_dtype
@pytest.mark.parametrize("width", [16, 64, 128, 256])
def test_every_tile_agrees_with_the_formula(width, dtype):
    for causal in (True, False):
        case = Case(options={"causal": causal}, width=width, value_width=width)
        check(case, 300, dtype, device="cuda")


@each_dtype
def test_a_long_odd_sequence_in_segments(dtype):
    check(Case(options={"causal": True}, width=64, value_width=64), 4097, dtype, device="cuda")


@pytest.mark.parametrize("impl", ["auto", "triton"])
def test_a_million_tokens_take_little_memory(impl):
    x = torch.randn(3, 1, 1, 2**20, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = (y.requires_grad_() for y in x)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attention(q, k, v, causal=True, impl=impl)
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert all(g.isfinite().all() for g in grads)
    assert torch.cuda.max_memory_allocated() - before <= 3 * x.nbytes


def test_no_length_or_batch_compiles_again():
    from cosformer.ops.triton.kernels.sweep import sweep_kernel

    def run(batch, length):
        x = torch.randn(3, batch, 4, length, 64, device="cuda", dtype=torch.bfloat16)
        leaves = [y.requires_grad_() for y in x.unbind()]
        torch.autograd.grad(attention(*leaves, causal=True, impl="triton").sum(), leaves)

    def compiled():
        return sum(len(cache[0]) for cache in sweep_kernel.device_caches.values())

    for length in (100, 5000):  # one segment, and several
        run(2, length)
    before = compiled()
    for batch, length in ((1, 64), (3, 999), (2, 6000), (5, 333)):
        run(batch, length)
    assert compiled() == before


def test_inductor_compiles_without_a_break():
    def attend(*x):
        return attention(*x, causal=True, impl="triton")

    inputs = list(torch.randn(3, 1, 2, 300, 64, device="cuda", dtype=torch.bfloat16))
    compiled = torch.compile(attend, fullgraph=True)
    for a, b in zip(results(attend, inputs), results(compiled, inputs), strict=True):
        torch.testing.assert_close(b, a, rtol=2e-2, atol=2e-2)


@pytest.fixture
def stream():
    """q, k, v of 50 tokens, and what attention makes of them in float64."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    x = [torch.randn(4, h, 50, 64, device="cuda", generator=generator) for h in (8, 4, 4)]
    return x, attention(*(y.double() for y in x), causal=True, horizon=80, impl="chunked")


def test_steps_follow_the_full_pass(stream):
    x, exact = stream
    _, state = attention_with_state(*(y[:, :, :30] for y in x), horizon=80)
    for t in range(30, 50):
        out = step(*(y[:, :, t : t + 1] for y in x), state, impl="triton")
        torch.testing.assert_close(out.double(), exact[:, :, t : t + 1], rtol=1e-4, atol=1e-5)


def test_a_captured_step_goes_on_where_the_stream_stood(stream):
    x, exact = stream
    state = State.empty(6, 4, 64, 64, horizon=80, device="cuda", position=torch.zeros(6, dtype=int))
    slots = torch.tensor([5, -1, 0, 2], device="cuda")
    graph = StepGraph(*(y[:, :, :1] for y in x), state, slots=slots)
    real = [0, 2, 3]
    for t in range(50):
        out = graph(*(y[:, :, t : t + 1] for y in x), slots=slots)
        assert (out[1] == 0).all()
        right = exact[real, :, t : t + 1]
        torch.testing.assert_close(out[real].double(), right, rtol=1e-4, atol=1e-5)
    assert state.position.tolist() == [50, 0, 50, 0, 0, 50]


@each_dtype
def test_running_sums_of_gates_and_the_gradient_of_a_decay(dtype):
    for length in (*LENGTHS, 100_000):
        check_sums(length, dtype, turned=length % 2 == 0, device="cuda")
        for scale in (1.0, 1e-30, 1e30):
            check_balanced(length, scale, device="cuda")

"""The kernels on a GPU: every option and width in three precisions, long and odd lengths, steps."""

import math

import pytest
import torch
from cosformer.ops.triton.decode import StepGraph
from gate_cases import LENGTHS, check_balanced, check_sums
from kernel_cases import CASES, Case, check, results

from cosformer import State, attention, attention_with_state, step
from cosformer.ops.hopper import passes as hopper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("poisoned"),
]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def by_triton(monkeypatch):
    """On Hopper other kernels would step in; test_op_hopper_gpu.py is about them."""
    monkeypatch.setattr(hopper, "unsupported", lambda *_: "nothing of these")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", [1, 63, 1000])
def test_every_option_agrees_with_its_formula(name, length):
    check(CASES[name], length, torch.bfloat16, device="cuda")


@each_dtype
@pytest.mark.parametrize("width", [16, 64, 128, 256])
@pytest.mark.parametrize("causal", [True, False])
def test_every_tile_agrees_with_the_formula(width, causal, dtype):
    case = Case(options={"causal": causal}, width=width, value_width=width)
    check(case, 300, dtype, device="cuda")


@each_dtype
def test_a_long_odd_sequence_in_segments(dtype):
    check(Case(options={"causal": True}, width=64, value_width=64), 4097, dtype, device="cuda")


def test_more_blocks_than_a_grid_axis_holds():
    q, k, v = (torch.randn(5000, 16, 8, 16, device="cuda") for _ in range(3))
    out = attention(q, k, v, causal=True, impl="triton")
    torch.testing.assert_close(out, attention(q, k, v, causal=True, impl="chunked"))


def test_a_million_tokens():
    x = torch.randn(3, 1, 1, 2**20, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = (y.requires_grad_() for y in x)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attention(q, k, v, causal=True)
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert all(g.isfinite().all() for g in grads)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= 3 * x.nbytes


def test_auto_takes_the_kernels():
    q, k, v = torch.randn(3, 1, 2, 100, 64, device="cuda", dtype=torch.bfloat16)
    chosen, kernels = (attention(q, k, v, causal=True, impl=i) for i in ("auto", "triton"))
    assert torch.equal(chosen, kernels)


def test_no_length_or_batch_compiles_again():
    from cosformer.ops.triton.kernels.sweep import sweep_kernel

    def run(batch, length):
        q, k, v = torch.randn(3, batch, 4, length, 64, device="cuda", dtype=torch.bfloat16)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        torch.autograd.grad(attention(*leaves, causal=True).sum(), leaves)

    def compiled():
        return sum(len(cache[0]) for cache in sweep_kernel.device_caches.values())

    for length in (100, 5000):  # one segment, and several
        run(2, length)
    before = compiled()
    for batch, length in ((1, 64), (3, 999), (2, 6000), (5, 333)):
        run(batch, length)
    assert compiled() == before


def test_inductor_compiles_without_a_break():
    inputs = list(torch.randn(3, 1, 2, 300, 64, device="cuda", dtype=torch.bfloat16))
    compiled = torch.compile(lambda *x: attention(*x, causal=True), fullgraph=True)
    eager = results(lambda *x: attention(*x, causal=True), inputs)
    for a, b in zip(eager, results(compiled, inputs), strict=True):
        torch.testing.assert_close(b, a, rtol=2e-2, atol=2e-2)


def tokens(batch=4, length=50):
    generator = torch.Generator(device="cuda").manual_seed(0)
    shapes = ((batch, 8, length, 64), (batch, 4, length, 64), (batch, 4, length, 64))
    return [torch.randn(s, device="cuda", generator=generator) for s in shapes]


def test_steps_follow_the_full_pass():
    q, k, v = tokens()
    exact = attention(*(x.double() for x in (q, k, v)), causal=True, horizon=80, impl="chunked")
    _, state = attention_with_state(*(x[:, :, :30] for x in (q, k, v)), horizon=80)
    for t in range(30, 50):
        out = step(*(x[:, :, t : t + 1] for x in (q, k, v)), state)
        torch.testing.assert_close(out.double(), exact[:, :, t : t + 1], rtol=1e-4, atol=1e-5)


def test_a_captured_step_goes_on_where_the_stream_stood():
    q, k, v = tokens()
    exact = attention(*(x.double() for x in (q, k, v)), causal=True, horizon=80, impl="chunked")
    state = State.empty(6, 4, 64, 64, horizon=80, device="cuda", position=torch.zeros(6, dtype=int))
    slots = torch.tensor([5, -1, 0, 2], device="cuda")
    graph = StepGraph(*(x[:, :, :1] for x in (q, k, v)), state, slots=slots)
    for t in range(50):
        out = graph(*(x[:, :, t : t + 1] for x in (q, k, v)), slots=slots)
        assert (out[1] == 0).all()
        for row in (0, 2, 3):
            torch.testing.assert_close(
                out[row].double(), exact[row, :, t : t + 1], rtol=1e-4, atol=1e-5
            )
    assert state.position.tolist() == [50, 0, 50, 0, 0, 50]
    assert math.isfinite(float(state.key_value.sum()))


@each_dtype
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("length", [*LENGTHS, 100_000])
def test_running_sums_of_gates(length, turned, dtype):
    check_sums(length, dtype, turned=turned, device="cuda")


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("length", [*LENGTHS, 100_000])
def test_gradients_of_a_decay_sum_to_nothing(length, scale):
    check_balanced(length, scale, device="cuda")

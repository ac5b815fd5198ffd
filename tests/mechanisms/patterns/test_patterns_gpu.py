"""Patterns on a GPU through FlexAttention: numbers, memory, and CUDA graphs."""

import pytest
import torch
from mechanism_cases import cases_where, check_graph, draw, make, tokens

pytestmark = pytest.mark.gpu
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
SLACK = {BF16: 2**-8, F32: 1e-5}  # one rounding more; exponentials by the device's instruction
OPTIONS = {
    "local": {"window": 256},
    "longformer": {"window": 256, "global_tokens": 3},
    "sparse": {"stride": 100, "summary": 30},
    "sparse-strided": {"stride": None},
    "bigbird": {"block": 64},
}
CASES = [case for case in cases_where() if case[0] in OPTIONS]
every_case = pytest.mark.parametrize(("name", "causal"), CASES)
every_pattern = pytest.mark.parametrize("name", OPTIONS)


@pytest.fixture(autouse=True)
def kernels_of_this_test_alone():
    """Else they count against the limit of recompilations."""
    torch.compiler.reset()
    # One kernel for all lengths instead of one for the first and one for the others.
    with torch._dynamo.config.patch(assume_static_by_default=False):
        yield


def create(name, impl, dtype, **options):
    sizes = {"heads": 4, "key_heads": 2, "width": 64}
    return make(name, **{**sizes, **OPTIONS[name], **options}, impl=impl).to("cuda", dtype)


def gradients(mechanism, inputs, attend):
    """Of the inputs and the parameters, after the output."""
    inputs = [x.detach().to(mechanism_dtype(mechanism, x)).requires_grad_() for x in inputs]
    out = attend(mechanism, *inputs)
    weight = draw(*out.shape, seed=8).to(out)
    leaves = [*inputs, *mechanism.parameters()]
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


def mechanism_dtype(mechanism, like):
    return next((x.dtype for x in mechanism.parameters()), like.dtype)


def check(name, inputs, dtype, **options):
    """By FlexAttention no worse than twice the matrix in plain PyTorch at that precision."""

    def computed(mechanism, q, k, v):
        return mechanism(q, k, v, **options)[0]

    def plain(mechanism, q, k, v):
        groups = q.shape[1] // k.shape[1]
        return mechanism.weights(q, k, **options) @ v.repeat_interleave(groups, 1)

    inputs = [x.to("cuda", dtype) for x in inputs]
    exact = gradients(create(name, "reference", F64), [x.double() for x in inputs], computed)
    usual = gradients(create(name, "reference", dtype), inputs, plain)
    mechanism = create(name, "auto", dtype)
    assert mechanism.choose(inputs[0], inputs[2]) == "flex"
    found = gradients(mechanism, inputs, computed)
    for one, other, right in zip(found, usual, exact, strict=True):
        error, allowed = (one - right).norm(), 2 * (other - right).norm()
        assert error <= allowed + SLACK[dtype] * right.norm()


@every_case
@pytest.mark.parametrize("masked", [False, True])
def test_no_worse_than_the_matrix_in_bfloat16(name, causal, masked):
    for length in (200, 1024, 4097):  # whole blocks are read without bounds
        inputs = tokens(create(name, "flex", BF16), length)[:3]
        mask = (draw(2, length, seed=9) > -0.8).cuda() if masked else None
        check(name, inputs, BF16, causal=causal, key_mask=mask)


@every_case
def test_no_worse_than_the_matrix_in_float32(name, causal):
    check(name, tokens(create(name, "flex", F32), 1000)[:3], F32, causal=causal)


@pytest.mark.parametrize("name", ["local", "sparse-strided"])
def test_queries_stand_anywhere(name):
    for queries, keys, start in ((300, 1000, None), (300, 1000, 333), (500, 200, 100)):
        inputs = tokens(create(name, "flex", BF16), queries, keys=keys)[:3]
        for causal in (False, True):
            check(name, inputs, BF16, causal=causal, start=start)


@every_pattern
def test_a_cuda_graph_repeats_a_call(name):
    mechanism = create(name, "auto", BF16)
    inputs, others = (
        [x.to("cuda", BF16) for x in tokens(mechanism, 1000, seed=seed)[:3]] for seed in (0, 5)
    )
    check_graph(mechanism, inputs, others)


@every_pattern
def test_a_long_sequence_takes_no_quadratic_memory(name):
    mechanism = create(name, "auto", BF16, key_heads=4)
    inputs = [x.to("cuda", BF16) for x in tokens(mechanism, 32768, batch=1)[:3]]

    def call():
        gradients(mechanism, inputs, lambda mechanism, *x: mechanism(*x)[0])

    call()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    extra = torch.cuda.max_memory_allocated() - before
    assert extra < 20 * sum(x.numel() * x.element_size() for x in inputs)  # all scores: 170 times

"""The chunked op on a GPU: the same numbers, decoding as a graph, compiled without a break."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from cosformer import State, attention, attention_with_state, linear_attention, step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CALLS = {
    "causal": {"causal": True},
    "bidirectional": {},
    "masked": {"key_mask": torch.arange(777).expand(2, -1) < torch.tensor([[777], [500]])},
    "per head": {"causal": True, "horizon": torch.tensor([800.0, 900.0, 1000.0, 4000.0])},
    "raised": {"causal": True, "horizon": 100.0, "weight": "raised_cosine"},
}


def draw(*shape: int, count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(count)]


def outputs(inputs: list[Tensor], grad: Tensor, impl: str, **call: object) -> list[Tensor]:
    """Output and gradients of q, k, v."""
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    out = attention(q, k, v, impl=impl, **call)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def relative_error(x: Tensor, exact: Tensor) -> float:
    return float((x.cpu().double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_output_and_gradients_are_as_exact_as_the_formula(name: str, dtype: torch.dtype) -> None:
    *inputs, grad = draw(2, 4, 777, 48, count=4)
    rounded = [x.to(dtype) for x in (*inputs, grad)]
    call = CALLS[name]
    on_gpu = {k: x.cuda() if isinstance(x, Tensor) else x for k, x in call.items()}
    exact = outputs([x.double() for x in rounded[:3]], rounded[3].double(), "reference", **call)
    gpu = [x.cuda() for x in rounded]
    plain = outputs(gpu[:3], gpu[3], "reference", **on_gpu)
    ours = outputs(gpu[:3], gpu[3], "chunked", **on_gpu)
    for mine, theirs, truth in zip(ours, plain, exact, strict=True):
        assert mine.is_cuda
        allowed = 2 * relative_error(theirs, truth) + 8 * torch.finfo(dtype).eps
        assert relative_error(mine, truth) <= allowed


@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences_equal_separate_calls(causal: bool) -> None:
    q, k, v = (x.cuda() for x in draw(1, 4, 300, 16))
    ends = [0, 3, 140, 300]
    packed = attention(q, k, v, causal=causal, cu_seqlens=torch.tensor(ends).cuda())
    for start, stop in pairwise(ends):
        one = (x[:, :, start:stop] for x in (q, k, v))
        torch.testing.assert_close(packed[:, :, start:stop], attention(*one, causal=causal))


def test_decay_per_token_agrees_with_the_formula() -> None:
    q, k, v = (x.cuda() for x in draw(2, 4, 300, 16))
    decay = -torch.rand(2, 4, 300, dtype=torch.float64, device="cuda")
    call = {"causal": True, "log_decay": decay, "feature_map": "1+elu"}
    torch.testing.assert_close(
        linear_attention(q, k, v, **call), linear_attention(q, k, v, impl="reference", **call)
    )


def test_steps_equal_the_full_pass() -> None:
    q, k, v = (x.cuda() for x in draw(2, 4, 20, 16))
    full = attention(q, k, v, causal=True, horizon=64)
    _, state = attention_with_state(q[:, :, :10], k[:, :, :10], v[:, :, :10], horizon=64)
    for i in range(10, 20):
        one = (x[:, :, i : i + 1] for x in (q, k, v))
        torch.testing.assert_close(step(*one, state), full[:, :, i : i + 1])


def test_a_step_replays_as_a_cuda_graph() -> None:
    q, k, v = (x.float().cuda() for x in draw(2, 4, 10, 16))
    full = attention(q, k, v, causal=True, horizon=64)
    state = State.empty(2, 4, 16, 16, horizon=64, device="cuda")
    fresh = copy.deepcopy(state)
    now = [x[:, :, :1].clone() for x in (q, k, v)]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(*now, fresh)  # warm-up on a state of its own
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(*now, state)
    for i in range(10):
        for slot, x in zip(now, (q, k, v), strict=True):
            slot.copy_(x[:, :, i : i + 1])
        graph.replay()
        torch.testing.assert_close(out, full[:, :, i : i + 1], rtol=1e-4, atol=1e-5)
    assert int(state.position) == 10


def test_it_compiles_without_a_break() -> None:
    q, k, v = (x.float().cuda().requires_grad_() for x in draw(2, 4, 300, 16))
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal=True), fullgraph=True)
    out, grads = compiled(q, k, v), []
    for y in (out, attention(q, k, v, causal=True)):
        grads.append(torch.autograd.grad(y.square().sum(), (q, k, v)))
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_autocast_rounds_inputs_only() -> None:
    q, k, v = (x.float().cuda() for x in draw(2, 4, 2000, 16))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = attention(q, k, v, causal=True)
    exact = attention(*(x.bfloat16().double() for x in (q, k, v)), causal=True)
    assert out.dtype == torch.bfloat16
    assert relative_error(out, exact.cpu()) <= torch.finfo(torch.bfloat16).eps


def test_a_slot_that_does_not_exist_is_named_before_anything_is_written() -> None:
    q, k, v = (x.float().cuda() for x in draw(2, 2, 1, 8))
    position = torch.zeros(3, dtype=torch.int64)
    state = State.empty(3, 2, 8, 8, horizon=50.0, position=position.cuda(), device="cuda")
    with pytest.raises(ValueError, match="slots must be below 3, got 7"):
        step(q, k, v, state, slots=torch.tensor([0, 7], device="cuda"))
    assert not state.key_value.any()
    step(q, k, v, state, slots=torch.tensor([2, -1], device="cuda"))
    assert state.position.tolist() == [0, 0, 1]

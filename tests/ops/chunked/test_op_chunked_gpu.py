"""The chunked op on a GPU: the same numbers in every precision, packed, raised and in steps."""

from itertools import pairwise

import pytest
import torch
from formula import results

from cosformer import State, attention, linear_attention, step

pytestmark = pytest.mark.gpu
CALLS = {
    "causal": {"causal": True},
    "masked": {"key_mask": torch.arange(777).expand(2, -1) < torch.tensor([[777], [500]])},
    "per head": {"causal": True, "horizon": torch.tensor([800.0, 900.0, 1000.0, 4000.0])},
    "raised": {"causal": True, "horizon": 100.0, "weight": "raised_cosine"},
}


def draw(*shape):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, *shape, generator=generator, dtype=torch.float64).unbind()


def relative_error(x, exact):
    return float((x.cpu().double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_output_and_gradients_are_as_exact_as_the_formula(name, dtype):
    inputs, options = [x.to(dtype) for x in draw(2, 4, 777, 48)], dict(CALLS[name])

    def by(impl, inputs):
        return results(lambda *x: attention(*x, impl=impl, **options), inputs)

    exact = by("reference", [x.double() for x in inputs])
    options |= {k: x.cuda() for k, x in options.items() if isinstance(x, torch.Tensor)}
    plain, ours = (by(impl, [x.cuda() for x in inputs]) for impl in ("reference", "chunked"))
    for mine, theirs, truth in zip(ours, plain, exact, strict=True):
        assert mine.is_cuda
        allowed = 2 * relative_error(theirs, truth) + 8 * torch.finfo(dtype).eps
        assert relative_error(mine, truth) <= allowed


def test_raised_cosine_by_kernels_stays_among_the_values():
    q, k, v = (x.float().cuda() for x in draw(1, 2, 17, 8))
    mask = torch.arange(17, device="cuda")[None] == 0
    given = (30 * q.abs(), 30 * k.abs(), v)
    out = attention(*given, causal=True, horizon=16, weight="raised_cosine", key_mask=mask)
    assert out.abs().max() <= 1.01 * v.abs().max()
    assert out[:, :, -1].abs().max() < 0.01


def test_packed_sequences_and_decays_agree_with_the_formula():
    q, k, v = (x.cuda() for x in draw(1, 4, 300, 16))
    ends = [0, 3, 140, 300]
    packed = attention(q, k, v, causal=True, cu_seqlens=torch.tensor(ends).cuda())
    for start, stop in pairwise(ends):
        one = (x[:, :, start:stop] for x in (q, k, v))
        torch.testing.assert_close(packed[:, :, start:stop], attention(*one, causal=True))
    decay = -torch.rand(1, 4, 300, dtype=torch.float64, device="cuda")
    call = {"causal": True, "log_decay": decay, "feature_map": "1+elu"}
    right = linear_attention(q, k, v, impl="reference", **call)
    torch.testing.assert_close(linear_attention(q, k, v, **call), right)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_host_does_not_wait_to_look_at_gates():
    q, k, v = (x.float().cuda() for x in draw(1, 2, 30, 16))
    options = {"causal": True, "log_decay": -torch.rand(1, 2, 30, device="cuda")}
    expected = linear_attention(q, k, v, **options)  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = linear_attention(q, k, v, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, expected)


def test_a_slot_that_does_not_exist_is_named_before_anything_is_written():
    q, k, v = (x.float().cuda() for x in draw(2, 2, 1, 8))
    position = torch.zeros(3, dtype=torch.int64).cuda()
    state = State.empty(3, 2, 8, 8, horizon=50.0, position=position, device="cuda")
    with pytest.raises(ValueError, match="slots must be below 3, got 7"):
        step(q, k, v, state, slots=torch.tensor([0, 7], device="cuda"))
    assert not state.key_value.any()
    step(q, k, v, state, slots=torch.tensor([2, -1], device="cuda"))
    assert state.position.tolist() == [0, 0, 1]

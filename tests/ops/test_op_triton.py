"""The kernels under Triton's interpreter: every option, its gradients, and how torch may use them.

The interpreter multiplies bfloat16 wrongly, so these are float32 and float16; a GPU has the rest.
"""

import pytest
import torch
from kernel_cases import CASES, Case, check, draw, ours, results
from torch.export import Dim, export
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cosformer import (
    State,
    attention,
    attention_with_state,
    linear_attention,
    linear_attention_with_state,
)
from cosformer.ops.triton import launch as passes
from cosformer.ops.triton import tiles

pytestmark = pytest.mark.usefixtures("interpreted", "poisoned")
each_case = pytest.mark.parametrize("name", CASES)


def draw_plain(length=100, heads=2, width=8):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, heads, length, width, generator=generator) + 0.3 for _ in range(3)]


def test_memory_is_poisoned():
    assert torch.empty(100).isnan().all()


@each_case
@pytest.mark.parametrize("length", [1, 100])
def test_every_option_agrees_with_its_formula(name, length):
    check(CASES[name], length, torch.float32)


@pytest.mark.parametrize(
    "name", ["causal", "bidirectional", "gated, scaled", "gated, divided", "masked"]
)
def test_segments_join(name, monkeypatch):
    monkeypatch.setattr(passes, "segment_length", lambda *sizes: 64)  # three of them
    check(CASES[name], 130, torch.float32)


@pytest.mark.parametrize(
    "name", ["causal", "bidirectional", "packed", "retention", "gated, scaled"]
)
def test_half_precision(name):
    check(CASES[name], 100, torch.float16)


@pytest.mark.parametrize(("width", "value_width"), [(1, 1), (40, 96), (130, 3), (200, 256)])
@pytest.mark.parametrize("causal", [True, False])
def test_odd_and_large_widths(width, value_width, causal):
    case = Case(options={"causal": causal}, width=width, value_width=value_width)
    check(case, 40, torch.float32)


def test_nothing_at_all():
    for queries, keys in ((0, 0), (0, 5), (5, 0)):
        q, k = torch.randn(1, 2, queries, 8), torch.randn(1, 2, keys, 8)
        for causal in (True, False):
            leaves = [x.requires_grad_() for x in (q.clone(), k.clone(), k.clone())]
            out = attention(*leaves, causal=causal, impl="triton")
            assert out.shape == q.shape
            assert (out == 0).all()
            for x, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
                assert grad.shape == x.shape
                assert (grad == 0).all()


def test_rows_without_weight_are_zero_and_extremes_stay_finite():
    q, k, v = draw_plain()
    q[:, :, 10] = -1.0
    k[:, :, :5] = -1.0
    out, *grads = results(lambda *x: attention(*x, causal=True, impl="triton"), [q, k, v])
    assert (out[:, :, 10] == 0).all()
    assert (out[:, :, :5] == 0).all()
    assert all(x.isfinite().all() for x in grads)
    huge = [torch.full_like(x, 3e4).half() for x in (q, k, v)]
    out = attention(*huge, causal=True, impl="triton")
    torch.testing.assert_close(out, huge[2])


def test_nan_in_padding_has_no_effect():
    q, k, v = draw_plain()
    mask = torch.arange(100)[None] < 70
    clean = results(lambda *x: attention(*x, causal=True, key_mask=mask, impl="triton"), [q, k, v])
    k[:, :, 70:], v[:, :, 70:] = torch.nan, torch.nan
    dirty = results(lambda *x: attention(*x, causal=True, key_mask=mask, impl="triton"), [q, k, v])
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a, b)


def test_strides_are_respected():
    q, k, v = draw_plain()
    wide = torch.stack([q, k, v], -1).transpose(1, 2).contiguous().transpose(1, 2)
    views = [wide[..., i] for i in range(3)]
    for causal in (True, False):
        assert torch.equal(
            attention(*views, causal=causal, impl="triton"),
            attention(q, k, v, causal=causal, impl="triton"),
        )


def test_a_stream_in_pieces_is_the_whole_and_passes_gradients():
    inputs = [x.repeat(1, 2, 1, 1)[:, :h] for x, h in zip(draw_plain(150), (4, 2, 2), strict=True)]

    def pieces(q, k, v, impl):
        outs, state = [], None
        for start, stop in ((0, 64), (64, 65), (65, 150)):
            part = (x[:, :, start:stop] for x in (q, k, v))
            horizon = 200 if state is None else None
            out, state = attention_with_state(*part, horizon=horizon, state=state, impl=impl)
            outs.append(out)
        return torch.cat([*outs, state.key_value[:, :, 0].repeat(1, 2, 1, 1)], 2)

    expected = results(lambda *x: pieces(*x, impl="chunked"), inputs)
    found = results(lambda *x: pieces(*x, impl="triton"), inputs)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


def test_a_gated_stream_passes_gradients_to_its_gates():
    q, k, v = draw_plain(90)
    gates = -torch.rand(1, 2, 90)

    def stream(q, k, v, gates, impl):
        state = State(torch.ones(1, 2, 1, 8, 8), torch.ones(1, 2, 1, 8), torch.tensor(0), None)
        out, state = linear_attention_with_state(
            q, k, v, state=state, log_decay=gates, feature_map="relu", impl=impl
        )
        return torch.cat([out, state.key_value[:, :, 0]], 2)

    expected, found = (
        results(lambda *x, i=i: stream(*x, impl=i), [q, k, v, gates]) for i in ("chunked", "triton")
    )
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("every", [0, 8, 2])
def test_closed_gates_take_no_precision_from_the_others(every):
    """They leave L at some −3,000, where float32 has steps of 2⁻¹²."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = torch.rand(3, 1, 1, 64, 8, generator=generator)
    gates = -torch.rand(1, 1, 64, generator=generator)
    if every:
        gates[..., ::every] = -torch.inf
    options = {"causal": True, "normaliser": "none"}

    def by(impl, dtype=torch.float32):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = linear_attention(*leaves, log_decay=gates.to(dtype), impl=impl, **options)
        return [out, *torch.autograd.grad(out.sum(), leaves)]

    right = by("reference", torch.float64)
    for found, theirs, exact in zip(by("triton"), by("chunked"), right, strict=True):
        error, usual = (((x.double() - exact) / exact).abs().max() for x in (found, theirs))
        assert error <= 2 * usual + 2**-22


def test_one_tensor_in_every_role():
    (x, *_) = draw_plain()
    expected, found = (
        results(lambda y, i=i: attention(y, y, y, causal=True, impl=i), [x])
        for i in ("chunked", "triton")
    )
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "asked"),
    [("causal", "qkv"), ("causal", "q"), ("bidirectional", "qkv"), ("packed", "kv"),
     ("gated, divided", "qkv"), ("gated, scaled", "qk"), ("masked", "v")],
)  # fmt: skip
def test_the_operators_keep_what_they_promise(name, asked):
    leaves, options = draw(CASES[name], 20)
    call = ours(CASES[name], options, "triton")

    def partly(q, k, v, *gates):
        rows = zip("qkv", (q, k, v), strict=True)
        return call(*(x if each in asked else x.detach() for each, x in rows), *gates)

    with Spy() as spy:
        results(partly, [x.float() for x in leaves])
    assert set(spy.calls) == {"cosformer::kernels_forward", "cosformer::kernels_backward"}
    for op, arguments in spy.calls.values():
        torch.library.opcheck(op, arguments)


class Spy(TorchDispatchMode):
    """Keeps the arguments of our operators."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "cosformer":
            copies = (x.detach().clone() if isinstance(x, torch.Tensor) else x for x in args)
            self.calls[func._schema.name] = func, tuple(copies)
        return func(*args, **(kwargs or {}))


def attend(q, k, v):
    return attention(q, k, v, causal=True, impl="triton")


def test_compiled_without_a_break():
    inputs = draw_plain()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for a, b in zip(results(attend, inputs), results(compiled, inputs), strict=True):
        torch.testing.assert_close(b, a)


def test_a_compiled_graph_serves_other_lengths():
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (70, 90, 300):
        inputs = draw_plain(length)
        torch.testing.assert_close(compiled(*inputs), attend(*inputs))


def test_exported_with_an_open_length():
    class Attend(torch.nn.Module):
        def forward(self, q, k, v):
            return attend(q, k, v)

    length = {2: Dim("length", min=2, max=4096)}
    program = export(Attend(), tuple(draw_plain(70)), dynamic_shapes=[length] * 3)
    inputs = draw_plain(133)
    torch.testing.assert_close(program.module()(*inputs), attend(*inputs))


def test_double_backward_goes_the_torch_way():
    inputs = [x.requires_grad_() for x in draw_plain(70)]
    seconds = []
    for impl in ("chunked", "triton"):
        out = attention(*inputs, causal=True, impl=impl)
        first = torch.autograd.grad(out.pow(2).sum(), inputs, create_graph=True)
        seconds.append(torch.autograd.grad(sum(x.pow(2).sum() for x in first), inputs))
    for a, b in zip(*seconds, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-4 * float(a.abs().max()))


def test_function_transforms_and_checkpointing():
    q, k, v = (torch.stack([x, 2 * x]) for x in draw_plain(70))
    mapped = torch.func.vmap(attend)(q, k, v)
    torch.testing.assert_close(mapped, torch.stack([attend(*x) for x in zip(q, k, v, strict=True)]))
    grads = torch.func.vmap(torch.func.grad(lambda *x: attend(*x).sum()))(q, k, v)
    singles = [torch.func.grad(lambda *x: attend(*x).sum())(*x) for x in zip(q, k, v, strict=True)]
    torch.testing.assert_close(grads, torch.stack(singles))
    inputs = draw_plain(70)
    saved = results(lambda *x: checkpoint(attend, *x, use_reentrant=False), inputs)
    for a, b in zip(results(attend, inputs), saved, strict=True):
        assert torch.equal(a, b)


def test_what_the_kernels_cannot_do_is_refused_with_a_remedy():
    x = torch.randn(1, 1, 5, 8)
    with pytest.raises(ValueError, match=r"impl='triton' needs float32.*got float64.*'auto'"):
        attention(x.double(), x.double(), x.double(), impl="triton")
    wide = torch.randn(1, 1, 5, 257)
    with pytest.raises(ValueError, match="widths up to 256, got 257 and 257"):
        attention(wide, wide, wide, impl="triton")
    with pytest.raises(ValueError, match="as many queries as keys under a decay, got 3 and 5"):
        linear_attention(x[:, :, :3], x, x, causal=True, gamma=0.9, impl="triton")


def test_segments_are_whole_chunks_and_enough():
    assert tiles.segment_length(programs=128, length=4096) == 2048
    assert tiles.segment_length(programs=300, length=4096) == 4096
    assert tiles.segment_length(programs=16, length=65536) == 4096
    assert tiles.segment_length(programs=1, length=100) == 128
    assert tiles.segment_length(programs=1, length=0) == 64
    for programs in (1, 7, 16, 100):
        for length in (1, 63, 1000, 4097, 100_000):
            rows = tiles.segment_length(programs, length)
            assert rows % 64 == 0
            assert programs * -(-length // rows) <= max(tiles.FEW_PROGRAMS, programs)


@pytest.mark.parametrize("scale", [1000.0, 1e-6])
def test_scales_that_lead_out_of_float16_are_refused(scale):
    q, k, v = (x.half() for x in torch.randn(3, 1, 1, 20, 8).unbind())
    options = {"causal": True, "feature_map": "relu", "normaliser": "none", "scale": scale}
    with pytest.raises(ValueError, match=f"in float16, got {scale}"):
        linear_attention(q, k, v, impl="triton", **options)
    by_torch = linear_attention(q, k, v, impl="chunked", **options)
    assert torch.equal(linear_attention(q, k, v, **options), by_torch)

"""The kernels under Triton's interpreter: every option, its gradients, and how torch may use them.

The interpreter multiplies bfloat16 wrongly, so these are float32 and float16; a GPU has the rest.
It takes a second per hundred tokens and head.
"""

import math

import pytest
import torch
from formula import in_pieces, results
from kernel_cases import CASES, ROUNDINGS, Case, check, draw, ours
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cosformer import (
    State,
    attention,
    attention_with_state,
    linear_attention,
    linear_attention_with_state,
)
from cosformer.ops.triton import launch, tiles

pytestmark = pytest.mark.usefixtures("interpreted", "poisoned")
QUICK = ("causal", "grouped, both ways", "masked", "packed", "gated quotient")
FEW = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]


def draw_plain(length=40, heads=1, width=8):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, heads, length, width, generator=generator) + 0.3 for _ in range(3)]


def close(found, right, rtol=1e-4, atol=2e-5):
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", FEW)
def test_every_option_agrees_with_its_formula(name):
    for length in (1, 35):  # a chunk has 32 rows
        check(CASES[name], length, torch.float32)


@pytest.mark.parametrize("name", ["causal", "gated, divided"])
def test_segments_join(name, monkeypatch):
    monkeypatch.setattr(launch, "segment_length", lambda *sizes: 64)
    check(CASES[name], 70, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bidirectional", "packed", "retention", "gated, scaled"])
def test_half_precision(name):
    check(CASES[name], 40, torch.float16)


@pytest.mark.parametrize(("width", "value_width"), [(1, 40), (130, 3)])
@pytest.mark.parametrize("causal", [True, False])
def test_odd_and_large_widths(width, value_width, causal):
    """Of one column dq is 0: all that is seen are roundings of terms that cancel."""
    case = Case(options={"causal": causal}, width=width, value_width=value_width)
    check(case, 10, torch.float32, roundings=ROUNDINGS * (20 if width == 1 else 1))


def test_nothing_at_all():
    for queries, keys in ((0, 0), (0, 5), (5, 0)):
        q, k = torch.randn(1, 2, queries, 8), torch.randn(1, 2, keys, 8)
        for causal in (True, False):
            leaves = [x.requires_grad_() for x in (q.clone(), k.clone(), k.clone())]
            out = attention(*leaves, causal=causal, impl="triton")
            assert out.shape == q.shape
            for x in (out, *torch.autograd.grad(out.sum(), leaves)):
                assert (x == 0).all()


def attend(q, k, v, **options):
    return attention(q, k, v, causal=True, impl="triton", **options)


def test_rows_without_weight_are_zero_and_extremes_stay_finite():
    q, k, v = draw_plain(35)
    q[:, :, 10] = k[:, :, :5] = -1.0
    out, *grads = results(attend, [q, k, v])
    assert (out[:, :, [0, 1, 2, 3, 4, 10]] == 0).all()
    assert all(x.isfinite().all() for x in grads)
    huge = [torch.full_like(x, 3e4).half() for x in (q, k, v)]
    torch.testing.assert_close(attend(*huge), huge[2])


def test_nan_in_padding_has_no_effect_and_strides_are_respected():
    q, k, v = draw_plain(35)
    mask = torch.arange(35)[None] < 20
    clean = results(lambda *x: attend(*x, key_mask=mask), [q, k, v])
    k[:, :, 20:], v[:, :, 20:] = torch.nan, torch.nan
    wide = torch.stack([q, k, v], -1).transpose(1, 2).contiguous().transpose(1, 2)
    views = [wide[..., i] for i in range(3)]
    for a, b in zip(clean, results(lambda *x: attend(*x, key_mask=mask), views), strict=True):
        assert torch.equal(a, b)


def test_a_stream_in_pieces_is_the_whole_and_passes_gradients():
    inputs = [x[:, :h] for x, h in zip(draw_plain(40, heads=2), (2, 1, 1), strict=True)]

    def pieces(*x, impl):
        cuts = (0, 33, 34, 40)
        out, state = in_pieces(attention_with_state, x, cuts, horizon=200, impl=impl)
        return torch.cat([out, state.key_value[:, :, 0].repeat(1, 2, 1, 1)], 2)

    right, found = (
        results(lambda *x, i=i: pieces(*x, impl=i), inputs) for i in ("chunked", "triton")
    )
    close(found, right)


def test_a_gated_stream_passes_gradients_to_its_gates():
    def stream(q, k, v, gates, impl):
        sums = (torch.ones(1, 1, 1, 8, 8), torch.ones(1, 1, 1, 8))
        state = State(*sums, torch.tensor(0), math.inf, log_decay=torch.zeros(1, 1).double())
        out, state = linear_attention_with_state(
            q, k, v, state=state, log_decay=gates, feature_map="relu", impl=impl
        )
        return torch.cat([out, state.key_value[:, :, 0]], 2)

    inputs = [*draw_plain(), -torch.rand(1, 1, 40)]
    right, found = (
        results(lambda *x, i=i: stream(*x, impl=i), inputs) for i in ("chunked", "triton")
    )
    close(found, right)


@pytest.mark.parametrize("every", [8, 2])
def test_closed_gates_take_no_precision_from_the_others(every):
    """They leave L at some −3,000, where float32 has steps of 2⁻¹²."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.rand(3, 1, 1, 64, 8, generator=generator)
    gates = -torch.rand(1, 1, 64, generator=generator)
    gates[..., ::every] = -torch.inf
    options = {"causal": True, "normaliser": "none"}

    def by(impl, dtype=torch.float32):
        leaves = [x.to(dtype).requires_grad_() for x in rows]
        out = linear_attention(*leaves, log_decay=gates.to(dtype), impl=impl, **options)
        return [out, *torch.autograd.grad(out.sum(), leaves)]

    right = by("reference", torch.float64)
    for found, theirs, exact in zip(by("triton"), by("chunked"), right, strict=True):
        error, usual = (((x.double() - exact) / exact).abs().max() for x in (found, theirs))
        assert error <= 2 * usual + 2**-22


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "asked"),
    [("causal", "qkv"), ("packed", "kv"), ("gated, divided", "qkv"), ("masked", "v")],
)
def test_the_operators_keep_what_they_promise(name, asked):
    leaves, options = draw(CASES[name], 4)
    call = ours(CASES[name], options, "triton")

    def partly(q, k, v, *gates):
        rows = zip("qkv", (q, k, v), strict=True)
        return call(*(x if each in asked else x.detach() for each, x in rows), *gates)

    with Spy() as spy:
        results(partly, [x.float() for x in leaves])
    assert set(spy.calls) == {"cosformer::kernels_forward", "cosformer::kernels_backward"}
    for op, arguments in spy.calls.values():
        torch.library.opcheck(op, arguments)


@pytest.mark.slow
def test_a_compiled_graph_has_no_break_and_serves_other_lengths():
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    close(results(compiled, draw_plain(35)), results(attend, draw_plain(35)))
    for length in (20, 70):
        torch.testing.assert_close(compiled(*draw_plain(length)), attend(*draw_plain(length)))


def test_double_backward_goes_the_torch_way():
    seconds = []
    for impl in ("chunked", "triton"):
        inputs = [x.requires_grad_() for x in draw_plain(35)]
        out = attention(*inputs, causal=True, impl=impl)
        first = torch.autograd.grad(out.pow(2).sum(), inputs, create_graph=True)
        seconds.append(torch.autograd.grad(sum(x.pow(2).sum() for x in first), inputs))
    for a, b in zip(*seconds, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-4 * float(a.abs().max()))


@pytest.mark.slow
def test_function_transforms_and_checkpointing():
    q, k, v = (torch.stack([x, 2 * x]) for x in draw_plain(20))
    each = list(zip(q, k, v, strict=True))
    torch.testing.assert_close(
        torch.func.vmap(attend)(q, k, v), torch.stack([attend(*x) for x in each])
    )
    slope = torch.func.grad(lambda *x: attend(*x).sum())
    torch.testing.assert_close(
        torch.func.vmap(slope)(q, k, v), torch.stack([slope(*x) for x in each])
    )
    saved = results(lambda *x: checkpoint(attend, *x, use_reentrant=False), draw_plain(20))
    assert all(map(torch.equal, saved, results(attend, draw_plain(20))))


def test_segments_are_whole_chunks_and_enough():
    assert tiles.segment_length(programs=128, length=4096) == 2048
    assert tiles.segment_length(programs=16, length=65536) == 4096
    assert tiles.segment_length(programs=1, length=0) == 64
    for programs in (1, 7, 16, 100, 300):
        for length in (1, 63, 1000, 4097, 100_000):
            rows = tiles.segment_length(programs, length)
            assert rows % 64 == 0
            assert programs * -(-length // rows) <= max(tiles.FEW_PROGRAMS, programs)

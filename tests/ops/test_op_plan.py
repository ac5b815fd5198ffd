"""How a sequence is cut and which code is chosen: pure functions that a table can state."""

from typing import NamedTuple

import pytest
import torch
from op_formula import tokens

from cosformer import attention, attention_with_state, linear_attention
from cosformer.ops import dispatch
from cosformer.ops.chunked.chunks import CHUNK_LENGTH, CPU_CHUNKS, GPU_CHUNKS, Span, plan
from cosformer.ops.dispatch import IMPLEMENTATIONS, auto_impl
from cosformer.ops.problem.arguments import build
from cosformer.ops.triton import operators as fused

LENGTHS = [0, 1, 2, 63, 64, 127, 128, 129, 1000, 4096, 4097, 100_001]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("heads", [0, 1, 8, 32, 33, 5000])
@pytest.mark.parametrize("length", LENGTHS)
def test_spans_cover_the_sequence_once_and_in_order(length, heads, device):
    spans = plan(length, heads, device)
    rows = [span.rows for span in spans]
    assert [r.start for r in rows] == [0, *(r.stop for r in rows[:-1])][: len(rows)]
    assert (rows[-1].stop if rows else 0) == length
    most = CPU_CHUNKS if device == "cpu" else GPU_CHUNKS
    for span in spans:
        assert span.stop - span.start == span.chunks * span.chunk_length > 0
        assert not span.padded
        assert span.chunk_length <= CHUNK_LENGTH
        assert span.chunks == 1 or span.chunks * heads <= most


PLANS = {
    (40, 8, "cpu"): [Span(0, 40, 1, 40)],
    (1000, 16, "cpu"): [Span(0, 512, 8, 64), Span(512, 960, 7, 64), Span(960, 1000, 1, 40)],
    (1000, 8, "cuda"): [Span(0, 960, 15, 64), Span(960, 1000, 1, 40)],
    (128, 5000, "cpu"): [Span(0, 64, 1, 64), Span(64, 128, 1, 64)],
}


@pytest.mark.parametrize("call", PLANS, ids=str)
def test_whole_chunks_go_in_groups_and_the_rest_is_a_shorter_one(call):
    assert plan(*call) == PLANS[call]


class OnGpu(NamedTuple):
    """What the choice looks at."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_cuda: bool = True


@pytest.mark.parametrize(
    ("dtype", "width", "impl"),
    [
        (torch.bfloat16, 64, "triton"),
        (torch.float32, 256, "triton"),
        (torch.float64, 64, "chunked"),
        (torch.bfloat16, 257, "chunked"),
    ],
)
def test_auto_on_a_gpu_takes_the_kernels_where_they_serve(dtype, width, impl, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(fused, "INTERPRETED", False)
    x = OnGpu(dtype, (1, 2, 10, width))
    problem = build(*tokens()[:2], **PLAIN)
    assert auto_impl(x, x, x, problem) == impl
    monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    assert auto_impl(x, x, x, problem) == "chunked"


PLAIN = {
    "causal": True,
    "theta": torch.zeros(1, 1, dtype=torch.float64),
    "weight": "plain",
    "feature_map": "relu",
    "rule": "clamp",
    "eps": 1e-6,
}


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_an_explicit_choice_calls_that_code_and_no_other(impl, monkeypatch):
    calls = []
    for name, function in list(IMPLEMENTATIONS.items()):

        def counted(*args, name=name, function=function):
            calls.append(name)
            return function(*args)

        monkeypatch.setitem(IMPLEMENTATIONS, name, counted)
    if impl == "triton":
        pytest.importorskip("triton")
    x = [y.float() for y in tokens()]
    attention(*x, impl=impl)
    linear_attention(*x, impl=impl)
    attention_with_state(*x, horizon=10, impl=impl)
    assert calls == [impl] * 3
    attention(*x)
    assert calls[-1] == "chunked"


@pytest.mark.parametrize("impl", ["flash", "Chunked", ""])
def test_an_unknown_impl_lists_the_known(impl):
    for function, options in (
        (attention, {}),
        (linear_attention, {}),
        (attention_with_state, {"horizon": 10}),
    ):
        with pytest.raises(
            ValueError, match=rf"impl must be one of auto, .*, got '{impl}'"
        ) as caught:
            function(*tokens(), impl=impl, **options)
        assert all(name in str(caught.value) for name in IMPLEMENTATIONS)

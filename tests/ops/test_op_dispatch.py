"""How a sequence is cut and which code is chosen: pure functions that a table can state."""

from types import SimpleNamespace

import pytest
import torch
from formula import tokens

from cosformer import attention, attention_with_state, linear_attention
from cosformer.ops import dispatch
from cosformer.ops.chunked.chunks import CHUNK_LENGTH, CPU_CHUNKS, GPU_CHUNKS, Span, plan
from cosformer.ops.dispatch import IMPLEMENTATIONS, choose
from cosformer.ops.triton import passes as by_triton

LENGTHS = [0, 1, 2, 63, 64, 127, 128, 129, 1000, 4096, 4097, 100_001]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("heads", [0, 1, 8, 32, 33, 5000])
@pytest.mark.parametrize("length", LENGTHS)
def test_spans_cover_the_sequence_once_and_in_order(length, heads, device):
    spans = plan(length, 7, heads, device).queries
    assert plan(7, length, heads, device).keys == spans
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
    (40, 8, "cpu"): (Span(0, 40, 1, 40),),
    (1000, 16, "cpu"): (
        Span(0, 512, 8, 64),
        Span(512, 960, 7, 64),
        Span(960, 1000, 1, 40),
    ),
    (1000, 8, "cuda"): (
        Span(0, 960, 15, 64),
        Span(960, 1000, 1, 40),
    ),
    (128, 5000, "cpu"): (
        Span(0, 64, 1, 64),
        Span(64, 128, 1, 64),
    ),
}


@pytest.mark.parametrize("call", PLANS, ids=str)
def test_whole_chunks_go_in_groups_and_the_rest_is_a_shorter_one(call):
    length, heads, device = call
    assert plan(length, length, heads, device) == (PLANS[call], PLANS[call])


PLAIN = SimpleNamespace(query_decay=None, gates=None, query_start=0, scale=1.0)


def on_gpu(dtype=torch.bfloat16, width=64):
    """What the choice looks at."""
    return SimpleNamespace(dtype=dtype, shape=(1, 2, 10, width), is_cuda=True)


@pytest.mark.parametrize(
    ("serving", "impl"),
    [
        ({"hopper", "triton"}, "hopper"),
        ({"hopper"}, "hopper"),
        ({"triton"}, "triton"),
        (set(), "chunked"),
    ],
)
def test_auto_on_a_gpu_takes_the_first_kernels_that_serve(serving, impl, monkeypatch):
    monkeypatch.setattr(
        dispatch, "why_not", lambda name, *_: None if name in serving else "something else"
    )
    x = on_gpu()
    assert choose(x, x, x, PLAIN) == impl
    x.is_cuda = False
    assert choose(x, x, x, PLAIN) == "chunked"


@pytest.mark.parametrize(
    ("dtype", "width", "reason"),
    [
        (torch.bfloat16, 64, None),
        (torch.float32, 256, None),
        (torch.float64, 64, "float32, bfloat16 or float16, got float64"),
        (torch.bfloat16, 257, "widths up to 256, got 257 and 257"),
    ],
)
def test_triton_says_what_it_needs(dtype, width, reason, monkeypatch):
    monkeypatch.setattr(by_triton, "INTERPRETED", False)
    monkeypatch.setattr(by_triton, "HAS_TRITON", True)
    x = on_gpu(dtype, width)
    assert by_triton.why_not(x, x, x, PLAIN) == reason
    monkeypatch.setattr(by_triton, "HAS_TRITON", False)
    assert by_triton.why_not(x, x, x, PLAIN) == "the package triton"


@pytest.mark.parametrize("impl", ["reference", "chunked", "triton"])
def test_an_explicit_choice_calls_that_code_and_no_other(impl, monkeypatch):
    if impl == "triton":
        pytest.importorskip("triton")
    calls = []
    attend, reference = dispatch.attend, dispatch.reference

    def counted(*args, impl, **options):
        calls.append(impl)
        return attend(*args, impl=impl, **options)

    monkeypatch.setattr(dispatch, "attend", counted)
    monkeypatch.setattr(
        dispatch, "reference", lambda *args: (calls.append("reference"), reference(*args))[1]
    )
    x = [y.float() for y in tokens()]
    attention(*x, impl=impl)
    linear_attention(*x, impl=impl)
    attention_with_state(*x, horizon=10, impl=impl)
    assert calls == [impl] * 3
    attention(*x)
    assert calls[-1] == "chunked"


def test_an_explicit_choice_that_cannot_serve_says_why():
    with pytest.raises(ValueError, match=r"impl='hopper' needs .*: use impl='auto'"):
        attention(*tokens(), impl="hopper")


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

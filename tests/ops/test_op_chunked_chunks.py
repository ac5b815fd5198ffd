"""How a sequence is cut: a pure function that a table can state."""

import pytest

from cosformer.ops.chunked.chunks import CHUNK_LENGTH, CPU_CHUNKS, GPU_CHUNKS, Span, plan

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

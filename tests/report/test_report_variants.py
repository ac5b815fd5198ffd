"""The table of attention as models use it: every ratio is to the line that it should be to."""

import pytest
from row_cases import cells, changed

from cosformer.records import Run
from cosformer.report import tables
from cosformer.report.variants import variant_table

RUN = Run(
    {"device": "cuda", "name": "Test GPU"}, {"torch": "2.11.0"}, "0123", 0, "2026-01-02T03:04:05"
)
LARGE = {"batch": 8, "heads": 16, "length": 4096, "width": 64}
BATCH = {"batch": 64, "heads": 16, "length": 1024, "width": 64}
DRAWN = {**BATCH, "length": 4096, "packing": "drawn", "tokens": 2**17}


def _measured(candidate, on_gpu, *, run=RUN, causal=True, dtype="bfloat16", **cell):
    """Rows of both passes: the caller waits twice as long as the GPU takes, both passes thrice."""
    found = []
    for pass_name, factor in (("forward", 1), ("forward_backward", 3)):
        at = {"candidate": candidate, "causal": causal, "dtype": dtype, "repeats": 5, **cell}
        at["pass"] = pass_name
        found.append(run.row("time", 2 * factor * on_gpu, "ms", **at))
        found.append(run.row("time_graph", factor * on_gpu, "ms", **at))
        found.append(run.row("floor_ratio", 1.5 * factor, "x", **at))
    return found


@pytest.fixture
def variants():
    return [
        *_measured("auto", 1.0, **LARGE),
        *_measured("chunked", 50.0, **LARGE),
        *_measured("decay", 1.1, **LARGE),
        *_measured("gates", 1.25, **LARGE),
        *_measured("sdpa_cudnn", 4.0, **LARGE),
        *_measured("fla_retention", 3.0, **LARGE),
        *_measured("fla_simple_gla", 5.0, **LARGE),
        *_measured("fla_gla", 6.0, **LARGE),
        *_measured("auto", 0.9, causal=False, **LARGE),
        *_measured("decay", 2.2, causal=False, **LARGE),
        *_measured("auto", 1.05, key_heads=4, **LARGE),
        *_measured("auto", 1.02, dtype="float16", **LARGE),
        *_measured("auto", 2.0, **BATCH),
        *_measured("auto", 2.2, packing="packed", tokens=2**16, **BATCH),
        *_measured("auto", 4.8, **DRAWN),
    ]


def test_every_line_has_the_ratio_that_it_is_judged_by(variants):
    header, _, *lines = cells(variant_table(variants))
    assert header[2:] == ["ms", "GPU ms", "× floor", "ratio", "peers"]
    size = "8 × 16 × 4,096 × 64"
    assert [(line[0], line[1], line[5]) for line in lines] == [
        ("causal, no decay", "64 × 16 × 1,024 × 64", "–"),
        ("causal, no decay", size, "–"),
        ("causal, a decay per head", size, "1.10 / 1.10 of no decay"),
        ("causal, a decay per token", size, "1.25 / 1.25 of no decay"),
        ("causal, no decay", "8 × 16 on 4 × 4,096 × 64", "1.05 / 1.05 of 16 on 16"),
        ("causal, no decay", "64 packed × 16 × 1,024 × 64", "1.10 / 1.10 of the batch"),
        # twice the tokens of the batch in 2.4 times its time
        ("causal, no decay", "64 packed × 16 × 16 … 4,096 × 64", "1.20 / 1.20 of the batch"),
        ("full, a decay per head", size, "2.00 / 2.00 of causal"),
        ("causal, no decay, float16", size, "1.02 / 1.02 of bfloat16"),
    ]
    assert lines[1][2:5] == ["2 / 6", "1 / 3", "1.50 / 4.50"]


def test_peers_stand_beside_the_line_that_they_are_peers_of(variants):
    _, _, *lines = cells(variant_table(variants))
    peers = {line[0]: line[-1] for line in lines if line[1] == "8 × 16 × 4,096 × 64"}
    assert peers["causal, no decay"] == "softmax (cuDNN) 8 / 24"
    assert peers["causal, a decay per head"] == "retention (fla) 6 / 18"
    both = "simple GLA (fla) 10 / 30; GLA, a gate per column (fla) 12 / 36"
    assert peers["causal, a decay per token"] == both
    assert peers["full, a decay per head"] == "–"


def test_peers_are_explained_where_they_are_shown(variants):
    assert "retention, simple GLA and GLA have a decay" in variant_table(variants)
    ours = [row for row in variants if not row.config["candidate"].startswith("fla")]
    assert "GLA" not in variant_table(ours)


def test_a_cell_measured_again_is_shown_as_the_newest_run_has_it(variants):
    later = Run(RUN.hardware, RUN.versions, "4567", 0, "2026-01-03T03:04:05")
    again = _measured("decay", 1.5, run=later, **LARGE)
    table = variant_table([*variants, *again])
    assert "1.50 / 1.50 of no decay" in table
    assert "1.10 / 1.10 of no decay" not in table
    assert "4567" in table


def test_steps_and_first_calls_have_tables_of_their_own(variants):
    assert "decoding step" not in variant_table(variants)
    at = {"heads": 16, "length": 1, "width": 64, "causal": True, "dtype": "bfloat16", "repeats": 5}
    for batch, name, ratio in ((8, "step", 1.2), (8, "step_decay", 1.25), (64, "step", 1.1)):
        about = {**at, "batch": batch, "candidate": name, "pass": "step"}
        variants.append(RUN.row("step_time_graph", 0.004, "ms", **about))
        variants.append(RUN.row("step_traffic_ratio", ratio, "x", **about))
    for cache, seconds in (("empty", 4.5), ("full", 0.25)):
        about = {**at, **LARGE, "key_heads": 4, "candidate": "decay", "cache": cache, "repeats": 1}
        about["pass"] = "forward_backward"
        variants.append(RUN.row("first_call", seconds, "s", **about))
    lines = cells(variant_table(variants))
    assert ["8", "0.004", "1.20", "0.004", "1.25"] in lines
    assert ["64", "0.004", "1.10", "–", "–"] in lines
    grouped = "8 × 16 on 4 × 4,096 × 64"
    assert ["a decay per head, bfloat16", grouped, "4.50", "0.25"] in lines


def test_on_a_cpu_one_run_is_shown_and_ratios_are_of_what_the_caller_sees(rows):
    ours = [row for row in rows if row.what == "time" and row.config["candidate"] == "chunked"]
    decays = [changed(row, value=1.25 * row.value, candidate="decay") for row in ours]
    _, _, *lines = cells(variant_table([*rows, *decays]))
    assert lines[3][:3] == ["causal, a decay per head", "1 × 8 × 256 × 64", "1.25 / 3.75"]
    assert {line[3] for line in lines} == {"–", "1.25 / 1.25 of no decay"}
    assert lines[0][-1] == "softmax (SDPA) 0.25 / 0.75"


def test_other_tables_do_not_mix_variants_with_plain_attention(variants):
    plain = [*_measured("auto", 1.0, **LARGE), *_measured("sdpa_cudnn", 4.0, **LARGE)]
    plain += _measured("auto", 2.0, **BATCH)
    kept = ("auto", "sdpa_cudnn")
    special = {"key_heads", "packing"}
    others = [
        row
        for row in variants
        if row.config["candidate"] not in (*kept, "chunked")
        or row.config.keys() & special
        or row.config["dtype"] == "float16"
    ]
    for make in (tables.time_table, tables.speed_table):
        assert make([*plain, *others]) == make(plain)

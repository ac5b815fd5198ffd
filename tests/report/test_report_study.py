"""The table of a study says what its rows say."""

import re
from dataclasses import replace

import pytest
from row_cases import RUN, SIZE, STUDY_ROWS, cells, studied

from cosformer.report.readme import renew
from cosformer.report.study import study_figure
from cosformer.report.tables import TABLES


def test_every_entry_stands_at_its_best_rate_beside_softmax_the_best_first():
    first, _ = TABLES["study"](STUDY_ROWS).split("7,500 steps")
    header, _, *lines = cells(first)
    assert header[:5] == ["entry", "rate 0.001", "rate 0.003", "mean of seeds", "against softmax"]
    rest = ["2 MiB", "4.81 M"]
    assert lines == [
        ["multiscale", "1.800", "**1.500**", "1.550 ± 0.071 (2)", "-0.050", "1.750 / 1.450",
         "–", *rest],
        ["softmax", "1.700", "**1.600**", "1.600", "–", "1.800 / 1.500", "123,456", *rest],
        ["cosformer", "**2.900**", "diverged", "2.900", "+1.300", "3.100 / 2.800", "–", *rest],
    ]  # fmt: skip


def test_longer_runs_have_a_table_of_their_own_and_the_line_below_says_whence():
    *_, longer = TABLES["study"](STUDY_ROWS).split(
        "7,500 steps of 32 × 1,024 tokens of enwik8, preset small, bits per"
    )
    assert cells(longer)[2][:3] == ["softmax", "**1.400**", "1.400"]
    for word in ("Test GPU", "enwik8", "first 128", "last 256", "0123456789"):
        assert word in longer


def test_longer_sequences_have_a_table_and_speeds_of_their_own():
    longer = studied("softmax", 3e-3, 1.3, scale="4k", length=4096, batch=8, stream_bytes={})
    *_, last = TABLES["study"]([*STUDY_ROWS, longer]).split("1,500 steps of 8 × 4,096 tokens")
    assert cells(last)[2][:2] == ["softmax", "**1.300**"]
    assert "100,000" not in last  # others ran beside it
    assert "123,456" not in last


def test_masked_bytes_have_no_stream_and_a_unit_of_their_own():
    masked = {"what": "bits_per_masked_byte", "stream_bytes": {}}
    table = TABLES["study"]([studied("multiscale", 1e-3, 3.0, **masked)])
    assert "bits per masked byte" in table
    assert cells(table)[2] == ["multiscale", "**3.000**", "3.000", "–", "3.200 / 2.900",
                               "–", "–", "4.81 M"]  # fmt: skip


def test_losses_beyond_the_training_length_have_a_table_of_their_own():
    far = [2.0, 2.25, 9.0, 2.5, 9.0, 9.0, 9.0, None]
    more = studied("softmax", 3e-3, 1.5, seed=1, far=[bits and bits + 0.5 for bits in far])
    rows = [studied("softmax", 3e-3, 1.6, far=far), more, studied("cosformer", 3e-3, 1.0, far=None)]
    _, table = TABLES["study"](rows).split("longer sequences, bits per byte of the 1,024 bytes")
    assert cells(table) == [
        ["entry", "1,024", "2,048", "4,096", "8,192"],
        [":--", *["--:"] * 4],
        ["softmax", "2.250", "2.500", "2.750", "–"],
    ]
    assert "longer sequences" not in TABLES["study"](STUDY_ROWS)


def test_probes_stand_at_the_rate_that_is_best_on_validation():
    def answered(entry, probe, rate, value, valid, *, length, seed=0, **more):
        at = {"entry": entry, "probe": probe, "task": probe.split("-")[0], "rate": rate}
        at |= {"seed": seed, "valid": valid, "length": length, "steps": 3000, "dtype": "bfloat16"}
        return RUN.row("accuracy", value, "accuracy", **at, **more)

    long = {"length": 256, "by_length": {"256": 0.75, "1024": 0.5}}
    short = {"length": 256, "by_length": {"256": 0.5, "1024": None}}
    rows = [
        answered("softmax", "mqar-512", 1e-3, 0.5, 0.9, length=512),
        answered("softmax", "mqar-512", 3e-3, 1.0, 0.8, length=512),  # better on test alone
        answered("softmax", "mqar-64", 1e-3, 0.5, 0.9, length=64),
        answered("softmax", "mqar-64", 1e-3, 0.7, 0.9, length=64, seed=1),
        answered("cosformer", "induction", 1e-3, 0.5, 0.5, **short),
        answered("softmax", "induction", 1e-3, 0.75, 0.5, **long),
        RUN.row("diverged", 7, "steps", entry="cosformer", probe="mqar-64"),
    ]
    header, _, *lines = cells(TABLES["probes"](rows))
    lengths = ["induction, 256 tokens", "induction, 1,024 tokens"]
    assert header == ["entry", *lengths, "mqar-64", "mqar-512"]
    assert lines == [
        ["softmax", "75.0", "50.0", "60.0 ± 14.1 (2)", "50.0"],
        ["cosformer", "50.0", "–", "–", "–"],
    ]


def test_curves_are_of_the_best_entries_of_the_longest_runs_against_tokens_and_seconds():
    many = [studied(f"entry-{n}", 3e-3, 1.0 + n / 10) for n in range(6)]
    many += [studied(f"entry-{n}", 3e-3, 1.0 + n / 10, mechanism="linear") for n in (6, 7)]
    picture = study_figure([*many, *STUDY_ROWS[:8], STUDY_ROWS[-1]], "svg").decode()
    drawn = re.findall("<!-- (.*?) -->", picture)  # words are outlines, beside what they say
    shown = [f"entry-{n}" for n in (0, 1, 2, 3, 6)]  # the last is the best without exact layers
    assert [name for name in drawn if name.startswith("entry")] == shown
    assert {"softmax", "position", "million tokens", "seconds of the device"} <= set(drawn)
    longest = re.findall("<!-- (.*?) -->", study_figure(STUDY_ROWS, "svg").decode())
    assert "softmax" in longest
    assert "multiscale" not in longest
    long = studied("far-sighted", 3e-3, 1.3, scale="16k", length=16_384)
    assert "far-sighted" not in study_figure([*STUDY_ROWS, long], "svg").decode()
    assert "far-sighted" in study_figure([*STUDY_ROWS, long], "svg", scale="16k").decode()
    untimed = study_figure(many, "svg").decode()
    assert "million tokens" in untimed
    assert "seconds of the device" not in untimed


def test_an_entry_that_always_diverged_is_shown():
    lost = RUN.row(
        "diverged", 70, "steps", entry="cosformer", rate=1e-3, seed=0, steps=1500, **SIZE
    )
    *_, line = cells(TABLES["study"]([studied("softmax", 1e-3, 1.7), lost]))
    assert line == ["cosformer", "diverged", *["–"] * 6]


def test_a_run_counts_once_and_runs_on_another_text_stand_apart():
    softmax = studied("softmax", 3e-3, 1.6)
    other = replace(studied("gated", 3e-3, 1.7), hardware={"name": "Other GPU"}, date="2025-01-01")
    lost = RUN.row("diverged", 7, "steps", entry="softmax", rate=6e-3, seed=0, steps=1500, **SIZE)
    rows = [replace(softmax, value=9.0), softmax, other, studied("softmax", 1e-3, 1.7), lost]
    table = TABLES["study"]([*rows, studied("gated", 3e-3, 1.0, text="another")])
    another, usual = table.split("1,500 steps of 32 × 1,024 tokens of enwik8")
    assert "tokens of another text" in another
    assert cells(another)[2:] == [["gated", "**1.000**", "1.000", "–", *cells(another)[2][4:]]]
    assert [line[4:6] for line in cells(usual)[2:]] == [["1.600", "–"], ["1.700", "+0.100"]]
    assert "commit 0123456789ab on Other GPU" in usual


def test_a_claim_says_where_fewer_rates_were_tried():
    lost = RUN.row("diverged", 7, "steps", entry="cosformer", rate=1e-3, seed=0, steps=1500, **SIZE)
    rows = [studied("softmax", rate, 1.6) for rate in (3e-3, 1e-3)]
    rows.append(studied("cosformer", 3e-3, 1.5))
    assert "here (one seed each; cosformer: 1 of 2 rates) cosformer is ahead" in TABLES["study"](
        rows
    )
    assert "here (one seed each) cosformer is ahead" in TABLES["study"]([*rows, lost])


@pytest.mark.parametrize("name", ["study-lm/study", "study-mlm/study", "study-probes/probes"])
def test_a_study_that_nobody_has_run_leaves_its_block_empty(name):
    page = f"<!-- rows:{name} -->\nold\n<!-- /rows -->\n"
    assert renew(page, {}) == page.replace("old\n", "")


def test_the_best_entry_of_every_share_of_exact_layers_is_shown_beside_softmax():
    held = {"stream_bytes": {"1024": {"a": 2**20}, "65536": {"a": 2**21}}}
    seen = {"options": {"local": {"window": 510}}}
    rows = [
        studied("softmax", 3e-3, 1.5, mechanism="softmax", **held),
        studied("good", 3e-3, 1.4, mechanism="linear*5 softmax", far=[1.4] * 7 + [1.5], **held),
        studied("good", 3e-3, 1.5, mechanism="linear*5 softmax", seed=1, **held),
        studied("good", 6e-3, 1.35, mechanism="linear*5 softmax", **held),  # of one seed alone
        studied("lucky", 3e-3, 1.39, mechanism="linear*2 softmax linear*3", **held),  # too
        studied("none", 3e-3, 1.7, mechanism="linear", **held),
        studied("large", 3e-3, 1.3, mechanism="linear", parameters=10**8, **held),
        studied("windowed", 3e-3, 1.6, mechanism="linear*5 local", model=seen, **held),
        studied("cosformer", 3e-3, 2.9, mechanism="cosformer", **held),
        studied("cosformer-positions", 3e-3, 2.8, mechanism="cosformer", **held),
        studied("cosformer", 3e-3, 1.1, mechanism="cosformer", steps=7500, **held),
    ]
    found = cells(TABLES["exact"](rows))
    assert [line[:4] for line in found[2:]] == [
        ["linear", "1 of 6", "1.450 ± 0.071 (2)", "-0.050"],
        ["softmax", "all", "1.500", "–"],
        ["linear", "none; 1 of 6 for the last 256 tokens", "1.600", "+0.100"],
        ["linear", "none", "1.700", "+0.200"],
        ["cosFormer as published", "none", "2.800", "+1.300"],
    ]
    assert found[2][4:] == ["1.500", "4.81 M", "1 MiB", "2 MiB", "`good`"]
    assert found[3][4] == "–"
    without = cells(TABLES["exact"](rows[1:]))  # nobody has run softmax
    assert [line[3] for line in without[2:]] == ["–"] * 4


def test_shares_of_models_of_twelve_layers_tell_their_speed_and_are_compared_with_none_other():
    held = {"stream_bytes": {"4096": {"a": 2**20}, "65536": {"a": 2**21}}}
    deep = {"scale": "deep", "length": 4096, "batch": 8, "model": {"layers": 12}, **held}
    rows = [
        studied(
            "softmax",
            3e-3,
            1.5,
            mechanism="softmax",
            jobs=1,
            **deep | {"model": {"layers": 12, "conv": 4}},
        ),
        studied("hybrid", 3e-3, 1.4, mechanism="linear*7 softmax linear*4", **deep),
        studied("shallow", 3e-3, 1.1, mechanism="linear", scale="4k", length=4096, **held),
    ]
    timed = studied("hybrid", 3e-3, 7e6, what="train_speed", mechanism="linear", steps=200, **deep)
    assert "| 7,000,000 |" in TABLES["shares"]([*rows, timed])
    table = TABLES["shares"](rows)
    found = cells(table)
    assert [[*line[:4], line[-2]] for line in found[2:]] == [
        ["linear", "1 of 12", "1.400", "-0.100", "–"],
        ["softmax with a short convolution", "all", "1.500", "–", "100,000"],
    ]
    assert "1,500 steps of 8 × 4,096 tokens of enwik8, preset small with 12 layers" in table
    assert TABLES["shares"](rows[-1:]) == ""
    assert "shallow" not in TABLES["study"](rows).split("preset small with 12 layers")[1]

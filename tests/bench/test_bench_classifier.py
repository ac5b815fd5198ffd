"""`cosformer reproduce speed` at toy size: a number or a reason in every place, measured once."""

import functools
from unittest.mock import Mock

import pytest
import torch

from cosformer import records
from cosformer.bench import classifier, timing
from cosformer.bench.classifier import PASSES, SIZES, Answers, Steps, Stretches
from cosformer.mechanisms import MECHANISMS
from cosformer.report.tables import TABLES

LENGTHS = SIZES["small"].lengths
SHORT = functools.partial(Stretches, text=functools.__file__)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A short text, and short samples."""
    monkeypatch.setattr(classifier, "Stretches", SHORT)
    monkeypatch.setattr(timing, "SHORTEST_SAMPLE", 1e-3)


def options(tmp_path, *only, **given):
    given = {"small": True, "repeats": 1, "threads": 1, "device": "cpu"} | given
    return classifier.Options(only=only, rows=tmp_path / "rows.jsonl", **given)


def kept(given):
    return records.read(given.path) if given.path.exists() else []


def reasons(rows):
    found = [row.config for row in rows if row.what == "failed"]
    return {(c["candidate"], c["pass"], c["length"]): c["reason"] for c in found}


def test_every_place_has_numbers_or_a_reason_and_is_measured_once(tmp_path, capsys):
    given = options(tmp_path, "cosformer", "retention")
    assert classifier.run(given) == 0
    rows = kept(given)
    places = {(each, length) for each in PASSES for length in LENGTHS}
    for what in ("speed", "peak_memory"):
        found = [row for row in rows if row.what == what]
        assert {(row.config["pass"], row.config["length"]) for row in found} == places
        assert {row.config["candidate"] for row in found} == {"cosformer"}
        assert min(row.value for row in found) > 0
    assert {place[1:] for place in reasons(rows)} == places
    assert all("retention cannot attend without causal" in why for why in reasons(rows).values())
    assert classifier.run(given) == 0
    assert kept(given) == rows
    assert "4 of 4 places of the table are measured or have a reason\n" in capsys.readouterr().out
    table = TABLES["classifier"](rows)
    assert "| retention | refused | refused |" in table
    assert "A toy size, whose numbers mean nothing." in table


def test_what_was_cut_goes_on(tmp_path, monkeypatch, capsys):
    given = options(tmp_path, "cosformer", "softmax")
    assert classifier.run(options(tmp_path, "cosformer", "softmax", minutes=1e-9)) == 0
    assert kept(given) == []
    assert "0 of 4 places of the table are measured" in capsys.readouterr().out
    first = next(iter(classifier.measure(given)))
    records.append(given.path, [first])  # of a run that was killed
    assert classifier.run(given) == 0
    found = [(r.what, *map(r.config.get, ("candidate", "pass", "length"))) for r in kept(given)]
    assert len(set(found)) == 2 * 2 * 2 * len(LENGTHS) + 1
    assert found.count((first.what, *map(first.config.get, ("candidate", "pass", "length")))) == 2


@pytest.mark.parametrize("broken", [Steps, Answers])
def test_a_pass_without_memory_is_a_row_and_longer_ones_are_not_tried(
    tmp_path, monkeypatch, broken
):
    explode = Mock(side_effect=torch.OutOfMemoryError("no room"))
    given = options(tmp_path, "linear")
    with monkeypatch.context() as patched:
        patched.setattr(broken, "__call__", explode)
        rows = list(classifier.measure(given))
    (pass_name,) = {row.config["pass"] for row in rows if row.what == "failed"}
    assert pass_name == {Steps: "training", Answers: "inference"}[broken]
    first, second = (reasons(rows)["linear", pass_name, length] for length in LENGTHS)
    assert first == "out of memory: no room"
    assert second == f"out of memory: so it was at {LENGTHS[0]} tokens"
    assert explode.call_count == 1
    records.append(given.path, rows)
    assert list(classifier.measure(given)) == []
    again = list(classifier.measure(options(tmp_path, "linear", retry=True)))
    assert {row.what for row in again} >= {"speed", "peak_memory"}


def test_what_would_take_too_long_or_too_much_is_not_tried(tmp_path):
    slow = list(classifier.measure(options(tmp_path, "linear", "one-vs-each", seconds=1e-9)))
    skipped = reasons(slow)
    assert skipped["linear", "training", LENGTHS[1]].startswith("skipped: a call would take")
    assert ("linear", "training", LENGTHS[0]) not in skipped  # nobody knew
    assert ("one-vs-each", "training", LENGTHS[0]) in skipped  # it was tried on less
    again = f"skipped: so it was at {LENGTHS[0]} tokens"
    assert skipped["one-vs-each", "inference", LENGTHS[1]] == again
    large = list(classifier.measure(options(tmp_path, "synthesizer", gigabytes=1e-6)))
    first = reasons(large)["synthesizer", "training", LENGTHS[0]]
    assert first.startswith("skipped: weights, gradients and moments would need")


@pytest.mark.slow
def test_every_mechanism_has_a_line(tmp_path):
    given = options(tmp_path)
    assert classifier.run(given) == 0
    assert {r.config["candidate"] for r in kept(given) if r.what != "spent"} == set(MECHANISMS)
    refused = {name for (name, *_), why in reasons(kept(given)).items() if "refused" not in why}
    assert not refused

"""`cosformer evaluate`: metrics on the screen, in a file of the run, and as rows."""

import json
import math
from pathlib import Path

import pytest

from cosformer import records
from cosformer.commands import evaluate

METRICS = {"loss", "accuracy", "perplexity", "bits_per_byte"}


def test_an_evaluation_is_shown_and_kept(run, shell):
    shown = shell.shows("evaluate", run, "--split", "valid", "--checkpoint", "last")
    kept = json.loads((run / "metrics-valid-last.json").read_text())
    assert kept["metrics"].keys() == METRICS
    for name, value in kept["metrics"].items():
        assert f"{name:<14} {value:.4f}" in shown
    assert "to beat: loss" in shown


def test_a_perplexity_of_hundreds_of_digits_is_shown_by_its_size(run, monkeypatch, shell):
    huge = {"loss": 1e4, "perplexity": math.exp(700)}
    monkeypatch.setattr(evaluate, "evaluate", lambda *given, **how: huge)
    shown = shell.shows("evaluate", run)
    assert "test loss           10000.0000\n" in shown
    assert "test perplexity     1.01e+304\n" in shown


def test_rows_say_what_was_judged_and_how_much_of_it(run, shell):
    shell.shows("evaluate", run, "--split", "train", "--batches", 1, "--rows", "rows.jsonl")
    rows = {row.what: row for row in records.read(Path("rows.jsonl"))}
    assert rows.keys() == METRICS | {"floor"}
    kept = json.loads((run / "metrics-train-best.json").read_text())
    assert rows["floor"].value == kept["floor"]
    config = rows["floor"].config
    assert (config["task"], config["options"]["text"]) == ("lm", "text.txt")
    assert (config["optimiser"]["lr"] > 0, config["pretraining"]) == (True, None)
    assert (config["samples"], config["steps"], config["budget"]["steps"]) == (2, 3, 3)
    assert config["split_size"] > 2


def test_a_run_that_cannot_be_written_to_is_judged(run, shell):
    (run / "metrics-test-best.json").mkdir()  # in the way, whoever runs this test
    code, out, err = shell("evaluate", run, "--rows", "rows.jsonl")
    said = [words in out for words in ("test loss", "rows added", "written:")]
    assert (code, said) == (0, [True, True, False])
    assert err.startswith("cosformer: evaluate: not written: ")


DATA = {
    "content": ("other", "as many samples with other contents"),
    "floor": (1.5, "as many samples with other contents"),
    "tokens": (1, "256 different tokens where it had 1"),
    "classes": (None, "256 classes where it had 0"),
    "sizes": ({"train": 1}, "17 samples in train where it had 1"),
}


@pytest.mark.parametrize("part", DATA)
def test_data_that_have_changed_are_refused_in_words(run, part, shell):
    (value, words), path = DATA[part], run / "data.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {part: value}))
    message = f"data must be those that the run in {run} began with, got {words}: bring the old "
    assert message in shell.refuses("evaluate", run)


def test_a_run_is_judged_by_its_data_where_they_are_now(run, tmp_path, shell):
    text = Path(json.loads((run / "config.json").read_text())["task"]["options"]["text"])
    shown = shell.shows("evaluate", run)
    (tmp_path / "moved.txt").write_bytes(text.read_bytes())
    assert shell.shows("evaluate", run, "--data", tmp_path / "moved.txt") == shown
    (tmp_path / "moved.txt").write_bytes(text.read_bytes()[::-1])
    assert f"bring the old data back ({text})" in shell.refuses(
        "evaluate", run, "--data", tmp_path / "moved.txt"
    )


def test_a_file_of_something_else_is_refused_before_the_model_is_judged(here, monkeypatch, shell):
    monkeypatch.setattr(evaluate, "load", lambda *given, **how: pytest.fail("loaded"))
    before = (here / "my.txt").read_text()
    rule = "rows must be a new file or one of rows, but my.txt, line 1 is not a row"
    assert rule in shell.refuses("evaluate", here, "--rows", "my.txt")
    assert (here / "my.txt").read_text() == before

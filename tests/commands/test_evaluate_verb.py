"""`cosformer evaluate`: rows say what was judged, and go to a file of rows only."""

from pathlib import Path

import pytest

from cosformer import cli, records
from cosformer.commands import evaluate
from cosformer.training import Budget, Evaluation, RunConfig, TaskConfig, train


def test_rows_say_how_much_of_the_split_was_judged(tmp_path: Path) -> None:
    task = TaskConfig("copying", {"length": 16, "copied": 2})
    config = RunConfig(
        task, tmp_path / "run", budget=Budget(1, 2), evaluation=Evaluation(batches=1), device="cpu"
    )
    train(config)
    rows = tmp_path / "rows.jsonl"
    assert cli.main(["evaluate", str(config.out), "--batches", "3", "--rows", str(rows)]) == 0
    said = [(row.config["samples"], row.config["split_size"]) for row in records.read(rows)]
    assert set(said) == {(6, 3000)}


@pytest.mark.parametrize("text", ["my only line", "line one\nmy last line", "line one\n"])
def test_a_file_of_something_else_is_refused_before_the_model_is_judged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text(text)
    monkeypatch.setattr(evaluate, "load", lambda *given, **how: pytest.fail("loaded"))
    assert cli.main(["evaluate", str(tmp_path), "--rows", str(notes)]) == 2
    rule = f"rows must be a new file or one of rows, but {notes}, line 1 is not a row"
    assert rule in capsys.readouterr().err
    assert notes.read_text() == text

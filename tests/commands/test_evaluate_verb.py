"""`cosformer evaluate`: rows say what was judged, and go to a file of rows only."""

from pathlib import Path

import pytest

from cosformer import cli
from cosformer.commands import evaluate


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

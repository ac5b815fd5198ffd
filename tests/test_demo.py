"""`cosformer demo` at toy size: checks, table, picture, rows."""

from pathlib import Path

import pytest

from cosformer import demo, records
from cosformer.bench.candidates import CANDIDATES, Candidate
from cosformer.bench.timing import threads


@pytest.fixture
def options(tmp_path: Path) -> demo.Options:
    return demo.Options(lengths=(8, 16), heads=1, width=4, repeats=1, out=tmp_path / "out")


def test_the_demo_prints_errors_table_and_crossover_and_leaves_picture_and_rows(
    options: demo.Options, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(demo.LIMITS, "reference", 8)
    with threads(1):
        assert demo.run(options) == 0
    printed = capsys.readouterr().out
    assert "CPU, 1 thread\n" in printed
    for word in ("causal", "bidirectional", "one by one", "tokens", "softmax / ours", "–"):
        assert word in printed
    assert "faster than softmax" in printed
    assert (options.out / "demo.png").read_bytes().startswith(b"\x89PNG")
    rows = records.read(options.out / "demo.jsonl")
    found = [(row.config["candidate"], row.config["length"]) for row in rows]
    assert found == [("chunked", 8), ("reference", 8), ("sdpa", 8), ("chunked", 16), ("sdpa", 16)]


def test_the_demo_fails_when_the_op_is_wrong(
    options: demo.Options, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = CANDIDATES["chunked"].attend
    broken = Candidate(lambda q, k, v, *, causal: 1.01 * right(q, k, v, causal=causal), True, False)
    monkeypatch.setitem(CANDIDATES, "chunked", broken)
    monkeypatch.setattr(demo, "race", lambda options: pytest.fail("timed"))
    with threads(1):
        assert demo.run(options) == 1
    assert "check failed: output" in capsys.readouterr().err
    assert not options.out.exists()


def test_a_bad_option_is_named_with_its_value() -> None:
    with pytest.raises(ValueError, match="heads must be at least 1, got 0"):
        demo.Options(heads=0)
    with pytest.raises(ValueError, match="lengths must be one or more positive numbers"):
        demo.Options(lengths=())

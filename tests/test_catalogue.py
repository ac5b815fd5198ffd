"""`cosformer mechanisms`: the table, one mechanism in full, and the page in docs/."""

from pathlib import Path

import pytest

from cosformer import catalogue, cli
from cosformer.mechanisms import MECHANISMS

PAGE = Path(__file__).parents[1] / "docs" / "mechanisms.md"


def test_the_table_has_a_line_for_every_mechanism(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["mechanisms"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["mechanism", "causal", "full", "cross"]
    assert [line.split()[0] for line in lines[: len(MECHANISMS)]] == list(MECHANISMS)
    assert any(line.split()[:4] == ["retention", "exact", "–", "–"] for line in lines)


def test_a_name_prints_formula_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["mechanisms", "rfa", "gated-delta"]) == 0
    printed = capsys.readouterr().out
    assert MECHANISMS["rfa"].formula in printed
    assert "`features=64`, `temperature=1.0`" in printed
    assert "per-token controls, projected by the layer: beta, gate" in printed
    assert "G operations" in printed


def test_an_unknown_name_prints_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["mechanisms", "sofmax"]) == 2
    assert "must be one of cosformer, softmax" in capsys.readouterr().err


def test_names_and_write_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["mechanisms", "rfa", "--write", "x.md"]) == 2
    assert "names must not be given beside write" in capsys.readouterr().err


def test_the_page_in_docs_is_up_to_date(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "mechanisms.md"
    assert cli.main(["mechanisms", "--write", str(made)]) == 0
    assert made.read_text() == PAGE.read_text(), "run cosformer mechanisms --write " + PAGE.name
    assert cli.main(["mechanisms", "--write", str(made)]) == 0
    assert "unchanged" in capsys.readouterr().out


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_option_is_named_with_its_default(name: str) -> None:
    about = catalogue.about(name)
    assert about.startswith(f"## {name}\n")
    assert "G operations" in about
    for option in list(catalogue._options(MECHANISMS[name])):
        assert option in about

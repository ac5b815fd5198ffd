"""`cosformer mechanisms`: the table, one mechanism in full, and the page in docs/."""

from pathlib import Path

from cosformer import catalogue
from cosformer.mechanisms import MECHANISMS

PAGE = Path(__file__).parents[1] / "docs" / "mechanisms.md"


def test_the_table_has_a_line_for_every_mechanism(shell):
    header, *lines = shell.shows("mechanisms").splitlines()
    assert header.split()[:4] == ["mechanism", "causal", "full", "cross"]
    assert [line.split()[0] for line in lines[: len(MECHANISMS)]] == list(MECHANISMS)
    assert any(line.split()[:4] == ["retention", "exact", "–", "–"] for line in lines)


def test_a_name_prints_formula_and_defaults(shell):
    printed = shell.shows("mechanisms", "rfa", "gated-delta")
    assert MECHANISMS["rfa"].formula in printed
    assert "`features=64`, `temperature=1.0`" in printed
    assert "per-token controls, projected by the layer: beta, gate" in printed
    assert "G operations" in printed


def test_a_mistake_is_named(shell):
    assert "must be one of cosformer, cosformer-multiscale" in shell.refuses("mechanisms", "sofmax")
    refused = shell.refuses("mechanisms", "rfa", "--write", "x.md")
    assert "names must not be given beside write" in refused


def test_the_page_in_docs_is_up_to_date_and_has_every_option(tmp_path, shell):
    made = tmp_path / "mechanisms.md"
    shell.shows("mechanisms", "--write", made)
    assert made.read_text() == PAGE.read_text(), f"run cosformer mechanisms --write {PAGE}"
    assert "unchanged" in shell.shows("mechanisms", "--write", made)
    for name, kind in MECHANISMS.items():
        about = made.read_text().split(f"## {name}\n")[1].split("\n## ")[0]
        assert all(option in about for option in catalogue._options(kind))

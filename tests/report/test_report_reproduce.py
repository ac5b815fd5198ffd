"""A published table measured anew says what its rows say, and why cells are empty."""

import pytest

from cosformer.records import Run
from cosformer.report.readme import OPTIONAL, renew
from cosformer.report.reproduce import REPRODUCED
from cosformer.report.tables import TABLES

RUN = Run(
    hardware={"device": "cuda", "name": "Test GPU"},
    versions={"torch": "2.13.0"},
    commit="0123456789ab",
    seed=None,
    date="2026-01-01T00:00:00+00:00",
)
AT = {"table": "lra", "size": "full", "start": "", "rates": [1e-3, 3e-4, 3e-3], "seeds": 1}
AT |= {"dtype": "bfloat16", "pretrain": None}
LEARNT = {"steps": 5000, "batch": 32, "length": 2000, "preset": "tiny", "floor": 0.345}
LEARNT |= {"floor_is": "the root operator", "model": {"layers": 2, "width": 64}}
LEARNT |= {"samples": {"train": 96_000, "valid": 2_000, "test": 2_000}}


def judged(entry, column, rate, valid, value, *, seed=0, **changes):
    at = {**AT, **LEARNT, "entry": entry, "column": column, "rate": rate, "seed": seed}
    return RUN.row("accuracy", value, "accuracy", **(at | {"valid": valid} | changes))


def lost(what, entry, column, rate, reason):
    at = {**AT, "entry": entry, "column": column, "rate": rate, "seed": 0, "reason": reason}
    return RUN.row(what, 7, "steps", **at)


def cell(entry, column, valid, value, **changes):
    """A cell all of whose rates have ended; the second one is best."""
    worse = [(1e-3, valid - 0.1, value + 0.2), (3e-4, valid, value), (3e-3, valid - 0.2, 0.9)]
    return [judged(entry, column, *each, **changes) for each in worse]


ROWS = [
    *cell("softmax", "listops", 0.5, 0.36, seeds=3),
    judged("softmax", "listops", 3e-4, 0.4, 0.38, seed=1, seeds=3),
    judged("softmax", "listops", 3e-4, 0.4, 0.40, seed=2, seeds=3),
    *(row for column in REPRODUCED["lra"].columns for row in cell("local", column, 0.5, 0.2)),
    judged("sparse", "listops", 1e-3, 0.3, 0.31),
    lost("diverged", "sparse", "listops", 3e-3, "the loss is nan"),
    lost("failed", "bigbird", "text", 1e-3, "no room (exit code 4)"),
    lost("failed", "linear", "listops", 1e-3, "tried again since"),
    *cell("linear", "listops", 0.5, 0.25, seeds=3),
]


def lines(table):
    found = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    return {cells[0].strip(): [each.strip() for each in cells[1:]] for cells in found}


def test_a_cell_is_the_mean_over_seeds_at_the_rate_that_is_best_on_validation():
    found = lines(TABLES["reproduced"](ROWS))
    assert found["softmax"] == ["38.0 ± 2.0 (3)", "–", "–", "–", "–", "–"]
    assert found["local"] == ["20.0"] * 6
    assert found["floor"][0] == "34.5"
    assert list(found)[3:5] == ["softmax", "*Tay et al. 2021*"]
    assert found["*Qin et al. 2022*"][0] == "*37.90*"


def test_cells_that_are_empty_or_not_final_say_why():
    table = TABLES["reproduced"](ROWS)
    found = lines(table)
    assert found["sparse"][0] == "31.0*"
    assert found["bigbird"][1] == "–"
    assert "* ListOps, sparse: 2 of 3 rates have ended; diverged at rate 0.003: the" in table
    assert "* Text, bigbird: failed at rate 0.001: no room (exit code 4)" in table
    assert found["linear"][0] == "25.0*"
    assert "* ListOps, linear: 1 of 3 seeds have a value\n" in table
    assert "tried again since" not in table
    assert "5,000 steps of 32 sequences of up to 2,000 tokens" in table


@pytest.mark.parametrize("name", REPRODUCED)
def test_a_block_without_rows_stays_empty(name):
    block = f"<!-- rows:reproduce-{name}/reproduced -->\n<!-- /rows -->\n"
    assert f"reproduce-{name}" in OPTIONAL
    assert renew(block, {}) == block


def test_a_table_without_values_is_a_table_of_reasons():
    (row,) = (row for row in ROWS if row.what == "failed" and row.config["entry"] == "bigbird")
    assert "* Text, bigbird: failed at rate 0.001" in TABLES["reproduced"]([row])

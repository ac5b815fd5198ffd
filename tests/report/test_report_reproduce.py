"""A published table measured anew says what its rows say, and why cells are empty."""

import pytest
from row_cases import TABLE_ROWS, cell, cells, judged

from cosformer import recipes
from cosformer.report.readme import OPTIONAL, renew
from cosformer.report.reproduce import REPRODUCED, rule
from cosformer.report.tables import TABLES


def lines(table):
    return {first: rest for first, *rest in cells(table)}


def test_a_cell_is_the_mean_over_seeds_at_the_rate_that_is_best_on_validation():
    found = lines(TABLES["reproduced"](TABLE_ROWS))
    assert found["softmax"] == ["38.0 ± 2.0 (3)", "–", "–", "–", "–", "–"]
    assert found["local"] == ["20.0"] * 6
    assert found["floor"][0] == "34.5"
    assert list(found)[3:5] == ["softmax", "*Tay et al. 2021*"]
    assert found["*Qin et al. 2022*"][0] == "*37.90*"


def test_cells_that_are_empty_or_not_final_say_why():
    table = TABLES["reproduced"](TABLE_ROWS)
    found = lines(table)
    assert found["sparse"][0] == "31.0*"
    columns = REPRODUCED["lra"].columns
    begun = [judged("sparse", column, 1e-3, 0.3, 0.31) for column in columns]
    assert lines(TABLES["reproduced"](begun))["sparse"][-1] == "31.0*"
    assert found["bigbird"][1] == "–"
    assert "* ListOps, sparse: 2 of 3 rates have ended; diverged at rate 0.003: the" in table
    assert "* Text, bigbird: failed at rate 0.001: no room (exit code 4)" in table
    assert found["linear"][0] == "25.0*"
    assert "* ListOps, linear: 1 of 3 seeds have a value\n" in table
    assert "tried again since" not in table
    assert "5,000 steps of 32 sequences of up to 2,000 tokens" in table


def test_the_mean_over_the_arena_is_one_column_of_the_ablation():
    arena = [name for name in REPRODUCED["ablation"].columns if name not in ("masked", "causal")]
    rows = [
        *(row for name in arena for row in cell("relu", name, 0.5, 0.2, table="ablation")),
        *(row for name in arena for row in cell("relu-cosine", name, 0.5, 0.3, table="ablation")),
        judged("relu", "causal", 1e-3, 2.0, 2.0, table="ablation"),
        judged("relu-cosine", "causal", 1e-3, 2.5, 2.5, table="ablation"),
    ]
    table = TABLES["reproduced"](rows)
    assert lines(table)["mechanism"][-1] == "LRA mean"
    assert lines(table)["relu-cosine"][-1] == "30.0"
    assert (
        "relu-cosine is ahead of relu in LRA mean (30 against 20) and behind relu in next byte "
        "(2.5 against 2), which supports it in part"
    ) in table


@pytest.mark.parametrize("name", REPRODUCED)
def test_a_table_says_what_its_mechanisms_have_around_them(name):
    """In the ablation all have the same, or lines would differ by more than their weights."""
    fields = recipes.TABLES[name].entries.values()
    told = rule(name, [])
    assert ("that are recommended for it" in told) == all("positions" not in f for f in fields)
    assert ("all with learned positions, and none" in told) == all(
        (f.get("positions"), f.get("conv"), f.get("norm", 0)) == ("learned", 0, None)
        for f in fields
    )


def test_runs_of_another_protocol_or_table_are_left_out_and_counted():
    other = judged("cosformer", "listops", 1e-3, 0.9, 0.9, steps=50_000, seeds=1)
    foreign = judged("softmax", "listops", 1e-3, 0.9, 0.9, table="lra-pretrained")
    table = TABLES["reproduced"]([*TABLE_ROWS, other, foreign])
    assert lines(table)["softmax"][0] == "38.0 ± 2.0 (3)"
    assert lines(table)["cosformer"][0] == "–"
    assert "* ListOps: runs by another protocol that are left out: 1" in table
    assert "5,000 steps of 32 sequences" in table


def test_a_claim_tells_what_is_not_final_and_who_does_not_beat_the_floor():
    rows = [
        judged("softmax", "listops", 1e-3, 0.3, 0.31, seeds=3),
        *cell("cosformer", "listops", 0.5, 0.36),
        *cell("local", "listops", 0.5, 0.37),
    ]
    table = TABLES["reproduced"](rows)
    assert (
        "here (one seed each; softmax: not all runs have ended) cosformer is ahead of softmax in "
        "ListOps (36 against 31), which supports the claim. "
        # two standard errors of 2,000 guesses are .021
        "No better than the floor of ListOps: softmax, cosformer.\n"
    ) in table


@pytest.mark.parametrize("name", [*REPRODUCED, "speed"])
def test_a_block_without_rows_stays_empty(name):
    shape = "classifier" if name == "speed" else "reproduced"
    block = f"<!-- rows:reproduce-{name}/{shape} -->\n<!-- /rows -->\n"
    assert f"reproduce-{name}" in OPTIONAL
    assert renew(block, {}) == block


def test_a_table_without_values_is_a_table_of_reasons():
    (row,) = (
        row for row in TABLE_ROWS if row.what == "failed" and row.config["entry"] == "bigbird"
    )
    assert "* Text, bigbird: failed at rate 0.001" in TABLES["reproduced"]([row])

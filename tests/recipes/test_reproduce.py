"""The runs of a table, in which order, and what is left of them; every entry is a model."""

import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest

from cosformer.models import PRESETS, create_model
from cosformer.recipes import TABLES, TableRun, plan, use_of
from cosformer.report.reproduce import REPRODUCED

CELLS = [
    (table, entry, column)
    for table, found in TABLES.items()
    for entry in found.entries
    for column in found.columns
    if not found.columns[column].start
]
KINDS = {"lm": "decoder", "mlm": "masked-lm", "classify": "classifier"}


def run(entry="softmax", column="listops", rate=1e-3, seed=0, table="lra", **changes):
    return TableRun(table, entry, column, rate, seed, **changes)


def config(found, **changes):
    given = {"data": None, "device": "cpu", "graph": False} | changes
    return found.config(Path("run"), **given)


def ended(entry, *values, column="listops", rates=(1e-3, 3e-4, 3e-3)):
    """Runs of a cell that have ended at the first so many rates."""
    return {run(entry, column, rate): value for rate, value in zip(rates, values, strict=False)}


def brief(found):
    return [(each.entry, each.rate, each.seed) for each in found.runs]


@pytest.mark.parametrize(("table", "entry", "column"), CELLS, ids=str)
def test_every_cell_is_a_model_with_what_is_recommended(table, entry, column):
    found = config(run(entry, column, table=table))
    kind = KINDS[use_of(found.task.name)]
    small = {"width": 64, "max_length": 64, "kind": kind}
    small |= {"classes": 2} if kind == "classifier" else {}
    create_model(dataclasses.replace(PRESETS[found.preset], **{**found.model, **small}))


@pytest.mark.parametrize("table", TABLES)
def test_a_table_has_the_same_columns_small_and_in_the_report(table):
    shown = REPRODUCED[table]
    assert list(TABLES[table].small) == list(TABLES[table].columns) == list(shown.columns)
    assert list(TABLES[table].entries) == list(shown.entries)
    for column, style in shown.columns.items():
        assert style.lower == (TABLES[table].columns[column].sign == 1)
    width = len(shown.columns) + bool(shown.mean)
    assert {len(line.values) for line in (*shown.published.values(), *shown.others)} <= {width}
    for line in (*shown.published.values(), *shown.others):
        if shown.mean and "–" not in line.values:
            *values, mean = map(float, line.values)
            chosen = values[-len(shown.mean) :]
            assert sum(chosen) / len(chosen) == pytest.approx(mean, abs=0.2), line.name


def test_all_runs_of_a_column_have_one_protocol():
    ours, theirs = (config(run(entry, seed=2)) for entry in ("cosformer", "softmax"))
    for name in ("task", "optimiser", "schedule", "budget", "evaluation", "preset", "precision"):
        assert getattr(ours, name) == getattr(theirs, name)
    same = ("layers", "width", "heads", "hidden", "dropout")
    assert [ours.model[name] for name in same] == [2, 64, 2, 128, 0.1]
    assert [theirs.model[name] for name in same] == [2, 64, 2, 128, 0.1]
    assert (ours.budget.steps, ours.budget.batch, ours.seed) == (5_000, 32, 2)
    before = config(run(table="lra-pretrained")).pretraining
    assert (before.objective, before.rate, before.budget.steps) == ("masked", 0.1, 5_000)


def test_a_column_is_searched_rate_by_rate_and_then_seed_by_seed_before_the_next():
    only = ("softmax", "bigbird")
    found = plan("lra", {}, only=only, columns=("listops", "image"))
    assert brief(found)[:6] == [(name, rate, 0) for rate in (1e-3, 3e-4, 3e-3) for name in only]
    assert {each.column for each in found.runs[:6]} == {"listops"}
    assert (len(found.runs), found.later) == (12, 4)  # two more seeds of softmax in each column
    whole = plan("lra", {})
    assert len(whole.runs) + whole.later == 5 * (13 * 3 + 5 * 2)


def test_seeds_follow_at_the_rate_that_is_best_on_validation_once_all_rates_have_ended():
    known = ended("softmax", 0.3, 0.4)
    found = plan("lra", known, only=("softmax",), columns=("listops",))
    assert (len(found.runs), found.later) == (3, 2)
    known |= ended("softmax", 0.3, 0.4, 0.2)
    found = plan("lra", known, only=("softmax",), columns=("listops",))
    assert brief(found)[3:] == [("softmax", 3e-4, 1), ("softmax", 3e-4, 2)]
    assert found.later == 0
    (seed, *_) = plan("lra", ended("reformer", 0.1, 0.2, 0.3), only=("reformer",)).runs[3:]
    assert seed.column == "text"  # one seed is enough for it


def test_forms_of_cosformer_in_the_ablation_have_all_seeds():
    counts = {
        entry: len(run(entry, "masked", table="ablation").seeds)
        for entry in TABLES["ablation"].entries
    }
    thrice = {"softmax", "relu-cosine", "relu-decay", "relu-cosine-decay"}
    assert {entry for entry, count in counts.items() if count == 3} == thrice
    assert {count for entry, count in counts.items() if entry not in thrice} == {1}


def test_a_lower_perplexity_is_the_better_one():
    known = {
        run("softmax", "wikitext2", rate, table="lm"): value
        for rate, value in ((1e-3, 90.0), (3e-3, 80.0), (3e-4, 99.0))
    }
    found = plan("lm", known, only=("softmax",), columns=("wikitext2",))
    assert brief(found)[3:] == [("softmax", 3e-3, 1), ("softmax", 3e-3, 2)]


def test_what_has_diverged_or_failed_is_done_and_never_the_best():
    known = ended("softmax", None, 0.1, None)
    found = plan("lra", known, only=("softmax",), columns=("listops",))
    assert {each.rate for each in found.runs if each.seed} == {3e-4}
    lost = plan("lra", ended("softmax", None, None, None), only=("softmax",), columns=("listops",))
    assert (len(lost.runs), lost.later) == (3, 0)


def test_fine_tuning_waits_for_the_run_that_it_begins_with():
    chosen = {"only": ("softmax",), "columns": ("masked", "sst2")}
    first = plan("mlm", {}, **chosen)
    assert ({each.column for each in first.runs}, first.later) == ({"masked"}, 2 + 5)
    known = {replace(each, table="mlm"): each.rate for each in first.runs}  # 3e-4 has the least
    found = plan("mlm", known, **chosen)
    fine = [each for each in found.runs if each.column == "sst2"]
    assert {each.start for each in fine} == {"masked-softmax-lr0.0003-seed0"}
    assert (len(fine), found.later) == (3, 2)
    lost = plan("mlm", dict.fromkeys(first.runs), **chosen)
    assert (len(lost.runs), lost.later) == (3, 0)  # nothing to begin with


def test_names_that_a_table_does_not_have_are_errors():
    with pytest.raises(ValueError, match=r"only must be one of softmax, .*got 'softmx'"):
        plan("lra", {}, only=("softmx",))
    with pytest.raises(ValueError, match=r"columns must be one of listops, .*got 'enwik8'"):
        plan("lra", {}, columns=("enwik8",))

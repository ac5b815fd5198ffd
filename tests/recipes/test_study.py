"""The protocol and the stages of a study; every entry is a model that can be made."""

import dataclasses
from pathlib import Path

import pytest

from cosformer.models import PRESETS, create_model
from cosformer.recipes import PROTOCOLS, STUDIES, Trial, trials

ENTRIES = [(study, entry) for study, found in STUDIES.items() for entry in found.entries]


def trial(study="lm", entry="softmax", rate=3e-3, seed=0, steps=1500):
    return Trial(study, entry, rate, seed, steps)


def config(found, **changes):
    given = {"data": None, "device": "cpu", "graph": False} | changes
    return found.config(Path("run"), **given)


def stage(name, done=(), **changes):
    given = {"only": (), "finalists": 2, "scale": "full"} | changes
    return trials("lm", name, dict(done), **given)


def done(**values):
    """Entries that are done at all rates; 6e-3 is best."""
    beyond = {1e-3: 0.2, 3e-3: 0.1, 6e-3: 0.0}
    return {
        trial(entry=entry.replace("_", "-"), rate=rate): value + more
        for entry, value in values.items()
        for rate, more in beyond.items()
    }


@pytest.mark.parametrize(("study", "entry"), ENTRIES, ids=lambda value: value)
def test_every_entry_is_a_model_of_six_layers_with_the_positions_that_it_wants(study, entry):
    found = config(trial(study, entry))
    kind = "decoder" if study == "lm" else "masked-lm"
    small = {"width": 64, "head_dim": None, "max_length": 1024}
    model = dataclasses.replace(PRESETS[found.preset], **{**found.model, **small}, kind=kind)
    assert model.layers == 6
    assert model.positions == STUDIES[study].entries[entry].get("positions", "auto")
    create_model(dataclasses.replace(model, value_dim=None))


def test_a_run_has_the_numbers_of_the_protocol():
    found = config(trial(steps=7500, seed=2), data=".", graph=True)
    assert found.optimiser.lr == 3e-3
    assert (found.optimiser.betas, found.optimiser.weight_decay) == ((0.9, 0.98), 0.1)
    assert found.schedule.warmup * found.budget.steps == pytest.approx(200)
    assert (found.schedule.final, found.budget.batch, found.optimiser.clip) == (0.05, 32, 1.0)
    assert (found.precision, found.graph, found.seed) == ("bfloat16", True, 2)
    options = found.task.options
    assert (options["text"], options["held_out"], options["length"]) == ("enwik8", 2_000_000, 1024)
    size = PRESETS[found.preset]
    assert (size.layers, size.width, size.heads, size.glu) == (6, 256, 4, False)


def test_rates_are_every_entry_at_every_rate():
    found = stage("rates")
    assert len(set(found)) == len(found) == 3 * len(STUDIES["lm"].entries)
    assert {each.rate for each in found} == {1e-3, 3e-3, 6e-3}
    assert [each.entry for each in stage("rates", only=("multiscale",))] == ["multiscale"] * 3


def test_finalists_are_the_best_and_softmax_at_their_best_rate():
    known = done(softmax=1.9, multiscale=1.7, cosformer=2.0, hybrid_6=1.6)
    known[trial(entry="retention")] = 1.0  # at one rate alone
    found = stage("seeds", known)
    assert {each.entry for each in found} == {"hybrid-6", "multiscale", "softmax"}
    assert {each.seed for each in found} == {0, 1, 2}
    assert {each.rate for each in found} == {6e-3}
    assert len(set(found) - known.keys()) == 6  # the first seed is done
    assert [each.entry for each in stage("long", known, only=("cosformer",))] == ["cosformer"]
    assert {each.steps for each in stage("long", known)} == {7500}
    assert all(each.is_timed for each in stage("speed", known))


def test_a_rate_that_diverged_is_done_and_never_the_best():
    known = done(softmax=1.9) | {trial(rate=6e-3): None}
    assert {each.rate for each in stage("seeds", known)} == {3e-3}


def test_an_unknown_entry_or_one_without_rates_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"only must be one of softmax.*got 'softmx'"):
        stage("rates", only=("softmx",))
    with pytest.raises(ValueError, match="all done, got multiscale: finish --stage rates first"):
        stage("seeds", done(softmax=1.9), only=("multiscale",))
    with pytest.raises(ValueError, match="stage long must come after rates"):
        stage("long")


def test_stages_of_a_protocol_have_different_numbers_of_steps():
    for protocol in PROTOCOLS.values():
        assert len({protocol.timed, protocol.steps, protocol.steps * protocol.longer}) == 3

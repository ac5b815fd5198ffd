"""The protocol and the stages of a study; every entry is a model that can be made."""

import dataclasses
from pathlib import Path

import pytest

from cosformer.models import PRESETS, create_model
from cosformer.recipes import PROBES, PROTOCOLS, STUDIES, Trial, trials

ENTRIES = [(study, entry) for study, found in STUDIES.items() for entry in found.entries]


def trial(study="lm", entry="softmax", rate=3e-3, seed=0, steps=1500, **changes):
    return Trial(study, entry, rate, seed, steps, **changes)


def config(found, **changes):
    given = {"data": None, "device": "cpu", "graph": False} | changes
    return found.config(Path("run"), **given)


def stage(name, done=(), study="lm", **changes):
    return trials(study, name, dict(done), **({"finalists": 2} | changes))


def done(**values):
    """Entries that are done at all rates; 6e-3 is best."""
    beyond = {1e-3: 0.2, 3e-3: 0.1, 6e-3: 0.0}
    return {
        trial(entry=entry.replace("_", "-"), rate=rate): value + more
        for entry, value in values.items()
        for rate, more in beyond.items()
    }


@pytest.mark.parametrize(("study", "entry"), ENTRIES, ids=lambda value: value)
def test_every_entry_is_a_model_with_the_layers_and_positions_that_it_wants(study, entry):
    probe = "mqar-64" if study == "probes" else ""
    scale = "deep" if entry.startswith("hybrid-12") else "full"
    found = config(trial(study, entry, probe=probe, scale=scale))
    kind = "masked-lm" if study == "mlm" else "decoder"
    small = {"width": 64, "head_dim": None, "max_length": 1024}
    model = dataclasses.replace(PRESETS[found.preset], **{**found.model, **small}, kind=kind)
    assert model.layers == (2 if study == "probes" else 12 if scale == "deep" else 6)
    assert model.positions == STUDIES[study].entries[entry].get("positions", "auto")
    create_model(dataclasses.replace(model, value_dim=None))


@pytest.mark.parametrize("probe", PROBES["full"])
def test_a_probe_has_the_same_name_at_every_scale_and_sequences_as_long_as_its_task(probe):
    for scale in PROBES:
        found = trial("probes", probe=probe, scale=scale)
        p, task = found.protocol, config(found).task.create("cpu")
        assert task.facts.length == p.length
        assert all(length > p.length for length in p.far)
        assert 2 * p.warmup <= p.steps


def test_probes_have_the_sizes_that_others_publish():
    full = PROBES["full"]
    pairs = {p.length: p.options["pairs"] for p in full.values() if p.name == "mqar"}
    assert pairs == {64: 4, 128: 8, 256: 16, 512: 64}
    assert {p.options["vocabulary"] for p in full.values() if p.name == "mqar"} == {8192}
    assert full["induction"].far == (1024, 4096, 16_384, 65_536)
    model = config(trial("probes", probe="copying")).model
    size = dataclasses.replace(PRESETS["mini"], **model)
    assert (size.layers, size.width, size.heads) == (2, 128, 2)


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
    assert len(set(found)) == len(found) == 3 * (len(STUDIES["lm"].entries) - 1)
    assert {each.rate for each in found} == {1e-3, 3e-3, 6e-3}
    assert [each.entry for each in stage("rates", only=("multiscale",))] == ["multiscale"] * 3


def test_rates_by_number_take_the_place_of_those_of_a_stage():
    only = ("softmax", "multiscale")
    tried = trials("lm", "rates", {}, only=only, rates=(3e-3,))
    assert [(trial.entry, trial.rate) for trial in tried] == [(name, 3e-3) for name in only]
    (long,) = trials("lm", "long", {}, only=("softmax",), rates=(1e-2,))
    assert (long.rate, long.steps) == (1e-2, 7500)
    with pytest.raises(ValueError, match=r"rates need entries by name \(only\) in the stage long"):
        trials("lm", "long", {}, rates=(1e-2,))


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


def test_every_probe_is_tried_at_every_rate_the_most_promising_rates_first():
    found = stage("rates", study="probes")
    entries, probes = STUDIES["probes"].entries, PROBES["full"]
    assert len(set(found)) == len(found) == 3 * len(entries) * len(probes)
    assert {each.rate for each in found[: len(found) // 3]} == {3e-3}
    some = stage("rates", study="probes", only=("hybrid",), probes=("mqar-256", "copying"))
    assert [(each.entry, each.probe) for each in some[:2]] == [
        ("hybrid", "mqar-256"), ("hybrid", "copying"),
    ]  # fmt: skip
    assert len(some) == 6


def test_finalists_of_a_probe_are_those_that_answer_best():
    right = {"softmax": 0.2, "cosformer": 0.9, "multiscale": 0.5, "hybrid": 0.8}
    rates = {1e-3: 0.0, 3e-3: 0.1, 1e-2: -0.1}
    at = {"steps": PROBES["full"]["copying"].steps, "probe": "copying"}
    known = {
        trial("probes", entry, rate, **at): value + more
        for entry, value in right.items()
        for rate, more in rates.items()
    }
    found = stage("seeds", known, study="probes", probes=("copying",))
    assert {each.entry for each in found} == {"cosformer", "hybrid", "softmax"}
    assert {each.rate for each in found} == {3e-3}
    with pytest.raises(ValueError, match=r"after rates, .* at all rates of mqar-64"):
        stage("seeds", known, study="probes")


def test_a_pattern_of_twelve_layers_is_tried_where_models_have_as_many():
    only = ("hybrid-12-gated-norm-sigmoid",)
    for scale in ("deep", "base"):
        assert {each.entry for each in stage("rates", only=only, scale=scale)} == {*only}
    with pytest.raises(ValueError, match="fit the scale full, got hybrid-12-gated"):
        stage("rates", only=only)


def test_an_unknown_entry_or_one_without_rates_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"only must be one of softmax.*got 'softmx'"):
        stage("rates", only=("softmx",))
    with pytest.raises(ValueError, match="all done, got multiscale: finish --stage rates first"):
        stage("seeds", done(softmax=1.9), only=("multiscale",))
    with pytest.raises(ValueError, match=r"probes must be one of mqar-64.*got 'mqar'"):
        stage("rates", study="probes", probes=("mqar",))
    with pytest.raises(ValueError, match=r"probes must be left out for lm, .* got 'copying'"):
        stage("rates", probes=("copying",))
    with pytest.raises(ValueError, match="scale must be one of full, tiny, got '4k'"):
        stage("rates", study="probes", scale="4k")
    with pytest.raises(ValueError, match="stage long must come after rates"):
        stage("long")


def test_stages_of_a_protocol_have_different_numbers_of_steps():
    probes = [protocol for found in PROBES.values() for protocol in found.values()]
    for protocol in (*PROTOCOLS.values(), *probes):
        assert len({protocol.timed, protocol.steps, protocol.steps * protocol.longer}) == 3

"""A softmax model becomes a cosFormer: errors fall, layers are kept, interruptions do no harm."""

import json
import os
import shutil
from typing import get_args, get_type_hints

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import cosformer.hf as hf
from cosformer.conversion import Conversion, Converter, convert, convert_pretrained, stages
from cosformer.training import Diverged

SMALL = {"match_steps": 20, "distil_steps": 20, "batch": 8, "length": 48, "distil_rate": 1e-3}
TEXTS = [f"{n} green bottles hanging on the {wall}" for n in range(40) for wall in ("wall", "tree")]
LAYER = "encoder.layer.{}.attention.self"


def converter(folders, name="bert", **given):
    return Converter(folders / name, TEXTS, Conversion(**SMALL | given), device="cpu")


def converted(folder, out, **given):
    return list(convert_pretrained(folder, TEXTS, out, Conversion(**SMALL | given), device="cpu"))


def inputs(folder):
    return AutoTokenizer.from_pretrained(folder)(TEXTS[:5], padding=True, return_tensors="pt")


@torch.no_grad()
def outputs(model, batch):
    """What the model says of real tokens."""
    return model(**batch)[0][batch["attention_mask"].bool()]


@pytest.mark.parametrize("mechanism", hf.REPLACEMENTS)
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_errors_fall_in_each_stage_and_the_model_ends_nearer_to_the_original(
    folders, name, mechanism
):
    one = converter(folders, name, mechanism=mechanism)
    batch = inputs(folders / name)
    wanted = outputs(convert.load(folders / name), batch)
    before = (outputs(one.model, batch) - wanted).norm()
    for stage in (one.match, one.distil):
        first, *_, last = stage()
        assert sum(last.losses.values()) < sum(first.losses.values())
        assert len(last.losses) == 3 + (last.stage == "distil")
    assert (outputs(one.model, batch) - wanted).norm() < before


def test_matching_changes_nothing_but_feature_maps_and_decays(folders):
    one = converter(folders)
    before = {name: x.clone() for name, x in one.model.state_dict().items()}
    list(one.match())
    changed = {name for name, x in one.model.state_dict().items() if not x.equal(before[name])}
    parts = ("query_map", "query_bias", "key_map", "key_bias", "decay_logit")
    assert changed == {f"{LAYER.format(n)}.cosformer.{part}" for n in range(3) for part in parts}


class Nested(torch.nn.Sequential):
    """Blocks that are numbered within one that has a number itself."""

    def __iter__(self):
        return iter(self[0])


def test_every_layer_is_matched_however_layers_are_named(folders):
    model = convert.load(folders / "bert")
    model.encoder.layer = Nested(model.encoder.layer)
    names, sizes = hf.find_layers(model)
    hf.replace_attention(model, hf.ConvertedConfig(dict.fromkeys(names, "cosformer"), sizes))
    losses = stages.match(model, 1, 0.1).losses(inputs(folders / "bert"))
    assert list(losses) == ["layer 0", "layer 1", "layer 2"]


def test_without_maps_and_decays_all_is_learnt_by_distilling(folders):
    one = converter(folders, mechanism="cosformer", expansion=0, distil_steps=2)
    assert not list(one.match())
    assert len(list(one.distil())) == 2


def test_distilling_leaves_embeddings_alone(folders):
    one = converter(folders, match_steps=0, distil_steps=2)
    before = one.model.embeddings.word_embeddings.weight.clone()
    list(one.distil())
    assert one.model.embeddings.word_embeddings.weight.equal(before)


@pytest.mark.parametrize(("name", "auto"), [("bert", AutoModel), ("gpt2", AutoModelForCausalLM)])
def test_a_converted_folder_loads_with_its_layers(folders, tmp_path, name, auto):
    told = converted(folders / name, tmp_path, match_steps=2, distil_steps=2, exact=(-1,))
    model = auto.from_pretrained(tmp_path).eval()
    layers = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["layers"]
    assert list(layers.values()) == ["cosformer-multiscale", "cosformer-multiscale", "softmax"]
    assert list(hf.heads_of(model)) == list(layers)[:2]
    result = json.loads((tmp_path / "conversion.json").read_text())
    assert result["errors"]["distil"] == told[-1].losses
    again = converter(folders, name, match_steps=2, distil_steps=2, exact=(-1,))
    assert [str(each).rsplit("  ", 1)[0] for each in (*again.match(), *again.distil())] == [
        str(each).rsplit("  ", 1)[0] for each in told
    ]
    batch = inputs(tmp_path)
    torch.testing.assert_close(outputs(model, batch), outputs(again.model, batch))
    assert converted(folders / name, tmp_path, match_steps=2, distil_steps=2, exact=(-1,)) == []


@pytest.mark.parametrize("told", [1, 4, 5])
def test_an_interrupted_conversion_goes_on_to_the_same_weights(
    folders, tmp_path, monkeypatch, told
):
    given = {"match_steps": 4, "distil_steps": 4, "exact_count": 1}
    converted(folders / "bert", tmp_path / "whole", **given)
    monkeypatch.setattr(convert, "SAVED_EVERY", 0.0)
    settings = Conversion(**SMALL | given)
    parts = convert_pretrained(folders / "bert", TEXTS, tmp_path / "parts", settings, device="cpu")
    for _ in range(told):
        next(parts)
    parts.close()
    assert len(converted(folders / "bert", tmp_path / "parts", **given)) == 8 - told
    one, other = (AutoModel.from_pretrained(tmp_path / name) for name in ("whole", "parts"))
    for name, x in one.state_dict().items():
        assert x.equal(other.state_dict()[name]), name
    assert not (tmp_path / "parts" / convert.CHECKPOINT).exists()


def test_a_signal_keeps_the_step_that_was_done(folders, tmp_path, monkeypatch):
    learn = convert.Training.learn

    def interrupted(self, batch):
        learn(self, batch)
        if self.step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(convert.Training, "learn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        converted(folders / "bert", tmp_path)
    found = convert.read_checkpoint(tmp_path / convert.CHECKPOINT)
    assert (found.facts["stage"], found.facts["step"]) == ("match", 3)


def test_a_conversion_goes_on_inside_a_later_epoch_and_judges_layers_by_the_first(
    folders, tmp_path, monkeypatch
):
    monkeypatch.setattr(convert, "SAVED_EVERY", 0.0)
    settings = Conversion(**SMALL | {"match_steps": 4, "distil_steps": 1, "exact_count": 1})
    given = (folders / "bert", TEXTS[:20], tmp_path, settings)
    parts = convert_pretrained(*given, device="cpu")
    for _ in range(3):  # batches of 8: the next one begins in the second epoch
        next(parts)
    parts.close()
    assert len(list(convert_pretrained(*given, device="cpu"))) == 2


def test_weights_that_are_not_finite_are_not_kept(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "SAVED_EVERY", 0.0)
    learn = convert.Training.learn

    def spoilt(self, batch):
        learn(self, batch)
        if self.step == 2:
            torch.nn.init.constant_(self.parameters[0], float("nan"))

    small = {"match_steps": 60, "distil_steps": 0}
    with monkeypatch.context() as patched:
        patched.setattr(convert.Training, "learn", spoilt)
        with pytest.raises(Diverged, match="step 2 of match: model"):
            converted(folders / "bert", tmp_path, **small)
    assert convert.read_checkpoint(tmp_path / convert.CHECKPOINT).facts["step"] == 1
    assert converted(folders / "bert", tmp_path, **small)[-1].step == 60


def test_an_interrupt_stays_one_where_weights_are_not_finite(folders, tmp_path, monkeypatch):
    def interrupted(self, batch):
        torch.nn.init.constant_(self.parameters[0], float("nan"))
        raise KeyboardInterrupt

    monkeypatch.setattr(convert.Training, "learn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        converted(folders / "bert", tmp_path)
    assert not (tmp_path / convert.CHECKPOINT).exists()


def test_all_files_are_on_disk_before_the_result_says_so(folders, tmp_path, monkeypatch):
    out, synced, write = tmp_path / "out", set(), convert.write_json

    def fsync(handle):
        synced.add(os.fstat(handle).st_ino)

    def last(path, content):
        missing = {each.name for each in out.rglob("*") if each.stat().st_ino not in synced}
        assert missing == {"lock"}
        assert out.stat().st_ino in synced
        write(path, content)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(convert, "write_json", last)
    source = shutil.copytree(folders / "bert", tmp_path / "source")
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "weights.txt").write_text("")
    converted(source, out, match_steps=1, distil_steps=0)
    assert (out / convert.RESULT).is_file()


def test_folders_in_the_folder_of_a_model_are_taken_over_whole(folders, tmp_path):
    source = shutil.copytree(folders / "bert", tmp_path / "sentences")
    for name in ("1_Pooling/config.json", "2_Dense/model.safetensors", "checkpoint-5/model.bin"):
        (source / name).parent.mkdir()
        (source / name).write_text("{}")
    out = source / "converted"  # which does not take itself over
    converted(source, out, match_steps=1, distil_steps=0)
    found = {str(path.relative_to(out)) for path in out.rglob("*") if path.parent != out}
    assert found == {"1_Pooling/config.json", "2_Dense/model.safetensors"}


def test_what_killed_conversions_left_is_removed(folders, tmp_path):
    def leave():
        (tmp_path / ".unfinished-a1b2").mkdir()
        for name in (convert.CHECKPOINT, convert.RESULT):
            (tmp_path / f".{name}.a1b2").write_text("")

    small = {"match_steps": 1, "distil_steps": 0}
    leave()
    converted(folders / "bert", tmp_path, **small)
    leave()
    (tmp_path / convert.CHECKPOINT).write_text("")  # killed when it was to be removed
    converted(folders / "bert", tmp_path, **small)
    left = {path.name for path in tmp_path.iterdir()}
    assert convert.CHECKPOINT not in left
    assert not [name for name in left if name.startswith(".")]


def test_a_folder_where_there_is_nothing_to_do_stays_as_it_is(folders, tmp_path):
    small = {"match_steps": 1, "distil_steps": 0}
    converted(folders / "bert", tmp_path / "ended", **small)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"got .*model with config\.json"):
        converted(folders / "bert", tmp_path / "model", **small)
    with pytest.raises(ValueError, match=r"in which settings.seed is another"):
        converted(folders / "bert", tmp_path / "ended", seed=1, **small)
    converted(folders / "bert", tmp_path / "ended", **small)  # as before
    assert sorted(tmp_path.rglob("*")) == before


def test_another_conversion_is_refused_where_one_was_begun_or_ended(folders, tmp_path):
    small = {"match_steps": 1, "distil_steps": 0}
    converted(folders / "bert", tmp_path / "ended", **small)
    with pytest.raises(ValueError, match=r"ended, in which settings.seed is another"):
        converted(folders / "bert", tmp_path / "ended", seed=1, **small)
    begun = convert_pretrained(
        folders / "bert", TEXTS, tmp_path / "begun", Conversion(**SMALL | small), device="cpu"
    )
    next(begun)
    begun.close()
    with pytest.raises(ValueError, match=r"begun, in which settings.batch is another"):
        converted(folders / "bert", tmp_path / "begun", **small | {"batch": 4})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    with pytest.raises(ValueError, match=r"out must be new.*mine with thesis.txt"):
        converted(folders / "bert", tmp_path / "mine", **small)


def test_the_layer_whose_replacement_harms_most_stays_softmax(folders):
    for spoilt in (1, 2):
        one = converter(folders, exact=(0,), exact_count=1, match_steps=0)
        heads = hf.heads_of(one.model)
        assert list(heads) == [LAYER.format(1), LAYER.format(2)]
        torch.nn.init.zeros_(heads[LAYER.format(spoilt)].query_map)  # this layer's output is 0
        list(one.match())
        assert one.exact == [0, spoilt]


def test_a_decoder_streams_after_its_conversion(folders, tmp_path):
    converted(folders / "gpt2", tmp_path, match_steps=1, distil_steps=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = inputs(tmp_path)["input_ids"][:2, :12]
    options = {"max_new_tokens": 6, "pad_token_id": 0, "do_sample": False}
    wanted = model.generate(tokens, use_cache=False, **options)
    assert torch.equal(model.generate(tokens, **options), wanted)
    cache = hf.CosformerCache()
    assert torch.equal(model.generate(tokens, past_key_values=cache, **options), wanted)


def test_training_in_train_mode_needs_no_dropout_of_attention(folders, tmp_path):
    converted(folders / "bert", tmp_path, match_steps=1, distil_steps=0)
    model = AutoModel.from_pretrained(tmp_path).train()
    model(**inputs(tmp_path))[0].sum().backward()
    heads = hf.heads_of(model)[LAYER.format(0)]
    assert all(parameter.grad is not None for parameter in heads.parameters())


BAD = [
    ({"mechanism": "softmax"}, "mechanism must be one of cosformer-multiscale, cosformer"),
    ({"match_steps": -1}, "match_steps must be .* got -1"),
    ({"batch": 0}, "batch must be .* got 0"),
    ({"distil_rate": 0.0}, "distil_rate must be .* got 0.0"),
    ({"horizon": -1.0}, "horizon must be .* got -1.0"),
    ({"exact": (3,)}, "exact must be numbers below the 3 layers, got 3"),
    ({"exact": (0, -3, 1), "exact_count": 1}, "must leave one of 3 layers to convert"),
    ({"length": 65}, "length must be at most the model's 64 tokens, got 65"),
    ({"expansion": 17}, "features must be at most 256, got 272"),
]


@pytest.mark.parametrize(("given", "message"), BAD)
def test_a_bad_setting_is_named_with_its_value(folders, given, message):
    with pytest.raises(ValueError, match=message):
        converter(folders, **given)


def test_what_is_not_of_its_type_is_named(tmp_path):
    for given in (3, [1], (1.5,), (True,)):
        with pytest.raises(TypeError, match="exact must be a tuple of ints, got"):
            Conversion(exact=given)
    for texts, settings, message in (
        ("abc", None, "texts must be a sequence of strings, got str"),
        ([3], None, "texts must be a sequence of strings, got list"),
        ([], None, "texts must be one or more, got none"),
        (TEXTS, {}, "settings must be a Conversion, got dict"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            next(convert_pretrained("bert", texts, tmp_path / "out", settings))
    assert not (tmp_path / "out").exists()


def test_settings_know_the_replacements_that_models_have():
    assert get_args(get_type_hints(Conversion)["mechanism"]) == hf.REPLACEMENTS


def test_a_model_that_cannot_be_converted_is_refused(folders, tmp_path):
    with pytest.raises(ValueError, match=r"model must be a folder with config.json, got .*no-such"):
        converter(folders, "no-such")
    converted(folders / "bert", tmp_path, match_steps=1, distil_steps=0)
    with pytest.raises(ValueError, match="model must be neither quantized nor converted"):
        Converter(tmp_path, TEXTS, Conversion(**SMALL), device="cpu")


def test_a_conversion_that_is_refused_leaves_no_folder(folders, tmp_path):
    shutil.copytree(folders / "bert", tmp_path / "bare")
    for path in (tmp_path / "bare").iterdir():
        if "tok" in path.name or "vocab" in path.name:
            path.unlink()
    for model, given, rule in (
        (tmp_path / "bare", {}, "model must have its tokenizer beside it"),
        (folders / "bert", {"length": 10**6}, "length must be at most"),
    ):
        with pytest.raises(ValueError, match=rule):
            converted(model, tmp_path / "out", **given)
        assert not (tmp_path / "out").exists()

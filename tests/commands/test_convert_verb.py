"""`cosformer convert`: a folder of a softmax model in, one of a cosFormer out."""

import json

import pytest

from cosformer.cli import main

pytest.importorskip("transformers")


@pytest.fixture
def model(here):
    """A small BERT."""
    from pretrained import save_small

    return save_small(here / "bert", layers=2)


def test_convert_tells_of_each_layer_and_leaves_a_folder_that_loads(model, capsys):
    steps = ["--match-steps", "2", "--distil-steps", "2", "--batch", "4", "--length", "48"]
    words = ["convert", "bert", "--data", "my.txt", "--out", "new", "--exact", "-1", *steps]
    assert main(words) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("200 texts")
    assert [line.split()[0] for line in shown[1:]] == ["match"] * 2 + ["distil"] * 2 + [
        "converted:"
    ]
    assert "layer 0 " in shown[1]
    assert "layer 1 " not in shown[1]  # it stays softmax
    assert json.loads((model.parent / "new" / "conversion.json").read_text())["layers"]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["converted: new"]


def test_convert_names_what_is_wrong(model, capsys):
    words = ["convert", "bert", "--data", "my.txt", "--out", "new"]
    assert main([*words, "--length", "100"]) == 2
    assert "length must be at most the model's 64 tokens, got 100" in capsys.readouterr().err
    assert main(["convert", "no-model", *words[2:]]) == 2
    assert "model must be a folder with config.json, got no-model" in capsys.readouterr().err

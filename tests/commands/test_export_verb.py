"""`cosformer export`: a run as a folder of Hugging Face Transformers, or as one file."""

import json
import resource

import pytest
import torch

from cosformer.config import build
from cosformer.models import ModelConfig, Sampling, create_model, generate
from cosformer.training import load

pytest.importorskip("transformers")


@pytest.fixture
def exported(trained, tmp_path, shell):
    out = shell.shows("export", trained, "--to", "hf", tmp_path / "model")
    assert out.endswith("model: CosformerForCausalLM, a tokenizer (bytes, 256 tokens)\n")
    return tmp_path / "model"


def test_the_folder_gives_the_logits_tokens_and_texts_of_the_run(exported, trained):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (
        each.from_pretrained(exported) for each in (AutoModelForCausalLM, AutoTokenizer)
    )
    run = load(trained, device="cpu")
    prompt = tokenizer("To be", return_tensors="pt")
    assert prompt.input_ids[0].tolist() == list(b"To be")
    assert torch.equal(model(**prompt).logits, run.model(prompt.input_ids))
    sampling = Sampling(max_new_tokens=9, temperature=0, data_tokens=256)
    (expected,) = generate(run.model, [b"To be"], sampling)
    written = model.generate(**prompt, max_new_tokens=9, do_sample=False)
    assert written[0, 5:].tolist() == expected
    assert model.config.pad_token_id == tokenizer.pad_token_id == 256
    assert model.generation_config.suppress_tokens == [256, 257, 258, 259]  # no text has them


def test_a_folder_that_is_not_empty_is_left_alone(exported, trained, shell):
    before = (exported / "config.json").read_bytes()
    refusal = shell.refuses("export", trained, "--to", "hf", exported)
    assert f"to must be a folder that is new or empty, got {exported}" in refusal
    assert (exported / "config.json").read_bytes() == before
    assert "--to must be" in shell.refuses("export", trained, "--to", "onnx", exported)


def test_a_disk_that_is_full_leaves_no_part_of_a_folder(trained, tmp_path, shell):
    folder, limits = tmp_path / "model", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))  # the config fits, weights do not
    try:
        code, _, err = shell("export", trained, "--to", "hf", folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2
    assert f"cosformer: export: weights not written to {folder}" in err
    assert "File too large" in err
    assert not folder.exists()
    shell.shows("export", trained, "--to", "hf", folder)


def test_a_run_without_text_has_no_tokenizer(tmp_path, shell, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ["--preset=tiny", "--length=32", "--steps=2", "--batch=2", "--device=cpu", "--out=run"]
    shell.shows("train", "copying", *small)
    out = shell.shows("export", "run", "--to", "hf", "model", "--checkpoint", "last")
    assert out.startswith("model: CosformerFor")
    assert out.endswith("no tokenizer: its tokens are not those of a text\n")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "cosformer"


def test_one_file_has_all_weights_and_says_of_what_model(trained, tmp_path, shell):
    import safetensors.torch

    path = tmp_path / "model.safetensors"
    out = shell.shows("export", trained, "--to", "safetensors", path)
    assert out.startswith(f"{path}: ")
    with safetensors.safe_open(path, "pt") as file:
        config = build(ModelConfig, json.loads(file.metadata()["model"]))
    model, run = create_model(config).eval(), load(trained, device="cpu")
    safetensors.torch.load_model(model, path)
    tokens = torch.arange(9)[None]
    assert torch.equal(model(tokens), run.model(tokens))
    refusal = shell.refuses("export", trained, "--to", "safetensors", path)
    assert f"to must be a new file, got {path}, which exists" in refusal

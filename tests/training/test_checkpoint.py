"""Checkpoints: what is read is what was written, or a clear error; nothing is ever executed."""

import pickle
import resource
import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch

from cosformer.models import ModelConfig, create_model
from cosformer.training import load, train
from cosformer.training.checkpoints.file import (
    FORMAT,
    Checkpoint,
    load_weights,
    read,
    weights,
    write,
)


@pytest.fixture
def path(tmp_path):
    """A checkpoint of one tensor."""
    write(tmp_path / "x.safetensors", Checkpoint({"model.a": torch.arange(1000.0)}, {"step": 3}))
    return tmp_path / "x.safetensors"


def test_what_is_written_is_read(path):
    found = read(path)
    assert (found.facts, found.part("average")) == ({"step": 3}, {})
    assert torch.equal(found.part("model")["a"], torch.arange(1000.0))


def test_a_number_of_any_stride_is_written(tmp_path):
    """As a buffer that is the last column of what a mechanism with one head has made."""
    number = torch.randn(1, 7)[:, -1]
    write(tmp_path / "x.safetensors", Checkpoint({"model.a": number}, {}))
    assert torch.equal(read(tmp_path / "x.safetensors").tensors["model.a"], number)


DAMAGED = {f"cut at {n}": lambda whole, n=n: whole[:n] for n in (0, 8, 50, -1)}
DAMAGED["a header that promises too much"] = lambda whole: struct.pack("<Q", 2**60) + whole[8:]


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_an_error(path, damage):
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"must be a whole safetensors file, got .*x.safetensors"):
        read(path)


@pytest.mark.parametrize("what", [b"step", torch.arange(500.0, 501.0).numpy().tobytes()])
def test_a_flipped_bit_is_an_error(path, what):
    content = bytearray(path.read_bytes())
    content[content.index(what)] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"as it was written, got .*x.safetensors"):
        read(path)


class Malicious:
    """Creates a file when it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("owned"),)


@pytest.mark.parametrize("dump", [pickle.dump, torch.save])
def test_a_pickle_is_refused_and_not_run(path, tmp_path, monkeypatch, dump):
    monkeypatch.chdir(tmp_path)
    target = Path("owned")
    with path.open("wb") as file:
        dump(Malicious(), file)
    with pytest.raises(ValueError, match="must be a whole safetensors file"):
        read(path)
    assert not target.exists()
    with path.open("rb") as file:  # the bait is one
        torch.load(file, weights_only=False) if dump is torch.save else pickle.load(file)
    assert target.exists()


OURS = {"kind": "cosformer checkpoint", "format": str(FORMAT), "facts": "{}"}
FOREIGN = [
    (None, "one that cosformer wrote"),
    ({"kind": "a cake", "facts": "{}"}, "one that cosformer wrote"),
    (OURS | {"format": "7"}, f"format {FORMAT} or 4, got 7"),
    (OURS | {"facts": "{"}, "facts in JSON"),
    (OURS | {"facts": "[]"}, "facts of .* must be an object, got list"),
]


@pytest.mark.parametrize(("metadata", "message"), FOREIGN)
def test_a_foreign_file_is_an_error(path, metadata, message):
    safetensors.torch.save_file({"a": torch.zeros(2)}, path, metadata)
    with pytest.raises(ValueError, match=message):
        read(path)


def test_a_run_with_a_broken_checkpoint_stays_as_it_is(finished):
    last = finished.out / "last.safetensors"
    last.write_bytes(last.read_bytes()[:-1])
    broken = last.read_bytes()
    for use in (lambda: train(finished), lambda: load(finished.out, "last")):
        with pytest.raises(ValueError, match="must be a whole safetensors file"):
            use()
    assert last.read_bytes() == broken
    assert load(finished.out, "best").place.step > 0


def test_a_file_that_cannot_be_written_leaves_the_old_one(path):
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write(path, Checkpoint({"a": torch.zeros(1)}, {"step": object()}))
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("name", ["softmax", "performer", "bigbird", "linformer"])
def test_weights_make_the_same_model(name):
    """With what mechanisms have drawn, and tied weights once."""
    config = ModelConfig(kind="masked-lm", mechanism=name, vocabulary=30, max_length=32)
    torch.manual_seed(0)
    first, second = create_model(config).eval(), create_model(config).eval()
    tokens = torch.randint(30, (2, 32))
    assert not torch.equal(first(tokens), second(tokens))
    stored = weights(first)
    assert "head.weight" not in stored
    load_weights(second, stored, "here")
    assert torch.equal(first(tokens), second(tokens))


def test_weights_of_another_model_are_refused():
    small, large = (create_model(ModelConfig(layers=n, max_length=8)) for n in (1, 2))
    with pytest.raises(ValueError, match=r"here must have the tensors of the model, .*blocks.1"):
        load_weights(small, weights(large), "here")
    wide = create_model(ModelConfig(layers=1, width=32, max_length=8))
    with pytest.raises(ValueError, match=r"in here must be \[.*\] torch.float32, got \["):
        load_weights(small, weights(wide), "here")


def forge(config, tensors=None, without="\0", **facts):
    """Change the last checkpoint and give it a valid checksum."""
    last = config.out / "last.safetensors"
    found = read(last)
    kept = {k: t for k, t in found.tensors.items() if not k.startswith(without)}
    changed = {name: each and {**found.facts[name], **each} for name, each in facts.items()}
    write(last, Checkpoint({**kept, **(tensors or {})}, {**found.facts, **changed}))


NORM, ZERO = "backbone.norm.weight", torch.zeros(1)
PLACES = [None, *({"step": step} for step in ("far", -5, 21, 25)), {"phase": 1}, {"phase": -1}]
PLACES += [{"later": 3}, {"seconds": float("nan")}, {"metrics": {"loss": "low"}}]
PLACES += [{"best": float("nan")}, {"best": float("-inf")}]
TENSORS = {"model.x": ZERO, "optimiser.step.x": ZERO, "window": torch.zeros(4, 4)}
TENSORS |= {f"optimiser.exp_avg.{NORM}": torch.zeros(3), f"optimiser.step.{NORM}": 24 + ZERO}
STRANGE = [
    *({"place": place} for place in PLACES),
    *({"tensors": {name: tensor}} for name, tensor in TENSORS.items()),
    {"tensors": {f"optimiser.exp_avg.{NORM}": torch.zeros(16).double()}},
    *({"without": part} for part in ("optimiser.", "optimiser.exp_avg_sq.", "window")),
    {"model": {"kind": "masked-lm"}},
]


@pytest.mark.parametrize("case", STRANGE, ids=str)
def test_a_checkpoint_of_something_else_is_refused(finished, whole, case):
    forge(finished, **case)
    with pytest.raises(ValueError, match=r"last.safetensors must "):
        train(finished)
    assert (finished.out / "log.jsonl").read_bytes() == (whole / "log.jsonl").read_bytes()


@pytest.mark.parametrize("place", [{"step": 21}, {"step": 10**9}, {"phase": 1}])
def test_a_forged_place_is_not_shown(finished, place):
    forge(finished, place=place)
    with pytest.raises(ValueError, match=r"last.safetensors must say where its run stood: "):
        load(finished.out, "last")


SIZES = {"vocabulary": (10**13, 2**70), "width": (10**7, -1), "layers": (10**6, 10**13, 2**70, 2)}
SIZES |= {"hidden": (10**17,), "max_length": (10**12,), "widht": (3,)}
ABSURD = [
    None,
    *({name: size} for name, sizes in SIZES.items() for size in sizes),
    {"options": {"horizon": "far"}},
    {"mechanism": "performer", "options": {"features": 10**7}},
]


@pytest.mark.parametrize("model", ABSURD, ids=str)
def test_a_model_that_the_tensors_do_not_have_is_never_built(finished, model):
    forge(finished, model=model)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"last.safetensors must (say what|hold the model)"):
        load(finished.out, "last")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB

"""Checkpoints: what is read is what was written, or a clear error; nothing is ever executed."""

import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from cosformer.mechanisms import MECHANISMS
from cosformer.models import ModelConfig, create_model
from cosformer.training import RunConfig, load, train
from cosformer.training.checkpoint import (
    FORMAT,
    Checkpoint,
    load_weights,
    read,
    weights,
    write,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint of one tensor."""
    write(tmp_path / "x.safetensors", Checkpoint({"model.a": torch.arange(1000.0)}, {"step": 3}))
    return tmp_path / "x.safetensors"


def test_what_is_written_is_read(path: Path) -> None:
    found = read(path)
    assert found.facts == {"step": 3}
    assert torch.equal(found.part("model")["a"], torch.arange(1000.0))
    assert found.part("average") == {}


@pytest.mark.parametrize("length", [0, 4, 8, 50, 1000, -1])
def test_a_truncated_file_is_an_error(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"must be a whole safetensors file, got .*x.safetensors"):
        read(path)


@pytest.mark.parametrize("what", [b"step", torch.arange(500.0, 501.0).numpy().tobytes()])
def test_a_flipped_bit_is_an_error(path: Path, what: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(what)] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"as it was written, got .*x.safetensors"):
        read(path)


class Malicious:
    """Creates a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


@pytest.mark.parametrize("dump", [pickle.dump, torch.save])
def test_a_pickle_is_refused_and_not_run(path: Path, tmp_path: Path, dump: Any) -> None:
    target = tmp_path / "owned"
    with path.open("wb") as file:
        dump(Malicious(target), file)
    with pytest.raises(ValueError, match="must be a whole safetensors file"):
        read(path)
    assert not target.exists()
    with path.open("rb") as file:  # the bait is one
        torch.load(file, weights_only=False) if dump is torch.save else pickle.load(file)
    assert target.exists()


FOREIGN = {
    "other": (None, "one that cosformer wrote"),
    "kind": ({"kind": "a cake", "facts": "{}"}, "one that cosformer wrote"),
    "format": (
        {"kind": "cosformer checkpoint", "format": "7", "facts": "{}"},
        f"format {FORMAT}, got 7",
    ),
    "facts": (
        {"kind": "cosformer checkpoint", "format": str(FORMAT), "facts": "{"},
        "facts in JSON",
    ),
    "list": (
        {"kind": "cosformer checkpoint", "format": str(FORMAT), "facts": "[]"},
        "facts of .* must be an object, got list",
    ),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_foreign_file_is_an_error(path: Path, case: str) -> None:
    metadata, message = FOREIGN[case]
    safetensors.torch.save_file({"a": torch.zeros(2)}, path, metadata)
    with pytest.raises(ValueError, match=message):
        read(path)


def test_a_header_that_promises_too_much_is_an_error(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 2**60) + path.read_bytes()[8:])
    with pytest.raises(ValueError, match="must be a whole safetensors file"):
        read(path)


def test_a_run_with_a_broken_checkpoint_stays_as_it_is(config: RunConfig) -> None:
    train(config)
    last = config.out / "last.safetensors"
    last.write_bytes(last.read_bytes()[:-1])
    broken = last.read_bytes()
    with pytest.raises(ValueError, match="must be a whole safetensors file"):
        train(config)
    assert last.read_bytes() == broken
    with pytest.raises(ValueError, match="must be a whole safetensors file"):
        load(config.out, "last")
    assert load(config.out, "best").place.step > 0


def test_a_file_that_cannot_be_written_leaves_the_old_one(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write(path, Checkpoint({"a": torch.zeros(1)}, {"step": object()}))
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("name", ["softmax", "performer", "reformer", "bigbird", "linformer"])
def test_weights_make_the_same_model(name: str) -> None:
    """With what mechanisms have drawn, and tied weights once."""
    assert name in MECHANISMS
    config = ModelConfig(kind="masked-lm", mechanism=name, vocabulary=30, max_length=32)
    torch.manual_seed(0)
    first, second = create_model(config).eval(), create_model(config).eval()
    tokens = torch.randint(30, (2, 32))
    assert not torch.equal(first(tokens), second(tokens))
    stored = weights(first)
    assert "head.weight" not in stored
    load_weights(second, stored, "here")
    assert torch.equal(first(tokens), second(tokens))


def test_weights_of_another_model_are_refused() -> None:
    small, large = (create_model(ModelConfig(layers=n, max_length=8)) for n in (1, 2))
    with pytest.raises(ValueError, match=r"here must have the tensors of the model, .*blocks.1"):
        load_weights(small, weights(large), "here")
    wide = create_model(ModelConfig(layers=1, width=32, max_length=8))
    with pytest.raises(ValueError, match=r"in here must be \[.*\] torch.float32, got \["):
        load_weights(small, weights(wide), "here")


NORM = "backbone.norm.weight"
STRANGE: dict[str, dict[str, Any]] = {
    "place": {"facts": {}},
    "step": {"facts": {"place": {"step": "far"}}},
    "later": {"facts": {"place": {"later": 3}}},
    "phase": {"facts": {"place": {"phase": 7}}},
    "phase before": {"facts": {"place": {"phase": -1}}},
    "step before": {"facts": {"place": {"step": -5}}},
    "step beyond": {"facts": {"place": {"step": 25}}},
    "seconds": {"facts": {"place": {"seconds": float("nan")}}},
    "metrics": {"facts": {"place": {"metrics": {"loss": "low"}}}},
    "tensors": {"tensors": {"model.x": torch.zeros(1)}},
    "optimiser": {"tensors": {"optimiser.step.x": torch.zeros(1)}},
    "short moments": {"tensors": {f"optimiser.exp_avg.{NORM}": torch.zeros(3)}},
    "wide moments": {"tensors": {f"optimiser.exp_avg.{NORM}": torch.zeros(16).double()}},
    "steps of a step": {"tensors": {f"optimiser.step.{NORM}": torch.zeros(1)}},
    "no moments": {"without": "optimiser."},
    "no squares": {"without": "optimiser.exp_avg_sq."},
    "long window": {"tensors": {"window": torch.zeros(4, 4)}},
    "narrow window": {"tensors": {"window": torch.zeros(0, 3)}},
    "no window": {"without": "window"},
}


@pytest.mark.parametrize("case", STRANGE)
def test_a_checkpoint_of_something_else_is_refused(config: RunConfig, case: str) -> None:
    train(config)
    last = config.out / "last.safetensors"
    found = read(last)
    changes = STRANGE[case]
    tensors = {**found.tensors, **changes.get("tensors", {})}
    if "without" in changes:
        tensors = {k: t for k, t in tensors.items() if not k.startswith(changes["without"])}
    write(last, Checkpoint(tensors, changes.get("facts", found.facts)))
    message = r"must|setting" if "facts" in changes else r"last.safetensors must "
    with pytest.raises(ValueError, match=message):
        train(config)


@pytest.mark.parametrize(
    "model", [None, [1], {"widht": 3}, {"width": -1}, {"options": {"horizon": "far"}}]
)
def test_a_model_that_cannot_be_made_is_refused(config: RunConfig, model: Any) -> None:
    train(config)
    last = config.out / "last.safetensors"
    found = read(last)
    write(last, Checkpoint(found.tensors, {**found.facts, "model": model}))
    with pytest.raises(ValueError, match=r"last.safetensors must say what its model is"):
        load(config.out, "last")

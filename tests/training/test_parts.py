"""Checkpoints in parts: whole or not at all, read without pickle, refused once they are changed."""

import json

import pytest
import torch

from cosformer.training.checkpoints import Checkpoint, clean, parts, read, write
from cosformer.training.checkpoints import file as checkpoint
from cosformer.training.checkpoints.sharded import fill_parts, write_parts

TENSORS = {
    "model.weight": torch.arange(12.0).view(3, 4),
    "model.half": torch.arange(3, dtype=torch.bfloat16),
    "optimiser.step.weight": torch.tensor(7.0),
    "window": torch.zeros(0, 4),
}


@pytest.fixture
def path(group, tmp_path):
    """A checkpoint that one process has written as its part."""
    write_parts(tmp_path / "last.safetensors", Checkpoint(TENSORS, {"step": 7}), group)
    return tmp_path / "last.safetensors"


def assert_same(found):
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_what_is_read_is_what_was_written(path, group):
    found = read(path)
    assert found.facts == {"step": 7}
    assert_same(found.tensors)
    assert found.part("optimiser.step") == {"weight": torch.tensor(7.0)}
    wanted = {name: torch.full_like(tensor, 5) for name, tensor in TENSORS.items()}
    fill_parts(wanted, found.tensors, str(path), group)
    assert_same(wanted)


def test_no_file_holds_a_pickle(path):
    names = [each for each in path.parent.rglob("*") if each.is_file()]
    assert {each.suffix for each in names} == {".safetensors"}
    for each in names:
        size = int.from_bytes(each.read_bytes()[:8], "little")
        json.loads(each.read_bytes()[8 : 8 + size])


def test_a_list_replaces_the_parts_of_the_one_before_it(path, group):
    before = read(path).tensors.listed.token
    write_parts(path, Checkpoint(TENSORS, {}), group)
    assert [each.name for each in parts.folder_of(path).iterdir()] == [
        read(path).tensors.listed.token
    ]
    assert read(path).tensors.listed.token != before
    write(path, Checkpoint(TENSORS, {}))
    assert not parts.folder_of(path).exists()
    assert_same(read(path).tensors)


def test_parts_that_nobody_lived_to_list_are_removed(path):
    token = read(path).tensors.listed.token
    (parts.folder_of(path) / "abc").mkdir()
    clean(path)
    assert [each.name for each in parts.folder_of(path).iterdir()] == [token]
    path.unlink()
    clean(path)
    assert not parts.folder_of(path).exists()


def test_a_full_disk_keeps_the_list_before_it(path, group, monkeypatch):
    def full(where):
        raise OSError(28, "No space left on device", str(where))

    monkeypatch.setattr(parts, "replacing", full)
    with pytest.raises(OSError, match="No space left on device: checkpoint of"):
        write_parts(path, Checkpoint({"model.weight": torch.ones(3, 4)}, {}), group)
    assert_same(read(path).tensors)


def part_of(path):
    (found,) = parts.folder_of(path).rglob("*.safetensors")
    return found


def test_a_bit_that_has_changed_is_an_error(path, group):
    content = bytearray(part_of(path).read_bytes())
    content[-1] ^= 1
    part_of(path).write_bytes(content)
    wanted = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    with pytest.raises(ValueError, match=r"as it was written, got .* has changed"):
        dict(read(path).tensors)
    with pytest.raises(ValueError, match=r"as it was written, got .* has changed"):
        fill_parts(wanted, read(path).tensors, str(path), group)


def test_a_part_that_is_missing_or_cut_off_is_an_error(path):
    found = read(path).tensors
    part_of(path).write_bytes(part_of(path).read_bytes()[:-8])
    with pytest.raises(ValueError, match="must be a part of a checkpoint"):
        found["model.weight"]
    part_of(path).unlink()
    with pytest.raises(ValueError, match="must have its parts, got none at"):
        found["model.weight"]


CUT = {"dtype": "float32", "shape": [2], "pieces": []}
PIECE = {"file": 0, "offsets": [0], "shape": [2], "checksum": "00000000"}
FORGED = {
    "token must be hexadecimal, got '../secret'": {"token": "../secret", "tensors": {}},
    "dtype must be one of .*, got 'object'": {"tensors": {"a": CUT | {"dtype": "object"}}},
    r"pieces must be the 2 numbers, got 0": {"tensors": {"a": CUT}},
    r"a piece must lie in a tensor of \(2,\)": {
        "tensors": {"a": CUT | {"pieces": [PIECE | {"offsets": [1]}]}}
    },
    "list must be one of pieces": {"tensors": [1]},
    "list must be one of pieces: ": {"tensors": {"a": {"shape": 3}}},
}


@pytest.mark.parametrize("message", FORGED)
def test_a_forged_list_is_refused(tmp_path, message):
    path = tmp_path / "last.safetensors"
    content = json.dumps({"token": "0f", **FORGED[message]}).encode()
    forged = {checkpoint.LIST: torch.frombuffer(bytearray(content), dtype=torch.uint8)}
    checkpoint._put(path, Checkpoint(forged, {}), checkpoint.IN_PARTS)
    with pytest.raises(ValueError, match=f"checkpoint must list its parts, got .*{message}"):
        read(path)


def test_tensors_of_another_model_are_refused_before_anything_is_read(path, group):
    wanted = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    wanted["model.weight"] = torch.zeros(4, 4)
    with pytest.raises(ValueError, match=r"model.weight in here must be \[4, 4\] torch.float32"):
        fill_parts(wanted, read(path).tensors, "here", group)

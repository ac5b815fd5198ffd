"""`cosformer data list | make | check`: what is there, what is made, what is broken."""

import lzma
from pathlib import Path

import numpy as np
import pytest

from cosformer.data import check
from cosformer.tasks import files, generated


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(generated, "BLOCK", 10)


def test_what_is_made_is_listed_and_checked(tmp_path, shell):
    given = ["--count", "20", "--workers", "1", "--data", tmp_path]
    made = shell.shows("data", "make", "listops", "pathfinder", *given)
    assert "listops: 20 samples in" in made
    assert "a second by 1 processes" in made
    assert "already there" in shell.shows("data", "make", "listops", *given)
    shown = shell.shows("data", "list", "--data", tmp_path)
    lines = {line.split()[0]: line for line in shown.splitlines() if line}
    states = {"listops": "there", "enwik8": "get", "mnli": "file", "python": "built in"}
    for name, state in states.items():
        assert f" {state} " in lines[name]
    assert "2 files" in shell.shows("data", "check", "--data", tmp_path)


def test_a_broken_file_is_named_and_the_others_are_checked(tmp_path, shell):
    generated.make("listops", tmp_path, count=10)
    (tmp_path / "sst2.tsv.xz").write_bytes(lzma.compress(b"split\tlabel\n"))
    (tmp_path / "cola.tsv.xz").write_bytes(lzma.compress(b"x\n")[:-4])
    (tmp_path / "rte.tsv.xz").write_bytes(lzma.compress(b"x\n" * 2768))
    code, out, _ = shell("data", "check", "--data", tmp_path)
    assert code == 1
    said = ["BROKEN  sst2.tsv.xz", "must have 70,043 lines, got 1", "BROKEN  cola.tsv.xz"]
    said += ["rte.tsv.xz must hold sha256", "ok      listops-10-seed0.npz", "4 files", "3 broken"]
    assert [words for words in said if words not in out] == []


def test_pictures_are_counted_by_class(tmp_path):
    path = tmp_path / "cifar10_gray.npz"
    arrays = {}
    for split, each in (("train", 5000), ("test", 1000)):
        arrays[f"x_{split}"] = np.zeros((10 * each, 32, 32), np.uint8)
        arrays[f"y_{split}"] = np.repeat(np.arange(10), each)
    files.save_arrays(path, **arrays)
    assert "10 classes in balance" in check.check(path)
    changes = {"1000 of each class to test": {"y_test": np.zeros(10_000, int)}}
    changes["32 × 32 pictures to train"] = {"x_train": np.zeros((5, 32, 32), np.uint8)}
    for message, change in changes.items():
        files.save_arrays(path, **(arrays | change))
        with pytest.raises(ValueError, match=f"must have {message}"):
            check.check(path)


BAD = [
    (["make", "path-x"], "name must be one of listops, pathfinder, snakes, got 'path-x'"),
    (["make", "listops", "--count", "0"], "count must be at least 1, got 0"),
    (["make", "listops", "--workers", "0"], "workers must be at least 1, got 0"),
    (["make", "listops", "--seed", "-1"], "seed must be at least 0, got -1"),
    (["check", "--data", "nowhere"], "data must be a folder, got nowhere"),
    (["get"], "names must be one or more of"),
    (["get", "x"], "names must be among"),
    (["get", "mnli"], "mnli_20k"),
]


@pytest.mark.parametrize(("words", "message"), BAD)
def test_bad_options_are_named(words, message, shell):
    assert message in shell.refuses("data", *words)


def test_the_data_folder_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("COSFORMER_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert files.folder() == tmp_path / "cosformer"
    monkeypatch.setenv("COSFORMER_DATA", "/somewhere")
    assert files.folder() == Path("/somewhere")
    assert files.folder(tmp_path) == tmp_path

"""`cosformer data list | make | check`: what is there, what is made, what is broken."""

import lzma
from pathlib import Path

import numpy as np
import pytest

from cosformer import cli
from cosformer.data import check
from cosformer.tasks import files, generated


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated, "BLOCK", 10)


def data(*words: str) -> int:
    return cli.main(["data", *words])


def test_what_is_made_is_listed_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--count", "20", "--workers", "1", "--data", str(tmp_path)]
    assert data("make", "listops", "pathfinder", *given) == 0
    made = capsys.readouterr().out
    assert "listops: 20 samples in" in made
    assert "a second by 1 processes" in made
    assert data("make", "listops", *given) == 0
    assert "already there" in capsys.readouterr().out
    assert data("list", "--data", str(tmp_path)) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert " there " in lines["listops"]
    assert " get " in lines["enwik8"]
    assert " file " in lines["mnli"]
    assert " built in " in lines["python"]
    assert data("check", "--data", str(tmp_path)) == 0
    assert "2 files" in capsys.readouterr().out


def test_a_broken_file_is_named_and_the_others_are_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generated.make("listops", tmp_path, count=10)
    (tmp_path / "sst2.tsv.xz").write_bytes(lzma.compress(b"split\tlabel\n"))
    (tmp_path / "cola.tsv.xz").write_bytes(lzma.compress(b"x\n")[:-4])
    (tmp_path / "rte.tsv.xz").write_bytes(lzma.compress(b"x\n" * 2768))
    assert data("check", "--data", str(tmp_path)) == 1
    out = capsys.readouterr().out
    assert "BROKEN  sst2.tsv.xz" in out
    assert "must have 70,043 lines, got 1" in out
    assert "BROKEN  cola.tsv.xz" in out
    assert "rte.tsv.xz must hold sha256" in out
    assert "ok      listops-10-seed0.npz" in out
    assert "4 files" in out
    assert "3 broken" in out


def test_pictures_are_counted_by_class(tmp_path: Path) -> None:
    path = tmp_path / "cifar10_gray.npz"
    arrays = {
        f"{kind}_{split}": array
        for split, each in (("train", 5000), ("test", 1000))
        for kind, array in (
            ("x", np.zeros((10 * each, 32, 32), np.uint8)),
            ("y", np.repeat(np.arange(10), each)),
        )
    }
    files.save_arrays(path, **arrays)
    assert "10 classes in balance" in check.check(path)
    files.save_arrays(path, **(arrays | {"y_test": np.zeros(10_000, int)}))
    with pytest.raises(ValueError, match="must have 1000 of each class to test"):
        check.check(path)
    files.save_arrays(path, **(arrays | {"x_train": np.zeros((5, 32, 32), np.uint8)}))
    with pytest.raises(ValueError, match="must have 32 × 32 pictures to train"):
        check.check(path)


BAD = [
    (["make", "path-x"], "name must be one of listops, pathfinder, snakes, got 'path-x'"),
    (["make", "listops", "--count", "0"], "count must be at least 1, got 0"),
    (["make", "listops", "--workers", "0"], "workers must be at least 1, got 0"),
    (["check", "--data", "nowhere"], "data must be a folder, got nowhere"),
]


@pytest.mark.parametrize(("words", "message"), BAD)
def test_bad_options_are_named(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert data(*words) == 2
    assert message in capsys.readouterr().err


def test_the_data_folder_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COSFORMER_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert files.folder() == tmp_path / "cosformer"
    monkeypatch.setenv("COSFORMER_DATA", "/somewhere")
    assert files.folder() == Path("/somewhere")
    assert files.folder(tmp_path) == tmp_path

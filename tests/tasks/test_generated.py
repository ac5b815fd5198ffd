"""Generated sets: the same whoever draws them, whole on disk, verified."""

from unittest.mock import Mock

import numpy as np
import pytest

from cosformer.tasks import files, generated, snakes


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(generated, "BLOCK", 20)


def same(one, other):
    return np.array_equal(one.flat, other.flat) and np.array_equal(one.labels, other.labels)


def test_a_set_is_kept_and_comes_back_as_it_was_drawn(tmp_path):
    path = generated.make("listops", tmp_path, count=50, seed=3)
    drawn = generated.draw("listops", count=50, seed=3)
    assert same(generated.load(path), drawn)
    assert len(drawn) == 50
    before = path.stat().st_mtime_ns
    assert generated.make("listops", tmp_path, count=50, seed=3) == path
    assert path.stat().st_mtime_ns == before
    assert [p.name for p in tmp_path.iterdir()] == ["listops-50-seed3.npz"]


def test_another_seed_draws_other_samples_and_more_samples_begin_alike():
    few = generated.draw("listops", count=30, seed=0)
    assert not same(few, generated.draw("listops", count=30, seed=1))
    assert same(few, generated.draw("listops", count=50, seed=0).take(np.arange(30)))


def test_the_smallest_set_has_paths_of_every_length(monkeypatch):
    monkeypatch.setattr(snakes, "AT_ONCE", 256)
    lengths = np.bincount(generated.draw("snakes", count=14, seed=0).labels // 2)
    assert len(lengths) == 13
    assert lengths.max() - lengths.min() == 1


@pytest.mark.slow
def test_several_processes_draw_what_one_does(monkeypatch):
    monkeypatch.undo()  # other processes have blocks of the usual size
    alone = generated.draw("listops", count=1100, seed=0)
    assert same(alone, generated.draw("listops", count=1100, seed=0, workers=2))


def test_a_sample_drawn_twice_is_kept_once(monkeypatch):
    draw = generated._draw_block
    twice = lambda name, seed, number, size: draw(name, seed, number // 2, size)  # noqa: E731
    monkeypatch.setattr(generated, "_draw_block", twice)
    found = generated.draw("listops", count=50, seed=0)
    assert len({found[n].tobytes() for n in range(50)}) == 50


def test_a_killed_writer_leaves_no_set(tmp_path, monkeypatch):
    monkeypatch.setattr("os.replace", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        generated.make("listops", tmp_path, count=10)
    assert list(tmp_path.iterdir()) == []


def test_verification_finds_damage_wrong_labels_and_other_rules(tmp_path):
    path = generated.make("listops", tmp_path, count=30)
    assert len(generated.verify("listops", path)) == 30
    arrays = files.load_arrays(path)
    changes = [
        ({"labels": (arrays["labels"] + 1) % 10}, "must begin as seed 0 does"),
        ({"about": np.array('{"name": "listops"}')}, "must be of the rule of today"),
        ({"about": np.array("[]")}, "must be of the rule of today"),
        ({"flat": arrays["flat"][:-5]}, "must have samples from 0 to"),
    ]
    for change, message in changes:
        files.save_arrays(path, **(arrays | change))
        with pytest.raises(ValueError, match=message):
            generated.verify("listops", path)
    files.save_arrays(path, flat=arrays["flat"])
    with pytest.raises(ValueError, match="must hold what `cosformer data make` writes"):
        generated.load(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"must be a whole \.npz"):
        generated.load(path)


def test_arrays_that_would_run_code_are_refused(tmp_path):
    np.savez(tmp_path / "x.npz", a=np.array([print], dtype=object))
    with pytest.raises(ValueError, match="plain arrays"):
        files.load_arrays(tmp_path / "x.npz")


def lines_of(path):
    with files.reading(path, "\n") as file:
        return list(file)


@pytest.mark.parametrize("read", [files.read_bytes, lines_of])
@pytest.mark.parametrize("suffix", files.OPENERS)
def test_a_packed_file_that_is_broken_is_named(suffix, read, tmp_path):
    path = tmp_path / f"x{suffix}"
    with files.OPENERS[suffix](path, "wb") as file:
        file.write(b"".join(b"%d\n" % n for n in range(9999)))
    whole = path.read_bytes()
    for place in (0, 40, len(whole) // 2):
        path.write_bytes(whole[:place] + b"\xff" * 8 + whole[place + 8 :])
        with pytest.raises(ValueError, match=rf"x{suffix} must be a whole {suffix} file"):
            read(path)
    path.write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=rf"x{suffix} must be a whole {suffix} file"):
        read(path)


@pytest.mark.parametrize("suffix", ["xz", "gz", "npz"])
def test_what_unpacks_to_too_much_is_refused(suffix, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LIMIT", 10**6)
    path, zeros = tmp_path / f"x.{suffix}", np.zeros(10**6 + 1, np.uint8)
    if suffix == "npz":
        np.savez_compressed(path, a=zeros)
    else:
        with files.OPENERS[path.suffix](path, "wb") as file:
            file.write(zeros)
    with pytest.raises(ValueError, match="must unpack to at most 1,000,000 bytes"):
        (files.load_arrays if suffix == "npz" else files.read_bytes)(path)

"""A small version of every task, from files made here in the published formats."""

import json
import lzma

import numpy as np
import pytest

from cosformer import tasks
from cosformer.tasks import generated, snakes

TEXT = "".join(f"line {n} of a small text, {'ab' * (n % 7)}\n" for n in range(400))


def pack(path, *lines):
    path.write_bytes(lzma.compress(("\n".join(lines) + "\n").encode()))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A data folder with small files under the names of the real ones."""
    where = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    (where / "own.txt").write_text(TEXT)
    splits = ["train"] * 80 + ["dev"] * 20
    rows = [f"{s}\t{n % 2}\t{n} {'word ' * (1 + n % 40)}" for n, s in enumerate(splits)]
    pack(where / "sst2.tsv.xz", "split\tlabel\tsentence", *rows)
    rows = [f"train\t{n % 3}\tpremise {n}\t{'so ' * (n % 30)}" for n in range(90)]
    pack(where / "mnli_20k.tsv.xz", "split\tlabel\tpremise\thypothesis", *rows)
    for split in ("train", "test"):
        rows = [f"{int(n < 20)}\t9\t{n}\t{f'good{n} ' * (1 + 5 * n)}" for n in range(40)]
        pack(where / f"imdb_{split}.tsv.xz", "label\trating\tid\ttext", *rows)
    splits = ["train"] * 40 + ["valid"] * 10 + ["test"] * 10
    rows = [f"{s}\t{n % 2}\tP{n % 7}\tP{n % 5}" for n, s in enumerate(splits)]
    pack(where / "aan_pairs.tsv.xz", "split\tlabel\tdoc1\tdoc2", *rows)
    papers = [json.dumps({"id": f"P{n}", "text": "é" * (50 + 30 * n)}) for n in range(7)]
    pack(where / "aan_docs_4k.jsonl.xz", *papers)
    sizes = {"train": 50, "test": 20}
    x = {f"x_{name}": rng.integers(0, 256, (n, 32, 32), np.uint8) for name, n in sizes.items()}
    y = {f"y_{name}": np.arange(n) % 10 for name, n in sizes.items()}
    np.savez(where / "cifar10_gray.npz", **x, **y)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generated, "BLOCK", 20)
        patch.setattr(snakes, "AT_ONCE", 256)
        for name, count in (("listops", 60), ("pathfinder", 60), ("snakes", 40)):
            generated.make(name, where, count=count)
    return where


create = tasks.create
SMALL = {
    "lm": lambda at: create("lm", text=str(at / "own.txt"), length=32),
    "lm-bpe": lambda at: create(
        "lm", text=str(at / "own.txt"), length=16, tokens="bpe", vocabulary=300
    ),
    "mlm": lambda at: create("mlm", text=str(at / "own.txt"), length=32),
    "sst2": lambda at: create("sst2", data=at, length=100),
    "mnli": lambda at: create("mnli", data=at, length=64),
    "mnli-towers": lambda at: create("mnli", data=at, length=64, towers=2),
    "listops": lambda at: create("listops", data=at, sizes=(40, 10, 10)),
    "pathfinder": lambda at: create("pathfinder", data=at, sizes=(40, 10, 10)),
    "pathfinder-rising": lambda at: create("pathfinder", data=at, sizes=(40, 10, 10), rising=2),
    "text": lambda at: create("text", data=at, length=300),
    "retrieval": lambda at: create("retrieval", data=at, length=200),
    "image": lambda at: create("image", data=at),
    "mqar": lambda _: create("mqar", length=64, pairs=4, vocabulary=64),
    "copying": lambda _: create("copying", length=40, copied=4),
    "induction": lambda _: create("induction", length=32, test_length=20),
    "pretraining": lambda at: tasks.MaskedTask(create("image", data=at), rate=0.5),
}


@pytest.fixture(params=SMALL)
def task(request, folder):
    return SMALL[request.param](folder)

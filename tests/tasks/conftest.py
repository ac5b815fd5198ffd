"""A small version of every task, from files made here in the published formats."""

import json
import lzma

import numpy as np
import pytest

from cosformer import tasks
from cosformer.tasks import generated, snakes

TEXT = "".join(f"line {n} of a small text, {'ab' * (n % 7)}\n" for n in range(400))


def pack(path, text):
    path.write_bytes(lzma.compress(text.encode()))
    return path


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A data folder with small files under the names of the real ones."""
    where = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    (where / "own.txt").write_text(TEXT)
    rows = [
        f"{'train' if n < 80 else 'dev'}\t{n % 2}\t{n} {'word ' * (1 + n % 40)}" for n in range(100)
    ]
    pack(where / "sst2.tsv.xz", "\n".join(["split\tlabel\tsentence", *rows]) + "\n")
    rows = [f"train\t{n % 3}\tpremise {n}\t{'so ' * (n % 30)}" for n in range(90)]
    pack(where / "mnli_20k.tsv.xz", "\n".join(["split\tlabel\tpremise\thypothesis", *rows]) + "\n")
    for split in ("train", "test"):
        rows = [f"{int(n < 20)}\t9\t{n}\t{f'good{n} ' * (1 + 5 * n)}" for n in range(40)]
        pack(where / f"imdb_{split}.tsv.xz", "\n".join(["label\trating\tid\ttext", *rows]) + "\n")
    splits = ["train"] * 40 + ["valid"] * 10 + ["test"] * 10
    rows = [f"{s}\t{n % 2}\tP{n % 7}\tP{n % 5}" for n, s in enumerate(splits)]
    pack(where / "aan_pairs.tsv.xz", "\n".join(["split\tlabel\tdoc1\tdoc2", *rows]) + "\n")
    papers = [json.dumps({"id": f"P{n}", "text": "é" * (50 + 30 * n)}) for n in range(7)]
    pack(where / "aan_docs_4k.jsonl.xz", "\n".join(papers) + "\n")
    np.savez(
        where / "cifar10_gray.npz",
        x_train=rng.integers(0, 256, (50, 32, 32), np.uint8),
        y_train=np.arange(50) % 10,
        x_test=rng.integers(0, 256, (20, 32, 32), np.uint8),
        y_test=np.arange(20) % 10,
    )
    before = generated.BLOCK, snakes.AT_ONCE
    generated.BLOCK, snakes.AT_ONCE = 20, 256
    try:
        for name, count in (("listops", 60), ("pathfinder", 60), ("snakes", 40)):
            generated.make(name, where, count=count)
    finally:
        generated.BLOCK, snakes.AT_ONCE = before
    return where


SMALL = {
    "lm": lambda at: tasks.create("lm", text=str(at / "own.txt"), length=32),
    "lm-bpe": lambda at: tasks.create(
        "lm", text=str(at / "own.txt"), length=16, tokens="bpe", vocabulary=300
    ),
    "mlm": lambda at: tasks.create("mlm", text=str(at / "own.txt"), length=32),
    "sst2": lambda at: tasks.create("sst2", data=at, length=100),
    "mnli": lambda at: tasks.create("mnli", data=at, length=64),
    "mnli-towers": lambda at: tasks.create("mnli", data=at, length=64, towers=2),
    "listops": lambda at: tasks.create("listops", data=at, sizes=(40, 10, 10)),
    "pathfinder": lambda at: tasks.create("pathfinder", data=at, sizes=(40, 10, 10)),
    "pathfinder-rising": lambda at: tasks.create(
        "pathfinder", data=at, sizes=(40, 10, 10), rising=2
    ),
    "text": lambda at: tasks.create("text", data=at, length=300),
    "retrieval": lambda at: tasks.create("retrieval", data=at, length=200),
    "image": lambda at: tasks.create("image", data=at),
    "mqar": lambda _: tasks.create("mqar", length=64, pairs=4, vocabulary=64),
    "copying": lambda _: tasks.create("copying", length=40, copied=4),
    "induction": lambda _: tasks.create("induction", length=32, test_length=20),
    "pretraining": lambda at: tasks.MaskedTask(tasks.create("image", data=at), rate=0.5),
}


@pytest.fixture(params=SMALL)
def task(request, folder):
    return SMALL[request.param](folder)

"""A small version of every task, from files made here in the published formats."""

import pytest
import small_data

from cosformer import tasks
from cosformer.tasks import generated, snakes

TEXT = "".join(f"line {n} of a small text, {'ab' * (n % 7)}\n" for n in range(400))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A data folder with small files under the names of the real ones."""
    where = tmp_path_factory.mktemp("data")
    (where / "own.txt").write_text(TEXT)
    small_data.write(where)
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

"""The real data sets, where COSFORMER_DATA names a folder that has them."""

import os
from pathlib import Path

import numpy as np
import pytest

from cosformer import tasks
from cosformer.tasks import files, listops

FOLDER = Path(os.environ.get("COSFORMER_DATA", ""))
SIZES = {"sst2": (67_349, 872, 1_821), "cola": (7_696, 855, 1_043), "mrpc": (3_668, 408, 1_725)}
SIZES |= {"rte": (2_241, 249, 277), "mnli": (9_000, 1_000, 10_000), "qqp": (6_840, 760, 2_000)}
SIZES |= {"amazon": (4_500, 500, 7_600), "retrieval": (4_574, 394, 600)}
SIZES |= {"image": (45_000, 5_000, 10_000), "text": (22_500, 2_500, 25_000)}


def _need(name):
    if not os.environ.get("COSFORMER_DATA") or not (FOLDER / name).is_file():
        pytest.skip(f"COSFORMER_DATA has no {name}")
    return FOLDER / name


@pytest.mark.parametrize("name", SIZES)
def test_splits_have_their_sizes(name):
    _need("sst2.tsv.xz")
    task = tasks.create(name)
    assert tuple(task.sizes.values()) == SIZES[name]
    batch = task.batch("test", seed=0, rank=0, step=0, batch_size=4)
    assert batch["tokens"].max() < task.facts.vocabulary
    assert batch["labels"].max() < task.facts.classes


def test_words_of_wikitext_are_counted_as_published():
    _need("wikitext2_train.txt.xz")
    task = tasks.create("lm", text="wikitext2", tokens="words")
    assert task.facts.classes == 33_278
    asked = sum(int(b["mask"].sum()) for b in task.evaluation("test", 32))
    assert asked == 245_569 - 1


def test_our_evaluator_agrees_with_all_published_listops():
    lines = files.read_text(_need("listops_d20s.tsv.xz")).splitlines()[1:]
    numbers = {word: n for n, word in enumerate(listops.TOKENS)}
    assert len(lines) == 10_000
    for line in lines:
        _, label, words = line.split("\t")
        assert listops.evaluate(np.array([numbers[w] for w in words.split()])) == int(label)

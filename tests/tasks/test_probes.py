"""The probes: what is asked can be told from the past, and from nothing else."""

import numpy as np
import pytest

from cosformer.tasks import IGNORED
from cosformer.tasks.probes import Copying, Induction, Recall

RNG = np.random.default_rng


@pytest.mark.parametrize(("length", "pairs"), [(64, 4), (512, 64)])
def test_recall_asks_for_the_value_of_each_key_once(length, pairs):
    tokens, labels = Recall(length=length, pairs=pairs).draw(RNG(0), 20, "train")
    for row, asked in zip(tokens, labels, strict=True):
        known = dict(row[: 2 * pairs].reshape(pairs, 2).tolist())
        places = np.flatnonzero(asked != IGNORED)
        assert len(known) == len(places) == pairs
        assert places.min() >= 2 * pairs
        assert not (places % 2).any()
        assert {int(row[p]): int(asked[p]) for p in places} == known
        assert 1 <= min(known) <= max(known) < 4096 <= min(known.values())


@pytest.mark.parametrize("kind", [Recall, Copying, Induction])
@pytest.mark.parametrize("split", ["train", "test"])
def test_every_sample_is_asked_as_often_as_the_facts_say(kind, split):
    task = kind()
    _, labels = task.draw(RNG(0), 50, split)
    assert ((labels != IGNORED).sum(1) == task.facts.asked).all()


def test_queries_come_soon_after_the_pairs():
    _, labels = Recall(length=256, pairs=4).draw(RNG(0), 2000, "train")
    gaps = (np.nonzero(labels != IGNORED)[1] - 8) // 2
    first = np.mean(gaps == 0) * 4  # share of samples that ask at the first place
    expected = 1 / sum((g + 1) ** (0.01 - 1) for g in range(124))
    assert 2 < first / expected < 4  # four draws without replacement from p ~ (g + 1)^(a - 1)


def test_copying_asks_for_the_tokens_in_their_order():
    task = Copying(length=30, copied=5)
    tokens, labels = task.draw(RNG(0), 50, "train")
    for row, asked in zip(tokens, labels, strict=True):
        seen = row[:30][row[:30] != task.blank]
        assert seen.tolist() == asked[30:].tolist()
        assert (asked[:30] == IGNORED).all()
        assert (row[30:] == task.ask).all()


def test_induction_asks_for_the_follower_at_the_end():
    task = Induction(length=40, test_length=90)
    for split, length in (("train", 40), ("test", 90)):
        tokens, labels = task.draw(RNG(0), 50, split)
        assert tokens.shape == (50, length)
        for row, asked in zip(tokens, labels, strict=True):
            first, last = np.flatnonzero(row == task.special)
            assert last == length - 1
            assert asked[-1] == row[first + 1]
            assert (asked[:-1] == IGNORED).all()
